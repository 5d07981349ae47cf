"""Which policies are there, and what do the baselines do?"""

from __future__ import annotations

import numpy as np

from paceline.bandit.policy_cara import CaraPolicy
from paceline.bandit.policy_dual_ema import DualEmaPolicy
from paceline.bandit.policy_hedge import HedgePolicy
from paceline.bandit.policy_payoff import PayoffPolicy
from paceline.bandit.policy_thompson import ThompsonPolicy
from paceline.bandit.policy_view import Choice, Policy, View, fullest, hold, largest_job, not_now, too_few_rows, train
from paceline.errors import ConfigError

__all__ = ["POLICIES", "SELF_FUNDED", "Choice", "Policy", "View", "make_policy"]


class NeverPolicy:
    """Keeps the first drafter: the static baseline."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        template = "Policy never trains {num} jobs and recalls {recalls} versions, whatever they are worth."
        return hold(view, "policy", template, at="", num=0, recalls=0)


class AlwaysPolicy:
    """Trains the largest arm on the bucket with most fresh rows as soon as rows suffice, whatever it costs."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        belief, needed = fullest(view), view.config.min_rows
        job = largest_job(view, belief.bucket)
        if job is None or belief.fresh_rows < needed:
            return too_few_rows(view, belief, needed)
        template = "{bucket} has {fresh} fresh rows, at least the {needed} that policy {policy} waits for."
        policy = view.config.policy
        return train(job, template, bucket=job.bucket, fresh=belief.fresh_rows, needed=needed, policy=policy)


class IntervalPolicy(AlwaysPolicy):
    """Like always, but one job per interval_s."""

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is None and view.since_job_s < view.config.interval_s:
            template = "The last job started {since:.0f} s ago, and one starts every {interval:.0f} s."
            return hold(view, "interval", template, since=view.since_job_s, interval=view.config.interval_s)
        return super().choose(view, rng)


POLICIES: dict[str, type[Policy]] = {
    "never": NeverPolicy,
    "always": AlwaysPolicy,
    "interval": IntervalPolicy,
    "payoff": PayoffPolicy,
    "dual_ema": DualEmaPolicy,
    "cara": CaraPolicy,
    "thompson": ThompsonPolicy,
    "hedge": HedgePolicy,
}
SELF_FUNDED = frozenset({"payoff", "thompson"})
"""Policies that spend only what the bank covers; their jobs are stopped when it would run dry."""


def make_policy(name: str) -> Policy:
    """The policy of that name; raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"policy.policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name]()
