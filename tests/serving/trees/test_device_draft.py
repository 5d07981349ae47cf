"""Rounds drafted with one host read get the trees that the host's own path builds."""

import dataclasses

import numpy as np
import pytest
import torch

from paceline.bench.engine.scripted_drafters import NoneDrafter, RandomDrafter
from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.builder import append_block, block_candidates, dense_frontier, rank_merged, select_tree
from paceline.serving.trees.policy import DraftGroup, RoundDraft, TreePolicy
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept
from tests.helpers.static_kernels import StrictGraphs
from tests.serving.trees.test_tree_policy import VOCAB, BrokenDrafter, inputs_for


class TwinDrafter(RandomDrafter):
    """Random candidates over few tokens, so that siblings are often equal."""

    def _slots(self, histories, request_ids):
        found = super()._slots(histories, request_ids)
        found.token_ids = found.token_ids % 4
        return found


class EdgedDrafter(RandomDrafter):
    """A product table whose scores depend on the parent's token."""

    def __init__(self, seed, worst=None):
        super().__init__(VOCAB, seed, is_product=True, is_reentrant=False)
        self.worst = worst

    def _slots(self, histories, request_ids):
        found = super()._slots(histories, request_ids)
        slots, width = self.caps.num_slots, self.caps.num_candidates
        rng = np.random.default_rng([len(histories), *histories[0]])
        edges = torch.from_numpy(-rng.exponential(1.0, (len(histories), slots - 1, width, width))).float()
        if self.worst is not None:
            edges[0, 0, 0, 0] = self.worst
        return dataclasses.replace(found, edge_logprobs=edges)


class DevicePolicy(TreePolicy):
    """Takes the path that devices other than the CPU take."""

    def draft(self, groups, keys, anchor_token_ids, context_rows):
        num = anchor_token_ids.numel()
        out = RoundDraft(
            tree=TreeBatch.roots(anchor_token_ids), keys=keys, num_draft_tokens=[0] * num, is_drafted=[False] * num,
            context_rows=context_rows,
        )  # fmt: skip
        self.device_draft.draft(out, groups, keys, anchor_token_ids, context_rows)
        return out


def make_policy(kind, kernels=None, **config):
    config = {"max_draft_tokens": 8, "max_frontier": 3, "policy": "fixed", **config}
    cost = CostModel(lambda q: 5e-3 + 1e-4 * q)
    return kind(TreeConfig(**config), cost=cost, vocab_size=VOCAB, kernels=kernels)


def nodes_of(out):
    """Per request: every node as (path of tokens, score), sorted."""
    tree, found = out.tree, []
    for b in range(tree.num_requests):
        lo, hi = tree.cu_nodes[b].item(), tree.cu_nodes[b + 1].item()
        own = []
        for row in range(lo, hi):
            path = tree.token_ids[lo:hi][tree.ancestors[row, : hi - lo]].tolist()
            own.append((tuple(path), round(float(tree.scores[row]), 4), int(out.cells[row])))
            assert int(tree.depths[row]) == len(path) - 1
        found.append(sorted(own))
    return found


def random_round(rng, drafters, count):
    histories = [rng.integers(VOCAB, size=3).tolist() for _ in range(count)]
    owner = rng.integers(len(drafters), size=count)
    groups = [
        DraftGroup(drafter=d, inputs=inputs_for([histories[i] for i in rows]), rows=rows)
        for j, d in enumerate(drafters)
        if (rows := np.flatnonzero(owner == j).tolist())
    ]
    keys = [(f"v{j}", "x", True) for j in owner]
    return groups, keys, torch.tensor([h[-1] for h in histories])


@pytest.mark.parametrize(
    "make",
    [
        lambda: [RandomDrafter(VOCAB, 1)],
        lambda: [TwinDrafter(VOCAB, 2)],
        lambda: [RandomDrafter(VOCAB, 3, is_product=True, is_reentrant=False), TwinDrafter(VOCAB, 4), NoneDrafter()],
        lambda: [EdgedDrafter(6), RandomDrafter(VOCAB, 7)],
    ],
    ids=["random", "equal siblings", "several drafters", "scores below each parent"],
)
def test_trees_equal_those_of_the_host_path(make):
    rng = np.random.default_rng(0)
    host, device = make_policy(TreePolicy), make_policy(DevicePolicy)
    for _ in range(12):
        groups, keys, anchors = random_round(rng, make(), int(rng.integers(2, 6)))
        expected, got = (p.draft(groups, keys, anchors, 10) for p in (host, device))
        assert nodes_of(got) == nodes_of(expected)
        assert got.num_draft_tokens == expected.num_draft_tokens and got.is_drafted == expected.is_drafted
        assert got.num_cells == expected.num_cells
        np.testing.assert_allclose(got.frontier_mass, expected.frontier_mass, rtol=1e-5)
        for policy, out in ((host, expected), (device, got)):
            drawn = out.tree.token_ids * 0 + 1
            policy.observe(out, accept(out.tree, drawn), verify_s=6e-3, round_s=1e-2)


def groups_with_a_broken_drafter(how):
    """Three requests, the middle one with a broken drafter."""
    histories = [[1, 2], [3, 4], [5, 6]]
    return [
        DraftGroup(drafter=BrokenDrafter(how), inputs=inputs_for([histories[1]]), rows=[1]),
        DraftGroup(drafter=RandomDrafter(VOCAB), inputs=inputs_for([histories[0], histories[2]]), rows=[0, 2]),
    ]


@pytest.mark.parametrize("how", ["raise", "nan", "3.0", "token"])
def test_a_broken_drafter_costs_its_own_requests_their_drafts_only(how):
    policy = make_policy(DevicePolicy)
    out = policy.draft(groups_with_a_broken_drafter(how), [("b", "x", True)] * 3, torch.tensor([2, 4, 6]), 10)
    assert list(out.failures) == [0] and out.is_drafted == [True, False, True]
    assert out.num_draft_tokens[1] == 0 and min(out.num_draft_tokens[0], out.num_draft_tokens[2]) > 0


@pytest.mark.parametrize("kind", [TreePolicy, DevicePolicy])
@pytest.mark.parametrize("worst", [float("nan"), 2.0])
def test_scores_below_a_parent_that_are_no_log_probabilities_are_a_failure(kind, worst):
    histories = [[1, 2], [3, 4]]
    groups = [DraftGroup(drafter=EdgedDrafter(1, worst), inputs=inputs_for(histories), rows=[0, 1])]
    out = make_policy(kind).draft(groups, [("b", "x", True)] * 2, torch.tensor([2, 4]), 10)
    assert list(out.failures) == [0] and out.is_drafted == [False, False]


def test_between_proposal_and_tree_nothing_is_read():
    drafter = TwinDrafter(VOCAB, 5)
    inputs = inputs_for([[1, 2], [3, 4]])
    first = drafter.propose(inputs)
    leaves = dense_frontier(block_candidates(first, False, 8), 3)
    second = drafter.expand(inputs, first, leaves.frontier)
    out = torch.zeros(2 * 6, dtype=torch.int64)

    def run():
        candidates = block_candidates(
            Proposal(token_ids=first.token_ids + 0, logprobs=first.logprobs + 0, widths=None), False, 8
        )
        leaves = dense_frontier(candidates, 3)
        ranked = rank_merged(append_block(candidates, leaves, second), drafter.caps.max_depth)
        tree, _ = select_tree(ranked, inputs.anchor_token_ids, [5, 5], present=[5, 5], max_depth=5)
        out.copy_(tree.token_ids)

    StrictGraphs().capture(run).replay()
    assert out[0] == 2 and out[6] == 4
