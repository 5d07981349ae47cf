"""Given prices, limits and the policy's name: which action?"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from paceline.bandit.belief import BucketBelief
from paceline.bandit.pricing import PricedJob, PricedRecall
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError

EXPLORE = 0.05
"""Probability of another job among near ties, so that logged decisions have propensities to evaluate with."""
NEAR_TIE = 0.05
"""Jobs whose net value is within this share of the best are near ties."""
RECALL_GAIN = 0.03
"""Relative fall of the mix's time below which a recall is not worth the noise."""
RECALL_Z = 1.0
"""Standard errors by which a recall must win."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a policy may look at."""

    config: PolicyConfig
    arms: tuple[ArmSpec, ...]
    beliefs: dict[str, BucketBelief]
    jobs: tuple[PricedJob, ...]
    recalls: tuple[PricedRecall, ...]
    balance_s: float
    horizon_s: float
    since_swap_s: float
    since_job_s: float
    is_job_running: bool


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One action; `code` names the kind of reason, so that equal holds are logged once."""

    action: str
    bucket: str
    code: str
    reason: str
    job: PricedJob | None = None
    recall: PricedRecall | None = None
    propensity: float = 1.0


class Policy(Protocol):
    """Chooses among priced actions; pure, all state lives in the view."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice: ...


def _main_bucket(view: View) -> str:
    active = [n for n in sorted(view.beliefs) if view.beliefs[n].is_active]
    return max(active, key=lambda n: view.beliefs[n].busy) if active else ""


def _hold(view: View, code: str, reason: str, bucket: str | None = None) -> Choice:
    return Choice(action="hold", bucket=_main_bucket(view) if bucket is None else bucket, code=code, reason=reason)


def _not_now(view: View) -> Choice | None:
    """Reasons that hold under every policy."""
    if view.is_job_running:
        return _hold(view, "job_running", "A training job is in flight; one at a time.")
    if not any(b.is_active for b in view.beliefs.values()):
        return _hold(view, "no_traffic", "No bucket has measured traffic yet.", "")
    return None


class NeverPolicy:
    """Keeps the first drafter: the static baseline."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        return _hold(view, "policy", "Policy never: nothing is trained or recalled.", "")


class AlwaysPolicy:
    """Trains the largest arm on the bucket with most fresh rows as soon as rows suffice, whatever it costs."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = _not_now(view)
        if held is not None:
            return held
        active = [b for b in view.beliefs.values() if b.is_active]
        belief = max(sorted(active, key=lambda b: b.bucket), key=lambda b: b.fresh_rows)
        if belief.fresh_rows < view.config.min_rows:
            return _hold(
                view,
                "rows",
                f"{belief.bucket} has {belief.fresh_rows} fresh rows of the {view.config.min_rows} that a job needs.",
                belief.bucket,
            )
        own = [j for j in view.jobs if j.bucket == belief.bucket]
        job = max(own, key=lambda j: (j.cost.training_s, j.arm.num_rows))
        reason = f"Policy {view.config.policy}: {belief.bucket} has {belief.fresh_rows} fresh rows, at least {view.config.min_rows}."
        return Choice(action="train", bucket=belief.bucket, code="train", reason=reason, job=job)


