"""Both twins of the joint budget find the best split: against exhaustive search and against serving's formula."""

import itertools

import numpy as np
import pytest
import torch

from paceline.config import TreeConfig
from paceline.kernels.reference.tree_budget import choose_budget as choose_reference
from paceline.kernels.reference.tree_budget import seconds_of_rows
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from tests.helpers.launches import count_launches

pytest.importorskip("triton")
from paceline.kernels.gpu import tree_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": choose_reference, "triton": tree_budget.choose_budget}
GRID = [1, 2, 4, 8, 12, 16, 24, 32]


def _masses(batch, width, seed=0, levels=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(batch, width, generator=g) ** 2
    if levels:
        x = (x * levels).round() / levels
    return x.sort(dim=1, descending=True).values


def _choose(twin, masses, table, *, fixed=0.0, floors=None, max_rows=1000, is_stepped=True, grid=GRID):
    batch = masses.shape[0]
    return TWINS[twin](
        masses=masses.to(DEVICE),
        table_rows=torch.tensor(grid, device=DEVICE),
        table_seconds=torch.tensor(table, dtype=torch.float32, device=DEVICE),
        fixed_seconds=torch.tensor([fixed], dtype=torch.float32, device=DEVICE),
        min_nodes=torch.tensor(floors or [0] * batch, dtype=torch.int64, device=DEVICE),
        max_rows=max_rows,
        is_stepped=is_stepped,
    )


def _rate(masses, nodes, table, fixed, is_stepped, grid=GRID):
    batch = masses.shape[0]
    gain = sum(float(masses[b, :n].double().sum()) for b, n in enumerate(nodes))
    rows = torch.tensor([batch + sum(nodes)])
    seconds = seconds_of_rows(rows, torch.tensor(grid), torch.tensor(table, dtype=torch.float32), is_stepped)
    return (batch + gain) / (float(torch.tensor(fixed, dtype=torch.float32)) + float(seconds))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("is_stepped", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_split_is_better_by_exhaustive_search(twin, is_stepped, seed):
    masses = _masses(3, 5, seed, levels=4 * (seed == 2))
    table = (torch.rand(len(GRID), generator=torch.Generator().manual_seed(seed + 9)) * 0.5 + 0.2).tolist()  # no order
    found = _choose(twin, masses, table, fixed=0.1, is_stepped=is_stepped)
    best = max(_rate(masses, n, table, 0.1, is_stepped) for n in itertools.product(range(6), repeat=3))
    assert _rate(masses, found.num_nodes.tolist(), table, 0.1, is_stepped) == pytest.approx(best, rel=1e-9)
    assert found.cu_nodes.tolist() == [0, *np.cumsum(found.num_nodes.cpu().numpy() + 1)]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("slope", [0.002, 0.02, 0.2])
def test_equals_the_batch_formula_of_serving(twin, slope):
    cost = CostModel(lambda rows: 0.01 * (1 + slope * rows))
    controller = BudgetController(TreeConfig(max_draft_tokens=12, policy="bastion"), cost)
    masses = _masses(5, 12, seed=3)
    masses[1] = 0.0
    masses[2, 4:] = 0.0
    expected = controller.choose(masses.double().numpy(), [None] * 5, 0, num_drafting=4)
    grid = [1, 2, 3, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513]
    table = [float(s) for s in cost.predict(np.array(grid))]
    fixed = controller.costs.draft_s(4) + controller.costs.aux_s(4)
    found = _choose(twin, masses, table, fixed=fixed, is_stepped=False, grid=grid)
    assert found.num_nodes.tolist() == expected.tolist()


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("table", "fixed", "max_rows", "expected"),
    [
        ([1.0] * 8, 0.0, 1000, [3, 1, 0]),  # rows are free: every present mass
        ([1.0, 1.0, 1.0, 50.0, 50.0, 50.0, 50.0, 50.0], 0.0, 1000, [1, 0, 0]),  # a cliff after 4 rows; first of equals
        ([1.0] * 8, 0.0, 5, [1, 1, 0]),  # two rows beside the roots: equal masses, lower request first
        ([1.0] * 8, 0.0, 3, [0, 0, 0]),
    ],
)
def test_ties_absent_masses_and_the_row_limit(twin, table, fixed, max_rows, expected):
    masses = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.0, -0.0], [0.0, float("nan"), -1.0]])
    assert _choose(twin, masses, table, fixed=fixed, max_rows=max_rows).num_nodes.tolist() == expected


