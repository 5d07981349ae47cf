"""Pricing: what a training job, or another of the versions there are, is worth to a bucket in device-seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
from scipy.special import ndtr, ndtri

from paceline.bandit.beliefs.arms import row_counts, sized
from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.evidence import EvidenceModel
from paceline.bandit.beliefs.gain_model import GainModel, learned_share, newness
from paceline.bandit.beliefs.job_cost import CostModel, JobCost
from paceline.bandit.beliefs.recall import ScoreTable
from paceline.contracts import ArmSpec

PRIOR_BEST_LENGTH = 2.2
"""Acceptance length that training reaches on an ordinary bucket; headroom prior before better was seen."""
MIN_HEADROOM, MAX_HEADROOM = 0.03, 1.2
"""Bounds of the headroom, relative to the acceptance length now."""
UNTRIED_HEADROOM = 0.15
"""MIN_HEADROOM of a bucket that no job of this service has tried: however long a drafter's drafts are, training may lengthen them.
A first job made them 22 to 27% longer on five kinds of text new to a drafter, and 5% on text that it was made for (8% behind
30,000 rows)."""
GATE_GAIN = 0.005
"""Least relative rise of the acceptance length that a swap is thought to cost, and step between those that are looked at.
The table worlds net 4.8% with 0.02, 5.2 to 5.4% with 0.01, 0.005 and 0.001."""
SHARES = (np.arange(5) + 0.5) / 5
"""Of the rises that are large enough to become sure, those at which a gain is looked at: it has a kink at plain decoding.
What is sure itself must be no point's matter: the row counts whose least sure rise is just below a point would look best."""


class PricedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one bucket; seconds are device-seconds over the horizon."""

    bucket: str
    arm: ArmSpec
    headroom: float
    share: float
    """learned_share of the rows."""
    new: float = 1.0
    """`newness` of the rows."""
    gain: float
    """Expected relative fall of the bucket's device time per token, 0 where the burst does not end sure."""
    sure_rise: float = 0.0
    """Least rise of the acceptance length, tokens a round, that the burst is expected to make sure."""
    length_after: float
    saving_s: float
    """Of the bucket, less what a recall would save without the job."""
    cost: JobCost
    left_s: float = 0.0
    """Seconds of this regime for which the new version is expected to serve the bucket."""
    return_s: float = 0.0
    """Seconds of later regimes, at today's load, for which the bucket is expected to be served."""
    known_gain: float = 0.0
    """`gain` of the best existing version on the bucket: what is to be had without this job."""
    recall_s: float = 0.0
    """What the bucket's best recall would save without this job, part of saving_s."""
    rate: float = 0.0
    """Device-seconds saved per second once the new version serves."""
    others: list[str] = []
    """Buckets that learn together with this one and get the version, too."""
    is_hope: bool = False
    """Nothing speaks for the gain but UNTRIED_HEADROOM."""

    @property
    def net_s(self) -> float:
        return self.saving_s - self.cost.total_s


class PricedRecall(msgspec.Struct, frozen=True, kw_only=True):
    """Giving a bucket another of the versions there are."""

    bucket: str
    version: str
    gain: float
    """Relative fall of the bucket's device time per token."""
    gain_se: float
    saving_s: float
    cost_s: float
    length_now: float
    length_after: float
    is_floor: bool = False
    """This is the first version, which the savings are measured against."""


def headroom(belief: BucketBelief, best_length: float) -> float:
    """Tokens a round that training might still add: k = 1 of the gain model, from the best length seen on any bucket."""
    is_tried = belief.is_tried or belief.learned_rows > belief.first_rows or belief.learner_rows > 0
    return headroom_of(belief.length, best_length, MIN_HEADROOM if is_tried else UNTRIED_HEADROOM)


def headroom_of(length: float, best_length: float, least: float = MIN_HEADROOM) -> float:
    """`headroom` of a bucket with this acceptance length. least: relative to it."""
    gap = max(best_length, PRIOR_BEST_LENGTH) - length
    return min(max(gap, least * length), MAX_HEADROOM * length)


