"""Generation: one HTTP request waits for the engine thread, and lets go when the client is gone.

The engine's events cross into the event loop through one queue an answer. A stream that breaks ends without `[DONE]`, or
with `response.failed`: HTTP 200 and a clean close do not mean that an answer is complete.

Requests whose grammar has to be compiled first wait in a few threads of their own: a compilation may take seconds, and the
event loop's threads read metrics, states and files. A
thread only compiles. The request itself is submitted by the event loop afterwards, so that one whose client went away
meanwhile never existed for the engine: nothing has to be undone, and a retry under the same id finds the id free.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from paceline.contracts import Group, HttpMeters
from paceline.serving.api.access_log import AccessRecord, HttpSpans
from paceline.serving.sampling.fair_threads import FairThreads
from paceline.serving.sampling.request import GenerationRequest, RoundEvent
from paceline.serving.wire.accounts import Clients
from paceline.serving.wire.choice import Piece
from paceline.serving.wire.exchange import BODY_GRACE_S, WRITE_S
from paceline.serving.wire.format import WireAnswer, to_json

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ANSWER_SCORES = 2**20
"""Log-probabilities of an answer that is no stream, half a KiB each while it is written: 50,000 tokens with 20 alternatives."""
LONG_ENTRIES = 2_000
"""Log-probabilities of a chunk from which on it is put together in a thread: an echoed prompt may take seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What clients may know about the model that is served."""

    model_name: str
    target_version: str
    context_tokens: int
    vocab_size: int
    created: int
    """Start of the replica, seconds since the epoch."""
    aliases: tuple[str, ...] = ()
    """Further names under which clients may ask for the model."""


class EngineClient(Protocol):
    """All that the routes need of an engine; every method is thread-safe, and all but `prepare` return at once."""

    def prepare(self, request: GenerationRequest) -> object:
        """Compile the request's grammar, if it has one: some seconds, and none for a `submit_all` while the result is held.

        Raises: RequestError, CapacityError.
        """

    def submit_all(self, requests: Sequence[GenerationRequest], on_event: Callable[[RoundEvent], None]) -> None:
        """Admit all of the requests or none; events come from another thread.

        Raises: RequestError, CapacityError, EngineStoppedError.
        """

    def abort(self, request_id: str) -> None:
        """Stop a request at the next round boundary; unknown and finished ids are ignored."""

    def info(self) -> EngineInfo: ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine thread last showed life."""

    def now(self) -> float:
        """Seconds of the clock that deadlines are given in."""

    def num_waiting(self) -> int:
        """Requests that wait for admission."""

    def is_draining(self) -> bool:
        """Whether new requests are refused because the replica shuts down."""


@dataclass(kw_only=True, slots=True)
class ApiParts:
    """What the routes are put together from; callables so that values may change while serving."""

    client: EngineClient
    tokenizer: Any
    admitted: Callable[[str], Awaitable[None]] | None = None
    """For a client that submits to another process: returns once the engine has taken the request of this id, raises what
    `submit_all` raises. None = `submit_all` itself does."""
    clients: Clients = field(default_factory=Clients)
    """Who may use the locked routes, and how much."""
    holdback_percent: Callable[[], int] = lambda: 0
    """Share of requests without an explicit group that keep the first drafter."""
    trusts_groups: bool = False
    """Requests that ask for a group count like those for which it was drawn."""
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
    """Raises HTTPException unless a request may GET /paceline/state and /paceline/swap; None = as for the locked routes."""
    check_metrics: Callable[[Request], None] | None = None
    """Raises HTTPException unless a request may GET /metrics; None = as for the locked routes."""
    max_silence_s: float = 30.0
    """An engine thread without heartbeat for longer counts as dead."""
    sends_request_id: bool = True
    """False where a proxy in front already sends x-request-id back."""
    body_grace_s: float = BODY_GRACE_S
    write_s: float = WRITE_S
    """Deadlines of clients that send and read slowly; see exchange.py."""
    has_access_log: bool = False
    """Write one line a request to the logger `paceline.access`."""
    meters: HttpMeters = field(default_factory=HttpMeters)
    """Where requests are counted and timed."""
    spans: HttpSpans | None = None
    """What makes OpenTelemetry's span of each request; None = nothing does."""
    extra_routers: Sequence[APIRouter] = ()
    """Further locked routes."""
    open_routers: Sequence[APIRouter] = ()
    """Further routes without a token: static files."""


