"""The policy drafts for whom it pays, survives broken drafters and calibrates its scores."""

import itertools

import numpy as np
import pytest
import torch

from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup
from paceline.serving.trees.verify import accept
from tests.helpers.scripted_drafters import NoneDrafter, OracleDrafter, RandomDrafter, ScriptedDrafter
from tests.helpers.trees import VOCAB, FaultyDrafter, draft_fixed, inputs_for


def policy(**config):
    ticks = itertools.count()
    return TreePolicy(
        TreeConfig(**config),
        cost=CostModel(lambda q: 5e-3 + 1e-4 * q),
        timer=lambda: next(ticks) * 1e-3,
        vocab_size=VOCAB,
    )


def test_groups_come_back_in_round_order_with_roots_between():
    pol = policy()
    histories = [[i, i + 1] for i in range(5)]
    anchors = torch.tensor([h[-1] for h in histories])
    keys = [("a", "x", True), ("b", "x", True), None, ("a", "x", True), ("n", "x", True)]
    groups = [
        DraftGroup(drafter=RandomDrafter(VOCAB, 1), inputs=inputs_for([histories[3], histories[0]]), rows=[3, 0]),
        DraftGroup(
            drafter=RandomDrafter(VOCAB, 2, is_product=True, is_reentrant=False),
            inputs=inputs_for([histories[1]]),
            rows=[1],
        ),
        DraftGroup(drafter=NoneDrafter(), inputs=inputs_for([histories[4]]), rows=[4]),
    ]
    out = pol.draft(groups, keys, anchors, 10)
    roots = out.tree.cu_nodes[:-1]
    assert out.tree.token_ids[roots].tolist() == anchors.tolist()
    assert out.is_drafted == [True, True, False, True, False]
    assert (
        out.num_draft_tokens[2] == out.num_draft_tokens[4] == 0 and min(out.num_draft_tokens[i] for i in (0, 1, 3)) >= 0
    )
    assert out.tree.token_ids.numel() == 5 + sum(out.num_draft_tokens) == out.tree.cells.numel()
    assert (out.tree.parents[roots] == -1).all() and (out.tree.parents == -1).sum() == 5
    pol.observe(out, accept(out.tree, torch.zeros_like(out.tree.token_ids)), verify_s=6e-3, round_s=1e-2)


@pytest.mark.parametrize("how", ["raise", "nan", "inf", "3.0", "token"])
def test_broken_drafter_is_reported_and_its_requests_decode_plainly(how):
    pol = policy()
    keys = [("bad", "x", True), ("bad", "x", True), ("good", "x", True)]
    groups = [
        DraftGroup(drafter=FaultyDrafter(how), inputs=inputs_for([[1], [2]]), rows=[0, 1]),
        DraftGroup(drafter=RandomDrafter(VOCAB, absent_share=0), inputs=inputs_for([[3]]), rows=[2]),
    ]
    out = pol.draft(groups, keys, torch.tensor([1, 2, 3]), 3)
    assert list(out.failures) == [0] and out.is_drafted == [False, False, True]
    assert out.num_draft_tokens[:2] == [0, 0] and out.num_draft_tokens[2] > 0


def test_without_groups_the_round_is_plain_decoding():
    out = policy().draft([], [None, None], torch.tensor([4, 5]), 8)
    assert out.tree.token_ids.tolist() == [4, 5] and out.draft_s == 0.0
    policy().observe(out, accept(out.tree, torch.tensor([1, 2])), verify_s=5e-3, round_s=6e-3)


class MiscalibratedDrafter(ScriptedDrafter):
    """Claims 0.9 for a first candidate that is right half of the time and 0.05 for one that is right otherwise."""

    def __init__(self):
        super().__init__("claims", num_slots=2, num_candidates=2)

    def _slots(self, histories, request_ids):
        logprobs = torch.tensor([0.9, 0.05]).log().expand(len(histories), 2, 2)
        return Proposal(token_ids=torch.tensor([1, 2]).expand(len(histories), 2, 2), logprobs=logprobs, widths=None)


def test_predicted_mass_converges_to_realised_hits():
    pol = policy()
    rng = np.random.default_rng(0)
    key = ("v", "x", False)
    for _ in range(400):
        group = DraftGroup(drafter=MiscalibratedDrafter(), inputs=inputs_for([[3, 0]]), rows=[0])
        out = pol.draft([group], [key], torch.tensor([0]), 2)
        drawn = torch.from_numpy(rng.integers(1, 3, out.tree.token_ids.numel()))
        pol.observe(out, accept(out.tree, drawn), verify_s=6e-3, round_s=9e-3)
    kappa = pol._calibration.corrections([key], 2)[0, 0]
    corrected = np.minimum(np.array([0.9, 0.05]) * np.exp(kappa[0, :2]), 1.0)
    assert abs(corrected[0] - 0.5) < 0.1 and corrected[1] > 0.07  # the rise of the second is clipped at e^0.5
    pol.forget("v")
    assert (pol._calibration.corrections([key], 2) == 0).all()


def test_policy_switches_a_useless_drafter_off_and_keeps_a_useful_one():
    text = list(np.random.default_rng(0).integers(0, VOCAB, 4000))
    for hit_rate, state in ((0.95, "on"), (0.0, "off")):
        pol, key, history = policy(), ("v", "x", True), [int(t) for t in text[:2]]
        drafter = OracleDrafter({"r0": [int(t) for t in text]}, hit_rate=hit_rate)
        for _ in range(150):
            groups = []
            if pol.wants_draft([key], len(history))[0]:
                groups = [DraftGroup(drafter=drafter, inputs=inputs_for([history]), rows=[0])]
            out = pol.draft(groups, [key], torch.tensor([history[-1]]), len(history))
            drawn = torch.tensor([text[len(history) + d] for d in out.tree.depths.tolist()])
            plan = accept(out.tree, drawn)
            verify_s = 5e-3 + 1e-4 * out.tree.token_ids.numel()
            pol.observe(out, plan, verify_s=verify_s, round_s=verify_s + out.draft_s + 3e-4)
            history += [int(t) for t in text[len(history) : len(history) + len(plan.on_host()[0][0])]]
        assert dict(pol.budget.states())[key] == state


def test_fixed_trees_are_deterministic_and_have_the_asked_size():
    drafter = RandomDrafter(VOCAB, absent_share=0.0)
    inputs = inputs_for([[1, 2, 3], [4, 5]])
    one, two = draft_fixed(drafter, inputs, 9), draft_fixed(drafter, inputs, 9)
    assert one.token_ids.tolist() == two.token_ids.tolist() and (one.cu_nodes[1:] - one.cu_nodes[:-1]).tolist() == [
        10,
        10,
    ]
    assert draft_fixed(NoneDrafter(), inputs, 9).token_ids.tolist() == [3, 5]
    assert draft_fixed(drafter, inputs, 0).token_ids.tolist() == [3, 5]
