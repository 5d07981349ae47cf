from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.policies.payoff import waiting_s
from paceline.bandit.policies.pricing import _expected_gains, passed_gains
from paceline.bandit.policies.table import POLICIES, ask_policy, make_policy
from paceline.bandit.policies.view import Choice, hold, recall, train
from paceline.config import PolicyConfig
from paceline.errors import ConfigError
from tests.helpers.views import FULL, HEAD, choose, make_belief, make_job, make_recall, make_view


def test_never_holds_whatever_the_price():
    assert choose("never", jobs=(make_job(saving=1e9),), recalls=(make_recall(),)).action == "hold"


def test_always_trains_the_dearest_arm_even_at_a_loss():
    choice = choose("always", jobs=(make_job(saving=-5.0), make_job(FULL, saving=-9.0, cost=50.0)), balance_s=0.0)
    assert choice.action == "train" and choice.job.arm.name == "full"


@pytest.mark.parametrize("name", ["always", "interval"])
def test_a_class_whose_jobs_are_frozen_keeps_no_other_from_training(name):
    beliefs = {
        "c": make_belief(fresh=2000),
        "frozen": msgspec.structs.replace(make_belief(fresh=9000), bucket="frozen"),
    }
    choice = choose(name, beliefs=beliefs, jobs=(make_job(),))
    assert choice.action == "train" and choice.job.bucket == "c"
    assert choose(name, beliefs=beliefs, jobs=()).action == "hold"


def test_interval_waits_for_its_period():
    assert choose("interval", since_job_s=60.0).code == "interval"
    assert choose("interval", since_job_s=121.0).action == "train"


@pytest.mark.parametrize("name", ["always", "interval", "payoff", "dual_ema", "cara", "thompson"])
def test_one_job_at_a_time(name):
    assert choose(name, is_job_running=True, recalls=(make_recall(),)).code == "job_running"


@pytest.mark.parametrize("name", ["always", "interval", "payoff", "cara", "thompson"])
def test_too_few_rows_or_no_traffic_hold(name):
    assert choose(name, beliefs={"c": make_belief(fresh=100)}, jobs=()).code == "rows"
    assert choose(name, beliefs={}, jobs=()).code == "no_traffic"


def test_payoff_trains_only_above_the_hysteresis():
    assert choose("payoff", jobs=(make_job(saving=6.2),)).code == "payoff"
    assert choose("payoff", jobs=(make_job(saving=6.3),)).action == "train"


def test_payoff_takes_the_best_net_value_that_the_bank_covers():
    jobs = (make_job(HEAD, 20.0, 5.0), make_job(FULL, 60.0, 30.0))
    assert choose("payoff", jobs=jobs).job.arm.name == "head"
    assert choose("payoff", jobs=jobs, balance_s=31.0).job.arm.name == "full"
    assert choose("payoff", jobs=jobs, balance_s=1.0).code == "bank"


def test_payoff_waits_for_more_rows_after_a_refused_job():
    assert choose("payoff", beliefs={"c": make_belief(required=4000)}).code == "rows"


def test_payoff_recalls_before_it_trains_when_the_gain_is_sure():
    assert choose("payoff", recalls=(make_recall(),)).action == "recall"
    for changes in (
        {"recalls": (make_recall(gain=0.02),)},
        {"recalls": (make_recall(se=0.3),)},
        {"recalls": (make_recall(saving=0.05),)},
    ):
        assert choose("payoff", **changes).action != "recall"


def test_near_ties_are_explored_at_the_logged_propensity():
    policy, rng = make_policy("payoff"), np.random.default_rng(0)
    view = make_view(jobs=(make_job(HEAD, 20.0), make_job(FULL, 19.9)))
    picks = [policy.choose(view, rng) for _ in range(2000)]
    share = np.mean([p.job.arm.name == "full" for p in picks])
    assert share == pytest.approx(0.05, abs=0.02)
    assert {(p.job.arm.name, round(p.propensity, 3)) for p in picks} == {("head", 0.95), ("full", 0.05)}