@pytest.mark.parametrize("twin", TWINS)
def test_equal_rates_take_the_smaller_total(twin):
    masses = torch.tensor([[1.0, 1.0, 1.0]])  # 1/1, 2/2, 3/3, 4/4 tokens a second
    assert _choose(twin, masses, [1.0, 2.0, 3.0, 4.0], grid=[1, 2, 3, 4]).num_nodes.tolist() == [0]


@pytest.mark.parametrize("twin", TWINS)
def test_floors_are_met_as_far_as_candidates_and_rows_go(twin):
    masses = torch.tensor([[0.1, 0.1, 0.0], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]])
    dear = [1.0, 9.0, 99.0, 999.0, 9e3, 9e3, 9e3, 9e3]
    assert _choose(twin, masses, dear, floors=[3, 2, -5]).num_nodes.tolist() == [2, 2, 0]
    assert _choose(twin, masses, dear, floors=[3, 2, 1], max_rows=6).num_nodes.tolist() == [2, 1, 0]


@pytest.mark.parametrize("twin", TWINS)
def test_batches_beyond_the_stepped_table_and_empty_ones_do_not_draft(twin):
    assert _choose(twin, _masses(3, 4), [1.0, 2.0], grid=[1, 2]).num_nodes.tolist() == [0, 0, 0]
    assert _choose(twin, _masses(2, 0), [1.0] * 8).cu_nodes.tolist() == [0, 1, 2]
    nothing = _choose(twin, _masses(0, 4), [1.0] * 8)
    assert nothing.num_nodes.tolist() == [] and nothing.cu_nodes.tolist() == [0]


def test_twins_agree_on_many_masses_of_extreme_size():
    masses = _masses(5, 13, seed=7) * torch.tensor([1.0, 1e-20, 1e-36, 1.0, 1e-30])[:, None]
    table = [0.01 + 0.0001 * r for r in GRID]
    for is_stepped in (True, False):
        pair = [_choose(t, masses, table, fixed=0.02, is_stepped=is_stepped) for t in TWINS]
        assert pair[0].num_nodes.tolist() == pair[1].num_nodes.tolist()
        assert pair[0].cu_nodes.tolist() == pair[1].cu_nodes.tolist()


def test_the_triton_kernel_runs_and_fills_poisoned_buffers(monkeypatch):
    launches = count_launches(monkeypatch, tree_budget, "_budget_kernel")
    empty = tree_budget.NodeBudget.empty

    def poisoned(*args):
        out = empty(*args)
        out.num_nodes.fill_(-77), out.cu_nodes.fill_(-77)
        return out

    monkeypatch.setattr(tree_budget.NodeBudget, "empty", poisoned)
    found = _choose("triton", torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.0, 0.0]]), [1.0] * 8)
    assert launches() == 1
    assert found.num_nodes.tolist() == [3, 1] and found.cu_nodes.tolist() == [0, 4, 6]


@pytest.mark.parametrize("twin", TWINS)
def test_a_row_limit_below_the_roots_is_refused(twin):
    with pytest.raises(ValueError, match="max_rows must be at least"):
        _choose(twin, _masses(3, 2), [1.0] * 8, max_rows=2)


def test_the_launcher_refuses_what_the_kernel_cannot_take():
    with pytest.raises(ValueError, match=r"masses must be torch.float32"):
        _choose("triton", _masses(2, 3).double(), [1.0] * 8)
    with pytest.raises(ValueError, match="masses must have at most 16384"):
        _choose("triton", torch.zeros(200, 100), [1.0] * 8)
    with pytest.raises(ValueError, match="table_seconds must have shape"):
        _choose("triton", _masses(2, 3), [1.0] * 3)
