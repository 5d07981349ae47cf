"""Drafter pins: the drafter version of each request, the rows that its drafter need not see, and what it keeps."""

from __future__ import annotations

from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.running import RunningRequest
from paceline.serving.target_model.kv_cache import PageAllocator


class DrafterPins:
    """Pins admitted requests to drafter slots until they end. Engine thread only."""

    def __init__(self, allocator: PageAllocator, slots: DrafterSlots) -> None:
        self._allocator, self._slots = allocator, slots

    def pin(self, request: RunningRequest) -> bool:
        """Choose the drafter version once, a preempted request keeps its own; whether it was chosen now."""
        is_new = not request.is_pinned
        if is_new:
            request.slot, request.version = self._slots.pin(request.request.group, request.request_id)
            request.is_pinned = True
        drafter = self._slots.drafter(request.slot)
        if request.slot is not None and drafter is not None and drafter.caps.is_row_local:
            request.draft_writer = (request.slot, self._slots.num_loads(request.slot))
        return is_new

    def unpin(self, request: RunningRequest) -> None:
        """Let the drafter version of a request that has ended go."""
        self.forget(request)
        if request.is_pinned:
            self._slots.unpin(request.slot)
            request.is_pinned = False

    def may_share(self, request: RunningRequest) -> bool:
        """Whether a request may use cached rows: not when it wants their logits."""
        return self._allocator.cache.is_enabled and request.request.prompt_logprobs is None

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        """Skip the drafter over those shared rows whose drafter KV the same weights wrote; their features are in the pool."""
        if request.context_len == 0:
            return
        request.drafted_len = 0
        if request.draft_writer is not None:
            request.drafted_len = self._allocator.num_drafted_rows(request.request_id, request.draft_writer)

    def forget(self, request: RunningRequest) -> None:
        """Let the request's drafter drop what it keeps per request."""
        drafter = self._slots.drafter(request.slot)
        if drafter is not None and request.slot is not None:
            try:
                drafter.release(request.request_id)
            except Exception as e:  # a broken drafter costs speed, never a request
                self._slots.mark_failed(request.slot, f"release raised {type(e).__name__}: {e}")
