"""How does one HTTP request wait for the engine thread, and how does it let go when the client is gone?

The engine's events cross into the event loop through one queue a request. A stream that breaks ends without `[DONE]`:
HTTP 200 and a clean close do not mean that an answer is complete.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from paceline.contracts import Group
from paceline.serving.api_format import SSE_DONE, Answer, Piece, error_body, sse, to_json
from paceline.serving.request import GenerationRequest, RoundEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What clients may know about the model that is served."""

    model_name: str
    target_version: str
    context_tokens: int
    vocab_size: int
    created: int
    """Start of the replica, seconds since the epoch."""


class EngineClient(Protocol):
    """All that the routes need of an engine; every method is thread-safe and returns at once."""

    def submit(self, request: GenerationRequest, on_event: Callable[[RoundEvent], None]) -> None:
        """Admit a request; events come from another thread. Raises RequestError, CapacityError, EngineStoppedError."""

    def abort(self, request_id: str) -> None:
        """Stop a request at the next round boundary; unknown and finished ids are ignored."""

    def info(self) -> EngineInfo: ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine thread last showed life."""


@dataclass(kw_only=True, slots=True)
class ApiParts:
    """What the routes are put together from; callables so that values may change while serving."""

    client: EngineClient
    tokenizer: Any
    admitted: Callable[[str], Awaitable[None]] | None = None
    """For a client that submits to another process: returns once the engine has taken the request of this id, raises what
    `submit` raises. None = `submit` itself does."""
    api_token: str | None = None
    holdback_percent: Callable[[], int] = lambda: 0
    """Share of requests without an explicit group that keep the first drafter."""
    opt_out_tenants: frozenset[str] = frozenset()
    """Tenants whose requests are never traced."""
    state: Callable[[], dict[str, Any]] = dict
    """Body of GET /paceline/state; may block (`run_state` awaits it)."""
    run_state: Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]] = asyncio.to_thread
    """Awaits `state` in a thread; a service gives threads of their own, so that a slow state takes none from the rest."""
    swap: Callable[[], dict[str, Any]] = dict
    """Body of GET /paceline/swap."""
    metrics: Callable[[], tuple[bytes, str]] = lambda: (b"", "text/plain; version=0.0.4; charset=utf-8")
    """Body and content type of GET /metrics."""
    check_state: Callable[[Request], None] | None = None
    """Raises HTTPException unless a request may GET /paceline/state and /paceline/swap; None = the token's rule."""
    check_metrics: Callable[[Request], None] | None = None
    """Raises HTTPException unless a request may GET /metrics; None = the token's rule."""
    max_silence_s: float = 30.0
    """An engine thread without heartbeat for longer counts as dead."""
    sends_request_id: bool = True
    """False where a proxy in front already sends x-request-id back."""
    extra_routers: Sequence[APIRouter] = ()
    """Further routes behind the same token."""
    open_routers: Sequence[APIRouter] = ()
    """Further routes without a token: static files."""


def default_group(request_id: str, holdback_percent: int) -> Group:
    """The hold-back group by crc32 of the request id: equal on every replica and after a restart."""
    return Group.STATIC if zlib.crc32(request_id.encode()) % 100 < holdback_percent else Group.ADAPTIVE


class Cutoff(Exception):
    """The engine will not finish this request; the message is for the client."""


class Generation:
    """One request between the HTTP handler and the engine thread; used from one event loop."""

    def __init__(self, parts: ApiParts, request: GenerationRequest, answer: Answer) -> None:
        self._parts, self.request, self.answer = parts, request, answer
        self._queue: asyncio.Queue[RoundEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_finished = False

    async def submit(self) -> None:
        """Hand the request to the engine; raises what the engine raises."""
        self._parts.client.submit(self.request, self._on_event)
        if self._parts.admitted is not None:
            try:
                await self._parts.admitted(self.request.request_id)
            except BaseException:  # also a client that hangs up meanwhile
                self.close()
                raise

    def close(self) -> None:
        """Abort unless finished; quick and idempotent, called whenever a handler ends for whatever reason."""
        if not self._is_finished:
            self._is_finished = True
            self._parts.client.abort(self.request.request_id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield one piece a round; raises Cutoff when the request ends without being answered."""
        while True:
            event = await self._next()
            if event.finish_reason in ("abort", "error"):
                self._is_finished = True
                raise Cutoff(event.error or "the request was aborted before it was complete; send it again")
            piece = self.answer.take(event)
            if piece.finish_reason is not None:
                self._is_finished = True
            yield piece
            if piece.finish_reason is not None:
                return

    async def _next(self) -> RoundEvent:
        while True:
            try:
                return await asyncio.wait_for(self._queue.get(), timeout=max(self._parts.max_silence_s / 4, 0.05))
            except TimeoutError:
                age_s = self._parts.client.heartbeat_age_s()
                if age_s > self._parts.max_silence_s:
                    raise Cutoff(f"the engine has been silent for {age_s:.0f} s; send the request again") from None

    def _on_event(self, event: RoundEvent) -> None:  # engine thread
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._parts.client.abort(self.request.request_id)


class EventStream(StreamingResponse):
    """Closes its generation however the response ends; a generator left at a `yield` would only end with the gc."""

    def __init__(self, generation: Generation, content: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def events(generation: Generation) -> AsyncIterator[bytes]:
    """Server-sent events of one answer: one chunk a round, then [DONE]; after an error event never [DONE]."""
    answer = generation.answer
    try:
        async for piece in generation.pieces():
            yield sse(answer.chunk(piece))
            if piece.finish_reason is not None and answer.with_usage:
                yield sse(answer.usage_chunk(piece.stats))
        yield SSE_DONE
    except Cutoff as e:
        yield sse(error_body(str(e), kind="server_error", code="incomplete"))
    except Exception as e:
        log.exception("stream %s failed", generation.request.request_id)
        yield sse(error_body(f"the answer broke off: {type(e).__name__}", kind="server_error", code="incomplete"))
    finally:
        generation.close()


async def whole(request: Request, generation: Generation) -> bytes:
    """The complete answer as JSON; a client that hangs up stops the generation."""

    async def collect() -> list[Piece]:
        return [piece async for piece in generation.pieces()]

    work = asyncio.ensure_future(collect())
    gone = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Cutoff("the client closed the connection")
        return to_json(generation.answer.body(work.result()))
    finally:
        generation.close()
        for task in (work, gone):
            task.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
