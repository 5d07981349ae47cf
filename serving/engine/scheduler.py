"""Scheduler: admits requests, chunks prefills, reserves pages and preempts.

Every request has a rank: its submission time plus its priority times `priority_aging_s`, then its arrival. Smaller ranks
are admitted first, equal priorities therefore in order of arrival, and a waiting request overtakes later ones of the next
better priority once it has waited `priority_aging_s` longer. A rank never changes, so the smallest one is never
preempted and always advances, and no two requests can preempt each other in turn.

That holds within a tenant. Between tenants the one goes first that was given the fewest rows, prompts get even parts of a
round's rows, and one that holds less than an even part of the places and pages gets them from those that hold more: their
newest requests go back to the queue, but never a tenant's only one. So nobody's flood, and nobody's priorities, hold up
others (the counter of rows: arXiv 2401.00588).

A request is admitted when its prompt's pages are free; pages of a cached prefix are shared (prefix_cache.py). Prompts are
prefilled in chunks between decode rounds. When a running request cannot get the page of its next row, the active request
with the largest rank loses its pages and goes back to the queue. When the first of the queue finds no room, active
requests of a worse priority make it, if their pages suffice. Lost rows are recomputed, or found in the prefix cache.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import torch

from paceline.serving.engine.running import RunningRequest
from paceline.serving.sampling.request import RequestStatus
from paceline.serving.target_model.prefix_cache import DraftWriter


class Deadlines:
    """The deadlines of unfinished requests; without any, a round pays nothing. Engine thread only."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # (deadline_s, arrival, request id)

    def __len__(self) -> int:
        """Deadlines kept, those of ended requests included for a while."""
        return len(self._heap)

    def add(self, request: RunningRequest, unfinished: Mapping[str, RunningRequest]) -> None:
        """Watch a request that has a deadline; `unfinished` says which of the others are worth keeping."""
        deadline_s = request.request.deadline_s
        if deadline_s is None:
            return
        if len(self._heap) > 2 * len(unfinished) + 64:
            self._heap = [e for e in self._heap if (r := unfinished.get(e[2])) is not None and r.arrival == e[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, request.arrival, request.request_id))

    def take_expired(self, now_s: float, unfinished: Mapping[str, RunningRequest]) -> list[RunningRequest]:
        """Requests whose deadline has come, earliest first; each is returned once."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = unfinished.get(request_id)
            if request is not None and request.arrival == arrival:  # an id may have been used again
                expired.append(request)
        return expired


class _Line:
    """Waiting requests of one tenant by rank; adding, removing and looking at the first cost O(log n)."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[float, int], RunningRequest]] = []  # entries of requests that left are skipped
        self.members: dict[str, RunningRequest] = {}

    def first(self) -> RunningRequest:
        """The smallest rank; there is one."""
        while self.members.get(self.heap[0][1].request_id) is not self.heap[0][1]:
            heapq.heappop(self.heap)
        return self.heap[0][1]


class RequestQueue:
    """Waiting requests, each tenant's by rank, smallest first. One thread only, but for `num_of`."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, request: RunningRequest) -> bool:
        line = self._lines.get(request.request.tenant)
        return line is not None and line.members.get(request.request_id) is request

    def __iter__(self) -> Iterator[RunningRequest]:
        """In order of rank; for checks and tests, as it sorts."""
        waiting = (r for line in self._lines.values() for r in line.members.values())
        return iter(sorted(waiting, key=lambda r: r.rank))

    @property
    def tenants(self) -> Collection[str]:
        """Who waits."""
        return self._lines.keys()

    def num_of(self, tenant: str) -> int:
        """Waiting requests of a tenant. Any thread."""
        line = self._lines.get(tenant)
        return 0 if line is None else len(line.members)

    def push(self, request: RunningRequest) -> None:
        """Add a request with its rank, which must differ from every other's and not change any more."""
        line = self._lines.setdefault(request.request.tenant, _Line())
        assert request.request_id not in line.members, "a request waits once"
        line.members[request.request_id] = request
        heapq.heappush(line.heap, (request.rank, request))
        self._num += 1

    def first(self, turn: Callable[[str], tuple[float, ...]] = lambda tenant: ()) -> RunningRequest | None:
        """The request whose turn it is; None when nobody waits. turn: smaller = earlier; among equals the rank decides."""
        if len(self._lines) <= 1:
            return next((line.first() for line in self._lines.values()), None)
        return min((line.first() for line in self._lines.values()), key=lambda r: (turn(r.request.tenant), r.rank))

    def remove(self, request: RunningRequest) -> None:
        """Take a request out, wherever it stands."""
        line = self._lines[request.request.tenant]
        del line.members[request.request_id]
        self._num -= 1
        if not line.members:
            del self._lines[request.request.tenant]
        elif len(line.heap) > 2 * len(line.members) + 64:
            line.heap = [(r.rank, r) for r in line.members.values()]
            heapq.heapify(line.heap)


