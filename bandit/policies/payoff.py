"""Pay-off policy, the default: acts when a job or another version pays for itself within what the bank covers."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.bandit.policies.pricing import PricedJob, PricedRecall
from paceline.bandit.policies.view import (
    Choice,
    View,
    fullest,
    hold,
    job_key,
    not_now,
    recall,
    too_few_rows,
    train,
)  # fmt: skip

EXPLORE = 0.05
"""Probability of another job among near ties, so that logged decisions have propensities to evaluate with."""
NEAR_TIE = 0.05
"""Jobs whose net value is within this share of the best are near ties."""
RECALL_GAIN = 0.03
"""Relative fall of the bucket's time below which a recall is not worth the noise."""
FLOOR_GAIN = 0.01
"""The same for the first version: it is the floor, and what serves worse than it must not stay."""
RECALL_Z, FLOOR_Z = 2.0, 1.0
"""Standard errors by which a recall must win, and one of the first version: several versions are compared by a few scores."""


class PayoffPolicy:
    """Acts when the expected saving over the regime's remaining life exceeds the cost by the hysteresis factor.

    V = remaining life x load x (time per token now - after) - training - shadow - interference - staging, by bucket;
    exploration is the small job, shadow scoring and what the income pays for on hope, not noise on V. A recall costs almost
    nothing and goes first.
    One job at a time: among funded jobs that pay, the one whose net value is highest after what the best paying job of
    another bucket loses by waiting for it.
    """

    def choose(self, view: View, rng: np.random.Generator) -> Choice:
        held = not_now(view)
        brought = self._recall(view)
        if brought is not None and not view.is_job_running:
            return brought
        if held is not None:
            return held
        jobs = [j for j in view.jobs if view.beliefs[j.bucket].fresh_rows >= view.beliefs[j.bucket].required_rows]
        if not jobs:
            belief = fullest(view)
            return too_few_rows(view, belief, belief.required_rows)
        factor = view.config.hysteresis
        paying = [j for j in jobs if j.saving_s > factor * j.cost.total_s]
        if not paying:
            return self._unpaid(view, jobs)
        funded = [j for j in paying if view.cost_margin * j.cost.total_s <= _funds(view, j)]
        if not funded:
            return self._unfunded(view, paying)
        job, chances = pick(funded, rng)
        probabilities: dict[str, float] = {}
        for other, chance in chances:
            probabilities[job_key(other)] = probabilities.get(job_key(other), 0.0) + chance
        return self._train(view, job, probabilities)

    def _unpaid(self, view: View, jobs: list[PricedJob]) -> Choice:
        best = max(jobs, key=lambda j: j.saving_s / max(j.cost.total_s, 1e-9))
        return hold(
            view,
            "payoff",
            "{arm} on {bucket} would save {saving:.1f} s for {cost:.1f} s, less than {factor:.2f} times its cost.",
            at=best.bucket,
            factor=view.config.hysteresis,
            **{**_about(best), "saving": max(best.saving_s, 0.0)},
        )

    def _unfunded(self, view: View, paying: list[PricedJob]) -> Choice:
        best = max(paying, key=lambda j: j.net_s)
        return hold(
            view,
            "bank",
            "{arm} on {bucket} would save {saving:.1f} s for {cost:.1f} s, which may become {margin:.2f} times as much, but "
            "the bank holds {balance:.1f} s" + (" for hopes." if best.is_hope else "."),
            at=best.bucket,
            margin=view.cost_margin,
            balance=_funds(view, best),
            **_about(best),
        )

    def _train(self, view: View, job: PricedJob, probabilities: dict[str, float]) -> Choice:
        belief = view.beliefs[job.bucket]
        with_others = " and {num_others} like it" if job.others else ""
        return train(
            job,
            "{arm} on {rows} rows of {bucket}"
            + with_others
            + " should lift acceptance length {before:.2f} to {after:.2f} and save "
            "{saving:.1f} s at {load:.0f} tokens/s over {horizon:.0f} s for {cost:.1f} s (bank {balance:.1f} s).",
            probabilities=probabilities,
            rows=job.arm.num_rows,
            before=belief.length,
            after=job.length_after,
            load=belief.load,
            horizon=view.horizon_s,
            balance=view.balance_s,
            **_about(job),
            **({"num_others": len(job.others)} if job.others else {}),
        )

    def _recall(self, view: View) -> Choice | None:
        worth = [r for r in view.recalls if self._is_worth(view, r)]
        if not worth:
            return None
        best = max(worth, key=lambda r: (r.saving_s - r.cost_s, r.bucket, r.version))
        return recall(
            best,
            "Version {version} serves {bucket} {gain:.0%} cheaper than {now} (acceptance length {after:.2f} against "
            "{before:.2f}), saving {saving:.1f} s for {cost:.1f} s without training.",
            version=best.version,
            bucket=best.bucket,
            gain=best.gain,
            now=view.versions.get(best.bucket) or "the one it has",
            after=best.length_after,
            before=best.length_now,
            saving=best.saving_s,
            cost=best.cost_s,
        )

    def _is_worth(self, view: View, priced: PricedRecall) -> bool:
        """A sure gain that pays for the swap; going back to the floor needs less of it and no funds: it stops a loss."""
        least, z = (FLOOR_GAIN, FLOOR_Z) if priced.is_floor else (RECALL_GAIN, RECALL_Z)
        is_sure = priced.gain > max(least, z * priced.gain_se)
        is_paid = priced.saving_s > view.config.hysteresis * priced.cost_s
        return is_sure and is_paid and (priced.is_floor or priced.cost_s <= view.balance_s)


def _funds(view: View, job: PricedJob) -> float:
    """What the job may cost; a hope no more than was earned or soon will be."""
    return min(view.balance_s, view.hope_s) if job.is_hope else view.balance_s


def _about(job: PricedJob) -> dict[str, Any]:
    return {"arm": job.arm.name, "bucket": job.bucket, "saving": job.saving_s, "cost": job.cost.total_s}


def waiting_s(job: PricedJob, jobs: list[PricedJob]) -> float:
    """Device-seconds that the best of the other buckets' jobs loses while this one holds the trainer."""
    rates = [j.rate for j in jobs if j.bucket != job.bucket]
    return max([0.0, *rates]) * job.cost.wait_s


def pick(jobs: list[PricedJob], rng: np.random.Generator) -> tuple[PricedJob, list[tuple[PricedJob, float]]]:
    """The best job, or with probability EXPLORE one of its near ties; with all that might have been picked and how likely."""
    worth = {id(j): j.net_s - waiting_s(j, jobs) for j in jobs}
    best = max(jobs, key=lambda j: worth[id(j)])
    ties = [j for j in jobs if j is not best and worth[id(j)] >= worth[id(best)] - NEAR_TIE * abs(worth[id(best)])]
    if not ties:
        return best, [(best, 1.0)]
    chances = [(best, 1.0 - EXPLORE), *((j, EXPLORE / len(ties)) for j in ties)]
    if rng.random() < EXPLORE:
        return ties[int(rng.integers(len(ties)))], chances
    return best, chances
