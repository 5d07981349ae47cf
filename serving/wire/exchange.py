"""Exchange: one HTTP request and its answer on the wire: a client that does not send or does not read is let go.

Bodies must come at some pace and answers must be taken within some time; otherwise connections that do nothing would
hold places that others wait for. The outermost ASGI middleware, for it closes the server's connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from paceline.serving.wire.accounts import Visit

log = logging.getLogger(__name__)

BODY_GRACE_S = 10.0
"""Time that a body has whatever its size: a link that is set up, or loses packets, takes seconds."""
BODY_BYTES_PER_S = 16 * 1024
"""Slowest pace of a body beyond the grace: a bad mobile link; 8 MiB may take 9 minutes."""
WRITE_S = 30.0
"""Longest time that the server waits for its reader: the buffers between them (64 KiB of the server's, and the kernels')
are full by then and nothing at all was taken out."""
VISIT, CUT = "visit", "cut"
"""Names in the scope's state: the Visit to close at the end; why a client was let go."""
AsgiScope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]


class BodyClock:
    """Tells whether a body comes fast enough."""

    def __init__(self, grace_s: float = BODY_GRACE_S, timer: Callable[[], float] = time.monotonic) -> None:
        """timer: seconds."""
        self._timer, self._begun_s, self._grace_s = timer, timer(), grace_s
        self._num_bytes = 0

    async def receive(self, receive: AsgiReceive) -> AsgiMessage:
        """The next message of the body. Raises: TimeoutError when it does not come in time."""
        left_s = self._begun_s + self._grace_s + self._num_bytes / BODY_BYTES_PER_S - self._timer()
        async with asyncio.timeout(max(left_s, 0.0)):
            message = await receive()
        self._num_bytes += len(message.get("body", b""))
        return message

    @property
    def reason(self) -> str:
        """For the client that was too slow."""
        return (
            f"the body must come within {self._grace_s:g} s and a second more for each {BODY_BYTES_PER_S} bytes, got "
            f"{self._num_bytes} bytes"
        )


class Exchange:
    """ASGI middleware: deadlines of body and answer, and the end of the client's Visit."""

    def __init__(self, app: Any, *, body_grace_s: float = BODY_GRACE_S, write_s: float = WRITE_S) -> None:
        self._app, self._body_grace_s, self._write_s = app, body_grace_s, write_s

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        clock: BodyClock | None = None
        is_whole = False

        async def receive_or_end() -> AsgiMessage:
            # Serve's `receive` fails where its proxy gave up the call that waits for the client to hang up.
            try:
                return await receive()
            except Exception as e:
                log.debug("the server's receive failed: %r", e)
                return {"type": "http.disconnect"}

        async def receive_in_time() -> AsgiMessage:
            nonlocal clock, is_whole
            if is_whole:
                return await receive_or_end()
            clock = clock or BodyClock(self._body_grace_s)
            try:
                message = await clock.receive(receive_or_end)
            except TimeoutError:
                state[CUT] = "slow_body"
                raise HTTPException(408, clock.reason, {"Connection": "close"}) from None
            is_whole = not message.get("more_body", False)
            return message

        async def send_to_reader(message: AsgiMessage) -> None:
            if not await send_in_time(send, message, self._write_s, scope.get("client")):
                state[CUT] = "slow_reader"

        try:
            await self._app(scope, receive_in_time, send_to_reader)
        finally:
            visit = state.get(VISIT)
            if isinstance(visit, Visit):
                visit.close()


async def send_in_time(send: AsgiSend, message: AsgiMessage, write_s: float, client: Any) -> bool:
    """Send a message to its reader; False: it read nothing for `write_s`, and the connection is dropped with all in it.

    The application then sees its client hang up. send: as uvicorn gives it. Raises: ConnectionError where the connection
    cannot be had.
    """
    try:
        async with asyncio.timeout(write_s):
            await send(message)
    except TimeoutError:
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is None:
            raise ConnectionError("the client does not read its answer") from None
        log.info("connection closed: its client %s read nothing for %.0f s", client, write_s)
        transport.abort()  # close() would wait for the reader
        return False
    return True
