"""Bootstrap intervals of ratios from paired samples."""

from __future__ import annotations

import numpy as np


def ratio_of_rates(
    tokens_a: list[float],
    seconds_a: list[float],
    tokens_b: list[float],
    seconds_b: list[float],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, tuple[float, float]]:
    """Return (rate_a / rate_b, interval) with rate = sum(tokens) / sum(seconds), resampling pairs.

    Element i of every list belongs to the same prompt, run once by each side; the interval is the percentile
    bootstrap over pairs, so that a hard prompt counts on both sides or on neither.
    """
    columns = np.array([tokens_a, seconds_a, tokens_b, seconds_b], dtype=np.float64)
    if columns.shape[1] == 0:
        return float("nan"), (float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    picks = rng.integers(columns.shape[1], size=(num_resamples, columns.shape[1]))
    sums = columns[:, picks].sum(axis=2)
    ratios = (sums[0] / sums[1]) / (sums[2] / sums[3])
    total = columns.sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return float((total[0] / total[1]) / (total[2] / total[3])), (float(low), float(high))
