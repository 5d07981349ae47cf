"""When should a client that found the queue full try again?"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
"""How far back finished requests are looked at."""
MAX_RETRY_S = 30
"""Longest wait that is asked for, also where nothing finished within the window."""


class FinishRate:
    """The rate at which a replica finishes requests. One event loop only."""

    def __init__(self, timer: Callable[[], float] = time.monotonic, max_kept: int = 256) -> None:
        """timer: seconds; max_kept: finishes remembered, the newest."""
        self._timer = timer
        self._finished_s: deque[float] = deque(maxlen=max_kept)

    def note(self) -> None:
        """A request has finished."""
        self._finished_s.append(self._timer())

    def retry_after_s(self, num_waiting: int) -> int:
        """Seconds until the queue as it stands should be served, in [1, MAX_RETRY_S].

        That is num_waiting over the rate of the finishes in the window, counted from the oldest one to now.
        """
        now = self._timer()
        while self._finished_s and now - self._finished_s[0] > WINDOW_S:
            self._finished_s.popleft()
        if num_waiting == 0:
            return 1
        if not self._finished_s:
            return MAX_RETRY_S
        seconds_each = (now - self._finished_s[0]) / len(self._finished_s)
        return min(max(math.ceil(num_waiting * seconds_each), 1), MAX_RETRY_S)
