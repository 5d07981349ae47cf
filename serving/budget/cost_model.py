"""How long does a verify forward, or a drafting pass, of so many rows take on this machine, now?

Both are curves over a size: measured once at start, scaled by a factor that follows the machine's speed (a training job
next door) quickly, and corrected slowly where the shape was wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

_ROW_GRID = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513)
_FAR = 1000
_FAR_ROW_GRID = np.array([*_ROW_GRID, _FAR * _ROW_GRID[-1]], dtype=np.float64)
"""Beyond the last point the average slope from 0 continues."""
_BATCH_GRID = (1, 2, 4, 8, 16, 32, 64, 128)
_FAST, _SLOW = 0.1, 0.04
"""Weights of one observation in the machine's speed and in the correction of one point."""
_NEW = 8
"""Observations that make a point, or the machine's speed, known."""


def interpolate(grid: Sequence[int], values: Sequence[float], at: float) -> float:
    """Piecewise linear through (grid, values); beyond the last point the average slope from 0 continues."""
    i = bisect_right(grid, at)
    if i == 0:
        return values[0]
    if i == len(grid):
        return values[-1] + (at - grid[-1]) * values[-1] / grid[-1]
    low, high = grid[i - 1], grid[i]
    return values[i - 1] + (values[i] - values[i - 1]) * (at - low) / (high - low)


def _nearest(grid: Sequence[int], at: float) -> int:
    i = bisect_left(grid, at)
    if i == len(grid) or (i > 0 and at - grid[i - 1] <= grid[i] - at):
        i -= 1
    return i


def _extend(grid: Sequence[int], times: Sequence[float]) -> list[float]:
    """A prior over the whole grid from times at its first points: rising, the last slope goes on."""
    known = list(accumulate(times, max))
    num = len(known)
    slope = (known[-1] - known[0]) / (grid[num - 1] - grid[0]) if num > 1 else 0.02 * known[0]
    return known + [known[-1] + slope * (q - grid[num - 1]) for q in grid[num:]]


class CostModel:
    """Seconds of a verify forward by packed rows, requests and committed context rows.

    time(rows, requests) = (tree curve(rows) + batch curve(requests)) x correction x speed x context factor. The tree curve
    is that of one request; the batch curve is what the same rows cost more when they belong to several requests.
    """

    def __init__(self, prior: Callable[[int], float] | None = None) -> None:
        """prior: seconds by rows; None: a weak default until `calibrate`, scaled by the first observation."""
        self._is_scaled = prior is not None
        shape = [prior(q) if prior else 5e-3 * (1 + 0.02 * (q - 1)) for q in _ROW_GRID]
        self._reset(list(accumulate(shape, max)), [0.0] * len(_BATCH_GRID))

    def _reset(self, rows: list[float], batch: list[float]) -> None:
        self._rows, self._batch = rows, batch
        self._corrections: dict[int, list[float]] = {}  # by log2 of the requests
        self._visits: dict[int, list[int]] = {}
        self._num_seen = 0
        self._context = [1.0] * 32
        self._speed = 1.0
        self._curves: dict[int, list[float]] = {}  # by requests

    @property
    def speed(self) -> float:
        """Time now over time at calibration."""
        return self._speed

    def calibrate(
        self,
        measure: Callable[[int, int], float],
        *,
        max_rows: int = 65,
        max_requests: int = 1,
        repeats: int = 3,
        limit_s: float = math.inf,
    ) -> None:
        """Measure the priors: measure(num_rows, num_requests) runs one verify forward and returns its seconds.

        limit_s: no further point is measured once so much time has gone; the curves are then continued.
        """
        spent = 0.0

        def timed(num_rows: int, num_requests: int) -> float:
            nonlocal spent
            times = [measure(num_rows, num_requests) for _ in range(repeats)]
            spent += sum(times)
            return min(times)

        measure(min(max_rows, 17), 1)  # warm-up
        times = [timed(1, 1)]
        batch = [0.0]
        for q in _ROW_GRID[1:]:
            if q <= max_rows and spent < limit_s / 2:
                times.append(timed(q, 1))
        rows = _extend(_ROW_GRID, times)
        for b in _BATCH_GRID[1:]:
            if b <= min(max_requests, max_rows) and spent < limit_s:
                batch.append(max(0.0, timed(b, b) - interpolate(_ROW_GRID, rows, b)))
        self._reset(rows, _extend(_BATCH_GRID, batch))
        self._is_scaled = True

    def at_start(self, rows: int, num_requests: int) -> float:
        """Seconds as they were calibrated, whatever was learnt since."""
        return interpolate(_ROW_GRID, self._rows, rows) + interpolate(_BATCH_GRID, self._batch, num_requests)

    def _curve(self, num_requests: int) -> list[float]:
        found = self._curves.get(num_requests)
        if found is None:
            extra = interpolate(_BATCH_GRID, self._batch, num_requests)
            correction = self._corrections.get(log2_bucket(num_requests))
            total = [q + extra for q in self._rows]
            if correction is not None:
                total = [t * c for t, c in zip(total, correction, strict=True)]
            found = self._curves[num_requests] = list(accumulate(total, max))
        return found

    def seconds(self, rows: float, context_rows: int = 0, num_requests: int = 1) -> float:
        """`predict` of one row count, without an array."""
        factor = self._speed * self._context[log2_bucket(context_rows)]
        return interpolate(_ROW_GRID, self._curve(num_requests), rows) * factor

    def predict(self, rows: int | np.ndarray, context_rows: int = 0, num_requests: int = 1) -> np.ndarray:
        """Seconds of a verify forward of `rows` packed rows of so many requests over `context_rows` committed rows; never
        falls with rows."""
        curve = self._curve(num_requests)
        times = np.asarray(np.interp(rows, _FAR_ROW_GRID, [*curve, curve[-1] * _FAR]))
        return times * (self._speed * self._context[log2_bucket(context_rows)])

    def observe(self, rows: int, context_rows: int, seconds: float, num_requests: int = 1) -> None:
        """Fold one measured verify forward."""
        if not seconds > 0:
            return
        predicted = self.seconds(rows, context_rows, num_requests)
        if not self._is_scaled:
            self._speed, self._is_scaled = self._speed * seconds / predicted, True
            return
        miss = min(max(math.log(seconds / predicted), -0.5), 0.5)  # hiccups count little
        bucket, point = log2_bucket(num_requests), _nearest(_ROW_GRID, rows)
        correction = self._corrections.setdefault(bucket, [1.0] * len(_ROW_GRID))
        visits = self._visits.setdefault(bucket, [0] * len(_ROW_GRID))
        # A point seen for the first times at a speed that others have told shows the shape, not the machine.
        is_new = visits[point] < _NEW <= self._num_seen - visits[point]
        correction[point] *= math.exp((max(_SLOW, 0.6 / (1 + visits[point])) if is_new else _SLOW) * miss)
        self._speed *= math.exp((_FAST / 4 if is_new else _FAST) * miss)
        visits[point] += 1
        self._num_seen += 1
        self._context[log2_bucket(context_rows)] *= math.exp(_SLOW / 2 * miss)
        for b in [b for b in self._curves if log2_bucket(b) == bucket]:
            del self._curves[b]