def default_group(request_id: str, holdback_percent: int) -> Group:
    """The hold-back group by crc32 of the request id: equal on every replica and after a restart."""
    return Group.STATIC if zlib.crc32(request_id.encode()) % 100 < holdback_percent else Group.ADAPTIVE


class Cutoff(Exception):
    """The engine will not finish this request; the message is for the client."""

    status = 503
    kind = "server_error"
    code = "incomplete"


class Expired(Cutoff):
    """The request's deadline passed first."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class Unfit(Cutoff):
    """The request itself is at fault; sent again it would end the same way."""

    status = 400
    kind = "invalid_request_error"
    code = "cannot_be_answered"


class Hangup(Cutoff):
    """The client closed the connection; nobody reads this."""

    status = 499
    code = "client_closed"


class Generation:
    """One answer between the HTTP handler and the engine thread; used from one event loop.

    Its engine requests, one a choice, live and die together: they are admitted all or none, and when one of them ends
    without being answered the others are aborted.
    """

    def __init__(
        self,
        parts: ApiParts,
        requests: Sequence[GenerationRequest],
        answer: WireAnswer,
        record: AccessRecord,
        on_finish: Callable[[], None] = lambda: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """on_finish: called when a choice is complete. on_close: called once, when the answer is over."""
        self._parts, self.requests, self.answer, self._record = parts, requests, answer, record
        self._on_finish, self._on_close = on_finish, on_close
        self._index = {r.request_id: i for i, r in enumerate(requests)}
        self._unfinished = set(self._index)
        self._queue: asyncio.Queue[RoundEvent] = asyncio.Queue()
        self._first: RoundEvent | None = None  # taken from the queue by `begin`, not yet folded
        self._loop = asyncio.get_running_loop()
        self.is_cut = False
        """The answer broke off on this side, not because the client hung up."""
        self._is_closed = False

    async def submit(self) -> None:
        """Hand the requests to the engine, all or none; raises what the engine raises."""
        held: object = None
        if self._parts.admitted is None and self.requests[0].params.grammar is not None:
            # compiling must not hold up the event loop, however many others compile meanwhile; choices share their grammar
            first = self.requests[0]
            held = await compile_in_thread(lambda: self._parts.client.prepare(first), first.tenant)
        self._parts.client.submit_all(self.requests, self._on_event)
        del held
        if self._parts.admitted is not None:
            try:
                for request in self.requests:
                    await self._parts.admitted(request.request_id)
            except BaseException as e:  # also a client that hangs up meanwhile
                self.is_cut = isinstance(e, Exception)
                self.close()
                raise

    def close(self) -> None:
        """Abort what is unfinished; quick and idempotent, called whenever a handler ends for whatever reason."""
        if self._is_closed:
            return
        self._is_closed = True
        record, choices = self._record, self.answer.choices
        record.is_disconnected = record.is_disconnected or bool(self._unfinished and not self.is_cut)
        record.completion_tokens = self.answer.num_completion_tokens
        record.stats = [c.stats for c in choices if c.stats is not None]
        for request_id in self._unfinished:
            self._parts.client.abort(request_id)
        self._on_close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield one piece a round and choice; raises Cutoff when a choice ends without being answered."""
        while self._first is not None or self._unfinished:
            event, self._first = self._first or await self._next(), None
            piece = self.answer.take(self._index[event.request_id], event)
            if piece.finish_reason is not None:
                self._on_finish()
            yield piece

    async def begin(self) -> None:
        """Wait until there is something to send; raises Cutoff when the request ends before that."""
        self._first = await self._next()

    def _cut(self, event: RoundEvent) -> Cutoff:
        self.is_cut = True
        if event.finish_reason == "deadline":
            done = self.answer.num_completion_tokens
            return Expired(event.error or f"the request's deadline passed before it was complete, after {done} tokens")
        if event.is_own_fault:
            return Unfit(event.error or "the request cannot be answered")
        return Cutoff(event.error or "the request was aborted before it was complete; send it again")

    async def _next(self) -> RoundEvent:
        event = await self._receive()
        if event.finish_reason is not None:
            self._unfinished.discard(event.request_id)
            self._record.finish_reasons.append(event.finish_reason)
        if event.finish_reason in ("abort", "error", "deadline"):
            raise self._cut(event)
        return event

    async def _receive(self) -> RoundEvent:
        while True:
            try:
                # not `wait_for`, which in Python 3.11 swallows a cancellation beside an arrival
                async with asyncio.timeout(max(self._parts.max_silence_s / 4, 0.05)):
                    return await self._queue.get()
            except TimeoutError:
                age_s = self._parts.client.heartbeat_age_s()
                if age_s > self._parts.max_silence_s:
                    self.is_cut = True
                    raise Cutoff(f"the engine has been silent for {age_s:.0f} s; send the request again") from None

    def _on_event(self, event: RoundEvent) -> None:  # engine thread
        try:
            self._loop.call_soon_threadsafe(self._take, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._parts.client.abort(event.request_id)

    def _take(self, event: RoundEvent) -> None:
        self._record.note_chunk(event)
        self._queue.put_nowait(event)


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


async def events(generation: Generation, record: AccessRecord) -> AsyncIterator[bytes]:
    """Server-sent events of one answer as they come; one that breaks off ends with the event of its error."""
    answer = generation.answer
    try:
        if opening := answer.opening():
            yield opening
        async for piece in generation.pieces():
            is_long = len(piece.entries) > LONG_ENTRIES
            if part := await asyncio.to_thread(answer.part, piece) if is_long else answer.part(piece):
                yield part
        if closing := answer.closing():
            yield closing
    except Cutoff as e:
        record.error = e.code
        yield answer.failure(str(e), kind=e.kind, code=e.code)
    except Exception as e:
        record.error, generation.is_cut = "internal_error", True
        log.exception("stream of request %s failed", record.request_id)
        yield answer.failure(f"the answer broke off: {type(e).__name__}", kind="server_error", code="incomplete")
    finally:
        generation.close()


async def begun(request: Request, generation: Generation) -> None:
    """Wait for the first tokens; a request that ends before them, or whose client hangs up, is closed and raises Cutoff."""
    try:
        await _unless_gone(request, generation.begin())
    except BaseException:
        generation.close()
        raise


async def whole(request: Request, generation: Generation) -> bytes:
    """The complete answer as JSON; a client that hangs up stops the generation."""

    async def collect() -> list[Piece]:
        # those of an echoed prompt are bounded before it is read
        num_echoed = sum(
            len(r.prompt_token_ids) * (r.prompt_logprobs + 1)
            for r in generation.requests
            if r.prompt_logprobs is not None
        )
        pieces, num_scores = list[Piece](), -num_echoed
        async for piece in generation.pieces():
            num_scores += sum(1 + len(scored.top) for _, scored, _ in piece.entries if scored is not None)
            if num_scores > MAX_ANSWER_SCORES:  # a stream keeps none of them
                generation.is_cut = True
                raise Unfit(
                    f"the log-probabilities of an answer must be at most {MAX_ANSWER_SCORES}, that is tokens * "
                    "(alternatives + 1) of all choices: ask for fewer, or for a stream"
                )
            pieces.append(piece)
        return pieces

    try:
        pieces, answer = await _unless_gone(request, collect()), generation.answer
        first = generation.requests[0]
        if first.prompt_logprobs is not None or first.params.logprobs is not None:  # seconds for many tokens' scores
            return await asyncio.to_thread(lambda: to_json(answer.body(pieces)))
        return to_json(answer.body(pieces))
    finally:
        generation.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises Hangup when the client hangs up first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Hangup("the client closed the connection")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


NUM_THREADS = 8
"""Most of them wait: a GrammarFactory compiles no more than a few at once. Further requests queue up for a thread."""


@lru_cache(maxsize=1)
def _threads() -> FairThreads:
    return FairThreads("grammars", NUM_THREADS)


async def compile_in_thread(compile_it: Callable[[], T], tenant: str = "") -> T:
    """Run `compile_it` in one of the threads and return its result; raises what it raises.

    When the caller is cancelled, one that still waits for a thread is never begun, and one that has begun ends unheard.
    """
    return await asyncio.wrap_future(_threads().submit(tenant, compile_it))
