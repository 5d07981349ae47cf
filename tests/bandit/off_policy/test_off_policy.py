"""Claims of bandit/off_policy/estimate.py on simulated logs whose truth is known by enumeration."""

import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.off_policy.estimate import LoggedDecision, decision_key, evaluate, read_decisions
from paceline.contracts import Decision
from paceline.errors import SupportError

ACTIONS = ("hold", "train:a:small", "train:a:large")
GRID = (np.arange(4000) + 0.5) / 4000


def reward(x: float, action: str) -> float:
    return {"hold": 0.0, "train:a:small": 4.0 * x - 1.0, "train:a:large": 9.0 * x - 4.0}[action]


def logging_policy(x: float) -> dict[str, float]:
    return {"hold": 0.5 - 0.2 * x, "train:a:small": 0.3, "train:a:large": 0.2 + 0.2 * x}


def evaluated(d: LoggedDecision) -> dict[str, float]:
    x = d.context["x"]
    return {"hold": 0.1, "train:a:small": 0.9 - 0.8 * x, "train:a:large": 0.8 * x}


def right_model(d: LoggedDecision, action: str) -> float:
    return reward(d.context["x"], action)


def wrong_model(d: LoggedDecision, action: str) -> float:
    return 0.0 if action == "hold" else 6.0 - 8.0 * d.context["x"]


def log(rng: np.random.Generator, n: int, noise: float = 1.0, *, with_all: bool = True) -> list[LoggedDecision]:
    out = []
    for i, x in enumerate(rng.random(n)):
        probabilities = logging_policy(x)
        action = ACTIONS[int(rng.choice(3, p=list(probabilities.values())))]
        out.append(
            LoggedDecision(
                decision_id=i,
                action=action,
                propensity=probabilities[action],
                reward_s=reward(x, action) + (noise * rng.standard_normal() if action != "hold" else 0.0),
                context={"x": float(x)},
                probabilities=probabilities if with_all else None,
            )
        )
    return out


@functools.cache
def truth() -> float:
    """Expected net per decision of the evaluated policy."""
    probe = [LoggedDecision(decision_id=0, action="hold", propensity=1.0, reward_s=0.0, context={"x": x}) for x in GRID]
    return float(np.mean([sum(p * reward(d.context["x"], a) for a, p in evaluated(d).items()) for d in probe]))


@pytest.fixture(scope="module")
def simulations():
    """Estimates of 300 logs of 150 decisions, by name."""
    rng = np.random.default_rng(0)
    found: dict[str, list] = {}
    for _ in range(300):
        decisions = log(rng, 150)
        for name, method, model in (
            ("ips", "ips", None), ("dr_right", "doubly_robust", right_model), ("dr_wrong", "doubly_robust", wrong_model),
            ("dr_fitted", "doubly_robust", None), ("direct_right", "direct", right_model), ("direct_wrong", "direct", wrong_model),
        ):  # fmt: skip
            found.setdefault(name, []).append(evaluate(decisions, evaluated, method=method, model=model))
    return found


@pytest.mark.parametrize("name", ["ips", "dr_right", "dr_wrong", "dr_fitted", "direct_right"])
def test_the_interval_covers_the_truth_as_often_as_it_says_and_the_mean_is_unbiased(simulations, name):
    runs, expected = simulations[name], truth()
    covered = np.mean([e.low_s <= e.num_decisions * expected <= e.high_s for e in runs])
    assert 0.915 <= covered <= 0.985  # 95% of 300: binomial standard error 1.3 points
    means = np.array([e.mean_s for e in runs])
    assert abs(means.mean() - expected) < 4 * means.std(ddof=1) / np.sqrt(len(runs))


def test_a_wrong_model_alone_is_wrong_and_the_propensities_repair_it(simulations):
    expected = truth()
    direct = np.mean([e.mean_s for e in simulations["direct_wrong"]])
    repaired = np.mean([e.mean_s for e in simulations["dr_wrong"]])
    assert abs(direct - expected) > 0.5
    assert abs(repaired - expected) < 0.05 * abs(direct - expected)


@pytest.mark.parametrize("name", ["dr_right", "dr_fitted"])
def test_a_usable_model_makes_the_doubly_robust_error_no_larger_than_that_of_ips(simulations, name):
    def rmse(key: str) -> float:
        return float(np.sqrt(np.mean([(e.mean_s - truth()) ** 2 for e in simulations[key]])))

    assert rmse(name) <= rmse("ips")
    assert np.mean([e.standard_error_s for e in simulations[name]]) < np.mean(
        [e.standard_error_s for e in simulations["ips"]]
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), n=st.integers(30, 120))
def test_the_logged_policy_itself_is_valued_at_what_was_logged(seed, n):
    decisions = log(np.random.default_rng(seed), n)
    found = evaluate(decisions, lambda d: d.probabilities or {}, method="ips")
    assert found.total_s == pytest.approx(found.logged_s, abs=1e-9)
    assert found.effective_decisions == pytest.approx(n) and found.mean_weight == pytest.approx(1.0)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_an_exact_model_of_noiseless_rewards_leaves_nothing_to_chance(seed):
    decisions = log(np.random.default_rng(seed), 60, noise=0.0)
    found = evaluate(decisions, evaluated, model=right_model)
    expected = sum(p * right_model(d, a) for d in decisions for a, p in evaluated(d).items())
    assert found.total_s == pytest.approx(expected)
    again = evaluate(decisions[::-1], evaluated, model=right_model)
    assert again.total_s == pytest.approx(found.total_s) and again.standard_error_s == pytest.approx(
        found.standard_error_s
    )


