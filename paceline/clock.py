"""Clocks: logic receives one instead of calling time.time()."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time in seconds."""

    def now(self) -> float: ...


class SystemClock:
    """Wall-clock seconds since the epoch."""

    def now(self) -> float:
        return time.time()


class ManualClock:
    """A clock that a test advances by hand."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
