"""What is settled when a request is admitted: drafter version, trace, and what becomes of its cached rows?

Shape legend: n shared rows, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

from paceline.serving.draft_weights import DrafterSlots
from paceline.serving.kv_cache import KVPool, PageAllocator
from paceline.serving.round_output import RoundOutput
from paceline.serving.running_request import RunningRequest
from paceline.serving.target import TargetModel


class Admission:
    """Pins admitted requests and hands them what is known of their first rows. Engine thread only."""

    def __init__(
        self, target: TargetModel, kv: KVPool, allocator: PageAllocator, slots: DrafterSlots, output: RoundOutput
    ) -> None:
        self._has_features = bool(target.tap_layers)
        self._kv = kv
        self._allocator = allocator
        self._slots = slots
        self._output = output

    def may_share(self, request: RunningRequest) -> bool:
        """Whether a request may use cached rows: not when it wants logits or features of them that are not kept."""
        if not self._allocator.cache.is_enabled or request.request.prompt_logprobs is not None:
            return False
        return self._kv.features is not None or not (self._has_features and self._slots.needs_features)

    def pin(self, request: RunningRequest) -> None:
        """Choose the drafter version once; a preempted request keeps its own."""
        if not request.is_pinned:
            request.slot, request.version = self._slots.pin(request.request.group, request.request_id)
            request.is_pinned = True
            self._output.start_trace(request, self._has_features)
        drafter = self._slots.drafter(request.slot)
        request.needs_features = drafter is not None and drafter.caps.needs_features and self._has_features
        if request.slot is not None and drafter is not None and drafter.caps.is_row_local:
            request.draft_key = (request.slot, self._slots.num_loads(request.slot))

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        """Hand the kept features (n, m * Dm) of shared rows to the trace, and to the drafter those it has no KV of."""
        count, kept = request.context_len, self._kv.features
        if count == 0:
            return
        request.drafted_len = 0
        if request.draft_key is not None:
            request.drafted_len = self._allocator.num_drafted_rows(request.request_id, request.draft_key)
        request.pending.clear()
        if kept is None or not (request.needs_features or request.trace is not None):
            return
        assert request.rows is not None
        features = kept[request.rows[:count].to(kept.device)]
        if request.needs_features and request.drafted_len < count:
            request.pending.append(features[request.drafted_len :])
        if request.trace is not None:
            self._output.trace_features(request, 0, features)