@pytest.mark.parametrize("name", list(POLICIES))
@given(seed=st.integers(0, 50), savings=st.lists(st.floats(-5, 60), min_size=1, max_size=4))
def test_probabilities_sum_to_one_and_hold_the_action_taken(name, seed, savings):
    arms = (HEAD, FULL)
    jobs = tuple(make_job(arms[i % 2], saving=s, cost=4.0 + i) for i, s in enumerate(savings))
    choice = choose(name, seed=seed, jobs=jobs, recalls=(make_recall(gain=0.05),))
    assert sum(choice.probabilities.values()) == pytest.approx(1.0) and min(choice.probabilities.values()) > 0
    assert choice.propensity == choice.probabilities[choice.key]
    if name not in ("payoff", "thompson"):
        assert choice.probabilities == {choice.key: 1.0}


def test_an_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="never, always, interval, payoff"):
        make_policy("sometimes")
    assert set(POLICIES) == {"never", "always", "interval", "payoff", "dual_ema", "cara", "thompson", "hedge"}
    for name in POLICIES:
        assert PolicyConfig(policy=name).policy == name


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "train"}, {"action": "recall"}, {"action": "explode"}, {"action": "hold", "job": make_job()},
        {"action": "hold", "probabilities": {"train:full:c:1": 1.0}},
    ],
)  # fmt: skip
def test_a_choice_that_is_none_is_refused_where_it_is_made(fields):
    with pytest.raises(ValueError, match="must"):
        Choice(**{"bucket": "c", "code": "own", "reason": "", **fields})


OWN = "tests.helpers.own_policy:Cheapest"


def _ask(answer, **changes):
    with patch("tests.helpers.own_policy.Cheapest.choose", return_value=answer):
        return ask_policy(OWN, make_view(**changes), np.random.default_rng(0))


_OTHER = msgspec.structs.replace(make_job(), arm=msgspec.structs.replace(make_job().arm, num_rows=-5))


@pytest.mark.parametrize(
    ("answer", "changes", "message"),
    [
        (train(make_job(), "x"), {"is_job_running": True}, "no job while another one runs .*got 'train:head:c:2000'"),
        (train(_OTHER, "x"), {}, "one of view.jobs as it is there, got 'train:head:c:-5'"),
        (recall(make_recall(version="v9"), "x"), {"recalls": (make_recall(),)}, "one of view.recalls .*'recall:c:v9'"),
        (msgspec.structs.replace(train(make_job(), "x"), bucket="d"), {}, "the bucket of what it chose, 'c', got 'd'"),
        *(
            (train(make_job(), "x", probabilities=p), {}, message)
            for p, message in (
                ({"train:head:c:2000": -3.0, "hold": 4.0}, r"probabilities in \[0, 1\] that sum to 1"),
                ({"train:head:c:2000": float("nan")}, r"probabilities in \[0, 1\] that sum to 1"),
                ({"train:head:c:2000": 0.0, "hold": 1.0}, "more than 0 for what it chose"),
                ({"train:head:c:2000": 0.5}, "sum to 1"),
                ({"train:head:c:2000": 0.5, "recall:c:v9": 0.5}, "actions of the view, got 'recall:c:v9'"),
            )
        ),
        (Choice(action="hold", bucket="", code=5, reason="x"), {}, "plain values .*Expected `str`, got `int`"),
    ],
)  # fmt: skip
def test_what_the_view_does_not_allow_is_refused_of_a_policy_that_is_not_ours(answer, changes, message):
    with pytest.raises(ConfigError, match=f"policy '{OWN}' must return .*{message}") as caught:
        _ask(answer, **changes)
    assert "\n" not in str(caught.value)


def test_what_the_view_allows_is_taken_as_it_is():
    view = {"recalls": (make_recall(),)}
    drawn = {"train:head:c:2000": 0.25, "hold": 0.5, "recall:c:v0": 0.25}
    for answer in (
        train(make_job(), "x", probabilities=drawn), recall(make_recall(), "x"),
        msgspec.structs.replace(hold(make_view(), "x", "x"), probabilities=drawn),
    ):  # fmt: skip
        assert _ask(answer, **view) is answer
    assert _ask(recall(make_recall(), "x"), is_job_running=True, **view).action == "recall"


