"""Clocks: logic receives one instead of calling time.time()."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time in seconds."""

    def now(self) -> float: ...


def steady() -> float:
    """Seconds that only ever go forward, also while the computer sleeps where the system can tell."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


_WALL_S = time.time() - steady()


class SystemClock:
    """Seconds since the epoch: the wall clock's when this process began, carried on without the steps it makes later."""

    def now(self) -> float:
        return _WALL_S + steady()


class ManualClock:
    """A clock that a test advances by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
