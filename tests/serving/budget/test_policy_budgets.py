"""Published policies build exactly the trees that their papers define, in every round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import RoundObservation
from tests.helpers.table_drafter import best_tree_mass, draft_tables, lattice, paths_of, random_tables

KEY = ("v", "b", True)


def staircase(rows):
    return 5e-3 + 2e-3 * ((rows + 7) // 8)


def falling(rng, num, length):
    return -np.sort(-(rng.random((num, length)) ** 2), axis=1)


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_ddtree_is_the_tree_of_the_largest_mass_of_all_trees_of_its_size(is_product, batch):
    for seed, size in enumerate((1, 2, 3, 4, 5, 6)):
        tables = random_tables(seed, batch, 3, 2, absent=0.2)
        out, _ = draft_tables(tables, is_product=is_product, policy="ddtree", max_draft_tokens=size)
        for b in range(batch):
            masses = lattice(tables, b, is_product=is_product)
            got = paths_of(out, b)
            assert len(got) == min(size, len(masses)) == out.num_draft_tokens[b]
            assert sum(got.values()) == pytest.approx(best_tree_mass(masses, size), rel=1e-4)
            assert list(got.values()) == pytest.approx([masses[p] for p in got], rel=1e-4)


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_bastions_tree_has_the_highest_rate_of_all_trees(is_product, batch):
    for seed in range(4):
        tables = random_tables(seed, batch, 2, 3)
        out, policy = draft_tables(tables, is_product=is_product, policy="bastion", max_draft_tokens=6)
        fixed_s = policy.budget.costs.draft_s(batch)
        per_request = []
        for b in range(batch):
            masses = lattice(tables, b, is_product=is_product)
            per_request.append([best_tree_mass(masses, n) for n in range(min(6, len(masses)) + 1)])

        def rate(sizes, mass=per_request, fixed_s=fixed_s, policy=policy):
            tokens = sum(1 + own[n] for own, n in zip(mass, sizes, strict=True))
            rows = len(sizes) + sum(sizes)
            return tokens / (fixed_s + policy.budget.costs.verify.seconds(rows, 2 * len(sizes), len(sizes)))

        best = max(rate(sizes) for sizes in itertools.product(*(range(len(m)) for m in per_request)))
        assert rate(out.num_draft_tokens) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_bastion_equals_its_greedy_stop_where_times_are_convex_and_beats_it_on_a_staircase(seed):
    masses = falling(np.random.default_rng(seed), 1, 24)[0]
    rates = {}
    for name, times in (("convex", lambda n: 5e-3 + 2e-4 * n), ("stairs", staircase)):
        budget = BudgetController(TreeConfig(policy="bastion", max_draft_tokens=24), CostModel(times))
        cost, fixed_s = budget.costs.verify, budget.costs.draft_s(1)

        def rate(n, cost=cost, fixed_s=fixed_s):
            return (1 + masses[:n].sum()) / (fixed_s + cost.seconds(1 + n))

        greedy = 0
        while greedy < 24:
            now, after = cost.seconds(1 + greedy), cost.seconds(2 + greedy)
            if masses[greedy] * (fixed_s + now) <= (1 + masses[:greedy].sum()) * (after - now):
                break
            greedy += 1
        chosen = budget.choose(masses[None], [KEY], 0)[0]
        assert rate(chosen) == max(rate(n) for n in range(25))
        rates[name] = rate(chosen) / rate(greedy)
    assert rates["convex"] == pytest.approx(1.0, abs=1e-9)
    assert rates["stairs"] >= 1.0


def test_a_greedy_stop_would_miss_a_plateau_behind_a_dear_step():
    budget = BudgetController(TreeConfig(policy="bastion", max_draft_tokens=16), CostModel(staircase))
    masses = [0.7] * 16
    first_step = masses[0] * (budget.costs.draft_s(1) + staircase(1)) <= staircase(2) - staircase(1)
    assert not first_step and budget.choose(np.array([masses]), [KEY], 0)[0] == 16


@pytest.mark.parametrize("batch", [1, 4])
def test_bastion_takes_no_node_where_none_pays_and_all_where_each_does(batch):
    for mass, wanted in ((1e-4, 0), (0.95, 8 * batch)):
        budget = BudgetController(
            TreeConfig(policy="bastion", max_draft_tokens=8), CostModel(lambda q: 5e-3 + 1e-3 * q)
        )
        nodes = budget.choose(np.full((batch, 8), mass), [KEY] * batch, 10)
        assert nodes.sum() == wanted


@pytest.mark.parametrize("policy", ["bastion", "ddtree", "bundle"])
def test_published_policies_draft_in_every_round_however_badly_it_goes(policy):
    budget = BudgetController(TreeConfig(policy=policy, max_draft_tokens=8), CostModel(staircase))
    for keys in ([KEY], [KEY, None, KEY]):
        drafts = [k is not None for k in keys]
        for _ in range(60):
            assert budget.wants_draft(keys, 100, [0] * len(keys), [50] * len(keys)) == drafts
            budget.observe(
                RoundObservation(
                    keys=keys, is_drafted=drafts, num_nodes=[8 * d for d in drafts],
                    num_accepted_tokens=[0] * len(keys), context_rows=100, draft_s=2e-2, verify_s=1e-2, round_s=4e-2,
                )
            )  # fmt: skip
    assert budget.states() == [], "there is no switch"


def test_fixed_policies_reenter_every_leaf_and_spend_the_whole_budget():
    budget = BudgetController(TreeConfig(policy="ddtree", max_draft_tokens=5), CostModel(staircase))
    assert budget.choose_leaves([KEY] * 3, [0.1, 1e-9, 0.5], 10, 1) == [2, 0, 1]
    masses = np.array([[0.9, 0.8, 1e-9, 0.0, 0.0, 0.0], [0.5] * 6])
    assert budget.choose(masses, [KEY] * 2, 10).tolist() == [3, 5]
    assert budget.choose(np.full((1, 9), 0.5), [KEY], 10)[0] == 5
