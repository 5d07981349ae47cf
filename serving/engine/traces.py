"""Trace collector: what the target says at every output token of traced requests, its most likely tokens and hidden states.

The best tokens of all traced requests of a round are found together, and of small rounds several rounds together; what is
found goes to the host behind the round's own work, so no round waits for it. A request's trace is handed over once its
last rows have arrived.

Shape legend: n rows, V vocab, k best tokens, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from paceline.serving.drafters.forward import Ranking, best_tokens
from paceline.serving.engine.buckets import OTHER_BUCKET
from paceline.serving.engine.running import RunningRequest, TraceRows
from paceline.serving.sampling.request import RequestTrace
from paceline.serving.target_model.device import upload

logger = logging.getLogger(__name__)


class TraceSink(Protocol):
    """Takes the trace of a finished request."""

    def wants(self, request_id: str, bucket: str) -> bool:
        """Whether this new request should be traced (sampling, room); asked once, at admission.

        The answer holds for the request's life: a request that is not wanted collects nothing.
        """

    def record_trace(self, trace: RequestTrace) -> None:
        """Append the trace of a request that was wanted; drops and counts when full."""


_MIN_ELEMENTS, _MAX_ELEMENTS = 1 << 16, 1 << 25
"""Logits ranked in one go: fewer are kept for later rounds, more go in parts (128 MiB)."""
TRACES = 4
"""Longest traces that the store must hold: one that took more would push out what it is to be compared with."""
_MAX_PARTS = 256
"""Parts of a trace that are joined: their rounds' other rows are then free."""


