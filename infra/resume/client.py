"""Resuming client: a request outlives the replica that works on it, because another one goes on behind the tokens that came.

A replica that dies takes its request along. The next one is given the same request with the output tokens that the client
already has; draws depend on (seed, position) only, so it goes on as the first would have. What the dead replica had
computed but not sent is computed again and never seen twice.

An EngineClient over engines in other processes, without Ray: whoever makes it says how a stream to some engine is opened.
Which engine that is, and noticing that one died, is the business of the opener.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from paceline.config import IngressConfig
from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.infra.resume.stream import EngineFacts, decode_item, encode_request
from paceline.machine import Clock, SystemClock
from paceline.serving.api.generation import EngineInfo
from paceline.serving.engine.buckets import DEFAULT_BUCKET
from paceline.serving.sampling.request import GenerationRequest, RequestStats, RoundEvent

_SUMMED = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "draft_ms", "verify_ms", "round_ms")


class Splice:
    """The tokens and statistics of one request over all engines that worked on it."""

    def __init__(self, request: GenerationRequest) -> None:
        """Gives the request a seed when it has none, so that every engine draws the same."""
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=random.getrandbits(62)))
        self.request = request
        self._token_ids: list[int] = []
        self._ended: RequestStats | None = None  # sums over the engines that are gone
        self._offset_ms = 0.0
        self._latest: RequestStats | None = None
        self.num_tries = 0
        self.target_version = ""
        """Of the target that the tokens are from; '' while there are none."""

    def next_request(self, elapsed_ms: float = 0.0) -> GenerationRequest:
        """What the next engine is given: the request behind the tokens so far, under an id of its own.

        The id differs from try to try, since an engine that only seems dead may still work under the last one.
        elapsed_ms: since the request came.
        """
        request, self._offset_ms, self._ended = self.request, elapsed_ms, self._latest
        if self.num_tries > 0:
            request = replace(request, request_id=f"{request.request_id}~{self.num_tries}")
        if self._latest is not None:  # prompt log-probabilities came with the first event
            request = replace(request, resumed_token_ids=tuple(self._token_ids), prompt_logprobs=None)
        self.num_tries += 1
        return request

    def take(self, event: RoundEvent) -> RoundEvent:
        """The event as the client sees it: under the request's own id, statistics summed."""
        self._token_ids += event.token_ids
        self._latest = stats = self._sum(event.stats)
        return msgspec.structs.replace(event, request_id=self.request.request_id, stats=stats)

    def end(self, finish_reason: str, error: str | None = None, elapsed_ms: float = 0.0) -> RoundEvent:
        """A last event that no engine sent."""
        stats = self._latest or RequestStats(
            drafter_version="", num_rounds=0, num_draft_tokens=0, num_accepted_tokens=0, num_emitted_tokens=0,
            draft_ms=0.0, verify_ms=0.0, total_ms=0.0, bucket=self.request.bucket or DEFAULT_BUCKET,
        )  # fmt: skip
        return RoundEvent(
            request_id=self.request.request_id, token_ids=(), num_accepted_tokens=0, logprobs=None, stop_match=None,
            finish_reason=finish_reason, stats=msgspec.structs.replace(stats, total_ms=elapsed_ms), error=error,
        )  # fmt: skip

    def _sum(self, stats: RequestStats) -> RequestStats:
        total_ms = stats.total_ms + self._offset_ms
        ended = self._ended
        if ended is None:
            return msgspec.structs.replace(stats, total_ms=total_ms)
        sums = {name: getattr(ended, name) + getattr(stats, name) for name in _SUMMED}
        return msgspec.structs.replace(stats, **sums, total_ms=total_ms, num_cached_tokens=ended.num_cached_tokens)


log = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Engines with a full queue that a new request is offered to before the client hears of it."""
MAX_SILENCE_S = 30.0
"""An engine from which nothing came for so long counts as dead, one that was only asked, too; see SIGN_OF_LIFE_S."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
DEADLINE_GRACE_S = 1.0
"""An engine that has the request may end it itself so long behind its deadline; it does not know how long the way to it took."""


class ItemStream(Protocol):
    """Encoded StreamItems of one request from some engine; any exception but CapacityError means that it is gone."""

    async def __anext__(self) -> bytes: ...

    def cancel(self) -> None:
        """Let go: the engine stops working on the request. May be called at any time, also after the end."""


class _Broken(Exception):
    """The stream of an engine ended before the answer did."""


class _Silent(_Broken):
    """Nothing came from it in the time that there was."""


@dataclass(kw_only=True, slots=True)
class ResumeCounters:
    """What happened since the start."""

    num_requests: int = 0
    num_broken: int = 0
    """Streams that broke off after an engine had taken the request."""
    num_resumed: int = 0
    """Requests that another engine took over."""
    num_given_up: int = 0
    """Requests that ended with an error because of it."""