def price_jobs(
    beliefs: Mapping[str, BucketBelief],
    arms: Iterable[ArmSpec],
    *,
    gains: GainModel,
    costs: CostModel,
    evidence: EvidenceModel,
    hysteresis: float,
    best_length: float,
    horizon_s: float,
    min_rows: int,
    num_replicas: int,
    trainer_price: float = 1.0,
    left_s: Callable[[float], float] | None = None,
    returning_s: Callable[[str, float], float] | None = None,
    known_length: Callable[[str], float] | None = None,
    recall_rates: Mapping[str, float] | None = None,
    pools: Mapping[str, list[str]] | None = None,
) -> list[PricedJob]:
    """Every arm and row count on every active bucket with enough fresh rows; the order is deterministic.

    left_s: seconds until the new version could serve -> expected seconds of the regime after that; default: what is left
    of horizon_s. returning_s: bucket, the same wait -> seconds, at today's load, that it is expected to be served in later
    regimes.
    known_length: bucket -> acceptance length of the best existing version, which would be recalled then.
    recall_rates: bucket -> device-seconds per second that its best recall saves, which a job must beat.
    pools: bucket -> other buckets that its belief is about, too.
    """
    priced = []
    busy = sum(b.busy for b in beliefs.values() if b.is_active)
    arms = tuple(arms)
    for name in sorted(beliefs):
        belief = beliefs[name]
        if not belief.is_active or belief.fresh_rows < min_rows:
            continue
        room = headroom(belief, best_length)
        is_hope = room > headroom_of(belief.length, best_length)
        best_known = max(known_length(name), belief.length) if known_length is not None else belief.length
        known = belief.relative_gain(belief.length, best_known)
        others = pools.get(name, []) if pools is not None else []
        recall_rate = sum(recall_rates.get(b, 0.0) for b in (name, *others)) if recall_rates is not None else 0.0
        least = swap_gain(belief, hysteresis * costs.staging_s(num_replicas), horizon_s)
        found = []
        before, unsure = belief.learner_rows, belief.unsure
        log_evidence = None if unsure is None else unsure.log_evidence
        by_rows: dict[int, tuple[float, float, float]] = {}  # what hangs on the rows alone, whatever the arm
        # of another one what the class's learner knows would be lost
        goes_on = [a for a in arms if a.parameters == belief.learner_parameters]
        for template in goes_on or arms:
            for rows in row_counts(template, belief.fresh_rows, min_rows):
                arm = sized(template, rows)
                if arm.num_rows not in by_rows:
                    rise = evidence.sure_rise(name, before, arm.num_rows, least, log_evidence)
                    by_rows[arm.num_rows] = (*_lesson(belief, arm), belief.length * rise)
                share, new, sure = by_rows[arm.num_rows]
                mean, sd = gains.predict(name, arm, room, share, new)
                cost = costs.predict(arm, busy=busy, num_replicas=num_replicas, price=trainer_price)
                if unsure is not None:
                    growth, doublings = share / max(learned_share(before), 1e-9), math.log2(1.0 + arm.num_rows / before)
                    mean, sd = unsure.blended(mean, sd, growth, gains.misfit_sd(arm) * room * doublings)
                found.append((arm, share, new, cost, mean, sd, sure))
        gained = _expected_gains(belief, [job[4:] for job in found], known)
        for (arm, share, new, cost, mean, _, sure), (gain, later) in zip(found, gained.tolist(), strict=True):
            wait = cost.wait_s
            left = max(horizon_s - wait, 0.0) if left_s is None else left_s(wait)
            returns = 0.0 if returning_s is None else returning_s(name, wait)
            saving = belief.busy * (left * gain + returns * later) - left * recall_rate
            priced.append(
                PricedJob(
                    bucket=name,
                    arm=arm,
                    headroom=room,
                    share=share,
                    new=new,
                    gain=gain,
                    sure_rise=sure,
                    length_after=belief.length + max(mean, 0.0),
                    saving_s=saving,
                    cost=cost,
                    left_s=left,
                    return_s=returns,
                    known_gain=known,
                    recall_s=left * recall_rate,
                    rate=belief.busy * gain - recall_rate,
                    others=others,
                    is_hope=is_hope,
                )
            )
    return priced


def _lesson(belief: BucketBelief, arm: ArmSpec) -> tuple[float, float]:
    """(learned_share, newness) of what a learner knows after a burst on the bucket's rows.

    The drafter may have learned some of them before, and the learner others in earlier bursts.
    """
    rows = belief.learner_rows + arm.num_rows
    after = max(belief.learned_rows + belief.learner_rows + min(arm.num_rows, belief.fresh_rows), rows)
    return learned_share(rows), newness(belief.learned_rows, after, rows)


def swap_gain(belief: BucketBelief, swap_s: float, left_s: float) -> float:
    """Relative rise of acceptance length at which making a version live saves, in left_s, what the swap takes.

    Below the length at which drafting pays nothing is saved, however much better the version is; 1 when no rise up to
    twice the length pays.
    """
    rises = np.arange(GATE_GAIN, 1.0, GATE_GAIN)
    saved = belief.busy * left_s * belief.relative_gains(belief.length, belief.length * (1.0 + rises))
    pays = rises[saved > swap_s]
    return float(pays[0]) if len(pays) else 1.0