class TraceCollector:
    """Collects the traces of one engine. Engine thread only."""

    def __init__(
        self,
        sink: TraceSink,
        features: torch.Tensor,
        ranking: Ranking,
        *,
        topk: int,
        target_version: str,
        tap_layers: tuple[int, ...],
        max_bytes: int | None = None,
        note_error: Callable[[str], None],
    ) -> None:
        """features: the KV pool's tapped hidden states (R, m * Dm). max_bytes: of the features of one trace; None = no limit,
        of what is longer there is none. note_error: counts what must end neither a request nor the
        engine; called inside the handler, with what failed."""
        self._sink, self._features, self.ranking = sink, features, ranking
        self._topk, self._target_version, self._note_error = topk, target_version, note_error
        self._tap_layers = tap_layers
        row_bytes = max(features.shape[1] * features.element_size(), 1)
        self._max_rows = None if max_bytes is None else max_bytes // row_bytes
        self._is_told = False
        self._logits: list[torch.Tensor] = []  # (n, V) each, not yet ranked
        self._owners: list[tuple[RunningRequest, int]] = []  # whose rows those are, and how many, in order
        self._num_elements = 0
        self._pending: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def start(self, request: RunningRequest) -> None:
        """Decide at admission whether the request is traced (the sink's sampling, the request's own opt-out)."""
        if not request.request.is_traced or request.request.params.max_tokens == 0:
            return
        if request.request.is_own and request.bucket == OTHER_BUCKET:  # which everybody's text trains
            return
        if request.request.resumed_token_ids:  # a trace needs the target's best tokens at every output token
            return
        if self._is_too_long(request.prompt_len):
            return
        try:
            if self._sink.wants(request.request_id, request.bucket):
                request.trace = TraceRows()
        except Exception:
            self._note_error("choosing a request to trace")

    def _is_too_long(self, num_rows: int) -> bool:
        """Whether a trace of so many rows would take the place of all others."""
        if self._max_rows is None or num_rows <= self._max_rows:
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "requests of more than %d tokens leave no trace, so nothing is learned from them: trace.max_bytes would hold less than %d",
                self._max_rows, TRACES,
            )  # fmt: skip
        return True

    def add(
        self,
        requests: list[RunningRequest],
        rows: list[list[int]],
        logits: torch.Tensor,
        rank: Callable[[list[int]], torch.Tensor | None] | None = None,
    ) -> None:
        """Take the rows of logits (N, V) from which the traced ones of these requests drew their newest tokens.

        rank: the best tokens of some rows by a graph, as `best_tokens` on the host; it may have none.  Syncs: none.
        """
        traced = [(r, own) for r, own in zip(requests, rows, strict=True) if r.trace is not None]
        index = [row for _, own in traced for row in own]
        if not index:
            return
        for request, _ in traced:  # parts of earlier rounds arrived before this one's tokens were read, its own later
            trace = request.trace
            if trace is not None and len(trace.parts) >= _MAX_PARTS:
                joined = trace.joined()
                trace.parts, trace.bounds = [joined], [0, len(joined)]
        try:
            best = None if rank is None else rank(index)
            if best is not None:
                self._rank()  # what came before
                self._hand_out(best, [(r, len(own)) for r, own in traced])
                return
        except Exception:
            self._owners += [(r, len(own)) for r, own in traced]  # a part that lacks rows would spoil its whole shard
            self._drop("ranking a trace")
            return
        self._owners += [(r, len(own)) for r, own in traced]
        self._num_elements += len(index) * logits.shape[1]
        try:
            # A copy: kept logits would be overwritten by the next round's.
            if self._logits or self._num_elements < _MIN_ELEMENTS or index != list(range(logits.shape[0])):
                logits = logits.index_select(0, upload(index, logits.device, torch.int64))
            self._logits.append(logits)
            if self._num_elements >= _MIN_ELEMENTS:
                self._rank()
        except Exception:  # no memory left, for example; the requests go on without a trace
            self._drop("ranking a trace")

    def finish(self, request: RunningRequest, reason: str) -> None:
        """Hand over the trace of a request that ends now, as soon as its rows are on the host.  Syncs: none."""
        try:
            self._rank()
        except Exception:
            self._drop("ranking a trace")
        trace, request.trace = request.trace, None
        if trace is None:
            return
        num_rows = len(request.tokens) - 1
        if self._is_too_long(num_rows):
            return
        try:
            assert request.rows is not None and request.context_len >= num_rows, "a trace lacks feature rows"
            rows = upload(request.rows[:num_rows], self._features.device)
            with torch.inference_mode(False):  # consumers train on these tensors
                features = self._features[rows].to("cpu", non_blocking=True)
        except Exception:
            self._note_error("recording a trace")
            return

        def hand_over() -> None:
            try:
                self._sink.record_trace(self._record(request, trace, features, reason))
            except Exception:
                self._note_error("recording a trace")

        if self._features.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._pending.append((event, hand_over))
        else:
            hand_over()

    def deliver(self, *, is_waiting: bool = False) -> None:
        """Hand over the finished traces whose rows have arrived; with is_waiting all of them, when they have."""
        while self._pending and (is_waiting or self._pending[0][0].query()):
            event, hand_over = self._pending.popleft()
            event.synchronize()
            hand_over()

    def _record(self, request: RunningRequest, trace: TraceRows, features: torch.Tensor, reason: str) -> RequestTrace:
        joined = trace.joined()
        ids, logprobs = joined[:, 0].copy(), joined[:, 1].copy().view(np.float32)
        with torch.inference_mode(False):
            return RequestTrace(
                request_id=request.request_id,
                bucket=request.bucket,
                temperature=request.request.params.temperature,
                prompt_len=request.prompt_len,
                token_ids=list(request.tokens),
                features=features.clone() if features.is_pinned() else features,  # pinned memory is never given back
                topk_ids=torch.from_numpy(ids),
                topk_logprobs=torch.from_numpy(logprobs),
                target_version=self._target_version,
                finish_reason=reason,
                extra={"tenant": request.request.tenant} if request.request.tenant else {},
                tap_layers=self._tap_layers,
            )

    def _rank(self) -> None:
        if not self._logits:
            return
        logits = self._logits[0] if len(self._logits) == 1 else torch.cat(self._logits)
        found = [
            best_tokens(part, self.ranking, self._topk)
            for part in logits.split(max(1, _MAX_ELEMENTS // logits.shape[1]))
        ]
        best = found[0] if len(found) == 1 else torch.cat(found)
        self._hand_out(best.to("cpu", non_blocking=True), self._owners)
        self._clear()

    def _hand_out(self, best: torch.Tensor, owners: list[tuple[RunningRequest, int]]) -> None:
        """Give every request its rows of (n, 2, k) int32."""
        rows, at = best.numpy(), 0
        for request, count in owners:
            trace = request.trace
            if trace is not None:
                trace.append(rows, at, at + count)
            at += count

    def _drop(self, what: str) -> None:
        lost = {id(request): request for request, _ in self._owners if request.trace is not None}
        self._clear()
        for request in lost.values():
            request.trace = None
            self._note_error(what)

    def _clear(self) -> None:
        self._logits, self._owners, self._num_elements = [], [], 0
