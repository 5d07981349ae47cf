"""What did the controller show lately, without ever making the caller wait for a controller that is away?"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

WAIT_S = 0.8
FRESH_S = 0.3
STALE_S = 30.0


class SnapshotCache:
    """The latest snapshot; one background fetch at a time. Thread-safe."""

    def __init__(self, fetch: Callable[[], dict[str, Any] | None]) -> None:
        """`fetch` may block or raise; None = the controller is away."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # of the fetch under way
        self._value: dict[str, Any] | None = None
        self._at = float("-inf")

    def recent(self, wait_s: float = WAIT_S) -> dict[str, Any] | None:
        """A snapshot at most STALE_S old, waiting at most `wait_s` for a fresh one; None when there is none."""
        with self._lock:
            if time.monotonic() - self._at <= FRESH_S:
                return self._value
            if self._done is None:
                self._done = threading.Event()
                threading.Thread(target=self._refresh, args=(self._done,), name="snapshot", daemon=True).start()
            done = self._done
        done.wait(wait_s)
        with self._lock:
            return self._value if time.monotonic() - self._at <= STALE_S else None

    def _refresh(self, done: threading.Event) -> None:
        value = None
        try:
            value = self._fetch()
        except Exception as e:  # Ray raises many kinds while a cluster fails over; a scrape shows what is left
            log.debug("controller snapshot is not available: %s", e)
        with self._lock:
            self._value, self._at, self._done = value, time.monotonic(), None
        done.set()
