"""Which requests have run out of time?"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from paceline.serving.running_request import RunningRequest


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
