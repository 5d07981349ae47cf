"""How sure are figures of many streamed answers? Bootstrap intervals that resample answers, never single chunks.

Chunks of one answer resemble each other (same load, same text), so that resampling them one by one would claim a
certainty that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.bench.engine.cells import expanded_level
from paceline.bench.replay.stats import mean_interval

LEVEL = 0.95
NUM_RESAMPLES = 1000
POINTS = (50, 95, 99)


def percentiles_with_intervals(
    seconds: Sequence[Sequence[float]], points: Sequence[float] = POINTS, *, seed: int = 0
) -> dict[str, Any]:
    """Percentiles in ms with 95% intervals, maximum and count of the values of all answers.

    Args:
        seconds: one list of times an answer; an answer without any still counts as one that can be drawn.
    Returns:
        {p50: ms, ..., max: ms, intervals: {p50: [low, high], ...} or None for fewer than two answers, num_values}.
    """
    names = [f"p{p:g}" for p in points]
    sizes = np.array([len(s) for s in seconds], dtype=np.int64)
    num_values = int(sizes.sum())
    if num_values == 0:
        return {**dict.fromkeys([*names, "max"]), "intervals": None, "num_values": 0}
    values = np.concatenate([np.asarray(s, dtype=np.float64) for s in seconds if len(s)])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(values, kind="stable")
    values, owner = 1e3 * values[order], owner[order]
    out: dict[str, Any] = {n: round(float(v), 3) for n, v in zip(names, np.percentile(values, points), strict=True)}
    out |= {"max": round(float(values[-1]), 3), "intervals": None, "num_values": num_values}
    if len(sizes) < 2:
        return out
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(NUM_RESAMPLES):
        times = np.bincount(rng.integers(len(sizes), size=len(sizes)), minlength=len(sizes))
        reached = np.cumsum(times[owner])  # how many resampled values lie at or below each value
        if reached[-1]:
            at = np.searchsorted(reached, np.asarray(points) / 100 * reached[-1])
            drawn.append(values[np.minimum(at, len(values) - 1)])
    tail = (1 - expanded_level(len(sizes), LEVEL)) / 2
    low, high = np.quantile(np.array(drawn), [tail, 1 - tail], axis=0)
    out["intervals"] = {n: [round(float(a), 3), round(float(b), 3)] for n, a, b in zip(names, low, high, strict=True)}
    return out


def mean_with_interval(values: Sequence[float], *, digits: int = 2) -> dict[str, Any] | None:
    """{value, interval} of a mean; the interval is None for fewer than two values, everything None without any."""
    if not len(values):
        return None
    if len(values) == 1:
        return {"value": round(float(values[0]), digits), "interval": None}
    mean, low, high = mean_interval(values, level=expanded_level(len(values), LEVEL))
    return {"value": round(mean, digits), "interval": [round(low, digits), round(high, digits)]}


def ratio_with_interval(tops: Sequence[float], bottoms: Sequence[float], *, digits: int = 4) -> dict[str, Any] | None:
    """{value, interval} of sum(tops) / sum(bottoms), resampling pairs; None where the bottoms sum to 0."""
    columns = np.array([tops, bottoms], dtype=np.float64)
    if columns.shape[1] == 0 or columns[1].sum() == 0:
        return None
    value = float(columns[0].sum() / columns[1].sum())
    if columns.shape[1] == 1:
        return {"value": round(value, digits), "interval": None}
    rng = np.random.default_rng(0)
    sums = columns[:, rng.integers(columns.shape[1], size=(NUM_RESAMPLES, columns.shape[1]))].sum(axis=2)
    ratios = sums[0][sums[1] > 0] / sums[1][sums[1] > 0]
    tail = (1 - expanded_level(columns.shape[1], LEVEL)) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return {"value": round(value, digits), "interval": [round(float(low), digits), round(float(high), digits)]}