class RowCounter:
    """Rows that each tenant was given; a tenant that comes anew begins level with the least of those that are there."""

    MAX_KEPT = 4096
    """Tenants remembered while they are away, so that none gains by leaving for a moment."""

    def __init__(self) -> None:
        self._rows: dict[str, float] = {}

    def __getitem__(self, tenant: str) -> float:
        return self._rows.get(tenant, 0.0)

    def enter(self, tenant: str, present: Collection[str]) -> None:
        """A tenant that had no request has one; `present`: the others that have some."""
        least = min((self[t] for t in present if t != tenant), default=None)
        if least is None:
            self._rows.clear()  # alone: nobody is ahead of anybody
        elif len(self._rows) > self.MAX_KEPT:
            self._rows = {t: n for t, n in self._rows.items() if t in present}
        self._rows[tenant] = max(self[tenant], least or 0.0)

    def add(self, tenant: str, num_rows: int) -> None:
        """A tenant is given rows."""
        self._rows[tenant] = self[tenant] + num_rows


class Pages(Protocol):
    """The part of the page allocator that the scheduler uses."""

    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_ever_cached(self) -> int: ...
    def ensure(self, request_id: str, num_rows: int) -> bool: ...
    def rows(self, request_id: str, start: int, stop: int) -> torch.Tensor: ...
    def release(self, request_id: str) -> None: ...
    def pages(self, request_id: str) -> tuple[int, ...]: ...
    def share(self, request_id: str, tenant: str, token_ids: list[int], max_rows: int) -> int: ...
    def num_shared_rows(self, request_id: str) -> int: ...
    def note_drafted(self, request_id: str, draft_writer: DraftWriter, num_rows: int) -> None: ...
    def next_page_key(self, request_id: str, tenant: str, token_ids: list[int]) -> tuple[int, bytes] | None: ...
    def publish(
        self,
        request_id: str,
        tenant: str,
        token_ids: list[int],
        num_rows: int,
        *,
        draft_writer: DraftWriter | None = None,
        num_drafted_rows: int = 0,
        is_last: bool = False,
    ) -> None: ...


class DraftState(Protocol):
    """What drafters know of a request's rows, as far as the scheduler moves them."""

    def may_share(self, request: RunningRequest) -> bool:
        """Whether a request may use cached pages."""

    def adopt_shared_rows(self, request: RunningRequest) -> None:
        """Told when a request that was admitted before has found more cached rows."""

    def forget(self, request: RunningRequest) -> None:
        """Told when a request has lost its rows."""


