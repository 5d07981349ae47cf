"""Policies: the table of all of them by name, the baselines, the rules taken from elsewhere (TIDE, CARA, Fixed-Share), and
policies that are not ours, as MODULE:CLASS or by an entry point.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from paceline.bandit.policies.payoff import PayoffPolicy
from paceline.bandit.policies.pricing import PricedRecall
from paceline.bandit.policies.thompson import ThompsonPolicy
from paceline.bandit.policies.view import (
    Choice,
    Policy,
    View,
    fullest,
    hold,
    job_key,
    largest_job,
    not_now,
    recall,
    recall_key,
    too_few_rows,
    train,
)
from paceline.config import MODULE_CLASS, policy_entry_points
from paceline.errors import ConfigError


class CaraPolicy:
    """Trains when the staleness cost accrued since the bucket's last job reaches cara_factor times the retraining cost.

    The cumulative-threshold variant of CARA (Mahadevan and Mathioudakis, arXiv 2310.04216), with staleness measured in
    device-seconds lost against the drafter that training now is believed to give. That is the rent-or-buy rule: with
    factor 1 and a right belief it pays at most twice what hindsight would, and it needs no horizon. The retraining is the
    largest arm on all usable rows.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        factor, stale = view.config.cara_factor, view.memory.staleness_s
        active = [n for n in sorted(view.beliefs) if view.beliefs[n].is_active]
        jobs = [job for name in active if (job := largest_job(view, name)) is not None]
        if not jobs:
            return too_few_rows(view, fullest(view), view.config.min_rows)
        job = max(jobs, key=lambda j: (stale.get(j.bucket, 0.0) / max(j.cost.total_s, 1e-9), j.bucket))
        lost, cost = stale.get(job.bucket, 0.0), job.cost.total_s
        if lost < factor * cost:
            template = "The staleness of {bucket} has cost {lost:.1f} s since its last job, less than {factor:.2f} times the {cost:.1f} s of training."  # fmt: skip
            bucket = job.bucket
            return hold(view, "staleness", template, at=bucket, bucket=bucket, lost=lost, factor=factor, cost=cost)
        return train(
            job,
            "The staleness of {bucket} has cost {lost:.1f} s since its last job, at least {factor:.2f} times the "
            "{cost:.1f} s of training.",
            bucket=job.bucket,
            lost=lost,
            factor=factor,
            cost=cost,
        )


