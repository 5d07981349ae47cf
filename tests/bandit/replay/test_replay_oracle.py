"""The hindsight bound equals exhaustive search where both are exact, and no plan beats it; for policies see test_replay_hindsight.py."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.bandit.replay.curves import off_diagonal
from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import simulate
from tests.helpers.tiny_traffic import ARM, CONFIG, exhaustive, tiny


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_the_best_plan_where_nothing_is_relaxed(seed):
    traffic, outcomes = tiny(seed, 1, 0.0)
    outcomes.staging_s = 0.0  # versions change free in the bound
    bound = hindsight(traffic, outcomes, CONFIG, slowdown=0.0, arms=(ARM,), num_levels=4001)
    # ends of jobs that outlast the replay are paid in full by both; levels round up by 1/4000 of the gap
    assert bound.net_s == pytest.approx(exhaustive(traffic, outcomes, 0.0), rel=2e-3, abs=0.05)


@given(
    seed=st.integers(0, 10_000), forgetting=st.floats(0, 0.6), slowdown=st.floats(0, 0.2), transfer=st.floats(0, 1),
    harmful=st.sampled_from([0.0, 0.5, 1.0]), train_cost=st.sampled_from([3.0, 1e-6]),
)  # fmt: skip
@example(seed=0, forgetting=0.0, slowdown=0.0, transfer=1.0, harmful=1.0, train_cost=1e-6)
@settings(max_examples=12)
def test_no_plan_of_a_tiny_service_beats_the_bound(seed, forgetting, slowdown, transfer, harmful, train_cost):
    traffic, outcomes = tiny(seed, 2, forgetting, train_cost)
    outcomes.transfer, outcomes.harmful = off_diagonal(2, transfer), harmful
    traffic.tokens[4:] = 0.0  # keeps the search small
    bound = hindsight(traffic, outcomes, CONFIG, slowdown=slowdown, arms=(ARM,))
    assert bound.net_s >= exhaustive(traffic, outcomes, slowdown) - 1e-6


def test_the_plan_adds_up_to_the_bound():
    cell = Scenario(name="x", regime_s=300.0, duration_s=1200.0, train_cost=0.3)
    bound = simulate(cell, "bound", {}, 0)
    assert bound.curve[-1] == pytest.approx(bound.net_s, abs=1e-3) and bound.num_jobs > 0 and bound.net_s > 0
    assert bound.serving_s + sum(bound.spent.values()) == pytest.approx(bound.never_s - bound.net_s)


def test_a_cheaper_trainer_is_booked_as_cheaper_by_the_service_and_by_the_plans():
    cell = Scenario(name="x", regime_s=300.0, duration_s=1200.0, train_cost=1.0)
    dear, cheap = (simulate(cell, "interval", {"interval_s": 300.0, "trainer_price": p}, 3) for p in (1.0, 0.25))
    assert dear.num_jobs == cheap.num_jobs > 2  # a policy that looks at no price does the same
    assert cheap.spent["training"] == pytest.approx(0.25 * dear.spent["training"])
    for kind in ("training", "shadow", "staging"):
        assert cheap.ledger[kind] == pytest.approx(cheap.spent[kind])
    for planner in ("oracle", "bound"):
        before, after = (simulate(cell, planner, {"trainer_price": p}, 3).net_s for p in (1.0, 0.25))
        assert after > before
    rule = simulate(cell, "payoff", {"trainer_price": 0.25}, 3)
    assert rule.net_s <= simulate(cell, "bound", {"trainer_price": 0.25}, 3).net_s + 1e-6 and not rule.contradictions


def test_nothing_to_gain_means_nothing_to_plan():
    cell = Scenario(name="x", regime_s=300.0, duration_s=900.0, headroom=0.0)
    assert simulate(cell, "bound", {}, 0).net_s == pytest.approx(0.0, abs=0.5)
