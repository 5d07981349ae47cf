"""The number of nodes maximises tokens per second, and costs follow the machine."""

import itertools

import numpy as np
import pytest

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostCurve, CostModel
from paceline.serving.budget.stats import RoundObservation

KEY = ("v1", "math", False)


def staircase(rows):
    return 5e-3 + 1e-3 * ((rows + 3) // 4)


def seen(ctrl, keys, drafted, nodes, accepted, *, draft_s=2e-3, aux_s=2e-4, verify=staircase, context_rows=100, **more):
    draft_s = draft_s if any(drafted) else 0.0
    verify_s = verify(len(keys) + sum(nodes))
    ctrl.observe(
        RoundObservation(
            keys=keys,
            is_drafted=drafted,
            num_nodes=nodes,
            num_accepted_tokens=accepted,
            context_rows=context_rows,
            draft_s=draft_s,
            verify_s=verify_s,
            round_s=draft_s + verify_s + aux_s,
            **more,
        )
    )
    return draft_s + verify_s + aux_s


@pytest.mark.parametrize("seed", range(6))
def test_joint_choice_equals_exhaustive_search_on_a_staircase(seed):
    rng = np.random.default_rng(seed)
    config = TreeConfig(max_draft_tokens=5)
    for num_requests in (1, 2, 3):
        ctrl = BudgetController(config, CostModel(staircase))
        masses = -np.sort(-(rng.random((num_requests, 7)) ** 2), axis=1)
        masses[rng.integers(num_requests), rng.integers(1, 6) :] = 0
        nodes = ctrl.choose(masses, [None] * num_requests, 50)
        fixed = ctrl.costs.draft_s(num_requests)

        def rate(ns, masses=masses, ctrl=ctrl, fixed=fixed):
            expected = len(ns) + sum(masses[b, :n].sum() for b, n in enumerate(ns))
            return expected / (fixed + ctrl.costs.verify.predict(len(ns) + sum(ns), 50))

        available = [(m[:5] > 0).sum() for m in masses]
        best = max(rate(ns) for ns in itertools.product(*(range(a + 1) for a in available)))
        assert rate(nodes) == pytest.approx(best, rel=1e-12)


def test_no_mass_means_no_nodes_and_undrafted_requests_get_none():
    ctrl = BudgetController(TreeConfig(policy="bastion"), CostModel(staircase))
    masses = np.zeros((3, 16))
    masses[1, :4] = 0.9
    assert ctrl.choose(masses, [None, KEY, None], 10).tolist() == [0, 4, 0]
    assert ctrl.choose(np.zeros((2, 16)), [KEY, KEY], 10).tolist() == [0, 0]


def test_uneven_trees_pay_for_the_padding_of_the_others():
    masses = np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.5, 0.01, 0.005], [0.9, 0.45, 0.01, 0.005]])
    nodes = {}
    for pair_s in (0.0, 1e-4):
        ctrl = BudgetController(TreeConfig(policy="bastion"), CostModel(lambda q: 4e-3 + 2e-4 * q))
        ctrl.costs.pair_s = pair_s
        nodes[pair_s] = ctrl.choose(masses, [KEY] * 3, 150).tolist()
    assert nodes[0.0] == [4, 2, 2] and len(set(nodes[1e-4])) == 1


def test_fixed_budget_ignores_costs():
    ctrl = BudgetController(TreeConfig(policy="fixed", max_draft_tokens=6), CostModel(lambda q: 1.0 * q))
    masses = np.full((2, 9), 1e-3)
    masses[1, 4:] = 0
    assert ctrl.choose(masses, [KEY, KEY], 10).tolist() == [6, 4]
    assert ctrl.wants_draft([KEY, None], 10) == [True, False]


def test_cost_model_tracks_machine_speed_without_distorting_the_shape():
    cost = CostModel()
    cost.calibrate(lambda rows, _requests: staircase(rows), max_rows=513)
    ratio = cost.predict(17, 64) / cost.predict(1, 64)
    for _ in range(200):
        cost.observe(9, 64, 2 * staircase(9))
    assert cost.predict(9, 64) == pytest.approx(2 * staircase(9), rel=0.02)
    assert cost.predict(17, 64) / cost.predict(1, 64) == pytest.approx(ratio, rel=0.02)
    cost.observe(9, 64, 100.0)
    assert cost.predict(9, 64) < 2.4 * staircase(9)
    assert (np.diff(cost.predict(np.arange(1, 700), 64)) >= 0).all()