class CostCurve:
    """Seconds of one kind of drafting work by its size (requests, leaves), at the speed of calibration."""

    GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def __init__(self) -> None:
        self._values: list[float] | None = None  # corrected; asked for once a leaf and round
        self._scale = 1.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured yet."""
        return self._values is not None

    def calibrate(self, measure: Callable[[int], float], *, max_size: int, repeats: int = 3) -> None:
        """measure(size) does the work once and returns its seconds; sizes beyond max_size are extrapolated."""
        sizes = [n for n in self.GRID if n <= max_size] or [1]
        measure(sizes[-1])  # warm-up
        times = [min(measure(n) for _ in range(repeats)) for n in sizes]
        self._values, self._scale = _extend(self.GRID, times), 1.0

    def seconds(self, size: float) -> float:
        """Expected seconds; 0 while nothing is known."""
        return 0.0 if self._values is None else interpolate(self.GRID, self._values, size) * self._scale

    def up_to(self, size: int) -> list[float]:
        """`seconds` of 1, 2, ..., size."""
        if self._values is None:
            return [0.0] * size
        grid, values, times = self.GRID, self._values, list[float]()
        for i in range(1, len(grid)):
            low, high, base = grid[i - 1], grid[i], values[i - 1]
            rise = values[i] - base
            times += [base + rise * (n - low) / (high - low) for n in range(low, min(high, size + 1))]
            if high > size:
                break
        else:
            times += [interpolate(grid, values, n) for n in range(grid[-1], size + 1)]
        return [t * self._scale for t in times]

    def observe(self, size: int, seconds: float) -> None:
        """Fold one measurement."""
        if not seconds > 0:
            return
        if self._values is None:  # never calibrated: the cost grows with the square root of the size until seen
            self._values = [seconds * math.sqrt(n / size) for n in self.GRID]
            return
        miss = min(max(math.log(seconds / self.seconds(size)), -0.7), 0.7)
        self._scale *= math.exp(_FAST / 2 * miss)
        self._values[_nearest(self.GRID, size)] *= math.exp(_SLOW * miss)


def log2_bucket(n: int) -> int:
    """Number of bits of n, at most 31."""
    return min(int(n).bit_length(), 31)
