"""Do pages, drafter pins and request states of an engine balance, and do a request's token biases fit the target?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import RequestError
from paceline.serving.draft_weights import DrafterSlots
from paceline.serving.kv_cache import PageAllocator
from paceline.serving.request import RequestStatus
from paceline.serving.round_output import RoundOutput
from paceline.serving.scheduler import Scheduler


def check_balance(allocator: PageAllocator, scheduler: Scheduler, slots: DrafterSlots, output: RoundOutput) -> None:
    """Raise AssertionError naming what does not balance; for tests and idle engines, between rounds."""
    allocator.check_integrity()
    pins = dict.fromkeys(slots.num_pins(), 0)
    num_held = 0
    for r in output.by_id.values():
        if r.is_pinned and r.slot is not None:
            pins[r.slot] += 1
        num_pages = len(allocator.pages(r.request_id))
        num_held += num_pages - allocator.num_shared_rows(r.request_id) // allocator.page_tokens
        num_shared = allocator.num_shared_rows(r.request_id)
        is_active = r in scheduler.active
        assert is_active != (r in scheduler.waiting), f"{r.request_id} is in both lists or in none"
        assert r.row_capacity == num_pages * allocator.page_tokens, f"{r.request_id}: stale row table"
        assert is_active or num_pages == 0, f"{r.request_id} waits but holds pages"
        if r.status is RequestStatus.RUNNING:
            assert r.context_len == len(r.tokens) - 1, f"{r.request_id}: KV length is not committed - 1"
        assert num_shared <= r.context_len, f"{r.request_id}: it would write rows that others share"
        assert r.drafted_len <= r.context_len <= r.row_capacity, f"{r.request_id}: row counts are inconsistent"
    assert pins == slots.num_pins(), f"drafter pins do not balance: {pins} != {slots.num_pins()}"
    num_shared_pages = allocator.cache.num_nodes - allocator.cache.num_idle
    assert num_held + num_shared_pages + allocator.num_free_pages == allocator.num_pages, (
        "pages of ended requests are held"
    )
    ranks = [r.rank for r in scheduler.active]
    assert ranks == sorted(ranks), "active requests are out of order"
    assert len(scheduler.active) + len(scheduler.waiting) == len(output.by_id), "a request is lost"


def check_bias(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    """Raise RequestError unless every biased token is in the vocabulary and named once."""
    token_ids = [t for t, _ in logit_bias]
    bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise RequestError(f"logit_bias token ids must be in [0, {vocab_size}), got {bad}")
    if len(set(token_ids)) < len(token_ids):
        raise RequestError("logit_bias must name every token id at most once")
