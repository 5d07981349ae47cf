import msgspec
import numpy as np
import pytest

from paceline.bandit.arms import default_arms, sized
from paceline.bandit.belief import BucketBelief
from paceline.bandit.cost_model import JobCost
from paceline.bandit.policies import POLICIES, View, make_policy
from paceline.bandit.pricing import PricedJob, PricedRecall
from paceline.config import PolicyConfig
from paceline.errors import ConfigError

CALIBRATION, HEAD, FULL = default_arms()


def _belief(fresh: int = 2000, required: int = 768) -> BucketBelief:
    return BucketBelief(
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


def _job(arm=HEAD, saving: float = 20.0, cost: float = 5.0) -> PricedJob:
    return PricedJob(
        bucket="c",
        arm=sized(arm, 2000),
        headroom=0.8,
        share=0.5,
        gain=0.2,
        length_after=1.8,
        saving_s=saving,
        cost=JobCost(training_s=cost, shadow_s=0.0, interference_s=0.0, staging_s=0.0),
    )


def _recall(gain: float = 0.2, se: float = 0.03, saving: float = 20.0) -> PricedRecall:
    return PricedRecall(
        version="v0", gain=gain, gain_se=se, saving_s=saving, cost_s=0.1, length_now=2.0, length_after=2.5, bucket="c"
    )


def _view(**changes) -> View:
    view = View(
        config=PolicyConfig(),
        arms=default_arms(),
        beliefs={"c": _belief()},
        jobs=(_job(),),
        recalls=(),
        balance_s=20.0,
        horizon_s=120.0,
        since_swap_s=1000.0,
        since_job_s=1000.0,
        is_job_running=False,
    )
    return msgspec.structs.replace(view, **changes)


def _choose(name: str, **changes):
    return make_policy(name).choose(_view(**changes), np.random.default_rng(0))


def test_never_holds_whatever_the_price():
    assert _choose("never", jobs=(_job(saving=1e9),), recalls=(_recall(),)).action == "hold"


def test_always_trains_the_dearest_arm_even_at_a_loss():
    choice = _choose("always", jobs=(_job(saving=-5.0), _job(FULL, saving=-9.0, cost=50.0)), balance_s=0.0)
    assert choice.action == "train" and choice.job.arm.name == "full"


def test_interval_waits_for_its_period():
    assert _choose("interval", since_job_s=60.0).code == "interval"
    assert _choose("interval", since_job_s=121.0).action == "train"


@pytest.mark.parametrize("name", ["always", "interval", "payoff"])
def test_one_job_at_a_time(name):
    assert _choose(name, is_job_running=True, recalls=(_recall(),)).code == "job_running"


@pytest.mark.parametrize("name", ["always", "interval", "payoff"])
def test_too_few_rows_or_no_traffic_hold(name):
    assert _choose(name, beliefs={"c": _belief(fresh=100)}, jobs=()).code == "rows"
    assert _choose(name, beliefs={}, jobs=()).code == "no_traffic"


def test_payoff_trains_only_above_the_hysteresis():
    assert _choose("payoff", jobs=(_job(saving=5.4),)).code == "payoff"
    assert _choose("payoff", jobs=(_job(saving=5.6),)).action == "train"


def test_payoff_takes_the_best_net_value_that_the_bank_covers():
    jobs = (_job(HEAD, 20.0, 5.0), _job(FULL, 60.0, 30.0))
    assert _choose("payoff", jobs=jobs).job.arm.name == "head"
    assert _choose("payoff", jobs=jobs, balance_s=31.0).job.arm.name == "full"
    assert _choose("payoff", jobs=jobs, balance_s=1.0).code == "bank"


def test_payoff_waits_for_more_rows_after_a_refused_job():
    assert _choose("payoff", beliefs={"c": _belief(required=4000)}).code == "rows"


def test_payoff_recalls_before_it_trains_when_the_gain_is_sure_and_the_dwell_over():
    assert _choose("payoff", recalls=(_recall(),)).action == "recall"
    for changes in (
        {"recalls": (_recall(gain=0.02),)},
        {"recalls": (_recall(se=0.3),)},
        {"recalls": (_recall(saving=0.05),)},
        {"recalls": (_recall(),), "since_swap_s": 3.0},
    ):
        assert _choose("payoff", **changes).action != "recall"


def test_a_job_that_would_end_within_the_dwell_waits():
    assert _choose("payoff", since_swap_s=2.0, jobs=(_job(cost=3.0),)).code == "dwell"
    assert _choose("payoff", since_swap_s=2.0, jobs=(_job(cost=9.0),)).action == "train"


def test_near_ties_are_explored_at_the_logged_propensity():
    policy, rng = make_policy("payoff"), np.random.default_rng(0)
    view = _view(jobs=(_job(HEAD, 20.0), _job(FULL, 19.9)))
    picks = [policy.choose(view, rng) for _ in range(2000)]
    share = np.mean([p.job.arm.name == "full" for p in picks])
    assert share == pytest.approx(0.05, abs=0.02)
    assert {(p.job.arm.name, round(p.propensity, 3)) for p in picks} == {("head", 0.95), ("full", 0.05)}


def test_an_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="never, always, interval, payoff"):
        make_policy("sometimes")
    assert set(POLICIES) == {"never", "always", "interval", "payoff"}
