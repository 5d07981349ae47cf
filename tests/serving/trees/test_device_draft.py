"""Rounds drafted with one host read get the trees that the host's own path builds."""

import numpy as np
import pytest
import torch

from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.device import DeviceCandidates
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup
from paceline.serving.trees.verify import accept
from tests.helpers.scripted_drafters import NoneDrafter, RandomDrafter
from tests.helpers.static_kernels import StrictGraphs
from tests.helpers.trees import (
    VOCAB,
    DevicePolicy,
    EdgedDrafter,
    TwinDrafter,
    groups_with_a_broken_drafter,
    inputs_for,
    make_policy,
    nodes_of,
    random_round,
)


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
        for policy, out in ((host, expected), (device, got)):
            drawn = out.tree.token_ids * 0 + 1
            policy.observe(out, accept(out.tree, drawn), verify_s=6e-3, round_s=1e-2)


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
    first, kappa = drafter.propose(inputs), torch.zeros(2, 8, 3)[:, : drafter.caps.num_slots]
    leaves = DeviceCandidates.of(first, False, 8, kappa).leaves(3)
    second = drafter.expand(inputs, first, leaves.frontier)
    late = kappa[leaves.frontier.request]
    out = torch.zeros(2, dtype=torch.float64)

    def run():
        proposal = Proposal(token_ids=first.token_ids + 0, logprobs=first.logprobs + 0, widths=None)
        candidates = DeviceCandidates.of(proposal, False, 8, kappa)
        candidates = candidates.append(candidates.leaves(3), second, late)
        out.copy_(candidates.scores.double().exp().sum(1))

    StrictGraphs().capture(run).replay()
    assert (out > 0).all()
