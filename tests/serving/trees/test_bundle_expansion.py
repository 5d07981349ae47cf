"""Bundle expansion is JetSpec's algorithm, and never has more mass than the heaviest nodes."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.trees.candidates import Candidates, HostProposal
from paceline.serving.trees.host import rank_bundles
from tests.helpers.scripted_drafters import RandomDrafter
from tests.helpers.table_drafter import bundle_tree, draft_tables, paths_of, random_edges, random_tables
from tests.helpers.trees import VOCAB, TwinDrafter, inputs_for, trees_of


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


@settings(max_examples=40)
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


@pytest.mark.parametrize("kind", [RandomDrafter, TwinDrafter])
@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_bundles_over_two_blocks_are_those_of_a_heap(kind, width, seed):
    drafter, inputs = kind(VOCAB, seed), inputs_for([[1, 2, 3], [4, 5]])
    proposal = drafter.propose(inputs)
    candidates = Candidates.of(HostProposal.read(proposal))
    leaves = candidates.leaves(3)
    block = drafter.expand(inputs, proposal, candidates.frontier(leaves, torch.device("cpu")))
    candidates = candidates.append(leaves, HostProposal.read(block))
    tree = trees_of(rank_bundles(candidates, width, 20), inputs.anchor_token_ids, [20, 20])
    owners, token_ids, parents, _, _ = candidates.merged().columns
    scores = candidates.merged().scores
    rows = tree.on_host()
    for request in range(2):
        heap, want = [(0.0, request)], []
        while heap and len(want) < 20:
            _, node = heapq.heappop(heap)
            below = [i for i in range(2, len(scores)) if parents[i] == node and scores[i] > -np.inf]
            for child in sorted(below, key=lambda i: -scores[i])[:width]:
                heapq.heappush(heap, (-scores[child], child))
                want.append(child)
        own = rows.owners == request
        assert rows.token_ids[own][1:].tolist() == token_ids[want[:20]].tolist()
        assert (owners[want] == request).all()
