"""What is settled when a request is admitted: drafter version, trace, and what becomes of its cached rows?"""

from __future__ import annotations

from paceline.serving.draft_weights import DrafterSlots
from paceline.serving.kv_cache import KVPool, PageAllocator
from paceline.serving.round_output import RoundOutput
from paceline.serving.running_request import RunningRequest


class Admission:
    """Pins admitted requests and hands them what is known of their first rows. Engine thread only."""

    def __init__(self, kv: KVPool, allocator: PageAllocator, slots: DrafterSlots, output: RoundOutput) -> None:
        self._kv = kv
        self._allocator = allocator
        self._slots = slots
        self._output = output

    def may_share(self, request: RunningRequest) -> bool:
        """Whether a request may use cached rows: not when it wants their logits."""
        return self._allocator.cache.is_enabled and request.request.prompt_logprobs is None

    def pin(self, request: RunningRequest) -> None:
        """Choose the drafter version once; a preempted request keeps its own."""
        if not request.is_pinned:
            request.slot, request.version = self._slots.pin(request.request.group, request.request_id)
            request.is_pinned = True
            self._output.start_trace(request)
        drafter = self._slots.drafter(request.slot)
        if request.slot is not None and drafter is not None and drafter.caps.is_row_local:
            request.draft_writer = (request.slot, self._slots.num_loads(request.slot))

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        """Skip the drafter over those shared rows whose drafter KV the same weights wrote; their features are in the pool."""
        if request.context_len == 0:
            return
        request.drafted_len = 0
        if request.draft_writer is not None:
            request.drafted_len = self._allocator.num_drafted_rows(request.request_id, request.draft_writer)
