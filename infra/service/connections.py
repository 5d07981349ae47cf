"""Connections: what uvicorn does with a client that sends no whole head, or never takes an answer's end.

uvicorn waits for heads without a limit in time (its own one is for connections that are idle after an answer) or size, and
what it has written it keeps until the client reads it. Each such connection costs an open file, of which a process has a
number.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import resource
import termios
import time
from array import array
from collections import Counter
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.serving.wire.exchange import BODY_GRACE_S, WRITE_S
from paceline.serving.wire.format import error_body, to_json

log = logging.getLogger(__name__)


MAX_HEAD_BYTES = 64 * 2**10
"""Bytes of a head, or of what stands between two parts of a body and behind the last: as of uvicorn's other parser, h11."""
MAX_QUEUED = 16
"""Requests behind the one that is answered on a connection; nobody's client sends more, and what waits is kept."""
TELL_EVERY_S = 60.0
"""Between two lines about connections that are too many."""


def _too_large() -> bytes:
    reason = f"a request's head must be at most {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
    body = to_json(error_body(reason, kind="invalid_request_error"))
    head = (
        f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    return head.encode() + b"\r\nconnection: close\r\n\r\n" + body


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

    _told_s: ClassVar[float] = -math.inf
    _running: RequestResponseCycle | None = None  # whose answer is written; `cycle` is the latest that was read
    _address: str | None = None  # while it is counted
    _head_timer: asyncio.TimerHandle | None = None
    _end_timer: asyncio.TimerHandle | None = None
    _unparsed_bytes = 0  # bytes of which the parser has made nothing yet, and which it keeps

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""  # '' = a socket of this computer
        self.num_open[self._address] += 1
        if self._address and self.num_open[self._address] > max_per_address():
            self._tell(self._address)
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:  # uvicorn tells the last one alone
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        self._forget()  # another protocol has the connection from now on
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            if self._is_answering:
                self.transport.abort()
            else:
                self.transport.write(_too_large())
                self.transport.close()
            return
        if not self._is_answering:  # blank lines, or the rest of a body that nobody waits for
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:  # uvicorn reads no further, and sees nobody leave
            self.transport.abort()

    def on_message_complete(self) -> None:
        self._unparsed_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        self._stop_waiting()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_QUEUED:
            self.transport.abort()
        elif self.pipeline:  # uvicorn reads no further, and would not see that the client is gone
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._end_timer is None:
            self._watch_reader()

    def _tell(self, address: str) -> None:
        now = time.monotonic()
        if now >= Connection._told_s + TELL_EVERY_S:
            Connection._told_s = now
            log.warning(
                "connections of %s are closed: it has %d, half of the files that this process may open; behind a proxy in front, "
                "which has all of them, raise `ulimit -n`",
                address, self.num_open[address],
            )  # fmt: skip

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and self._address is not None:
            self._head_timer = self.loop.call_later(self.head_s, self._miss_head)

    def _miss_head(self) -> None:
        self._head_timer = None
        if self._is_answering:  # the request before it; until that is over, nothing is missed
            self._await_head()
        else:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        if self.transport.get_write_buffer_size():  # the kernel looks after its own part
            self._end_timer = self.loop.call_later(self.write_s, self._check_reader, self._num_unread())

    def _check_reader(self, before: int) -> None:
        """before: _num_unread() one `write_s` ago."""
        self._end_timer = None
        if self._is_answering:  # the next answer has a deadline of its own, and an end
            return
        if self._num_unread() < before:
            self._watch_reader()
        else:
            self.transport.abort()  # close() would wait for the reader

    def _num_unread(self) -> int:
        """Bytes that wait here and in the kernel, which takes from here in portions as large as megabytes."""
        queued = array("i", [0])
        with contextlib.suppress(OSError):  # closed already
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + queued[0]

    def _forget(self) -> None:
        self._stop_waiting()
        if self._address is not None:
            self.num_open[self._address] -= 1
            if not self.num_open[self._address]:
                del self.num_open[self._address]
            self._address = None
