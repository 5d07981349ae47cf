"""Round output: what leaves the engine after a round, i.e. events to the caller, statistics, traces of finished requests.

The sinks are protocols owned by serving and implemented elsewhere; their calls must never block.

Shape legend: r rows of one request, V vocab, m tapped layers, Dm hidden size, T tokens of a request, k top log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from paceline.clock import Clock
from paceline.contracts import RoundStats
from paceline.serving.engine.running import DrafterPins, RunningRequest, TraceRows
from paceline.serving.engine.scheduler import Scheduler
from paceline.serving.sampling.draw import token_logprobs
from paceline.serving.sampling.request import RequestStatus, RequestTrace, RoundEvent, TokenLogprob


class FeedbackSink(Protocol):
    """Takes the statistics of every decode round."""

    def record_rounds(self, rows: RoundStats) -> None:
        """Keep a round's rows, one per request; drops and counts when full."""


class TraceSink(Protocol):
    """Takes the trace of a finished request."""

    def wants(self, request_id: str, bucket: str) -> bool:
        """Whether this new request should be traced (sampling, room); asked once, at admission.

        The answer holds for the request's life: a request that is not wanted collects nothing.
        """

    def record_trace(self, trace: RequestTrace) -> None:
        """Append the trace of a request that was wanted; drops and counts when full."""


logger = logging.getLogger(__name__)

_TRACE_BATCH_ELEMENTS = 1 << 16  # logits kept before they are reduced to the top k in one go


class RoundOutput:
    """Ends requests, calls their owners, feeds the sinks. Engine thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        pins: DrafterPins,
        features: torch.Tensor | None,
        *,
        clock: Clock,
        target_version: str,
        feedback: FeedbackSink | None,
        traces: TraceSink | None,
        trace_topk: int,
        on_end: Callable[[str], None],
    ) -> None:
        """features: the KV pool's tapped hidden states (R, m * Dm). on_end: told the id of every request that has ended, before its owner is."""
        self._scheduler = scheduler
        self._pins = pins
        self._features = features
        self.clock = clock
        self._target_version = target_version
        self.feedback = feedback
        self._traces = traces
        self._trace_topk = trace_topk
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

    # ---- traces -------------------------------------------------------------------------------------------------
    def start_trace(self, request: RunningRequest) -> None:
        """Decide at admission whether the request is traced (sink's sampling, the request's own opt-out)."""
        if self._features is None or self._traces is None or not request.request.is_traced:
            return
        if request.request.params.max_tokens == 0:  # nothing is drawn, so there is nothing to learn from
            return
        if request.request.resumed_token_ids:  # a trace needs the target's top k at every output token
            return
        try:
            if self._traces.wants(request.request_id, request.request.bucket):
                request.trace = TraceRows()
        except Exception:
            self._note_broken_sink("choosing a request to trace")

    def trace_logits(self, request: RunningRequest, logits: torch.Tensor) -> None:
        """Append logits (r, V), one row per output token just emitted; reduced to the top k in batches."""
        trace = request.trace
        assert trace is not None
        trace.logits.append(logits)
        trace.num_logits += logits.shape[0]
        if trace.num_logits * logits.shape[1] >= _TRACE_BATCH_ELEMENTS:
            try:
                self._reduce(trace)
            except Exception:  # no memory left, for example; the request goes on without a trace
                request.trace = None
                self._note_broken_sink("reducing a trace")

    def _reduce(self, trace: TraceRows) -> None:
        if not trace.logits:
            return
        logits = trace.logits[0] if len(trace.logits) == 1 else torch.cat(trace.logits)
        top = logits.topk(min(self._trace_topk, logits.shape[1]), -1)
        trace.topk_ids.append(top.indices.int().cpu())
        trace.topk_logprobs.append((top.values - logits.logsumexp(-1, keepdim=True)).cpu())
        trace.logits.clear()
        trace.num_logits = 0

    def _record_trace(self, request: RunningRequest, reason: str) -> None:
        trace, num_rows = request.trace, len(request.tokens) - 1
        assert trace is not None and self._traces is not None and self._features is not None
        self._reduce(trace)
        assert request.rows is not None and request.context_len >= num_rows, "a trace lacks feature rows"
        rows = request.rows[:num_rows].to(self._features.device)
        with torch.inference_mode(False):  # consumers train on these tensors
            record = RequestTrace(
                request_id=request.request_id,
                bucket=request.request.bucket,
                temperature=request.request.params.temperature,
                prompt_len=request.prompt_len,
                token_ids=list(request.tokens),
                features=self._features[rows].cpu(),
                topk_ids=torch.cat(trace.topk_ids),
                topk_logprobs=torch.cat(trace.topk_logprobs),
                target_version=self._target_version,
                finish_reason=reason,
                extra={"tenant": request.request.tenant} if request.request.tenant else {},
            )
        self._traces.record_trace(record)

    def _note_broken_sink(self, what: str) -> None:
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
        if finish_reason == "error":  # its own grammar's; no drafter is to blame
            error = request.grammar.error if request.grammar is not None else None
            if token_ids:
                self.emit(request, token_ids, num_accepted_tokens, logprobs, None, None, prompt_logprobs)
            if request.request_id in self.by_id:  # its owner may be gone
                self.end_early(request, "error", error, is_drafters=False)
            return
        self.num_tokens += len(token_ids)
        event = request.event(
            self.clock.now(),
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
                try:
                    self._record_trace(request, finish_reason)
                except Exception:
                    self._note_broken_sink("recording a trace")
            self._end(request, RequestStatus.FINISHED)
        self._call(request, event)

    def end_early(
        self, request: RunningRequest, reason: str, error: str | None = None, *, is_drafters: bool = True
    ) -> None:
        """End a request without a result: reason 'abort', 'deadline' or 'error'. Its pages and pin are free afterwards.

        is_drafters: whether an error counts against the drafter version that the request is pinned to.
        """
        self.num_aborted += 1
        self.num_expired += reason == "deadline"
        if reason == "error" and is_drafters and request.version:
            self.num_errors[request.version] = self.num_errors.get(request.version, 0) + 1
        is_own_fault = reason == "error" and not is_drafters
        event = request.event(self.clock.now(), finish_reason=reason, error=error, is_own_fault=is_own_fault)
        self._end(request, RequestStatus.ABORTED)
        self._call(request, event)

    def _end(self, request: RunningRequest, status: RequestStatus) -> None:
        self._pins.unpin(request)
        self._scheduler.remove(request, status)
        request.trace = None
        del self.by_id[request.request_id]
        self._on_end(request.request_id)

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
            self._note_broken_sink("recording a round")


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
