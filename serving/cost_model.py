"""How long does a verify forward of so many rows take on this machine, now?"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from operator import mul

import numpy as np

_ROW_GRID = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513)


class CostModel:
    """Seconds of a verify forward by rows and context: prior shape x global speed x slow corrections.

    The prior is measured once; the global factor follows machine speed (a training job next door) quickly, so that a
    slow-down seen only at one row count does not distort the comparison between row counts.
    """

    def __init__(self, prior: Callable[[int], float] | None = None) -> None:
        """prior: seconds by rows; None: a weak default until `calibrate`, scaled by the first observation."""
        self._is_scaled = prior is not None
        shape = [prior(q) if prior else 5e-3 * (1 + 0.02 * (q - 1)) for q in _ROW_GRID]
        self._prior = list(accumulate(shape, max))
        self._correction = [1.0] * len(_ROW_GRID)
        self._speed = 1.0
        self._context = [1.0] * 32
        self._shape()

    @property
    def speed(self) -> float:
        """Time now over time at calibration."""
        return self._speed

    def calibrate(self, measure: Callable[[int], float], max_rows: int = 65, repeats: int = 3) -> None:
        """Measure the prior: measure(num_rows) runs one verify forward and returns its seconds."""
        rows = [q for q in _ROW_GRID if q <= max_rows] or [1]
        measure(rows[-1])  # warm-up
        times = [min(measure(q) for _ in range(repeats)) for q in rows]
        known = list(accumulate(times, max))
        slope = (known[-1] - known[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.02 * known[0]
        self._prior = known + [known[-1] + slope * (q - rows[-1]) for q in _ROW_GRID[len(rows) :]]
        self._correction = [1.0] * len(_ROW_GRID)
        self._context = [1.0] * 32
        self._speed, self._is_scaled = 1.0, True
        self._shape()

    def _shape(self) -> None:
        self._curve = list(accumulate(map(mul, self._prior, self._correction), max))

    def seconds(self, rows: float, context_rows: int = 0) -> float:
        """`predict` of one row count, without an array."""
        curve, factor = self._curve, self._speed * self._context[log2_bucket(context_rows)]
        i = bisect_right(_ROW_GRID, rows)
        if i == 0:
            return curve[0] * factor
        if i == len(_ROW_GRID):
            return (curve[-1] + (rows - _ROW_GRID[-1]) * curve[-1] / _ROW_GRID[-1]) * factor
        low, high = _ROW_GRID[i - 1], _ROW_GRID[i]
        return (curve[i - 1] + (curve[i] - curve[i - 1]) * (rows - low) / (high - low)) * factor

    def predict(self, rows: int | np.ndarray, context_rows: int = 0) -> np.ndarray:
        """Seconds of a verify forward of `rows` packed rows over `context_rows` committed rows; never falls with rows."""
        out = np.interp(rows, _ROW_GRID, self._curve)
        beyond = np.maximum(np.asarray(rows) - _ROW_GRID[-1], 0) * (self._curve[-1] / _ROW_GRID[-1])
        return (out + beyond) * (self._speed * self._context[log2_bucket(context_rows)])

    def observe(self, rows: int, context_rows: int, seconds: float) -> None:
        """Fold one measured verify forward."""
        if not seconds > 0:
            return
        predicted = self.seconds(rows, context_rows)
        if not self._is_scaled:
            self._speed, self._is_scaled = self._speed * seconds / predicted, True
            return
        miss = min(max(math.log(seconds / predicted), -0.5), 0.5)  # hiccups count little
        self._speed *= math.exp(0.1 * miss)
        slow = math.exp(0.02 * miss)
        i = bisect_left(_ROW_GRID, rows)
        if i == len(_ROW_GRID) or (i > 0 and rows - _ROW_GRID[i - 1] <= _ROW_GRID[i] - rows):
            i -= 1
        self._correction[i] *= slow
        self._context[log2_bucket(context_rows)] *= slow
        self._shape()


def log2_bucket(n: int) -> int:
    """Number of bits of n, at most 31."""
    return min(int(n).bit_length(), 31)
