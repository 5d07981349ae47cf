"""What does the gain model believe about every training arm: posterior mean and interval against its prior?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.bandit.gain_model import ARM_SD, K_MEAN, K_SD, GainModel

Z90 = 1.645
"""Half-width of a central 90% interval of a normal distribution, in standard deviations."""


def arm_posteriors(gains: GainModel) -> list[dict[str, Any]]:
    """One row for each arm that was ever priced, and one for each arm and bucket; reads only, nothing is learned.

    `mean`, `low` and `high` are the share of the reachable gain (headroom) that endless training with the arm would close:
    1 = all of it; the interval holds 90%. bucket None = over all buckets. The misfit of the curve is not part of it.
    """
    mean, cov = np.asarray(gains.mean), np.asarray(gains.cov)
    buckets = [n.removeprefix("bucket:") for n in gains.names if n.startswith("bucket:")]
    rows = []
    for name in (n for n in gains.names if n.startswith("arm:")):
        at_arm = gains.names.index(name)
        share = gains.prior_sd[at_arm] / ARM_SD  # the prior spread of an arm is proportional to its share
        for bucket in (None, *buckets):
            x = np.zeros(len(gains.names))
            x[0], x[at_arm] = share, 1.0
            if bucket is not None:
                x[gains.names.index(f"bucket:{bucket}")] = share
            middle, sd = float(x @ mean), math.sqrt(max(float(x @ cov @ x), 0.0))
            prior_sd = share * math.hypot(K_SD, ARM_SD)
            rows.append(
                {
                    "arm": name.removeprefix("arm:"),
                    "bucket": bucket,
                    "mean": middle,
                    "low": middle - Z90 * sd,
                    "high": middle + Z90 * sd,
                    "prior_mean": share * K_MEAN,
                    "prior_low": share * K_MEAN - Z90 * prior_sd,
                    "prior_high": share * K_MEAN + Z90 * prior_sd,
                }
            )
    return rows


def regime_starts(start: float, lengths: list[float]) -> list[float]:
    """When the present and the remembered regimes began, oldest first, seconds since the epoch."""
    starts = [start]
    for length in reversed(lengths):
        starts.append(starts[-1] - length)
    return starts[::-1]
