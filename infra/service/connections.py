"""Connections: what uvicorn does with a client that sends no whole head, or never takes an answer's end.

uvicorn waits for heads without a limit (its own one is for connections that are idle after an answer), and what it has
written it keeps until the client reads it. Each such connection costs an open file, of which a process has a number.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serving.wire.exchange import BODY_GRACE_S, WRITE_S

log = logging.getLogger(__name__)


def max_per_address() -> int:
    """Connections that one address may have: half of the files that this process may open, so that others get in too."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with an end to waiting."""

    head_s: ClassVar[float] = BODY_GRACE_S
    """Time for a request's head, from its first byte or, for the first one, from the connection on: what a body has."""
    write_s: ClassVar[float] = WRITE_S
    """Longest time in which nothing of an answer's end is taken."""
    num_open: ClassVar[Counter[str]] = Counter()
    """Address -> connections of this process."""

    _address: str | None = None  # while it is counted
    _head_timer: asyncio.TimerHandle | None = None
    _end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""  # '' = a socket of this computer
        self.num_open[self._address] += 1
        if self._address and self.num_open[self._address] > max_per_address():
            log.debug("connection closed: %s has %d", self._address, self.num_open[self._address])
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._forget()  # another protocol has the connection from now on
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._stop_waiting()
        elif self._address is not None and self._head_timer is None:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        left = self.transport.get_write_buffer_size()
        if left and self._end_timer is None:
            self._end_timer = self.loop.call_later(self.write_s, self._check_reader, left)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_reader(self, before: int) -> None:
        """before: bytes that waited for the reader one `write_s` ago."""
        self._end_timer = None
        left = self.transport.get_write_buffer_size()
        if not left or self._is_answering:  # the next answer has a deadline of its own, and an end
            return
        if left >= before:
            self.transport.abort()  # close() would wait for the reader
        else:
            self._end_timer = self.loop.call_later(self.write_s, self._check_reader, left)

    def _forget(self) -> None:
        self._stop_waiting()
        if self._address is not None:
            self.num_open[self._address] -= 1
            if not self.num_open[self._address]:
                del self.num_open[self._address]
            self._address = None
