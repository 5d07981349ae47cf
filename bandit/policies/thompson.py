"""Thompson policy: the best job in a world drawn from what is believed (discounted contextual Thompson sampling)."""

from __future__ import annotations

import msgspec
import numpy as np

from paceline.bandit.policies.pricing import PricedJob, passed_gains
from paceline.bandit.policies.view import Choice, View, fullest, hold, job_key, not_now, too_few_rows, train


class ThompsonPolicy:
    """Plays each job with the posterior probability that it is the best, and 'hold' with that of no job paying.

    Contextual: gains come from the discounted Bayesian regression of gain_model on bucket, arm, headroom and rows (linear
    Thompson sampling, Agrawal and Goyal 2013, arXiv 1209.3352; discounting as in Raj and Kalyani 2017, arXiv
    1707.09727). The probabilities are Monte-Carlo frequencies over thompson_draws joint draws, and the action is drawn
    from these very frequencies: the logged propensity is exact given the draws. Spends only what the bank covers.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        if held is not None:
            return held
        jobs = [j for j in view.jobs if view.beliefs[j.bucket].fresh_rows >= view.beliefs[j.bucket].required_rows]
        if not jobs:
            belief = fullest(view)
            return too_few_rows(view, belief, belief.required_rows)
        funded = [j for j in jobs if j.cost.total_s <= view.balance_s]
        if not funded:
            cheapest = min(jobs, key=lambda j: (j.cost.total_s, j.bucket))
            template = "The cheapest job, {arm} on {bucket}, costs {cost:.1f} s, but the bank holds {balance:.1f} s."
            arm, bucket, cost = cheapest.arm.name, cheapest.bucket, cheapest.cost.total_s
            return hold(view, "bank", template, at=bucket, arm=arm, bucket=bucket, cost=cost, balance=view.balance_s)
        shares = propensities(view, funded, rng)
        names = ["hold", *(job_key(j) for j in funded)]
        probabilities: dict[str, float] = {}
        for name, share in zip(names, shares.tolist(), strict=True):
            if share > 0:
                probabilities[name] = probabilities.get(name, 0.0) + share
        at = int(np.searchsorted(np.cumsum(shares), rng.random(), side="right"))
        at = min(at, int(np.flatnonzero(shares)[-1]))
        if at == 0:
            best = int(np.argmax(shares[1:]))
            choice = hold(
                view,
                "thompson",
                "No job pays in {none:.1%} of {draws} draws; the likeliest, {arm} on {bucket}, is best in {some:.1%}.",
                at=funded[best].bucket,
                none=float(shares[0]),
                draws=view.config.thompson_draws,
                arm=funded[best].arm.name,
                bucket=funded[best].bucket,
                some=float(shares[1 + best]),
            )
            return msgspec.structs.replace(choice, probabilities=probabilities)
        job = funded[at - 1]
        return train(
            job,
            "{arm} on {rows} rows of {bucket} is best in {share:.1%} of {draws} draws, against {none:.1%} for holding, "
            "and costs {cost:.1f} s of the bank's {balance:.1f} s.",
            probabilities=probabilities,
            arm=job.arm.name,
            rows=job.arm.num_rows,
            bucket=job.bucket,
            share=float(shares[at]),
            draws=view.config.thompson_draws,
            none=float(shares[0]),
            cost=job.cost.total_s,
            balance=view.balance_s,
        )


def propensities(view: View, jobs: list[PricedJob], rng: np.random.Generator) -> np.ndarray:
    """(1 + number of jobs,) float64 summing to 1: share of joint draws in which holding, or each job, is worth most."""
    num = view.config.thompson_draws
    closed = view.gains.draw([(j.bucket, j.arm, j.new) for j in jobs], num, rng)
    worth = np.zeros((num, 1 + len(jobs)))
    for i, job in enumerate(jobs):
        belief = view.beliefs[job.bucket]
        gain = passed_gains(belief, closed[:, i] * job.headroom * job.share, job.sure_rise)
        later = np.maximum(gain - job.known_gain, 0.0)
        saving = belief.busy * (job.left_s * gain + job.return_s * later) - job.recall_s
        worth[:, 1 + i] = saving - view.config.hysteresis * job.cost.total_s
    return np.bincount(np.argmax(worth, axis=1), minlength=1 + len(jobs)) / num
