"""Cost model: seconds of a verify forward and of a drafting pass by their sizes, on this machine at its present speed.

Shape legend: n packed tree rows, c committed context rows (both over all requests), B requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from paceline.serving.budget.roofline import Roofline, TargetShape

_ROW_GRID = (1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513)
_FAR = 1000
_FAR_ROW_GRID = np.array([*_ROW_GRID, _FAR * _ROW_GRID[-1]], dtype=np.float64)
"""Beyond the last point the average slope from 0 continues."""
_BATCH_GRID = (1, 2, 4, 8, 16, 32, 64, 128)
_FAST, _SLOW = 0.1, 0.04
"""Weights of one observation in the scale and in the correction of one point."""
_ROWS_A_REQUEST = 65
"""Rows a request whose times are kept; for more the prior is computed."""
_MAX_KEPT = 65 * 1024
"""Times kept, 3 MB."""


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
    """Seconds of a verify forward by packed rows, requests and committed context rows: r x prior(n, c, B).

    The shape is fixed at start, r follows the measured times, one for every doubling of c. The prior is the table that
    `calibrate` measures (tree curve of one request + what the same rows cost more when they belong to several), with every
    step that the device really has, plus the roofline's cost of the committed context, which that table lacks. It is never
    dropped: estimates that follow the measurements alone are unstable.
    Source: BASTION's latency model, tree_speculation.md 3.2, with the memory term of attention kernels that store no score
    matrix (4.5).
    """

    RATE = 0.05
    """Weight of one round in r; tree_speculation.md 3.2 suggests it, the paper does not say."""
    MAX_JUMP = 4.0
    """A round that took more than so many times what r says is a hiccup and counts as this."""

    def __init__(
        self,
        prior: Callable[[int], float] | None = None,
        *,
        shape: TargetShape | None = None,
        roofline: Roofline | None = None,
    ) -> None:
        """prior: seconds by rows. roofline: declared bandwidth and speed, the prior until `calibrate`. Neither: a weak
        default, scaled by the first observation. shape: adds the context's cost to the table that `calibrate` measures."""
        self._shape = shape if shape is not None or roofline is None else roofline.shape
        self._roofline = roofline
        if prior is None and roofline is not None:
            times = [float(roofline.seconds(q, 0)) for q in _ROW_GRID]
        else:
            times = [prior(q) if prior else 5e-3 * (1 + 0.02 * (q - 1)) for q in _ROW_GRID]
        self._reset(list(accumulate(times, max)), [0.0] * len(_BATCH_GRID), is_known=bool(prior or roofline))

    def _reset(self, rows: list[float], batch: list[float], *, is_known: bool) -> None:
        self._rows, self._batch = rows, batch
        self._is_known = is_known
        self._tables: dict[tuple[int, int], tuple[list[float], np.ndarray]] = {}  # by requests and context
        self._num_kept = 0
        self._lines: dict[int, tuple[float, ...]] = {}
        """By requests: the roofline's terms without context, and by how much a row of context raises the first and third."""
        self._scales: dict[int, float] = {}
        self._scale = 1.0

    @property
    def speed(self) -> float:
        """r of the newest round: time now over time at calibration."""
        return self._scale

    def scale(self, context_rows: int) -> float:
        """r at so much context; of the newest round where none was seen yet."""
        return self._scales.get(log2_bucket(context_rows), self._scale)

    def calibrate(
        self,
        measure: Callable[[int, int], float],
        *,
        max_rows: int = 65,
        max_requests: int = 1,
        tree_rows: int = _ROW_GRID[-1],
        repeats: int = 3,
        limit_s: float = math.inf,
    ) -> None:
        """Measure the priors: measure(num_rows, num_requests) runs one verify forward and returns its seconds.

        tree_rows: of the largest tree of one request; more rows are measured with several requests, since the rows of one
        attend to each other. limit_s: no further point is measured once so much time has gone; the curves are then continued.
        """
        spent = 0.0

        def timed(num_rows: int, num_requests: int) -> float:
            nonlocal spent
            times = [measure(num_rows, num_requests) for _ in range(repeats)]
            spent += repeats * min(times)  # a kernel that the first run compiles costs no later point
            return min(times)

        measure(min(max_rows, 17), 1)  # warm-up
        times = [timed(1, 1)]
        batch = [0.0]
        for q in _ROW_GRID[1:]:
            if q <= min(max_rows, tree_rows) and spent < limit_s / 2:
                times.append(timed(q, 1))
        is_whole = len(times) == sum(q <= min(max_rows, tree_rows) for q in _ROW_GRID)
        rows = _extend(_ROW_GRID, times)
        for b in _BATCH_GRID[1:]:
            if b <= min(max_requests, max_rows) and spent < limit_s * (0.75 if is_whole else 1.0):
                batch.append(max(0.0, timed(b, b) - interpolate(_ROW_GRID, rows, b)))
        extra = _extend(_BATCH_GRID, batch)
        for q in _ROW_GRID[len(times) :] if is_whole else ():
            num_requests = -(-q // tree_rows)
            if q <= max_rows and num_requests <= max_requests and spent < limit_s:
                times.append(timed(q, num_requests) - interpolate(_BATCH_GRID, extra, num_requests))
        self._reset(_extend(_ROW_GRID, times), extra, is_known=True)
        if self._shape is not None:
            self._roofline = Roofline.measured(self._shape, lambda n: self.at_start(n, 1))

    def at_start(self, rows: int, num_requests: int) -> float:
        """Seconds as they were calibrated, of rows without context."""
        return interpolate(_ROW_GRID, self._rows, rows) + interpolate(_BATCH_GRID, self._batch, num_requests)

    def prior(self, rows: Any, context_rows: int = 0, num_requests: int = 1) -> Any:
        """Seconds as they were known at start, never falling with rows: of a row count (a number), or of an array of them."""
        extra = interpolate(_BATCH_GRID, self._batch, num_requests)
        table: Any
        larger: Any
        if isinstance(rows, np.ndarray):
            table = np.interp(rows, _FAR_ROW_GRID, [*self._rows, self._rows[-1] * _FAR]) + extra
            larger = np.maximum
        else:
            table, larger = interpolate(_ROW_GRID, self._rows, rows) + extra, max
        if self._roofline is None or context_rows == 0:
            return table
        lines = self._lines.get(num_requests)
        if lines is None:
            (a, b, d, e), (a1, _, d1, _) = (self._roofline.terms(c, num_requests) for c in (0, 1))
            lines = self._lines[num_requests] = (a, b, d, e, a1 - a, d1 - d)
        a, b, d, e, more_a, more_d = lines
        bytes_s, flops_s = a + b * rows, rows * (d + e * rows)  # without context they are in the table already
        with_context = larger(bytes_s + more_a * context_rows, flops_s + rows * (more_d * context_rows))
        return table + with_context - larger(bytes_s, flops_s)

    def _times(self, context_rows: int, num_requests: int) -> tuple[list[float], np.ndarray]:
        """The prior of 0, 1, ... rows as numbers and as an array, kept: rounds ask for it several times. The context is
        rounded to one of eight steps a doubling, of whose cost all row counts bear about the same."""
        step = 1 << max(log2_bucket(context_rows) - 4, 0)
        key = (num_requests, context_rows // step * step)
        known = self._tables.get(key)
        if known is None:
            size = _ROWS_A_REQUEST * num_requests
            if self._num_kept + size > _MAX_KEPT:
                self._tables.clear()
                self._num_kept = 0
            self._num_kept += size
            times = self.prior(np.arange(size), key[1], num_requests)
            known = self._tables[key] = (times.tolist(), times)
        return known

    def seconds(self, rows: float, context_rows: int = 0, num_requests: int = 1) -> float:
        """`predict` of one row count, without an array."""
        return self._at_calibration(rows, context_rows, num_requests) * self.scale(context_rows)

    def up_to(self, rows: int, context_rows: int = 0) -> list[float]:
        """`seconds` of 0, 1, ..., `rows` rows of one request."""
        times, scale = self._times(context_rows, 1)[0], self.scale(context_rows)
        return [t * scale for t in times[: rows + 1]] + [
            self.seconds(n, context_rows) for n in range(len(times), rows + 1)
        ]

    def _at_calibration(self, rows: float, context_rows: int, num_requests: int) -> float:
        if isinstance(rows, int):
            times = self._times(context_rows, num_requests)[0]
            if rows < len(times):
                return times[rows]
        return float(self.prior(rows, context_rows, num_requests))

    def predict(self, rows: Any, context_rows: int = 0, num_requests: int = 1) -> np.ndarray:
        """Seconds of a verify forward of `rows` packed rows of so many requests over `context_rows` committed rows."""
        rows = np.asarray(rows)
        if rows.dtype.kind == "i":
            times = self._times(context_rows, num_requests)[1]
            if rows.max(initial=0) < len(times):
                return times[rows] * self.scale(context_rows)
        return np.asarray(self.prior(rows, context_rows, num_requests) * self.scale(context_rows))

    def observe(self, rows: int, context_rows: int, seconds: float, num_requests: int = 1) -> None:
        """Fold one measured verify forward: r <- (1 - RATE) r + RATE T_measured / T_prior."""
        if not seconds > 0:
            return
        bucket = log2_bucket(context_rows)
        old = self._scales.get(bucket, self._scale)
        ratio = seconds / self._at_calibration(rows, context_rows, num_requests)
        if not self._is_known:
            self._is_known, old = True, ratio
        self._scale = old + self.RATE * (min(ratio, self.MAX_JUMP * old) - old)
        self._scales[bucket] = self._scale


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
        expected = self.seconds(size)
        if not expected > 0:  # measured as a difference that noise took
            self._values[_nearest(self.GRID, size)] = seconds / self._scale
            return
        miss = min(max(math.log(seconds / expected), -0.7), 0.7)
        self._scale *= math.exp(_FAST / 2 * miss)
        self._values[_nearest(self.GRID, size)] *= math.exp(_SLOW * miss)


def log2_bucket(n: int) -> int:
    """Number of bits of n, at most 31."""
    return min(int(n).bit_length(), 31)
