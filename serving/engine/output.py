"""Round output: what leaves the engine after a round, i.e. events to the caller, statistics, finished requests to their trace.

The sinks are protocols owned by serving and implemented elsewhere; their calls must never block.

Shape legend: N rows of the round, V vocab.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.contracts import RoundStats
from paceline.machine import Clock
from paceline.serving.engine.running import DrafterPins, RunningRequest
from paceline.serving.engine.scheduler import Scheduler
from paceline.serving.engine.traces import TraceCollector
from paceline.serving.sampling.draw import token_logprobs
from paceline.serving.sampling.request import (
    GenerationRequest,
    RequestStats,
    RequestStatus,
    RoundEvent,
    TokenLogprob,
)


class FeedbackSink(Protocol):
    """Takes the statistics of every decode round."""

    def record_rounds(self, rows: RoundStats) -> None:
        """Keep a round's rows, one per request; drops and counts when full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRequest:
    """A request that is over; times are seconds of the engine's clock, None = it did not come so far."""

    request: GenerationRequest
    stats: RequestStats
    finish_reason: str
    submitted_s: float
    admitted_s: float | None
    first_token_s: float | None
    ended_s: float
    was_preempted: bool


class EndSink(Protocol):
    """Takes requests that have ended, those with a traceparent."""

    def record_end(self, ended: EndedRequest) -> None:
        """Keep it; drops and counts when full."""


logger = logging.getLogger(__name__)


class RoundOutput:
    """Ends requests, calls their owners, feeds the sinks. Engine thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        pins: DrafterPins,
        *,
        clock: Clock,
        feedback: FeedbackSink | None,
        ends: EndSink | None,
        on_end: Callable[[str], None],
    ) -> None:
        """on_end: told the id of every request that has ended, before its owner is."""
        self._scheduler = scheduler
        self._pins = pins
        self.clock = clock
        self.feedback = feedback
        self.traces: TraceCollector | None = None
        self._ends = ends
        self._on_end = on_end
        self.by_id: dict[str, RunningRequest] = {}
        self.is_training = False
        """Whether a training job runs on this host now; set by the replica, copied into the statistics."""
        self.num_finished = 0
        self.num_aborted = 0
        self.num_expired = 0
        """Of the aborted ones, those whose deadline came."""
        self.num_errors: dict[str, int] = {}
        """Drafter version -> requests pinned to it that ended in an error."""
        self.num_tokens = 0
        self.num_callback_errors = 0
        """Calls of owners and sinks that raised."""
        self._broken_sinks: set[str] = set()  # what was logged once

    def note_broken_sink(self, what: str) -> None:
        """Count an exception of a by-product, which must end neither a request nor the engine; log the first of its kind."""
        self.num_callback_errors += 1
        if what not in self._broken_sinks:
            self._broken_sinks.add(what)
            logger.exception("%s failed; further failures are only counted", what)

    # ---- events -------------------------------------------------------------------------------------------------
    def emit(
        self,
        request: RunningRequest,
        token_ids: list[int],
        num_accepted_tokens: int,
        logprobs: tuple[TokenLogprob, ...] | None,
        finish_reason: str | None,
        stop_match: str | None,
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None,
    ) -> None:
        """Send one round's tokens (already in request.tokens) to the owner; end the request when there is a reason."""
        if finish_reason == "error":  # its grammar's; no drafter is to blame
            assert request.grammar is not None
            error, is_own_fault = request.grammar.error, request.grammar.is_own_fault
            if token_ids:
                self.emit(request, token_ids, num_accepted_tokens, logprobs, None, None, prompt_logprobs)
            if request.request_id in self.by_id:  # its owner may be gone
                self.end_early(request, "error", error, is_drafters=False, is_own_fault=is_own_fault)
            return
        self.num_tokens += len(token_ids)
        now_s = self.clock.now()
        if token_ids and request.first_token_s is None:
            request.first_token_s = now_s
        event = request.event(
            now_s,
            tuple(token_ids),
            num_accepted_tokens=num_accepted_tokens,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_match=stop_match,
            prompt_logprobs=prompt_logprobs,
        )
        if finish_reason is not None:
            self.num_finished += 1
            if request.trace is not None:
                assert self.traces is not None
                self.traces.finish(request, finish_reason)
            self._end(request, RequestStatus.FINISHED, event, now_s)
        self._call(request, event)

    def end_early(
        self,
        request: RunningRequest,
        reason: str,
        error: str | None = None,
        *,
        is_drafters: bool = True,
        is_own_fault: bool = False,
    ) -> None:
        """End a request without a result: reason 'abort', 'deadline' or 'error'. Its pages and pin are free afterwards.

        is_drafters: whether an error counts against the drafter version that the request is pinned to.
        is_own_fault: whether the request would end the same way again.
        """
        self.num_aborted += 1
        self.num_expired += reason == "deadline"
        if reason == "error" and is_drafters and request.version:
            self.num_errors[request.version] = self.num_errors.get(request.version, 0) + 1
        now_s = self.clock.now()
        event = request.event(now_s, finish_reason=reason, error=error, is_own_fault=is_own_fault)
        self._end(request, RequestStatus.ABORTED, event, now_s)
        self._call(request, event)

    def _end(self, request: RunningRequest, status: RequestStatus, event: RoundEvent, now_s: float) -> None:
        self._pins.unpin(request)
        self._scheduler.remove(request, status)
        request.trace = None
        del self.by_id[request.request_id]
        self._on_end(request.request_id)
        if self._ends is not None and request.request.traceparent:
            ended = EndedRequest(
                request=request.request, stats=event.stats, finish_reason=event.finish_reason or "",
                submitted_s=request.submitted_s, admitted_s=request.admitted_s, first_token_s=request.first_token_s,
                ended_s=now_s, was_preempted=request.was_preempted,
            )  # fmt: skip
            try:
                self._ends.record_end(ended)
            except Exception:
                self.note_broken_sink("recording the end of a request")

    def _call(self, request: RunningRequest, event: RoundEvent) -> None:
        try:
            request.on_event(event)
        except Exception:  # the owner is gone (closed event loop); nobody reads the rest
            self.num_callback_errors += 1
            logger.exception("event callback of request %s failed", request.request_id)
            if event.finish_reason is None:
                request.on_event = _ignore
                self.end_early(request, "abort")

    def record_rounds(self, rows: RoundStats) -> None:
        """Pass a round's statistics to the feedback sink; there is one."""
        assert self.feedback is not None
        try:
            self.feedback.record_rounds(rows)
        except Exception:
            self.note_broken_sink("recording a round")