@dataclass(slots=True)
class _Pump:
    task: asyncio.Task[None]
    admitted: asyncio.Future[None]


@dataclass(slots=True)
class _Progress:
    """How the attempts of one request went."""

    started_s: float
    is_admitted: bool = False
    """An engine has it now."""
    was_admitted: bool = False
    num_broken: int = 0
    num_refusals: int = 0
    lost_s: float = 0.0
    """Since when no engine has it, while none has."""
    backoff_s: float = 0.0
    reasons: list[str] = field(default_factory=list)


class ResumingClient:
    """Runs every request in a task of the event loop that calls it; all methods belong to that loop."""

    def __init__(
        self,
        open_stream: Callable[[bytes], ItemStream],
        facts: EngineFacts,
        config: IngressConfig,
        *,
        clock: Clock | None = None,
        timer: Callable[[], float] = time.monotonic,
        max_silence_s: float = MAX_SILENCE_S,
        model: str = "",
    ) -> None:
        """clock: of GenerationRequest.deadline_s; model: as it is configured here, engines of another one refuse requests."""
        self._open, self._facts, self._config = open_stream, facts, config
        self._clock, self._timer = clock or SystemClock(), timer
        self._max_silence_s, self._model = max_silence_s, model
        self._heard_s = timer()
        self._pumps: dict[str, _Pump] = {}
        self._refusals: dict[str, asyncio.Future[None]] = {}
        """Of requests that ended before anybody asked; see `admitted`."""
        self.counters = ResumeCounters()

    # ---- EngineClient -------------------------------------------------------------------------------------------
    def prepare(self, request: GenerationRequest) -> None:
        """Nothing to do: grammars are compiled where the engine is."""

    def submit_all(self, requests: Sequence[GenerationRequest], on_event: Callable[[RoundEvent], None]) -> None:
        """Each choice may go to another engine; `admitted` tells for each."""
        known = [r.request_id for r in requests if r.request_id in self._pumps]
        if known:
            raise RequestError(f"request_id must be unique among unfinished requests, got {known[0]!r}")
        loop = asyncio.get_running_loop()
        for request in requests:
            admitted: asyncio.Future[None] = loop.create_future()
            task = loop.create_task(self._pump(Splice(request), on_event, admitted))
            self._pumps[request.request_id] = _Pump(task, admitted)
            self.counters.num_requests += 1

    async def admitted(self, request_id: str) -> None:
        """Return once an engine has taken a submitted request; raises what that engine's `submit_all` raised."""
        pump = self._pumps.get(request_id)
        future = pump.admitted if pump is not None else self._refusals.pop(request_id, None)
        if future is not None:
            await asyncio.shield(future)
        self._refusals.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        self._refusals.pop(request_id, None)
        pump = self._pumps.pop(request_id, None)
        if pump is not None:
            pump.task.cancel()
            pump.admitted.cancel()

    def now(self) -> float:
        return self._clock.now()

    def num_waiting(self) -> int:
        """Requests that no engine has taken yet."""
        return sum(not pump.admitted.done() for pump in self._pumps.values())

    def is_draining(self) -> bool:
        """Serve takes an ingress out of its proxies before it stops it."""
        return False

    def info(self) -> EngineInfo:
        return self._facts.info

    def heartbeat_age_s(self) -> float:
        """Seconds since any engine was last heard of."""
        return self._timer() - self._heard_s

    # ---- for the process around it ------------------------------------------------------------------------------
    def holdback_percent(self) -> int:
        return self._facts.holdback_percent

    def heard(self, facts: EngineFacts) -> None:
        """An engine answered a probe."""
        self._facts, self._heard_s = facts, self._timer()

    # ---- one request --------------------------------------------------------------------------------------------
    async def _pump(
        self, splice: Splice, on_event: Callable[[RoundEvent], None], admitted: asyncio.Future[None]
    ) -> None:
        progress = _Progress(started_s=self._timer(), lost_s=self._timer())
        try:
            await self._until_done(splice, progress, on_event, admitted)
        except Exception as e:
            if progress.was_admitted or not isinstance(e, RequestError | CapacityError):
                self.counters.num_given_up += 1
                log.warning("request %s given up: %s (%s)", splice.request.request_id, e, "; ".join(progress.reasons))
            if not admitted.done():
                admitted.set_exception(e)
                admitted.exception()  # read here: whoever waited may be gone
                self._refusals[splice.request.request_id] = admitted
            else:
                on_event(splice.end("error", str(e), self._elapsed_ms(progress)))
        finally:
            pump = self._pumps.get(splice.request.request_id)
            if pump is not None and pump.admitted is admitted:
                del self._pumps[splice.request.request_id]

    async def _until_done(
        self,
        splice: Splice,
        progress: _Progress,
        on_event: Callable[[RoundEvent], None],
        admitted: asyncio.Future[None],
    ) -> None:
        config = self._config
        while True:
            try:
                return await self._try_once(splice, progress, on_event, admitted)
            except RequestError:
                raise  # the request's own fault
            except CapacityError as e:
                progress.num_refusals += 1
                if not progress.was_admitted and progress.num_refusals >= MAX_REFUSALS:
                    raise
                progress.reasons.append(str(e))
            except (EngineStoppedError, _Broken) as e:
                # that time was up says less than why the engines before did not take it
                if progress.is_admitted or not progress.reasons or not isinstance(e, _Silent):
                    progress.reasons.append(str(e))
                log.warning("request %s: %s", splice.request.request_id, e)
            if progress.is_admitted:  # it was being worked on
                progress.is_admitted = False
                progress.num_broken += 1
                self.counters.num_broken += 1
                if progress.num_broken > config.max_resumes:
                    raise EngineStoppedError(
                        f"{progress.num_broken} replicas in a row did not finish this request, the last because "
                        f"{progress.reasons[-1]}; send it again"
                    )
                # A client's leaving breaks the stream as well, a moment before `abort` says so: nobody waits for the rest then
                progress.lost_s, progress.backoff_s = self._timer(), FIRST_BACKOFF_S
            if self._left_s(splice) <= 0.0:
                _settle(admitted)
                return on_event(splice.end("deadline", elapsed_ms=self._elapsed_ms(progress)))
            await asyncio.sleep(progress.backoff_s * random.uniform(0.5, 1.0))
            if self._timer() - progress.lost_s >= config.max_wait_s:
                raise EngineStoppedError(
                    f"no replica took this request within {config.max_wait_s:g} s ({progress.reasons[-1]}); send it again"
                )
            progress.backoff_s = min(max(2 * progress.backoff_s, FIRST_BACKOFF_S), LAST_BACKOFF_S)

    async def _try_once(
        self,
        splice: Splice,
        progress: _Progress,
        on_event: Callable[[RoundEvent], None],
        admitted: asyncio.Future[None],
    ) -> None:
        """Follow one engine to the end of the answer; raises _Broken when it does not get there."""
        request, now = splice.next_request(self._elapsed_ms(progress)), self._clock.now()
        target_version = splice.target_version if request.resumed_token_ids else ""
        stream = self._open(encode_request(request, now, model=self._model, target_version=target_version))
        is_over = False
        try:
            while True:
                item = decode_item(await self._next(stream, self._patience_s(splice, progress)))
                is_over = item.refusal is not None
                item.raise_refusal()
                self._heard_s = self._timer()
                if not progress.is_admitted:
                    self.counters.num_resumed += progress.was_admitted
                    progress.is_admitted = progress.was_admitted = True
                    splice.target_version = item.target_version or splice.target_version  # '' from older releases
                    _settle(admitted)
                for event in item.events:
                    if event.finish_reason == "error" and not event.is_own_fault:
                        raise _Broken(event.error or "the engine failed")
                    is_over = event.finish_reason is not None
                    on_event(splice.take(event))
                    if is_over:
                        return
                if self._left_s(splice) <= -DEADLINE_GRACE_S:
                    return on_event(splice.end("deadline", elapsed_ms=self._elapsed_ms(progress)))
        finally:
            if not is_over:
                stream.cancel()

    def _patience_s(self, splice: Splice, progress: _Progress) -> float:
        """Longest time to wait for the next item: signs of life come while an engine has the request, none before, when it
        may wait for a place or be on its way to a computer that is lost."""
        if progress.is_admitted:
            return self._max_silence_s
        left_s = self._config.max_wait_s - (self._timer() - progress.lost_s)
        return max(min(left_s, self._left_s(splice), self._max_silence_s), 0.0)

    def _left_s(self, splice: Splice) -> float:
        """Until the request's deadline, < 0 behind it; infinite without one."""
        deadline_s = splice.request.deadline_s
        return math.inf if deadline_s is None else deadline_s - self._clock.now()

    async def _next(self, stream: ItemStream, patience_s: float) -> bytes:
        try:
            # not `wait_for`, which in Python 3.11 swallows a cancellation beside an arrival
            async with asyncio.timeout(patience_s):
                return await anext(stream)
        except StopAsyncIteration:
            raise _Broken("its stream ended without a last event") from None
        except TimeoutError:
            raise _Silent(f"nothing came from an engine for {patience_s:.1f} s") from None
        except CapacityError:
            raise
        except Exception as e:  # whatever the way to the engine raises when that dies
            raise _Broken(f"its replica is gone ({type(e).__name__})") from e

    def _elapsed_ms(self, progress: _Progress) -> float:
        return (self._timer() - progress.started_s) * 1e3


def _settle(admitted: asyncio.Future[None]) -> None:
    if not admitted.done():
        admitted.set_result(None)