def test_buckets_compete_for_the_trainer_by_what_the_other_one_loses_by_waiting():
    beliefs = {"c": make_belief(), "d": make_belief(bucket="d")}
    slow = make_job(FULL, saving=60.0, cost=40.0, rate=0.1)
    quick = make_job(HEAD, saving=24.0, cost=5.0, bucket="d", rate=0.3)
    assert slow.net_s > quick.net_s
    assert waiting_s(slow, [slow, quick]) == pytest.approx(12.0) and waiting_s(quick, [slow, quick]) == pytest.approx(
        0.5
    )
    view = {"beliefs": beliefs, "balance_s": 100.0}
    assert choose("payoff", jobs=(slow, quick), **view).bucket == "d"
    assert choose("payoff", jobs=(slow,), **view).bucket == "c"
    # a rival that could not be started anyway delays nobody
    assert (
        choose("payoff", jobs=(slow, make_job(HEAD, saving=1.0, cost=5.0, bucket="d", rate=0.3)), **view).bucket == "c"
    )


def test_going_back_to_the_floor_needs_no_funds_and_less_proof():
    jobs = {"jobs": (), "balance_s": -5.0}
    assert choose("payoff", recalls=(make_recall(gain=0.02, se=0.01),), **jobs).action == "hold"
    assert choose("payoff", recalls=(make_recall(gain=0.02, se=0.01, is_floor=True),), **jobs).action == "recall"
    assert choose("payoff", recalls=(make_recall(gain=0.2),), **jobs).action == "hold"
    assert choose("payoff", recalls=(make_recall(gain=0.02, se=0.03, is_floor=True),), **jobs).action == "hold"


@given(
    saving=st.floats(-50, 500),
    cost=st.floats(0.5, 200),
    balance=st.floats(-50, 300),
    hysteresis=st.floats(1.0, 3.0),
)
def test_payoff_trains_only_what_pays_by_the_hysteresis_and_is_funded(saving, cost, balance, hysteresis):
    config = PolicyConfig(hysteresis=hysteresis)
    choice = choose("payoff", jobs=(make_job(saving=saving, cost=cost),), balance_s=balance, config=config)
    assert (choice.action == "train") == (saving > hysteresis * cost and cost <= balance)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ema_fast", 0.0), ("ema_slow", 0.5), ("ema_margin", 1.0), ("cara_factor", -1.0), ("thompson_draws", 1),
        ("hedge_rate", 0.0), ("hedge_share", 1.0), ("horizon_s", 0.0), ("hysteresis", -1.0), ("bank_s", float("nan")),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"policy.{field}"):
        PolicyConfig(**{field: value})


def test_a_first_job_that_may_outgrow_the_bank_is_not_begun():
    jobs = (make_job(HEAD, 20.0, 5.0), make_job(FULL, 60.0, 20.0))
    assert choose("payoff", jobs=jobs, balance_s=25.0).job.arm.name == "full"
    assert choose("payoff", jobs=jobs, balance_s=25.0, cost_margin=1.5).job.arm.name == "head"
    held = choose("payoff", jobs=jobs, balance_s=6.0, cost_margin=1.5)
    assert held.code == "bank" and "1.50 times" in held.reason


@given(
    mean=st.floats(-0.3, 0.6), sd=st.floats(0.001, 0.4), sure=st.floats(0.0, 0.8), known=st.floats(0.0, 0.2),
    plain=st.one_of(st.none(), st.floats(0.7, 1.1)),
)  # fmt: skip
def test_an_expected_gain_is_the_integral_over_what_becomes_sure(mean, sd, sure, known, plain):
    belief = make_belief(plain_token_s=None if plain is None else plain * 0.005 / 1.4)
    rises = mean + sd * np.linspace(-8.0, 8.0, 40_001)
    density = np.exp(-0.5 * ((rises - mean) / sd) ** 2)
    gains = passed_gains(belief, rises, sure)
    wanted = [float(np.sum(g * density) / np.sum(density)) for g in (gains, np.maximum(gains - known, 0.0))]
    assert _expected_gains(belief, [(mean, sd, sure), (mean, sd, np.inf)], known) == pytest.approx(
        np.array([wanted, [0.0, 0.0]]), abs=1e-9 + 0.01 * float(gains.max())
    )