class DualEmaPolicy:
    """Trains the largest arm after a drop of acceptance, on rows collected since; knows neither cost nor horizon.

    Source: TIDE, arXiv 2602.05145, Alg. 1; its gate (deploy only what scored better) is that of every job. The memory
    is policy_memory.DualEma; the weights and the margin are ours (PolicyConfig), the paper does not give them.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        ema, config = view.memory.ema, view.config
        level = (1.0 - config.ema_margin) * ema.slow
        if not ema.is_collecting:
            template = "The fast mean of acceptance length {fast:.2f} did not fall below {level:.2f}, which is the slow mean {slow:.2f} less {margin:.0%}."  # fmt: skip
            return hold(view, "ema", template, fast=ema.fast, level=level, slow=ema.slow, margin=config.ema_margin)
        active = [b for b in view.beliefs.values() if b.is_active]
        able = {j.bucket for j in view.jobs}  # others are frozen, or have too few rows
        belief = max(active, key=lambda b: (b.bucket in able, ema.collected.get(b.bucket, 0), b.bucket))
        collected = ema.collected.get(belief.bucket, 0)
        if collected < config.min_rows:
            template = "{bucket} collected {collected} rows since acceptance dropped, of the {needed} that a job needs."
            bucket, needed = belief.bucket, config.min_rows
            return hold(view, "rows", template, at=bucket, bucket=bucket, collected=collected, needed=needed)
        job = largest_job(view, belief.bucket)
        if job is None:
            return too_few_rows(view, belief, config.min_rows)
        return train(
            job,
            "Acceptance length dropped (fast mean {fast:.2f}, slow mean {slow:.2f}) and {bucket} collected {collected} "
            "rows, at least {needed}.",
            fast=ema.fast,
            slow=ema.slow,
            bucket=job.bucket,
            collected=collected,
            needed=config.min_rows,
        )


ODDS = 2.0
"""The heaviest version takes a bucket over when it weighs this much more than the one that it has."""


class HedgePolicy:
    """Never trains; gives every bucket its heaviest version, lazily.

    Every epoch each version's loss is its believed device time per token on the bucket over that of a drafter that accepts
    nothing; shadow scores and served rounds give it without exploring. The bound of policy_memory.HedgeWeights is
    on the weighted mean of losses; serving the leader instead avoids swaps, which cost.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        rivals = [(self._odds(view, r), r) for r in view.recalls if r.version in self._weights(view, r.bucket)]
        if not rivals:
            template = "{num} versions that a bucket does not have are known on it."
            return hold(view, "no_version", template, num=0)
        odds, best = max(rivals, key=lambda o: (o[0], o[1].bucket, o[1].version))
        weights = self._weights(view, best.bucket)
        numbers = {
            "best": best.version, "bucket": best.bucket, "weight": weights[best.version], "odds": ODDS,
            "own": weights.get(view.versions[best.bucket], 0.0),
        }  # fmt: skip
        if odds < ODDS:
            template = "On {bucket} version {best} has weight {weight:.3f}, less than {odds:.1f} times the {own:.3f} of the one that it has."  # fmt: skip
            return hold(view, "weights", template, at=best.bucket, **numbers)
        held = not_now(view)
        if held is not None:
            return held
        template = "On {bucket} version {best} has weight {weight:.3f}, at least {odds:.1f} times the {own:.3f} of the one that it has."  # fmt: skip
        return recall(best, template, **numbers)

    def _weights(self, view: View, bucket: str) -> dict[str, float]:
        hedge = view.memory.hedges.get(bucket)
        return hedge.weights if hedge is not None else {}

    def _odds(self, view: View, rival: PricedRecall) -> float:
        """Weight of a version over that of the one that its bucket has."""
        weights = self._weights(view, rival.bucket)
        return weights[rival.version] / max(weights.get(view.versions[rival.bucket], 0.0), 1e-12)


