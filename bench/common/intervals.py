"""How sure is a figure that sums over samples? Bootstrap intervals over prompts or groups.

Shape legend: C columns, n samples, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats


def expanded_level(num_samples: int, level: float = 0.95) -> float:
    """Level at which a percentile bootstrap over so few samples covers `level`.

    The percentile bootstrap is too narrow for small samples: it uses normal instead of t quantiles and a variance with
    n instead of n - 1. Source: Hesterberg 2015, arXiv 1411.5279, section 'expanded percentile interval'.
    """
    t = stats.t.ppf((1 + level) / 2, num_samples - 1)
    return float(2 * stats.norm.cdf(math.sqrt(num_samples / (num_samples - 1)) * t) - 1)


def resampled(
    columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, num_resamples: int = 4000, seed: int = 0
) -> tuple[float, np.ndarray]:
    """The statistic of the columns' sums, and of the sums over bootstrap resamples of the samples.

    Args:
        columns: (C, n), n >= 1; a sample is drawn with all its columns.
        statistic: (C, R) sums -> (R,) values.
    Returns: the value over all samples; (R,) values over resamples.
    """
    columns = np.asarray(columns, dtype=np.float64)
    num_samples = columns.shape[1]
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(num_samples, np.full(num_samples, 1 / num_samples), size=num_resamples)
    return float(statistic(columns.sum(1, keepdims=True))[0]), statistic(columns @ counts.T)


def percentile_interval(values: np.ndarray, num_samples: int, digits: int = 4) -> list[float] | None:
    """The 95% interval of resampled values, expanded for few samples; None where one sample gives none."""
    values = values[np.isfinite(values)]
    if num_samples < 2 or not len(values):
        return None
    tail = (1 - expanded_level(num_samples)) / 2
    return [round(float(v), digits) for v in np.quantile(values, [tail, 1 - tail])]


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
