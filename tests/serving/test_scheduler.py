"""Admission, prefill chunks, page reservation and preemption of the scheduler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import IllegalTransitionError
from paceline.serving.kv_cache import PageAllocator
from paceline.serving.request import GenerationRequest, RequestStatus, SamplingParams
from paceline.serving.running_request import RunningRequest
from paceline.serving.scheduler import Scheduler

PAGE = 4


def make_request(arrival: int, prompt_len: int, max_tokens: int = 8) -> RunningRequest:
    request = GenerationRequest(
        request_id=f"r{arrival}", prompt_token_ids=tuple(range(3, 3 + prompt_len)), params=SamplingParams()
    )
    return RunningRequest(
        request=request,
        on_event=lambda e: None,
        arrival=arrival,
        seed=0,
        token_limit=prompt_len + max_tokens,
        stop_token_ids=frozenset(),
        stop_checker=None,
        counts=None,
        submitted_s=0.0,
    )


def make_scheduler(num_pages: int, *, max_running: int = 8, chunk: int = 6) -> tuple[Scheduler, PageAllocator]:
    pages = PageAllocator(num_pages, PAGE)
    return Scheduler(pages, page_tokens=PAGE, max_running=max_running, prefill_chunk_tokens=chunk), pages


def finish_prefill(scheduler: Scheduler, request: RunningRequest) -> None:
    """Pretend that the whole prompt was computed and the first token drawn."""
    request.context_len = request.prefill_len
    if len(request.tokens) == request.context_len:
        request.tokens.append(9)
    scheduler.start_running(request)


def test_requests_are_admitted_in_arrival_order_up_to_the_running_limit():
    scheduler, _ = make_scheduler(64, max_running=2)
    for i in range(3):
        scheduler.add(make_request(i, 5))
    assert [r.request_id for r in scheduler.admit()] == ["r0", "r1"]
    assert [r.request_id for r in scheduler.waiting] == ["r2"]


def test_a_prompt_waits_until_its_pages_are_free():
    scheduler, pages = make_scheduler(6)
    first, second = make_request(0, 15), make_request(1, 7)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.admit() == [first]
    assert scheduler.admit() == []
    finish_prefill(scheduler, first)
    scheduler.remove(first, RequestStatus.FINISHED)
    assert scheduler.admit() == [second]
    pages.check_integrity()


def test_prefill_chunks_share_the_row_budget_oldest_first():
    scheduler, _ = make_scheduler(64, chunk=6)
    first, second = make_request(0, 4), make_request(1, 9)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert scheduler.prefill_chunks() == [(first, 4), (second, 2)]
    second.context_len = 2
    finish_prefill(scheduler, first)
    assert scheduler.prefill_chunks() == [(second, 6)]


def test_the_newest_request_is_preempted_when_pages_run_out():
    scheduler, pages = make_scheduler(5)
    old, new = make_request(0, 7, max_tokens=12), make_request(1, 3)
    for r in (old, new):
        scheduler.add(r)
    scheduler.admit()
    for r in (old, new):
        finish_prefill(scheduler, r)
    old.tokens += [9] * 10
    old.context_len += 10
    assert scheduler.reserve(0) == [old]
    assert new.status is RequestStatus.PREEMPTED and list(scheduler.waiting) == [new]
    assert new.row_capacity == 0 and new.context_len == 0 and len(new.tokens) == 4
    pages.check_integrity()


def test_a_preempted_request_recomputes_everything_but_its_anchor():
    scheduler, _ = make_scheduler(8)
    request = make_request(0, 5)
    scheduler.add(request)
    scheduler.admit()
    finish_prefill(scheduler, request)
    request.tokens += [9, 9]
    request.context_len += 2
    scheduler.preempt(request)
    assert request.prefill_len == len(request.tokens) - 1
    assert scheduler.admit() == [request]


def test_a_preempted_request_returns_before_later_arrivals():
    scheduler, _ = make_scheduler(16, max_running=1)
    first, second = make_request(0, 5), make_request(1, 5)
    scheduler.add(first)
    scheduler.admit()
    scheduler.add(second)
    finish_prefill(scheduler, first)
    scheduler.preempt(first)
    assert list(scheduler.waiting) == [first, second]


def test_draft_rows_are_reserved_only_from_free_pages():
    scheduler, pages = make_scheduler(4)
    a, b = make_request(0, 6), make_request(1, 2)
    for r in (a, b):
        scheduler.add(r)
    scheduler.admit()
    for r in (a, b):
        finish_prefill(scheduler, r)
    assert scheduler.reserve(8) == [a, b]
    assert scheduler.num_preemptions == 0
    assert a.row_capacity >= a.context_len + 1 and b.row_capacity >= b.context_len + 1
    pages.check_integrity()


def test_a_finished_request_cannot_be_preempted():
    scheduler, _ = make_scheduler(8)
    request = make_request(0, 3)
    scheduler.add(request)
    scheduler.admit()
    finish_prefill(scheduler, request)
    scheduler.remove(request, RequestStatus.FINISHED)
    with pytest.raises(IllegalTransitionError):
        scheduler.preempt(request)


@given(
    st.integers(3, 12),
    st.lists(st.tuples(st.sampled_from(["add", "round", "abort"]), st.integers(0, 9)), min_size=1, max_size=40),
)
def test_pages_balance_and_the_oldest_request_always_advances(num_pages, operations):
    scheduler, pages = make_scheduler(num_pages)
    arrivals = 0
    for name, value in operations:
        alive = [*scheduler.active, *scheduler.waiting]
        if name == "add":
            limit = num_pages * PAGE - 1
            prompt_len = min(1 + value, limit - 1)
            scheduler.add(make_request(arrivals, prompt_len, max_tokens=min(8, limit - prompt_len)))
            arrivals += 1
        elif name == "abort" and alive:
            scheduler.remove(alive[value % len(alive)], RequestStatus.ABORTED)
        elif name == "round" and alive:
            oldest = min(alive, key=lambda r: r.arrival)
            before = (len(oldest.tokens), oldest.context_len)
            scheduler.admit()
            for request, num_rows in scheduler.prefill_chunks():
                if request.context_len + num_rows == request.prefill_len:
                    finish_prefill(scheduler, request)
                else:
                    request.context_len += num_rows
            for request in scheduler.reserve(3):
                room = min(request.row_capacity - request.context_len, 1 + value % 3)
                assert room >= 1
                request.tokens += [9] * room
                request.context_len += room
                if len(request.tokens) >= request.token_limit:
                    scheduler.remove(request, RequestStatus.FINISHED)
            assert oldest.status is RequestStatus.FINISHED or (len(oldest.tokens), oldest.context_len) > before
        pages.check_integrity()
        assert all(r.row_capacity == 0 for r in scheduler.waiting)
    for request in [*scheduler.active, *scheduler.waiting]:
        scheduler.remove(request, RequestStatus.ABORTED)
    assert pages.num_free_pages == num_pages
