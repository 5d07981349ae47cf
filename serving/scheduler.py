"""Which requests run this round, and who gives pages back when they run out?

First come, first served. A request is admitted when its prompt's pages are free; prompts are prefilled in chunks between
decode rounds; when a running request cannot get the page of its next row, the newest request loses its pages and goes
back to the queue (its rows are recomputed later from its tokens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from paceline.serving.request import RequestStatus
from paceline.serving.running_request import RunningRequest


class Pages(Protocol):
    """The part of the page allocator that the scheduler uses."""

    @property
    def num_free_pages(self) -> int: ...
    def ensure(self, request_id: str, num_rows: int) -> bool: ...
    def rows(self, request_id: str, start: int, stop: int) -> torch.Tensor: ...
    def release(self, request_id: str) -> None: ...


class Scheduler:
    """Queue, running requests and their pages. Not thread-safe: engine thread only."""

    def __init__(
        self,
        pages: Pages,
        *,
        page_tokens: int,
        max_running: int,
        prefill_chunk_tokens: int,
        on_preempt: Callable[[RunningRequest], None] = lambda r: None,
    ) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._on_preempt = on_preempt
        self.waiting: deque[RunningRequest] = deque()
        self.active: list[RunningRequest] = []  # PREFILL and RUNNING, oldest first
        self.num_preemptions = 0
        self.generation = 0
        """Grows whenever the set of active requests, a status or a page table changes."""

    def add(self, request: RunningRequest) -> None:
        """Queue a request in arrival order."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].arrival > request.arrival:
            at -= 1
        self.waiting.insert(at, request)

    def admit(self) -> list[RunningRequest]:
        """Move requests from the queue to prefill while they fit; returns the admitted ones."""
        admitted = []
        while self.waiting and len(self.active) < self._max_running:
            request = self.waiting[0]
            # The first output row is part of the bill, and one page per active request stays free: otherwise
            # the admission would be preempted at once.
            num_rows = request.prefill_len + 1
            num_pages = -(-num_rows // self._page_tokens)
            if self.active and self._pages.num_free_pages < num_pages + len(self.active):
                break
            if not self._grow(request, num_rows):
                break
            self.waiting.popleft()
            request.advance(RequestStatus.PREFILL)
            self._insert(request)
            admitted.append(request)
        return admitted

    def prefill_chunks(self) -> list[tuple[RunningRequest, int]]:
        """(request, rows) to prefill in this round, at most prefill_chunk_tokens rows together, oldest first."""
        budget = self._prefill_chunk_tokens
        chunks = []
        for request in self.active:
            if request.status is RequestStatus.PREFILL and budget > 0:
                num_rows = min(budget, request.prefill_len - request.context_len)
                budget -= num_rows
                chunks.append((request, num_rows))
        return chunks

    def start_running(self, request: RunningRequest) -> None:
        """Prefill is complete: the request decodes from the next round on."""
        request.advance(RequestStatus.RUNNING)
        self.generation += 1

    def reserve(self, num_lookahead_rows: int) -> list[RunningRequest]:
        """Give every running request the page of its next row, and of the draft path's rows where they are free.

        Preempts the newest active requests when pages run out. Returns the running requests, oldest first.
        """
        batch: list[RunningRequest] = []
        for request in list(self.active):
            if request.status is not RequestStatus.RUNNING:
                continue
            need = request.context_len + 1
            want = min(need + num_lookahead_rows, request.token_limit)
            if request.row_capacity < want and not self._grow(request, want):
                while request.row_capacity < need and not self._grow(request, need):
                    victim = self.active[-1]
                    self.preempt(victim)
                    if victim is request:
                        break
            if request.status is RequestStatus.RUNNING:
                batch.append(request)
        return batch

    def preempt(self, request: RunningRequest) -> None:
        """Take a request's pages and queue it for recomputation."""
        request.advance(RequestStatus.PREEMPTED)
        self._drop(request)
        self.num_preemptions += 1
        self._on_preempt(request)
        request.forget_rows()
        self.add(request)

    def remove(self, request: RunningRequest, status: RequestStatus) -> None:
        """End a request (FINISHED or ABORTED) wherever it is; its pages are free afterwards."""
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)
        else:
            self._drop(request)
        request.advance(status)
        request.forget_rows()

    def _insert(self, request: RunningRequest) -> None:
        at = len(self.active)
        while at and self.active[at - 1].arrival > request.arrival:
            at -= 1
        self.active.insert(at, request)
        self.generation += 1

    def _drop(self, request: RunningRequest) -> None:
        self.active.remove(request)
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