class Scheduler:
    """Queue, running requests and their pages. Not thread-safe: engine thread only."""

    def __init__(
        self,
        pages: Pages,
        drafts: DraftState,
        *,
        page_tokens: int,
        max_running: int,
        prefill_chunk_tokens: int,
        min_prefill_tokens: int = 1,
        priority_aging_s: float = math.inf,
    ) -> None:
        """Args:
        min_prefill_tokens: rows of a chunk however many requests decode.
        """
        self._pages = pages
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._min_prefill_tokens = min(min_prefill_tokens, prefill_chunk_tokens)
        self._priority_aging_s = priority_aging_s
        self._drafts = drafts
        self.waiting = RequestQueue()
        self.active: list[RunningRequest] = []  # PREFILL and RUNNING, smallest rank first
        self._given = RowCounter()
        self._num_active: dict[str, int] = {}  # active requests of each tenant that has some
        self.num_preemptions = 0
        self.num_lookups = 0
        self.num_hits = 0
        self.num_hit_rows = 0
        self._blocked: tuple[RunningRequest, tuple[int, int, int], tuple[int, set[str]]] | None = None
        """The first of the queue when it last found no room, with `_room`, `generation` and the tenants then: see
        `_is_still_blocked`."""
        self.generation = 0
        """Grows whenever the set of active requests, a status or a page table changes."""

    def add(self, request: RunningRequest) -> None:
        """Queue a request by its rank."""
        priority = request.request.priority
        delay_s = priority * self._priority_aging_s if priority else 0.0
        request.rank = (request.submitted_s + delay_s, request.arrival)
        tenant = request.request.tenant
        if tenant not in self._num_active and tenant not in self.waiting.tenants:
            self._given.enter(tenant, self._tenants())
        self.waiting.push(request)

    def admit(self) -> list[RunningRequest]:
        """Move requests from the queue to prefill while they fit; returns the admitted ones."""
        admitted: list[RunningRequest] = []
        while (request := self.waiting.first(self._turn)) is not None:
            is_full = len(self.active) >= self._max_running
            if is_full and next(self._giving_way(request), None) is None:
                break
            if self._is_still_blocked(request):
                break
            num_active = len(self.active)
            # The first output row is part of the bill, and one page per active request stays free: otherwise
            # the admission would be preempted at once.
            num_rows = request.prefill_len + 1
            num_shared = self._share(request) // self._page_tokens
            num_pages = -(-num_rows // self._page_tokens) - num_shared
            if (is_full or not self._has_room(num_pages)) and not self._make_room(request, num_pages):
                self._pages.release(request.request_id)
                # Preemptions that were not enough are followed by others in the next round.
                around = (self.generation, self._tenants())
                self._blocked = (request, self._room(), around) if len(self.active) == num_active else None
                break
            self._blocked = None
            is_covered = self._grow(request, num_rows)
            assert is_covered, "pages that are free can be taken"
            self.waiting.remove(request)
            self.num_lookups += self._drafts.may_share(request)
            self._count_hit(request, 0, num_shared * self._page_tokens)
            request.advance(RequestStatus.PREFILL)
            tenant = request.request.tenant
            self._num_active[tenant] = self._num_active.get(tenant, 0) + 1
            self._given.add(tenant, request.prefill_len - request.context_len)
            bisect.insort(self.active, request, key=lambda r: r.rank)
            self.generation += 1
            admitted.append(request)
        return admitted

    def prefill_chunks(self, num_decode_rows: int = 0) -> list[tuple[RunningRequest, int]]:
        """(request, rows) to prefill in this round, smallest rank first.

        All rows of the round together stay within prefill_chunk_tokens, so that a decoding request waits no longer for its
        next tokens when prompts come in; prompts get at least min_prefill_tokens of them. Every tenant gets an even part,
        and what others leave. Of several prompts whose next page is the same, one computes it and the others wait to share
        it.
        """
        budget = max(self._min_prefill_tokens, self._prefill_chunk_tokens - num_decode_rows)
        prompts = [r for r in self.active if r.status is RequestStatus.PREFILL]
        if not prompts:
            return []
        in_work: set[tuple[int, bytes]] = set()
        rows: dict[str, int] = {}  # request -> its rows; 0 = it waits to share
        num_tenants = len({r.request.tenant for r in prompts})
        parts = dict.fromkeys((r.request.tenant for r in prompts), -(-budget // num_tenants))
        for is_rest in (False, True)[: min(num_tenants, 2)]:
            for request in prompts:
                tenant = request.request.tenant
                room = budget if is_rest else min(budget, parts[tenant])
                if room <= 0:
                    continue
                if request.request_id not in rows:
                    rows[request.request_id] = 0
                    if not self._find_more(request, in_work):
                        continue
                elif not rows[request.request_id]:
                    continue
                given = rows[request.request_id]
                more = min(room, request.prefill_len - request.context_len - given)
                rows[request.request_id] = given + more
                budget -= more
                parts[tenant] -= more
        return [(r, n) for r in prompts if (n := rows.get(r.request_id, 0))]

    def note_drafted(self) -> None:
        """Write down which shared pages have drafter KV by now; before new requests ask."""
        for request in self.active:
            if request.draft_writer is not None:
                self._pages.note_drafted(request.request_id, request.draft_writer, request.drafted_len)

    def publish(self, request: RunningRequest) -> None:
        """Let others share the full pages that a request has computed."""
        self._publish(request, is_last=False)

    @property
    def num_running(self) -> int:
        """Requests that decode."""
        return sum(r.status is RequestStatus.RUNNING for r in self.active)

    def start_running(self, request: RunningRequest) -> None:
        """Prefill is complete: the request decodes from the next round on."""
        request.advance(RequestStatus.RUNNING)
        self.generation += 1

    def reserve(self, num_lookahead_rows: int) -> list[RunningRequest]:
        """Give every running request the page of its next row, and of the draft path's rows where they are free.

        Preempts active requests when pages run out: the largest rank of a tenant that holds more than its part, else of
        all. Returns the running requests, smallest
        rank first.
        """
        batch: list[RunningRequest] = []
        for request in list(self.active):
            if request.status is not RequestStatus.RUNNING:
                continue
            need = request.context_len + 1
            while request.row_capacity < need and not self._grow(request, need):
                victim = self._greediest()
                self.preempt(victim)
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                self._given.add(request.request.tenant, 1)
                batch.append(request)
        if len(self._num_active) > 1:  # a greedy tenant's request may have gone after its turn
            batch = [r for r in batch if r.status is RequestStatus.RUNNING]
        for request in batch:  # once nobody has to give way
            want = min(request.context_len + 1 + num_lookahead_rows, request.token_limit)
            if request.row_capacity < want:
                self._grow(request, want)
        return batch

    def preempt(self, request: RunningRequest) -> None:
        """Take a request's pages and queue it for recomputation."""
        request.advance(RequestStatus.PREEMPTED)
        request.was_preempted = True
        self._drop(request)
        self.num_preemptions += 1
        self._drafts.forget(request)
        request.forget_rows()
        self.add(request)

    def remove(self, request: RunningRequest, status: RequestStatus) -> None:
        """End a request (FINISHED or ABORTED) wherever it is; its pages are free or cached afterwards."""
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)
        else:
            self._drop(request)
        request.advance(status)
        request.forget_rows()

    # ---- room ---------------------------------------------------------------------------------------------------
    def _room(self) -> tuple[int, int, int]:
        """What decides whether the first of the queue fits: free pages, active requests, pages that were ever cached."""
        return self._pages.num_free_pages, len(self.active), self._pages.num_ever_cached

    def _is_still_blocked(self, request: RunningRequest) -> bool:
        """Whether a request that found no room would find none again: looking for its prefix costs time with its length.

        While it is first nobody else is admitted. Room for it can come only from pages that became free, from requests
        that left, or from cached pages that may continue its prefix; what active requests take makes no room.
        """
        if self._blocked is None or self._blocked[0] is not request:
            return False
        _, room, around = self._blocked
        if len(self._num_active.keys() | {request.request.tenant}) > 1:  # what others take may make them give way
            return (room, around) == (self._room(), (self.generation, self._tenants()))
        (num_free, num_active, num_cached), (now_free, now_active, now_cached) = room, self._room()
        return now_free <= num_free and now_active >= max(num_active, 1) and now_cached == num_cached

    def _has_room(self, num_pages: int) -> bool:
        return self._pages.num_free_pages >= num_pages + len(self.active)

    def _make_room(self, request: RunningRequest, num_pages: int) -> bool:
        """Preempt active requests that must give way until a request has a place and its pages.

        Nobody is preempted when all their pages together would not be enough; pages that they share count in full.
        """
        num_free, num_left = self._pages.num_free_pages, len(self.active)
        candidates = self._giving_way(request)
        victims: list[RunningRequest] = []
        while num_left >= self._max_running or num_free < num_pages + num_left:
            victim = next(candidates, None)
            if victim is None:
                return False
            victims.append(victim)
            num_left -= 1
            num_free += len(self._pages.pages(victim.request_id))
        for victim in victims:
            self.preempt(victim)
        return self._has_room(num_pages)

    def _giving_way(self, request: RunningRequest) -> Iterator[RunningRequest]:
        """Active requests that give way to a request: its tenant's of worse priority, others' of greed.

        Largest ranks first. Ends before the tenants that hold too much are down to their parts. Only for a tenant that is
        within both its parts with this request as well, shared pages counted: so what all hold beyond their parts shrinks
        with every preemption, and no two tenants can preempt each other in turn.
        """
        own = request.request
        for other in reversed(self.active):
            if other.request.tenant == own.tenant:
                if other.request.priority <= own.priority or other.rank < request.rank:
                    break
                yield other
        if len(self._num_active.keys() | {own.tenant}) == 1:
            return
        places, pages = self._parts()
        held = self._held_pages()
        num_wanted = -(-(request.prefill_len + 1) // self._page_tokens)
        if self._num_active.get(own.tenant, 0) >= places or held.get(own.tenant, 0) + num_wanted > pages:
            return
        left = dict(self._num_active)
        for other in reversed(self.active):
            tenant = other.request.tenant
            if tenant != own.tenant and left[tenant] > 1 and (left[tenant] > places or held[tenant] > pages):
                left[tenant] -= 1
                held[tenant] -= len(self._pages.pages(other.request_id))
                yield other

    def _greediest(self) -> RunningRequest:
        """Who loses its pages when a running request needs one."""
        if len(self._num_active) > 1:
            _, pages = self._parts()
            held = self._held_pages()
            greedy = {t for t, n in self._num_active.items() if n > 1 and held[t] > pages}
            if greedy:
                most = max(greedy, key=held.__getitem__)
                return next(r for r in reversed(self.active) if r.request.tenant == most)
        return self.active[-1]

    def _tenants(self) -> set[str]:
        """Who has requests."""
        return self._num_active.keys() | set(self.waiting.tenants)

    def _turn(self, tenant: str) -> tuple[float, ...]:
        """Smaller for whom was given less."""
        return self._given[tenant], self._num_active.get(tenant, 0)

    def _parts(self) -> tuple[int, int]:
        """An even part of the places and of the pages for each tenant that has requests."""
        num = len(self._tenants())
        return max(1, self._max_running // num), self._pages.num_pages // num

    def _held_pages(self) -> dict[str, int]:
        """Tenant -> pages of its active requests, shared ones in full."""
        held = dict.fromkeys(self._num_active, 0)
        for request in self.active:
            held[request.request.tenant] += len(self._pages.pages(request.request_id))
        return held

    def _drop(self, request: RunningRequest) -> None:
        at = bisect.bisect_left(self.active, request.rank, key=lambda r: r.rank)
        assert self.active[at] is request, "an active request stands where its rank says"
        del self.active[at]
        tenant = request.request.tenant
        self._num_active[tenant] -= 1
        if not self._num_active[tenant]:
            del self._num_active[tenant]
        self._publish(request, is_last=True)
        self._pages.release(request.request_id)
        self.generation += 1

    def _grow(self, request: RunningRequest, num_rows: int) -> bool:
        """Cover at least num_rows positions; whole pages, so capacity is a multiple of the page."""
        if not self._pages.ensure(request.request_id, num_rows):
            return False
        capacity = -(-num_rows // self._page_tokens) * self._page_tokens
        if capacity > request.row_capacity:
            request.rows = self._pages.rows(request.request_id, 0, capacity)
            self.generation += 1
        return True

    # ---- shared prefixes ----------------------------------------------------------------------------------------
    def _share(self, request: RunningRequest) -> int:
        """Rows that a request can share; the last one to prefill is always computed, for its logits and features."""
        if not self._drafts.may_share(request):
            return 0
        return self._pages.share(
            request.request_id, request.request.tenant, request.tokens, max_rows=request.prefill_len - 1
        )

    def _find_more(self, request: RunningRequest, in_work: set[tuple[int, bytes]]) -> bool:
        """Share what was cached since admission; False when another request of this chunk computes the next page."""
        if not self._drafts.may_share(request):
            return True
        start = request.context_len
        is_fresh = start == self._pages.num_shared_rows(request.request_id)  # no rows of its own behind the shared ones
        if is_fresh and (num_shared := self._share(request)) > start:
            request.rows = self._pages.rows(request.request_id, 0, request.row_capacity)
            self.generation += 1
            self._count_hit(request, start, num_shared)
            self._drafts.adopt_shared_rows(request)
        key = self._pages.next_page_key(request.request_id, request.request.tenant, request.tokens)
        if key is not None:
            if is_fresh and key in in_work:
                return False
            in_work.add(key)
        return True

    def _publish(self, request: RunningRequest, *, is_last: bool) -> None:
        self._pages.publish(
            request.request_id, request.request.tenant, request.tokens, request.context_len,
            draft_writer=request.draft_writer, num_drafted_rows=request.drafted_len, is_last=is_last,
        )  # fmt: skip

    def _count_hit(self, request: RunningRequest, start: int, stop: int) -> None:
        """The rows [start, stop) of a request were found in the cache."""
        request.context_len = stop
        self.num_hits += start == 0 < stop
        self.num_hit_rows += stop - start
        if not request.was_preempted:
            request.num_cached_tokens += stop - start