def test_reentry_stops_when_it_gains_nothing():
    ctrl = BudgetController(TreeConfig(policy="bastion"), CostModel(staircase))
    num_expanded = 0
    for _ in range(600):
        ctrl.wants_draft([KEY], 100)
        is_expanded = bool(ctrl.choose_leaves([KEY], [0.5], 100, 1))
        num_expanded += is_expanded
        more = {"expand_s": 2e-3, "frontier_mass": [0.5], "num_accepted_tokens_reentered": [0], "num_leaves": 1}
        more = more if is_expanded else {}
        seen(ctrl, [KEY], [True], [8], [3], draft_s=4e-3 if is_expanded else 2e-3, **more)
    assert 2 < num_expanded < 60


def test_only_leaves_that_earn_their_time_are_reentered():
    ctrl = BudgetController(TreeConfig(policy="bastion"), CostModel(staircase))
    ctrl.costs.expand.calibrate(lambda n: 1e-3 + 1e-3 * n, max_size=64)
    for _ in range(40):  # about 100 tokens a second: a leaf's millisecond is worth a tenth of a token
        seen(ctrl, [KEY], [False], [0], [0], verify=lambda _rows: 10e-3)
    masses = [0.9, 0.02, 0.5, 0.05, 0.8]
    assert ctrl.choose_leaves([KEY] * 5, masses, 100, 1) == [0, 4, 2]
    assert ctrl.choose_leaves([KEY] * 2, [0.01, 0.02], 100, 1) == [1, 0]  # a trial
    assert ctrl.choose_leaves([KEY] * 2, [0.01, 0.02], 100, 1) == []


def test_rows_of_many_requests_cost_what_was_measured_for_many():
    def measure(rows, requests):
        return 1e-3 * (4 + rows / 16 + requests / 4)

    cost = CostModel()
    cost.calibrate(measure, max_rows=513, max_requests=64)
    for rows, requests in ((1, 1), (16, 16), (64, 64), (17, 1), (200, 16)):
        assert cost.seconds(rows, 0, requests) == pytest.approx(measure(rows, requests), rel=0.06)
    for _ in range(300):
        cost.observe(96, 500, 2 * measure(96, 16), 16)
    assert cost.seconds(96, 500, 16) == pytest.approx(2 * measure(96, 16), rel=0.05)


def test_costs_of_many_sizes_are_those_of_each_size():
    cost, curve = CostModel(staircase), CostCurve()
    assert curve.up_to(3) == [0.0] * 3
    rows = np.arange(1, 1200)  # the grid ends at 513
    assert cost.predict(rows, 64, 4) == pytest.approx([cost.seconds(int(q), 64, 4) for q in rows], rel=1e-12)
    curve.calibrate(lambda n: 1e-3 + 1e-4 * n**0.7, max_size=40)
    for size in (0, 1, 2, 5, 64, 255, 256, 300):
        assert curve.up_to(size) == [curve.seconds(n) for n in range(1, size + 1)]


def test_a_first_run_that_compiles_takes_no_point_from_the_calibration():
    calls, seen = [], set()

    def measure(rows, requests):
        calls.append(rows)
        is_new, _ = rows not in seen, seen.add(rows)
        return 2.0 if is_new else 1e-3

    CostModel().calibrate(measure, max_rows=513, max_requests=64, limit_s=3.0)
    assert max(calls) == 513


def test_calibration_stops_when_its_time_is_over():
    calls = []
    cost = CostModel()
    cost.calibrate(lambda rows, requests: calls.append(rows) or 0.1 * rows, max_rows=513, max_requests=64, limit_s=3.0)
    assert max(calls) < 65 and cost.seconds(513) > cost.seconds(17)


def test_work_that_was_measured_as_none_is_known_from_its_first_observation():
    """Graphs tell the time of a second block as a difference, which noise may take whole."""
    curve = CostCurve()
    curve.calibrate(lambda n: 0.0, max_size=8)
    assert curve.seconds(4) == 0.0
    curve.observe(4, 2e-3)
    assert curve.seconds(4) == pytest.approx(2e-3)
    for _ in range(20):
        curve.observe(4, 4e-3)
    assert curve.seconds(4) == pytest.approx(4e-3, rel=0.1)