def _expected_gains(belief: BucketBelief, jobs: list[tuple[float, float, float]], known: float) -> np.ndarray:
    """(J, 2) expected gains over the live version, and over the best existing one, whose gain over the live one is `known`.

    jobs: mean and standard deviation of the rise of the acceptance length, and the least that becomes sure.
    """
    table = np.array(jobs).reshape(-1, 3)
    means, sds, sure_rises = table[:, :1], np.maximum(table[:, 1:2], 1e-9), np.maximum(table[:, 2:], 0.0)
    chance = ndtr((means - sure_rises) / sds)
    rises = means - sds * ndtri(np.maximum(chance, 1e-300) * SHARES)
    gains = np.maximum(belief.relative_gains(belief.length, belief.length + rises), 0.0)
    return chance * np.stack((gains.mean(1), np.maximum(gains - known, 0.0).mean(1)), 1)


def passed_gains(belief: BucketBelief, rises: np.ndarray, sure_rise: np.ndarray | float) -> np.ndarray:
    """Relative fall of the bucket's time per token by rise of acceptance length, 0 below the least that becomes sure."""
    gains = np.maximum(belief.relative_gains(belief.length, belief.length + rises), 0.0)
    return np.where(rises >= sure_rise, gains, 0.0)


def staleness_rates(
    beliefs: Mapping[str, BucketBelief], arms: Iterable[ArmSpec], *, gains: GainModel, best_length: float, min_rows: int
) -> dict[str, float]:
    """Active bucket -> device-seconds lost per second against what the best arm would give on the rows there are.

    Buckets with fewer than min_rows are valued as if they had them: their drafter is stale before it can be helped.
    """
    rates = {}
    for name, belief in sorted(beliefs.items()):
        if not belief.is_active:
            continue
        room, found = headroom(belief, best_length), []
        for template in arms:
            arm = sized(template, min(max(belief.fresh_rows, min_rows), template.num_rows))
            found.append((*gains.predict(name, arm, room, *_lesson(belief, arm)), GATE_GAIN * belief.length))
        best = _expected_gains(belief, found, 0.0)[:, 0].max(initial=0.0)
        rates[name] = belief.busy * float(best)
    return rates


def price_recalls(
    beliefs: Mapping[str, BucketBelief],
    versions: Iterable[str],
    version_of: Callable[[str], str],
    *,
    table: ScoreTable,
    horizon_s: float,
    staging_s: float,
    first_version: str = "",
) -> list[PricedRecall]:
    """Every known version on every active bucket, against the one that the bucket has; the order is deterministic.

    version_of: bucket -> the version that it has.
    """
    priced = []
    for name, belief in sorted(beliefs.items()):
        if not belief.is_active:
            continue
        # from the same table as the others: where drafting rests, the belief knows more of the version that is live alone
        now, now_se = table.estimate(name, version_of(name)) or (belief.length, belief.length_se)
        for version in sorted(set(versions) - {version_of(name), ""}):
            found = table.estimate(name, version)
            if found is None:
                continue
            length, se = found
            gain = belief.relative_gain(now, length)
            priced.append(
                PricedRecall(
                    bucket=name,
                    version=version,
                    gain=gain,
                    # d ln(time) = d ln(length): relative errors of both lengths add in quadrature
                    gain_se=math.hypot(se / length, now_se / now),
                    saving_s=horizon_s * belief.busy * gain,
                    cost_s=staging_s,
                    length_now=now,
                    length_after=length,
                    is_floor=version == first_version,
                )
            )
    return priced


def recall_rates(beliefs: Mapping[str, BucketBelief], recalls: Iterable[PricedRecall]) -> dict[str, float]:
    """Bucket -> device-seconds per second that its best recall saves, less one standard error; only those above 0."""
    rates: dict[str, float] = {}
    for r in recalls:
        rate = beliefs[r.bucket].busy * (r.gain - r.gain_se)
        if rate > rates.get(r.bucket, 0.0):
            rates[r.bucket] = rate
    return rates


def version_losses(belief: BucketBelief, versions: Iterable[str], *, table: ScoreTable) -> dict[str, float]:
    """Version -> its device time per token on a bucket over that of a drafter that accepts nothing, in [0, 1].

    A version whose score on the bucket is unknown is left out.
    """
    worst = belief.token_s(1.0)
    found = {v: table.estimate(belief.bucket, v) for v in sorted(set(versions) - {""})}
    if worst <= 0:
        return {}
    return {v: min(max(belief.token_s(f[0]) / worst, 0.0), 1.0) for v, f in found.items() if f is not None}
