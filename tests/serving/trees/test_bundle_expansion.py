"""Bundle expansion is JetSpec's algorithm, and never has more mass than the heaviest nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.trees.builder import append_block, block_candidates, choose_frontier
from paceline.serving.trees.bundle import BundleExpansion
from paceline.serving.trees.host_tree import HostCandidates, HostProposal
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.table_drafter import bundle_tree, draft_tables, paths_of, random_edges, random_tables
from tests.serving.trees.test_device_draft import TwinDrafter
from tests.serving.trees.test_tree_policy import VOCAB, inputs_for


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_trees_equal_the_published_algorithm(is_product, batch, width):
    for seed, size in enumerate((1, 2, 5, 8, 13, 24, 40)):
        tables = random_tables(seed, batch, 5, 4, absent=0.3)
        out, _ = draft_tables(tables, is_product=is_product, policy="bundle", max_draft_tokens=size, bundle_width=width)
        for b in range(batch):
            want = bundle_tree(tables, b, is_product=is_product, budget=size + 1, width=width)
            got = paths_of(out, b)
            assert got.keys() == want.keys() and len(got) == out.num_draft_tokens[b]
            assert [got[p] for p in want] == pytest.approx(list(want.values()), rel=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_scores_that_depend_on_the_parent_grow_the_published_tree_too(batch, width):
    for seed, size in enumerate((1, 2, 5, 8, 13, 24, 40)):
        tables = (*random_tables(seed, batch, 5, 4), random_edges(seed, batch, 5, 4))
        out, _ = draft_tables(tables, is_product=True, policy="bundle", max_draft_tokens=size, bundle_width=width)
        for b in range(batch):
            want = bundle_tree(tables, b, is_product=True, budget=size + 1, width=width)
            got = paths_of(out, b)
            assert got.keys() == want.keys()
            assert [got[p] for p in want] == pytest.approx(list(want.values()), rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), is_product=st.booleans(), batch=st.sampled_from([1, 2]), size=st.integers(1, 30),
    slots=st.integers(1, 6), width=st.integers(1, 5), bundle=st.integers(1, 6),
)  # fmt: skip
def test_the_heaviest_nodes_have_at_least_the_mass_of_bundles(seed, is_product, batch, size, slots, width, bundle):
    tables = random_tables(seed, batch, slots, width, absent=0.2)
    trees = {}
    for policy in ("ddtree", "bundle"):
        trees[policy], _ = draft_tables(
            tables, is_product=is_product, policy=policy, max_draft_tokens=size, bundle_width=bundle
        )
    for b in range(batch):
        best, grown = (paths_of(trees[p], b) for p in ("ddtree", "bundle"))
        assert len(grown) <= len(best)
        assert sum(best.values()) >= sum(grown.values()) * (1 - 1e-5)


def test_a_bundle_wastes_nodes_where_one_chain_is_sure():
    logprobs = torch.tensor([[[0.9, 0.02, 0.01]] * 6]).log()
    tables = (torch.arange(18).view(1, 6, 3), logprobs)
    mass = {}
    for policy in ("ddtree", "bundle"):
        out, _ = draft_tables(tables, is_product=True, policy=policy, max_draft_tokens=6)
        mass[policy] = sum(paths_of(out, 0).values())
    assert mass["ddtree"] > 1.5 * mass["bundle"]


def reentered(drafter, policy_order):
    inputs = inputs_for([[1, 2, 3]])
    proposal = drafter.propose(inputs)
    found = HostCandidates()
    kappa = [0.0] * 24
    found.add_block(HostProposal.of(proposal, VOCAB), 0, kappa)
    leaves = found.leaves(3)
    block = HostProposal.of(drafter.expand(inputs, proposal, found.frontier(leaves)), VOCAB)
    for node, leaf in enumerate(leaves):
        found.add_block(block, node, kappa, entry=leaf, first_cell=12)
    order = policy_order.order_of_one(found, 20)
    host = []
    for i in order:
        path = []
        while i >= 0:
            path.insert(0, found.token_ids[i])
            i = found.parents[i]
        host.append(tuple(path))
    return host


@pytest.mark.parametrize("kind", [RandomDrafter, TwinDrafter])
@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_lone_request_and_batch_add_the_same_nodes_in_the_same_order_after_reentry(kind, width, seed):
    drafter, bundle, inputs = kind(VOCAB, seed), BundleExpansion(width), inputs_for([[1, 2, 3]])
    proposal = drafter.propose(inputs)
    candidates = block_candidates(proposal, False, 20)
    leaves = choose_frontier(candidates, 3)
    block = drafter.expand(inputs, proposal, leaves.frontier)
    ranked = bundle.rank(append_block(candidates, leaves, block), 8)
    batch = []
    for i, score in zip(ranked.order[0].tolist(), ranked.scores[0].tolist(), strict=True):
        path = []
        while i >= 0:
            path.insert(0, int(ranked.candidates.token_ids[0, i]))
            i = int(ranked.candidates.parents[0, i])
        if score > -torch.inf:
            batch.append(tuple(path))
    host = reentered(drafter, bundle)
    assert batch[:20] == host
    assert all(len(path) == 1 or path[:-1] in host[:at] for at, path in enumerate(host))
