"""Views, prices and beliefs for policy tests: a bucket 'c' at acceptance length 1.4 that costs one device."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms, sized
from paceline.bandit.beliefs.belief import BucketBelief
from paceline.bandit.beliefs.job_cost import JobCost
from paceline.bandit.policies.pricing import PricedJob, PricedRecall
from paceline.bandit.policies.table import Choice, View, make_policy
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec

CALIBRATION, HEAD, FULL = default_arms()


def make_belief(fresh: int = 2000, required: int = 768, **changes: Any) -> BucketBelief:
    belief = BucketBelief(
        bucket="c",
        load=300.0,
        time_per_token_s=1 / 300,
        round_s=0.005,
        plain_token_s=None,
        length=1.4,
        length_se=0.02,
        usable_rows=fresh,
        fresh_rows=fresh,
        learned_rows=0,
        required_rows=required,
        is_active=True,
    )
    return msgspec.structs.replace(belief, **changes)


def make_job(arm: ArmSpec = HEAD, saving: float = 20.0, cost: float = 5.0, **changes: Any) -> PricedJob:
    job = PricedJob(
        bucket="c",
        arm=sized(arm, 2000),
        headroom=0.8,
        share=0.5,
        gain=0.2,
        length_after=1.8,
        saving_s=saving,
        cost=JobCost(training_s=cost, shadow_s=0.0, interference_s=0.0, staging_s=0.0),
        left_s=100.0,
    )
    return msgspec.structs.replace(job, **changes)


def make_recall(gain: float = 0.2, se: float = 0.03, saving: float = 20.0, **changes: Any) -> PricedRecall:
    recall = PricedRecall(
        version="v0", gain=gain, gain_se=se, saving_s=saving, cost_s=0.1, length_now=2.0, length_after=2.5, bucket="c"
    )
    return msgspec.structs.replace(recall, **changes)


def make_view(**changes: Any) -> View:
    view = View(
        config=PolicyConfig(),
        arms=default_arms(),
        beliefs={"c": make_belief()},
        jobs=(make_job(),),
        recalls=(),
        balance_s=20.0,
        horizon_s=120.0,
        since_job_s=1000.0,
        is_job_running=False,
        versions={"c": "v1"},
    )
    return msgspec.structs.replace(view, **changes)


def choose(name: str, *, seed: int = 0, **changes: Any) -> Choice:
    """What policy `name` does on make_view(**changes)."""
    return make_policy(name).choose(make_view(**changes), np.random.default_rng(seed))
