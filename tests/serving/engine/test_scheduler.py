"""Admission, prefill chunks, page reservation and preemption of the scheduler."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import IllegalTransitionError
from paceline.serving.engine.running import RunningRequest
from paceline.serving.engine.scheduler import Scheduler
from paceline.serving.sampling.request import RequestStatus
from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.prefix_cache import PrefixCache
from tests.helpers.running_requests import NoDrafts, make_request

PAGE = 4


def make_scheduler(
    num_pages: int, *, max_running: int = 8, chunk: int = 6, **options
) -> tuple[Scheduler, PageAllocator]:
    pages = PageAllocator(num_pages, PAGE)
    return Scheduler(
        pages, NoDrafts(), page_tokens=PAGE, max_running=max_running, prefill_chunk_tokens=chunk, **options
    ), pages


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


def test_nobody_is_preempted_for_the_rows_of_anothers_draft():
    scheduler, pages = make_scheduler(15, chunk=64)
    requests = [make_request(i, 7, max_tokens=30) for i in range(5)]
    for r in requests:
        scheduler.add(r)
    scheduler.admit()
    for r in requests:
        finish_prefill(scheduler, r)
        r.tokens.append(9)
        r.context_len += 1
    assert scheduler.reserve(8) == requests and scheduler.num_preemptions == 0
    assert all(r.row_capacity >= r.context_len + 1 for r in requests)
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


# ---- priorities -----------------------------------------------------------------------------------------------------
def with_priority(arrival: int, priority: int, *, submitted_s: float = 0.0, prompt_len: int = 3, max_tokens: int = 8):
    request = make_request(arrival, prompt_len, max_tokens)
    request.request = dataclasses.replace(request.request, priority=priority)
    request.submitted_s = submitted_s
    return request


def test_better_priorities_go_first_and_equals_in_order_of_arrival():
    scheduler, _ = make_scheduler(64, priority_aging_s=30.0)
    requests = [with_priority(i, p) for i, p in enumerate((1, 0, 1, -1, 0))]
    for r in requests:
        scheduler.add(r)
    assert [r.request_id for r in scheduler.admit()] == ["r3", "r1", "r4", "r0", "r2"]


def test_waiting_makes_up_for_a_worse_priority():
    scheduler, _ = make_scheduler(64, max_running=1, priority_aging_s=30.0)
    old = with_priority(0, 1, submitted_s=0.0)
    scheduler.add(old)
    scheduler.add(with_priority(1, 0, submitted_s=29.0))
    scheduler.add(with_priority(2, 0, submitted_s=31.0))
    assert [r.request_id for r in scheduler.waiting] == ["r1", "r0", "r2"]


def test_a_better_priority_takes_the_place_of_the_newest_request_of_the_worst():
    scheduler, pages = make_scheduler(64, max_running=3, priority_aging_s=30.0)
    running = [with_priority(i, p) for i, p in enumerate((0, 1, 1))]
    for r in running:
        scheduler.add(r)
    for r in scheduler.admit():
        finish_prefill(scheduler, r)
    urgent = with_priority(3, -1)
    scheduler.add(urgent)
    assert scheduler.admit() == [urgent]
    assert [r.status for r in running] == [RequestStatus.RUNNING, RequestStatus.RUNNING, RequestStatus.PREEMPTED]
    assert scheduler.admit() == [], "the one that lost its place does not take it back"
    pages.check_integrity()


def test_equals_never_preempt_each_other_for_a_place():
    scheduler, _ = make_scheduler(64, max_running=1, priority_aging_s=30.0)
    for i in range(2):
        scheduler.add(with_priority(i, 1))
    first = scheduler.admit()
    scheduler.add(with_priority(2, 1))
    assert scheduler.admit() == [] and scheduler.active == first and scheduler.num_preemptions == 0


def test_pages_for_a_better_priority_are_taken_only_if_they_suffice():
    scheduler, pages = make_scheduler(8, priority_aging_s=30.0)
    same, worse = with_priority(0, 0, prompt_len=15), with_priority(1, 1, prompt_len=7)
    for r in (same, worse):
        scheduler.add(r)
    assert scheduler.admit() == [same, worse]
    scheduler.add(with_priority(2, 0, prompt_len=19))
    assert scheduler.admit() == [] and scheduler.num_preemptions == 0, "not even all pages of the worse one would do"
    fits = with_priority(3, -1, prompt_len=7)
    scheduler.add(fits)
    assert scheduler.admit() == [fits] and worse.status is RequestStatus.PREEMPTED and same in scheduler.active
    pages.check_integrity()


def test_nobody_is_preempted_for_a_place_whose_pages_are_not_there():
    scheduler, pages = make_scheduler(8, max_running=2, priority_aging_s=30.0)
    better, worse = with_priority(0, -1, prompt_len=15), with_priority(1, 1, prompt_len=3)
    for r in (better, worse):
        scheduler.add(r)
    assert scheduler.admit() == [better, worse]
    scheduler.add(with_priority(2, 0, prompt_len=19))
    assert scheduler.admit() == [] and scheduler.num_preemptions == 0
    assert scheduler.active == [better, worse]
    pages.check_integrity()


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 9)), min_size=2, max_size=12), st.integers(3, 10))
def test_preemption_by_priority_ends(requests, num_pages):
    scheduler, pages = make_scheduler(num_pages, max_running=3, priority_aging_s=10.0)
    limit = num_pages * PAGE - 1
    for i, (priority, prompt_len) in enumerate(requests):
        prompt_len = min(prompt_len, limit - 1)
        scheduler.add(with_priority(i, priority, submitted_s=3.0 * i, prompt_len=prompt_len, max_tokens=min(6, limit - prompt_len)))  # fmt: skip
    for _ in range(60 * len(requests)):
        scheduler.admit()
        for request, num_rows in scheduler.prefill_chunks():
            if request.context_len + num_rows == request.prefill_len:
                finish_prefill(scheduler, request)
            else:
                request.context_len += num_rows
        for request in scheduler.reserve(0):
            request.tokens.append(9)
            request.context_len += 1
            if len(request.tokens) >= request.token_limit:
                scheduler.remove(request, RequestStatus.FINISHED)
        pages.check_integrity()
    assert not scheduler.active and not scheduler.waiting
    assert scheduler.num_preemptions <= len(requests) ** 2


# ---- rows of a round ------------------------------------------------------------------------------------------------
def test_prompts_get_what_decoding_leaves_and_at_least_their_minimum():
    scheduler, _ = make_scheduler(64, chunk=20, min_prefill_tokens=5)
    request = make_request(0, 100)
    scheduler.add(request)
    scheduler.admit()
    assert [scheduler.prefill_chunks(n)[0][1] for n in (0, 8, 15, 16, 500)] == [20, 12, 5, 5, 5]


def test_several_prompts_share_what_decoding_leaves():
    scheduler, _ = make_scheduler(64, chunk=12, min_prefill_tokens=2)
    requests = [make_request(i, 4) for i in range(3)]
    for r in requests:
        scheduler.add(r)
    scheduler.admit()
    assert scheduler.prefill_chunks(3) == [(requests[0], 4), (requests[1], 4), (requests[2], 1)]


# ---- a first of the queue that finds no room --------------------------------------------------------------------------
class Forgetful(Scheduler):
    """Looks for the prefix of a blocked request in every round."""

    def _is_still_blocked(self, request: RunningRequest) -> bool:
        return False


class CountingPages(PageAllocator):
    num_lookups = 0

    def share(self, *args, **kwargs) -> int:
        self.num_lookups += 1
        return super().share(*args, **kwargs)


def make_sharing(kind: type[Scheduler], num_pages: int, **options) -> tuple[Scheduler, CountingPages]:
    pages = CountingPages(num_pages, PAGE, PrefixCache(PAGE))
    values = {"max_running": 8, "prefill_chunk_tokens": 6, **options}
    return kind(pages, NoDrafts(can_share=True), page_tokens=PAGE, **values), pages


def test_a_blocked_request_looks_for_its_prefix_once_per_change_that_can_make_room():
    scheduler, pages = make_sharing(Scheduler, 24, prefill_chunk_tokens=64)
    running, blocked = make_request(0, 63, max_tokens=24), make_request(1, 95)
    scheduler.add(running)
    scheduler.add(blocked)
    assert scheduler.admit() == [running]
    finish_prefill(scheduler, running)
    scheduler.publish(running)  # a part of the blocked one's prompt: it may need fewer pages now
    assert scheduler.admit() == []
    num_lookups = pages.num_lookups
    for _ in range(20):
        running.tokens.append(9)
        running.context_len += 1
        assert scheduler.reserve(2) == [running]
        assert scheduler.admit() == []
    assert pages.num_lookups == num_lookups
    scheduler.remove(running, RequestStatus.FINISHED)
    assert scheduler.admit() == [blocked] and blocked.context_len == 60
    pages.check_integrity()


@example(
    9, 1, [("add", 0), ("add", 8), ("add", 1), ("add", 15), ("add", 0)]
)  # preemptions in two rounds for one request
@given(
    st.integers(5, 14),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["add", "step", "step", "step", "end"]), st.integers(0, 40)), max_size=60),
)
def test_nothing_is_admitted_later_for_looking_less_often(num_pages, num_tenants, operations):
    """Two schedulers through the same requests, one of which looks in every round."""
    pair = [make_sharing(kind, num_pages, priority_aging_s=1.0) for kind in (Scheduler, Forgetful)]
    for i, (name, value) in enumerate(operations):
        admitted = []
        for scheduler, pages in pair:
            if name == "add":
                request = make_request(i, 1 + value % (PAGE * num_pages // 2), max_tokens=6)
                request.request = dataclasses.replace(
                    request.request, priority=value % 3, tenant=f"t{value % num_tenants}"
                )
                scheduler.add(request)
            elif name == "end" and scheduler.active:
                scheduler.remove(scheduler.active[value % len(scheduler.active)], RequestStatus.FINISHED)
            admitted.append([r.request_id for r in scheduler.admit()])
            for request, num_rows in scheduler.prefill_chunks():
                request.context_len += num_rows
                scheduler.publish(request)
                if request.context_len == request.prefill_len:
                    finish_prefill(scheduler, request)
            for request in scheduler.reserve(2):
                if len(request.tokens) < request.token_limit:
                    request.tokens.append(3 + value % 5)
                    request.context_len += 1
            pages.check_integrity()
        assert admitted[0] == admitted[1]
    assert pair[0][1].num_lookups <= pair[1][1].num_lookups
