"""Request queue and deadlines: the order of waiting requests, any of which may leave at any time, and those out of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from paceline.serving.engine.running import RunningRequest


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


class RequestQueue:
    """Requests by rank, smallest first; adding, removing and looking at the first cost O(log n). One thread only."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], RunningRequest]] = []  # entries of requests that left are skipped
        self._members: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: RunningRequest) -> bool:
        return self._members.get(request.request_id) is request

    def __iter__(self) -> Iterator[RunningRequest]:
        """In order; for checks and tests, as it sorts."""
        return iter(sorted(self._members.values(), key=lambda r: r.rank))

    def push(self, request: RunningRequest) -> None:
        """Add a request with its rank, which must differ from every other's and not change any more."""
        assert request.request_id not in self._members, "a request waits once"
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request))

    def first(self) -> RunningRequest | None:
        """The request whose turn it is; None when nobody waits."""
        while self._heap and self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: RunningRequest) -> None:
        """Take a request out, wherever it stands."""
        del self._members[request.request_id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(r.rank, r) for r in self._members.values()]
            heapq.heapify(self._heap)
