"""Has the drafter been stale for so long that training it would have been cheaper?"""

from __future__ import annotations

import numpy as np

from paceline.bandit.policy_view import Choice, View, fullest, hold, largest_job, not_now, too_few_rows, train


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
