"""The simulated service keeps its accounts, is the same for every policy, and repeats by seed."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.beliefs.observation import fold
from paceline.bandit.controller.state import MAX_ACTIONS
from paceline.bandit.policies.table import POLICIES
from paceline.bandit.replay.scenario import RECURRENCES, Scenario
from paceline.bandit.replay.simulate import draw_world, policy_config, simulate
from paceline.bandit.replay.world import RunResult, World

SHORT = Scenario(name="short", regime_s=300.0, duration_s=900.0, recurrence="fresh", train_cost=0.3)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_same_seed_gives_the_same_run_and_another_seed_another_one(policy):
    one, two = (simulate(SHORT, policy, {}, 1) for _ in range(2))
    assert msgspec.to_builtins(one) == msgspec.to_builtins(two)
    assert simulate(SHORT, policy, {}, 2).never_s != one.never_s


@functools.cache
def generous_run(policy: str) -> RunResult:
    """With money and few rows asked for, so that every policy that trains does."""
    return simulate(SHORT, policy, {"bank_s": 200.0, "min_rows": 256}, 3)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_ledger_books_what_the_world_spent(policy):
    run = generous_run(policy)
    for kind in ("training", "shadow", "staging"):
        assert run.ledger.get(kind, 0.0) == pytest.approx(run.spent[kind], abs=1e-6)
    # interference is measured, not told: rounds carry 5% noise, and the last epoch is not closed
    assert run.ledger.get("interference", 0.0) == pytest.approx(run.spent["interference"], abs=0.25 * run.spent["interference"] + 2.0)  # fmt: skip
    assert run.contradictions == []
    assert run.net_s == pytest.approx(run.never_s - run.serving_s - sum(run.spent.values()))


def test_the_books_of_more_jobs_than_the_controller_remembers_add_up():
    scenario = Scenario(name="many", regime_s=2500.0, duration_s=5000.0)
    run = simulate(scenario, "tests.helpers.own_policy:Always", {}, 1)
    assert run.num_jobs > MAX_ACTIONS and run.contradictions == []


def test_booked_savings_are_near_the_true_ones():
    cell = dataclasses.replace(SHORT, regime_s=900.0, duration_s=2700.0, recurrence="cycle")
    runs = [simulate(cell, "always", {"min_rows": 2000}, seed) for seed in range(3)]
    true, booked = (sum(v) for v in zip(*((r.never_s - r.serving_s, r.ledger["saved_s"]) for r in runs), strict=True))
    assert true > 50.0
    assert booked == pytest.approx(true, rel=0.25)


def test_never_costs_nothing_and_saves_nothing():
    run = simulate(SHORT, "never", {}, 3)
    assert run.net_s == 0.0 and set(run.curve) == {0.0} and run.num_jobs == 0 and run.never_s > 100.0


def test_every_policy_meets_the_same_demand():
    assert len({generous_run(p).never_s for p in POLICIES}) == 1


def test_training_cost_changes_no_traffic():
    dear, cheap = (draw_world(dataclasses.replace(SHORT, train_cost=c), 0) for c in (4.0, 0.3))
    assert np.array_equal(dear[0].tokens, cheap[0].tokens) and np.array_equal(dear[1].first, cheap[1].first)


def test_bad_jobs_lower_the_net_of_training_always_and_forgetting_harms_nobody():
    cell = dataclasses.replace(SHORT, duration_s=1200.0, recurrence="cycle")
    nets = {}
    for name, change in {"plain": {}, "bad": {"bad_jobs": 0.6}, "forgetful": {"forgetting": 0.8}}.items():
        runs = [simulate(dataclasses.replace(cell, **change), "always", {}, seed) for seed in range(3)]
        nets[name] = sum(r.net_share for r in runs)
    assert nets["bad"] < nets["plain"]
    assert nets["forgetful"] == pytest.approx(nets["plain"]), "what a job forgets serves no other bucket"


def test_larger_batches_leave_less_to_save():
    small, large = (draw_world(dataclasses.replace(SHORT, batch_size=b), 0)[0] for b in (4, 32))
    fall = [1 - t.token_s(2.3) / t.token_s(1.4) for t in (small, large)]
    assert fall[0] > 1.3 * fall[1] > 0


def test_a_job_in_flight_at_the_end_is_charged_for_what_it_ran():
    cell = dataclasses.replace(SHORT, train_cost=30.0, duration_s=600.0)
    run = simulate(cell, "always", {"job_time_limit_s": 1e4}, 0)
    assert run.num_jobs >= 1 and run.spent["training"] + run.spent["shadow"] > 100.0
    assert run.ledger["training"] + run.ledger.get("shadow", 0.0) == pytest.approx(
        run.spent["training"] + run.spent["shadow"]
    )


@given(
    recurrence=st.sampled_from(RECURRENCES),
    load=st.floats(0.02, 20.0),
    batch_size=st.sampled_from([1, 4, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15)
def test_reported_feedback_adds_up_to_about_the_demand(recurrence, load, batch_size, seed):
    cell = Scenario(name="x", recurrence=recurrence, load=load, batch_size=batch_size, duration_s=600.0, regime_s=200.0)
    traffic, outcomes = draw_world(cell, seed)
    world = World(traffic, outcomes, policy_config("never", {}, seed), seed=seed)
    windows: dict = {}
    for k in range(traffic.num_steps):
        fold(windows, world._serve(k))
    seen = sum(r[1] for w in windows.values() for g in w.cells.values() for c in g.values() for r in c.requests.values())  # fmt: skip
    demand = float(traffic.tokens.sum())
    # reported are whole requests, drawn at random below one a step: sqrt(number of requests) is the noise
    assert abs(seen - demand) <= 5 * traffic.tokens_per_request * np.sqrt(demand / traffic.tokens_per_request + 25)
    assert world.never_s == pytest.approx(world.serving_s)