def _plain(action: str, propensity: float, reward_s: float = 1.0) -> LoggedDecision:
    return LoggedDecision(decision_id=1, action=action, propensity=propensity, reward_s=reward_s)


def test_an_action_that_the_log_never_tries_is_refused_and_named():
    decisions = [_plain("hold", 1.0, 0.0)] * 40
    with pytest.raises(SupportError, match=r"chooses train:a:x in 40 of 40 decisions"):
        evaluate(decisions, lambda d: {"train:a:x": 1.0})
    assert evaluate(decisions, lambda d: {"hold": 1.0}).total_s == 0.0
    trained = evaluate(decisions, lambda d: {"train:a:x": 1.0}, method="direct", model=lambda d, a: 2.0)
    assert trained.total_s == 80.0  # the model's word alone


def test_logged_probabilities_decide_what_has_support():
    rng = np.random.default_rng(1)
    decisions = [
        msgspec.structs.replace(d, probabilities={**(d.probabilities or {}), "train:a:large": 0.0})
        for d in log(rng, 80)
        if d.action != "train:a:large"
    ]
    with pytest.raises(SupportError, match="chooses train:a:large"):
        evaluate(decisions, evaluated)


def test_too_few_effective_decisions_are_refused():
    decisions = [_plain("hold", 0.99, 0.0)] * 60 + [_plain("train:a:x", 0.01, 50.0)] * 2
    with pytest.raises(SupportError, match=r"only 2\.0 of 62 decisions effectively bear"):
        evaluate(decisions, lambda d: {"train:a:x": 1.0})
    with pytest.raises(SupportError, match="at least 2"):
        evaluate(decisions[:1], lambda d: {"hold": 1.0})


def test_wrong_propensities_show_in_the_weights():
    decisions = [msgspec.structs.replace(d, propensity=d.propensity / 3) for d in log(np.random.default_rng(2), 300)]
    with pytest.raises(SupportError, match="instead of 1"):
        evaluate(decisions, evaluated)


def test_rare_exploration_that_did_not_happen_is_no_reason_to_refuse():
    decisions = [_plain("train:a:x", 0.95)] * 20
    assert evaluate(decisions, lambda d: {"train:a:x": 1.0}).mean_weight == pytest.approx(1 / 0.95)


@pytest.mark.parametrize("given_probabilities", [{}, {"hold": 0.7}, {"hold": 1.4, "train:a:x": -0.4}])
def test_probabilities_must_sum_to_one(given_probabilities):
    with pytest.raises(ValueError, match="must sum to 1"):
        evaluate([_plain("hold", 0.5)] * 20, lambda d: given_probabilities)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="method must be one of"):
        evaluate([_plain("hold", 0.5)] * 20, lambda d: {"hold": 1.0}, method="guess")
    with pytest.raises(ValueError, match="propensity must be in"):
        evaluate([_plain("hold", 0.0)] * 20, lambda d: {"hold": 1.0})


def _row(**fields) -> bytes:
    row = {
        "decision_id": 3, "ts": 1.0, "bucket": "a", "action": "train", "arm": "head", "version": "v1", "policy": "payoff",
        "context": {"epoch": 4, "arm": {"num_rows": 900}}, "propensity": 0.95, "realised_saving_s": 5.0, "realised_cost_s": 2.0, "outcome": "accepted",
        "expected_gain": 0.1, "expected_saving_s": 6.0, "expected_cost_s": 2.0, "reason": "it pays",
    }  # fmt: skip
    return msgspec.json.encode({**row, **fields})


def test_exported_lines_become_decisions_without_orders_and_unfinished_jobs():
    lines = [
        _row(),
        _row(outcome=None),
        _row(policy="operator"),
        _row(action="pin", context={"left_version": "v0"}),
        _row(action="rollback", context={"left_version": "v0"}, outcome=None),
        _row(action="rollback", outcome=None, realised_saving_s=None, realised_cost_s=0.5),
        _row(action="hold", outcome=None, realised_saving_s=None, realised_cost_s=None),
        b"\n",
    ]
    found = read_decisions(lines)
    assert [(d.action, d.reward_s) for d in found] == [("train:head:a:900", 3.0), ("recall:a:v1", -0.5), ("hold", 0.0)]
    assert found[0].context == {"epoch": 4, "arm": {"num_rows": 900}, "bucket": "a", "policy": "payoff", "ts": 1.0}
    with pytest.raises(ValueError, match="line 2 is not a decision"):
        read_decisions([_row(), b'{"action": "train"}'])
    assert decision_key(msgspec.json.decode(_row(action="recall", version="v7"), type=Decision)) == "recall:a:v7"
