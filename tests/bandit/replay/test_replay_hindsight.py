"""The plan with hindsight is a real one: it lies below the bound, above every policy, and near an exhaustive search."""

import numpy as np
import pytest

from paceline.bandit.policies.table import POLICIES
from paceline.bandit.replay.hindsight import Executor, PlannedJob, best_plan, neighbours
from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.outcomes import FIRST, TrainOrder
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import HINDSIGHT_SETTINGS, draw_world, simulate
from paceline.bandit.replay.table import table_of
from tests.helpers.tiny_traffic import ARM, CONFIG, exhaustive, tiny

CELLS = [
    {},
    {"recurrence": "fresh", "forgetting": 0.4},
    {"bad_jobs": 0.3},
    {"batch_size": 32},
    {"load": 8.0},
    {"load": 0.1},
]


def _cell(changes: dict) -> Scenario:
    return Scenario(name="x", **{"regime_s": 200.0, "duration_s": 800.0, "train_cost": 0.3, **changes})


@pytest.mark.parametrize("forgetting", [0.0, 0.4])
def test_the_plan_comes_near_an_exhaustive_search_of_tiny_services(forgetting):
    found = best = 0.0
    for seed in range(8):
        traffic, outcomes = tiny(seed, 2, forgetting)
        traffic.tokens[4:] = 0.0  # keeps the search small
        one = best_plan(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,)).net_s
        limit = exhaustive(traffic, outcomes, 0.05)
        assert one <= limit + 0.05  # the search takes 64 rows a job, the plan may take fewer
        found, best = found + one, best + limit
    assert found >= 0.9 * best


@pytest.mark.parametrize("changes", CELLS)
def test_it_lies_between_every_policy_and_the_bound(changes):
    cell = _cell({"duration_s": 600.0, **changes})
    for seed in range(2):
        plan = simulate(cell, "oracle", {}, seed).net_s
        nets = [simulate(cell, policy, {}, seed).net_s for policy in POLICIES]
        assert max(nets) <= plan + 1e-6 and plan <= simulate(cell, "bound", {}, seed).net_s + 1e-6
        assert min(nets) < 0.0 or max(nets) > 0.0, "some policy has trained"


