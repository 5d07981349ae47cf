"""What is a training job, or the return of an older version, worth in device-seconds?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from paceline.bandit.arms import row_counts, sized
from paceline.bandit.belief import BucketBelief
from paceline.bandit.cost_model import CostModel, JobCost
from paceline.bandit.gain_model import GainModel, forgetting, further_share
from paceline.bandit.recall import ScoreTable
from paceline.contracts import ArmSpec

PRIOR_BEST_LENGTH = 2.2
"""Acceptance length that training reaches on an ordinary bucket; headroom prior before better was seen."""
MIN_HEADROOM = 0.03
MAX_HEADROOM = 1.2
"""Bounds of the headroom, relative to the acceptance length now."""
GATE_GAIN = 0.02
"""Relative rise of the acceptance length below which the gate is taken to refuse."""
QUANTILES = (-1.2816, -0.5244, 0.0, 0.5244, 1.2816)
"""Normal quantiles at 10, 30, 50, 70 and 90%: the mean over them prices the kink at plain decoding and at the gate."""


class PricedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one bucket; seconds are device-seconds over the horizon."""

    bucket: str
    arm: ArmSpec
    headroom: float
    share: float
    """further_share of the rows."""
    gain: float
    """Expected relative fall of the bucket's device time per token."""
    length_after: float
    saving_s: float
    """Of the whole mix: the bucket's saving less what other active buckets lose by forgetting."""
    cost: JobCost

    @property
    def net_s(self) -> float:
        return self.saving_s - self.cost.total_s


class PricedRecall(msgspec.Struct, frozen=True, kw_only=True):
    """Bringing an existing version back for all buckets."""

    version: str
    gain: float
    """Relative fall of the mix's device time, load-weighted."""
    gain_se: float
    saving_s: float
    cost_s: float
    length_now: float
    length_after: float
    """Acceptance length in the bucket that counts most."""
    bucket: str


def headroom(belief: BucketBelief, best_length: float) -> float:
    """Tokens a round that training might still add: k = 1 of the gain model, from the best length seen on any bucket."""
    gap = max(best_length, PRIOR_BEST_LENGTH) - belief.length
    return min(max(gap, MIN_HEADROOM * belief.length), MAX_HEADROOM * belief.length)


def price_jobs(
    beliefs: Mapping[str, BucketBelief],
    arms: Iterable[ArmSpec],
    *,
    gains: GainModel,
    costs: CostModel,
    best_length: float,
    horizon_s: float,
    min_rows: int,
    num_replicas: int,
) -> list[PricedJob]:
    """Every arm and row count on every active bucket with enough fresh rows; the order is deterministic."""
    priced = []
    busy = sum(b.busy for b in beliefs.values() if b.is_active)
    arms = tuple(arms)
    for name in sorted(beliefs):
        belief = beliefs[name]
        if not belief.is_active or belief.fresh_rows < min_rows:
            continue
        room = headroom(belief, best_length)
        for template in arms:
            for rows in row_counts(template, belief.usable_rows, min_rows):
                arm = sized(template, rows)
                after = max(belief.learned_rows + min(rows, belief.fresh_rows), rows)
                share = further_share(belief.learned_rows, after)
                mean, sd = gains.predict(name, arm, room, share)
                cost = costs.predict(arm, busy=busy, num_replicas=num_replicas)
                gain = _expected_gain(belief, mean, sd)
                left = max(horizon_s - cost.training_s - cost.shadow_s, 0.0)
                saving = left * (belief.busy * gain - _forgotten(beliefs, name, arm))
                priced.append(
                    PricedJob(
                        bucket=name,
                        arm=arm,
                        headroom=room,
                        share=share,
                        gain=gain,
                        length_after=belief.length + max(mean, 0.0),
                        saving_s=saving,
                        cost=cost,
                    )
                )
    return priced


def _expected_gain(belief: BucketBelief, mean: float, sd: float) -> float:
    total = 0.0
    for z in QUANTILES:
        rise = mean + z * sd
        if rise > GATE_GAIN * belief.length:
            total += max(belief.relative_gain(belief.length, belief.length + rise), 0.0)
    return total / len(QUANTILES)


def _forgotten(beliefs: Mapping[str, BucketBelief], trained: str, arm: ArmSpec) -> float:
    """Device-seconds per second that other active buckets lose after the job."""
    lost = forgetting(arm)
    return sum(
        -b.busy * b.relative_gain(b.length, b.length * (1.0 - lost))
        for name, b in beliefs.items()
        if name != trained and b.is_active
    )


def price_recalls(
    beliefs: Mapping[str, BucketBelief],
    versions: Iterable[str],
    live_version: str,
    *,
    table: ScoreTable,
    horizon_s: float,
    staging_s: float,
) -> list[PricedRecall]:
    """Every known version against the live one on the load-weighted mix of active buckets.

    A version whose score is unknown in a bucket that carries more than a tenth of the time is left out.
    """
    active = {name: b for name, b in beliefs.items() if b.is_active}
    busy = sum(b.busy for b in active.values())
    if busy <= 0:
        return []
    main = max(sorted(active), key=lambda name: active[name].busy)
    priced = []
    for version in sorted(set(versions) - {live_version, ""}):
        gain = variance = unknown = 0.0
        length_after = active[main].length
        for name, belief in active.items():
            weight = belief.busy / busy
            found = table.estimate(name, version)
            if found is None:
                unknown += weight
                continue
            length, se = found
            gain += weight * belief.relative_gain(belief.length, length)
            # d ln(time) = d ln(length): relative errors of both lengths add in quadrature
            variance += (weight * math.hypot(se / length, belief.length_se / belief.length)) ** 2
            if name == main:
                length_after = length
        if unknown > 0.1:
            continue
        priced.append(
            PricedRecall(
                version=version,
                gain=gain,
                gain_se=math.sqrt(variance),
                saving_s=horizon_s * busy * gain,
                cost_s=staging_s,
                length_now=active[main].length,
                length_after=length_after,
                bucket=main,
            )
        )
    return priced