class IntervalPolicy(AlwaysPolicy):
    """Like always, but one job per interval_s."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = _not_now(view)
        if held is None and view.since_job_s < view.config.interval_s:
            return _hold(
                view, "interval", f"A job runs every {view.config.interval_s:.0f} s; one started more recently."
            )
        return super().choose(view, rng)


class PayoffPolicy:
    """Acts when the expected saving over the regime's remaining life exceeds the cost by the hysteresis factor.

    V = horizon x load x (time per token now - after) - training - shadow - interference - staging (adaptation.md, 8);
    exploration is the small job and shadow scoring, not noise on V. A recall costs almost nothing and goes first.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = _not_now(view)
        recall = self._recall(view)
        if recall is not None and not view.is_job_running:
            return recall
        if held is not None:
            return held
        jobs = [j for j in view.jobs if view.beliefs[j.bucket].fresh_rows >= view.beliefs[j.bucket].required_rows]
        if not jobs:
            fullest = max((b for b in view.beliefs.values() if b.is_active), key=lambda b: (b.fresh_rows, b.bucket))
            reason = (
                f"{fullest.bucket} has {fullest.fresh_rows} fresh rows of the {fullest.required_rows} that a job needs."
            )
            return _hold(view, "rows", reason, fullest.bucket)
        factor = view.config.hysteresis
        paying = [j for j in jobs if j.saving_s > factor * j.cost.total_s]
        if not paying:
            return self._unpaid(view, jobs)
        funded = [j for j in paying if j.cost.total_s <= view.balance_s]
        if not funded:
            best = max(paying, key=lambda j: j.net_s)
            reason = (
                f"{best.arm.name} on {best.bucket} would save {best.saving_s:.1f} s for {best.cost.total_s:.1f} s, "
                f"but the bank holds {view.balance_s:.1f} s."
            )
            return _hold(view, "bank", reason, best.bucket)
        job, propensity = _pick(funded, rng)
        if view.since_swap_s + job.cost.training_s + job.cost.shadow_s < view.config.min_dwell_s:
            reason = f"The live version is {view.since_swap_s:.0f} s old; it stays {view.config.min_dwell_s:.0f} s."
            return _hold(view, "dwell", reason, job.bucket)
        belief = view.beliefs[job.bucket]
        reason = (
            f"{job.arm.name} on {job.arm.num_rows} rows of {job.bucket} should lift acceptance length "
            f"{belief.length:.2f} to {job.length_after:.2f} and save {job.saving_s:.1f} s at {belief.load:.0f} tokens/s "
            f"over {view.horizon_s:.0f} s for {job.cost.total_s:.1f} s (bank {view.balance_s:.1f} s)."
        )
        return Choice(action="train", bucket=job.bucket, code="train", reason=reason, job=job, propensity=propensity)

    def _unpaid(self, view: View, jobs: list[PricedJob]) -> Choice:
        best = max(jobs, key=lambda j: j.saving_s / max(j.cost.total_s, 1e-9))
        reason = (
            f"{best.arm.name} on {best.bucket} would save {max(best.saving_s, 0.0):.1f} s for {best.cost.total_s:.1f} s, "
            f"less than {view.config.hysteresis:.2f} times its cost."
        )
        return _hold(view, "payoff", reason, best.bucket)

    def _recall(self, view: View) -> Choice | None:
        worth = [
            r
            for r in view.recalls
            if r.gain > max(RECALL_GAIN, RECALL_Z * r.gain_se) and r.saving_s > view.config.hysteresis * r.cost_s
        ]
        if not worth or view.since_swap_s < view.config.min_dwell_s:
            return None
        best = max(worth, key=lambda r: (r.saving_s - r.cost_s, r.version))
        reason = (
            f"Version {best.version} serves the mix {100 * best.gain:.0f}% cheaper than the live one "
            f"({best.bucket}: acceptance length {best.length_after:.2f} against {best.length_now:.2f}), "
            f"saving {best.saving_s:.1f} s for {best.cost_s:.1f} s without training."
        )
        return Choice(action="recall", bucket=best.bucket, code="recall", reason=reason, recall=best)


def _pick(jobs: list[PricedJob], rng: np.random.Generator) -> tuple[PricedJob, float]:
    """The best job, or with probability EXPLORE one of its near ties; with its propensity."""
    best = max(jobs, key=lambda j: j.net_s)
    ties = [j for j in jobs if j is not best and j.net_s >= (1.0 - NEAR_TIE) * best.net_s]
    if not ties:
        return best, 1.0
    if rng.random() < EXPLORE:
        return ties[int(rng.integers(len(ties)))], EXPLORE / len(ties)
    return best, 1.0 - EXPLORE


POLICIES: dict[str, type[Policy]] = {
    "never": NeverPolicy,
    "always": AlwaysPolicy,
    "interval": IntervalPolicy,
    "payoff": PayoffPolicy,
}


def make_policy(name: str) -> Policy:
    """The policy of that name; raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"policy.policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()