@pytest.mark.parametrize("forgetting", [0.0, 0.3])
def test_a_version_of_the_plan_is_the_one_that_the_world_would_train(forgetting):
    cell = _cell({"forgetting": forgetting})
    traffic, outcomes = draw_world(cell, 5)
    executor = Executor(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    rows = float(min(64.0, executor.written[30, 1]))
    outcomes.gate_noise = 0.0  # a few requests of three rows are sure
    order = TrainOrder(
        step=30, domain=1, bucket="b1", arm=ARM, base=FIRST, rows=int(rows), rows_per_request=2.0, time_limit_s=1e9, decision_id=1
    )  # fmt: skip
    truth = outcomes.train(order)
    run = executor.run([[PlannedJob(step=30, domain=1, arm=0, rows=rows)]])[0]
    assert (truth.version is not None) == (run.num_accepted == 1)
    assert run.spent["training"] == pytest.approx(truth.train_s)
    assert run.spent["shadow"] >= truth.shadow_s > 0, "the plan scores every row"
    assert truth.version is not None
    saved = (traffic.tokens @ (traffic.token_s(outcomes.first) - traffic.token_s(outcomes.lengths(truth.version))))[40:]
    assert (
        run.flow[40:].sum() >= 0.9 * saved.sum() - outcomes.staging_s - 1e-9
    )  # hold-back keeps a tenth; it may go back for less


def test_refused_jobs_and_bad_moments_bring_no_version():
    traffic, outcomes = draw_world(_cell({"headroom": 0.0}), 0)
    executor = Executor(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    one = executor.run([[PlannedJob(step=30, domain=1, arm=0, rows=64.0)]])[0]
    assert one.num_accepted == 0 and one.net_s < 0 and one.num_swaps == 0
    outcomes.fate[:] = 0.0
    outcomes.failed = outcomes.harmful = 0.25
    assert executor.run([[PlannedJob(step=30, domain=1, arm=0, rows=64.0)]])[0].net_s == pytest.approx(0.0, abs=1e-9)


def test_one_job_at_a_time():
    traffic, outcomes = draw_world(_cell({"train_cost": 4.0}), 1)
    executor = Executor(traffic, outcomes, CONFIG, slowdown=0.0, arms=(ARM,))
    plan = [PlannedJob(step=40, domain=1, arm=0, rows=64.0), PlannedJob(step=40, domain=0, arm=0, rows=64.0)]
    starts = [e["t"] for e in executor.run([plan])[0].events]
    seconds = float(sum(outcomes.job_seconds(ARM, 64.0, 40)))
    assert starts[1] >= starts[0] + np.floor(seconds / traffic.step_s) * traffic.step_s


def test_the_flow_adds_up():
    cell = _cell({"duration_s": 1200.0})
    plan = simulate(cell, "oracle", {}, 0)
    assert plan.curve[-1] == pytest.approx(plan.net_s, abs=1e-3) and plan.num_jobs > 0 and plan.net_s > 0
    assert plan.serving_s + sum(plan.spent.values()) == pytest.approx(plan.never_s - plan.net_s)


def test_the_search_never_ends_below_the_plan_it_began_with():
    cell = _cell({"forgetting": 0.5})
    traffic, outcomes = draw_world(cell, 3)
    bound = hindsight(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    executor = Executor(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    begun = [
        PlannedJob(step=round(e["t"] / traffic.step_s) - 1, domain=e["domain"], arm=0, rows=e["rows"])
        for e in bound.events
    ]
    found = best_plan(traffic, outcomes, CONFIG, slowdown=0.05, arms=(ARM,))
    assert found.net_s >= max(executor.run([begun])[0].net_s, 0.0) - 1e-9
    assert all(len(p) in (len(begun), len(begun) - 1) for p in neighbours(begun, (ARM,)))


def _table(**changes):
    """Two classes of which the larger one learns from the other."""
    own = {"acceptance_length": 1.5, "curves": {"full": [[1500, 3.0]]}}
    return table_of({
        "name": "t", "rounds": {"drafted_s": 0.0065, "plain_s": 0.005}, "classes": {"a": own, "b": own},
        "jobs": {"full": {"fixed_s": 2.0, "row_s": 0.004, "scoring_s": 2.0}},
        "traffic": [{"tokens": {"a": 500, "b": 3000}, "steps": 120}], "transfer": {"a": {"b": 1.0}}, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"failures": {"harmful": 1.0, "harm": 0.0}}, {"failures": {"harmful": 0.5, "failed": 0.25, "harm": 0.5}},
        {"jobs": {"full": {"fixed_s": 0.0, "row_s": 0.0, "scoring_s": 0.0}}, "transfer": {}},
    ],
)  # fmt: skip
def test_what_a_job_carries_to_other_classes_counts_though_it_harms_its_own(changes):
    world = _table(**changes)
    for seed in range(2):
        nets = [simulate(world, policy, {}, seed).net_s for policy in ("payoff", "always", "cara")]
        plan, bound = (simulate(world, planner, {}, seed).net_s for planner in ("oracle", "bound"))
        assert max(nets) <= plan + 1e-6 and 0.0 < plan <= bound + 1e-6


def test_a_plan_gets_the_version_of_a_job_that_takes_no_time_when_the_service_gets_it():
    traffic, outcomes = _table(jobs={"full": {"fixed_s": 0.0, "row_s": 0.0, "scoring_s": 0.0}}).draw(0)
    executor = Executor(traffic, outcomes, CONFIG, slowdown=0.0, arms=outcomes.arms)
    flow = executor.run([[PlannedJob(step=10, domain=1, arm=0, rows=5000.0)]])[0].flow
    assert flow[11] == pytest.approx(0.0) and flow[12] != pytest.approx(0.0)


def test_plans_with_hindsight_read_the_settings_that_they_are_swept_over():
    read = set()

    class Watched:
        def __getattr__(self, name):
            read.add(name)
            return getattr(CONFIG, name)

    traffic, outcomes = draw_world(_cell({}), 0)
    assert best_plan(traffic, outcomes, Watched(), slowdown=0.05).num_jobs > 0  # which begins with the bound's plan
    assert read == set(HINDSIGHT_SETTINGS)


def test_the_search_finds_the_same_plan_however_many_it_carries_out_together(monkeypatch):
    cell = _cell({"duration_s": 600.0, "forgetting": 0.3})
    together = simulate(cell, "oracle", {}, 1)
    monkeypatch.setattr("paceline.bandit.replay.hindsight.CHUNK_BYTES", 1)
    assert simulate(cell, "oracle", {}, 1) == together and together.num_jobs > 1