class NeverPolicy:
    """Keeps the first drafter: the static baseline."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        template = "Policy never trains {num} jobs and recalls {recalls} versions, whatever they are worth."
        return hold(view, "policy", template, at="", num=0, recalls=0)


class EagerPolicy:
    """Trains the largest arm on the bucket with most fresh rows as soon as rows suffice, whatever it costs.

    'always' does so at every epoch, 'interval' starts one job per interval_s.
    """

    def __init__(self, *, has_interval: bool) -> None:
        self._has_interval = has_interval

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        if self._has_interval and view.since_job_s < view.config.interval_s:
            template = "The last job started {since:.0f} s ago, and one starts every {interval:.0f} s."
            return hold(view, "interval", template, since=view.since_job_s, interval=view.config.interval_s)
        belief, needed = fullest(view, with_job=True), view.config.min_rows
        job = largest_job(view, belief.bucket)
        if job is None or belief.fresh_rows < needed:
            return too_few_rows(view, belief, needed)
        template = "{bucket} has {fresh} fresh rows, at least the {needed} that policy {policy} waits for."
        policy = view.config.policy
        return train(job, template, bucket=job.bucket, fresh=belief.fresh_rows, needed=needed, policy=policy)


POLICIES: dict[str, Callable[[], Policy]] = {
    "never": NeverPolicy,
    "always": partial(EagerPolicy, has_interval=False),
    "interval": partial(EagerPolicy, has_interval=True),
    "payoff": PayoffPolicy,
    "dual_ema": DualEmaPolicy,
    "cara": CaraPolicy,
    "thompson": ThompsonPolicy,
    "hedge": HedgePolicy,
}
SELF_FUNDED = frozenset({"payoff", "thompson"})
"""Policies that spend only what the bank covers; their jobs are stopped when it would run dry."""


def is_self_funded(name: str) -> bool:
    """A policy's jobs are bounded by the bank: one of SELF_FUNDED, or another's class that has `is_self_funded = True`."""
    return name in SELF_FUNDED or (name not in POLICIES and bool(getattr(_foreign(name), "is_self_funded", False)))


def make_policy(name: str) -> Policy:
    """The policy of that name: one of POLICIES, an entry point of the group 'paceline.policies', or MODULE:CLASS.

    One is made for every decision, so it keeps nothing between decisions: what it may know is in the view.

    Raises: ConfigError with the known names, or with what is wrong with a class that is not ours.
    """
    if name in POLICIES:
        return POLICIES[name]()
    try:
        policy: Policy = _foreign(name)()
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"policy.policy {name!r} must be a class that needs no arguments ({e!r})") from e
    return policy


def ask_policy(name: str, view: View, rng: np.random.Generator) -> Choice:
    """What the policy of that name chooses; of one that is not ours, what the view allows.

    Raises: ConfigError when it is unknown, or answers with anything else. What it raises itself gets a note with its name.
    """
    policy = make_policy(name)
    try:
        choice = policy.choose(view, rng)
    except Exception as e:
        e.add_note(f"policy {name!r} raised this in choose(view, rng)")
        raise
    fault = None if name in POLICIES else _fault(choice, view)
    if fault is not None:
        raise ConfigError(f"policy {name!r} must return {fault}")
    return choice


def _fault(choice: object, view: View) -> str | None:
    """What a policy must return instead, and what it returned; None for a choice that the view allows."""
    if not isinstance(choice, Choice):
        return f"a Choice from choose(view, rng), as hold(), train() and recall() of paceline.replay make it, got {choice!r}"
    try:
        msgspec.convert(msgspec.to_builtins(choice), Choice)
    except (TypeError, ValueError) as e:
        return f"a Choice of plain values of its fields' types, got one that is not: {e}"
    target = choice.job or choice.recall
    if choice.job is not None and view.is_job_running:
        return f"no job while another one runs (view.is_job_running; not_now(view) holds then), got {choice.key!r}"
    if choice.job is not None and choice.job not in view.jobs:
        return f"one of view.jobs as it is there, got {choice.key!r}, which differs from all {len(view.jobs)} of them"
    if choice.recall is not None and choice.recall not in view.recalls:
        return f"one of view.recalls as it is there, got {choice.key!r}, which differs from all {len(view.recalls)} of them"
    if target is not None and choice.bucket != target.bucket:
        return f"the bucket of what it chose, {target.bucket!r}, got {choice.bucket!r}"
    odds = choice.probabilities
    known = {"hold", *map(job_key, view.jobs), *(recall_key(r.bucket, r.version) for r in view.recalls)}
    foreign = next((key for key in odds if key not in known), None)
    if foreign is not None:
        return f"probabilities of actions of the view, got {foreign!r}"
    if not (
        all(0.0 <= p <= 1.0 for p in odds.values()) and abs(sum(odds.values()) - 1.0) < 1e-6 and choice.propensity > 0.0
    ):
        return f"probabilities in [0, 1] that sum to 1, more than 0 for what it chose, got {odds}"
    return None


def _foreign(name: str) -> Callable[[], Policy]:
    """The class behind a name that is not in POLICIES, as its module has it now: a notebook may define it anew."""
    points = policy_entry_points()
    if name not in points and not MODULE_CLASS.fullmatch(name):
        known = ", ".join((*POLICIES, *points))
        raise ConfigError(f"policy.policy must be one of {known}, or MODULE:CLASS of one of your own; got {name!r}")
    try:
        if name in points:
            found = points[name].load()
        else:
            module, _, attribute = name.partition(":")
            found = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # whatever a foreign module raises when it is imported
        raise ConfigError(f"policy.policy {name!r} must be importable; put its folder on PYTHONPATH ({e!r})") from e
    if not callable(found) or not callable(getattr(found, "choose", None)):
        raise ConfigError(f"policy.policy {name!r} must be a class with a method choose(view, rng), got {found!r}")
    made: Callable[[], Policy] = found
    return made
