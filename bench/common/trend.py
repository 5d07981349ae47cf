"""Does a series that wanders rise steadily, and how sure is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

NUM_BLOCKS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """Slope per second with its 95% interval."""

    slope: float
    low: float
    high: float
    num_samples: int


def trend(times_s: Sequence[float], values: Sequence[float], *, num_blocks: int = NUM_BLOCKS) -> Trend | None:
    """Least-squares slope over the means of blocks of equal length in time; None when there are too few samples.

    Neighbouring samples of a process's memory are nearly equal, so the usual error of a slope through all samples is far
    too small. Means of long blocks are close to independent (method of batch means); the interval is Student's t on them.
    """
    t, y = np.asarray(times_s, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(t) < 2 * num_blocks or t[-1] <= t[0]:
        return None
    block = np.minimum(((t - t[0]) / (t[-1] - t[0]) * num_blocks).astype(int), num_blocks - 1)
    used = [b for b in range(num_blocks) if (block == b).any()]
    if len(used) < 4:
        return None
    x = np.array([t[block == b].mean() for b in used])
    z = np.array([y[block == b].mean() for b in used])
    x, z = x - x.mean(), z - z.mean()
    spread = float(x @ x)
    slope = float(x @ z) / spread
    rest = z - slope * x
    error = float(np.sqrt(rest @ rest / (len(used) - 2) / spread))  # 0, not NaN, for a series that does not move
    half = float(stats.t.ppf(0.975, len(used) - 2)) * error
    return Trend(slope=slope, low=slope - half, high=slope + half, num_samples=len(t))


def second_half(times_s: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The samples of the later half of the time."""
    if not times_s:
        return [], []
    middle = (times_s[0] + times_s[-1]) / 2
    kept = [(t, v) for t, v in zip(times_s, values, strict=True) if t >= middle]
    return [t for t, _ in kept], [v for _, v in kept]
