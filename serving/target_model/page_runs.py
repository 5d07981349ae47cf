"""Page runs: neighbouring free pages, found and merged without scanning the pool."""

from __future__ import annotations

import heapq


class PageRuns:
    """The free pages of a pool as runs [start, end); taking and giving cost O(log runs)."""

    def __init__(self, num_pages: int) -> None:
        self._end_of = {0: num_pages}  # start -> end
        self._start_of = {num_pages: 0}  # end -> start
        self._longest = [(-num_pages, 0)]  # (-length, start); entries of runs that changed since are skipped
        self.num_free = num_pages

    def take(self, num_pages: int, after: int | None) -> list[int]:
        """Take free pages, in order as far as possible; `num_free` must cover them.

        Args:
            after: the page before them. They start right behind it if that page is free, else in the longest run; there
                in the middle when another owner's page lies before it, which leaves that owner room to grow in order.
        """
        assert num_pages <= self.num_free, "pages are taken only when they are free"
        taken: list[int] = []
        while len(taken) < num_pages:
            wanted = num_pages - len(taken)
            run = start = after + 1 if after is not None else -1
            if run not in self._end_of:
                run, start = self._find(wanted)
            end = self._end_of[run]
            self._remove(run)
            if run < start:
                self._add(run, start)
            stop = min(end, start + wanted)
            if stop < end:
                self._add(stop, end)
            taken += range(start, stop)
            after = stop - 1
        self.num_free -= num_pages
        return taken

    def give(self, page: int) -> None:
        """Give one page back."""
        start, end = page, page + 1
        before, behind = self._start_of.get(page), self._end_of.get(end)
        if before is not None:
            self._remove(before)
            start = before
        if behind is not None:
            self._remove(end)
            end = behind
        self._add(start, end)
        self.num_free += 1

    def pages(self) -> set[int]:
        """All free pages; for checks."""
        return {page for start, end in self._end_of.items() for page in range(start, end)}

    # ---- private ------------------------------------------------------------------------------------------------
    def _find(self, wanted: int) -> tuple[int, int]:
        """(start of the longest run, where to start in it)."""
        heap = self._longest
        while self._end_of.get(heap[0][1]) != heap[0][1] - heap[0][0]:
            heapq.heappop(heap)
        length, start = -heap[0][0], heap[0][1]
        return start, start + length // 2 if start > 0 and length > 2 * wanted else start

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        heapq.heappush(self._longest, (start - end, start))
        if len(self._longest) > 4 * len(self._end_of) + 64:
            self._longest = [(s - e, s) for s, e in self._end_of.items()]
            heapq.heapify(self._longest)

    def _remove(self, start: int) -> None:
        del self._start_of[self._end_of.pop(start)]