def round_logprobs(
    requests: list[RunningRequest], logits: torch.Tensor, rows: list[list[int]], token_ids: list[list[int]]
) -> list[tuple[TokenLogprob, ...] | None] | None:
    """Log-probabilities of the new tokens of requests that asked for them; None when nobody did.

    Args:
        logits: (N, V) float32.
        rows: per request, the logits row that each of its new tokens was drawn from.
        token_ids: per request, the new tokens.
    """
    wanted = [i for i, r in enumerate(requests) if r.request.params.logprobs is not None]
    if not wanted:
        return None
    index = torch.tensor([row for i in wanted for row in rows[i]], dtype=torch.int64, device=logits.device)
    drawn = torch.tensor([t for i in wanted for t in token_ids[i]], dtype=torch.int64, device=logits.device)
    k = min(max(requests[i].request.params.logprobs or 0 for i in wanted), logits.shape[1])
    own, top_ids, top_values = (t.tolist() for t in token_logprobs(logits[index], drawn, k))
    result: list[tuple[TokenLogprob, ...] | None] = [None] * len(requests)
    at = 0
    for i in wanted:
        num_top = requests[i].request.params.logprobs or 0
        entries = []
        for token_id in token_ids[i]:
            top = tuple(zip(top_ids[at][:num_top], top_values[at][:num_top], strict=True))
            entries.append(TokenLogprob(token_id=token_id, logprob=own[at], top=top))
            at += 1
        result[i] = tuple(entries)
    return result


def _ignore(_event: RoundEvent) -> None:
    """Events of an aborted request whose owner is gone."""
