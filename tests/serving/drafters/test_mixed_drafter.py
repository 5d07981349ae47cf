"""Candidates of a model and of a text drafter share one tree, heaviest first, whoever proposed them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.drafters.mixed import MixedDrafter
from paceline.serving.drafters.text import SuffixDrafter
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup
from paceline.serving.trees.verify import accept
from tests.helpers.scripted_drafters import NoneDrafter, RandomDrafter, ScriptedDrafter
from tests.helpers.table_drafter import lattice, paths_of, random_edges
from tests.helpers.trees import VOCAB, DevicePolicy, draft_fixed, inputs_for

HISTORIES = [
    [1, 2, 5, 6, 7, 8, 1, 2, 9, 3, 1, 2, 5, 6, 1, 2],
    [4, 4, 4, 4, 4, 4],
    [11, 12, 13, 14, 15, 11, 12, 13, 20, 21, 11, 12, 13],
    [30, 29, 28],
]


class OneTable(ScriptedDrafter):
    """A product table or a block whose first chain begins like the texts go on, so that nodes coincide."""

    def __init__(self, *, is_product: bool, seed: int = 0, has_edges: bool = False) -> None:
        super().__init__("table", num_slots=3, num_candidates=3, is_product=is_product)
        rng = np.random.default_rng(seed)
        first = [5, 4, 20, 3]
        self.token_ids = torch.from_numpy(
            np.stack(
                [[[first[i] if s == 0 else 6 + i, *(22 + rng.permutation(8)[:2])] for s in range(3)] for i in range(4)]
            )
        )
        self.logprobs = torch.from_numpy(-np.sort(rng.exponential(1.0, (4, 3, 3)), axis=2)).float() - 0.05
        self.edges = (random_edges(seed, 4, 3, 3),) if has_edges else ()

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.logprobs, *self.edges

    def _slots(self, histories, request_ids):
        rows = [HISTORIES.index(h) for h in histories]
        edges = self.edges[0][rows] if self.edges else None
        return Proposal(token_ids=self.token_ids[rows], logprobs=self.logprobs[rows], widths=None, edge_logprobs=edges)


def union(drafter: OneTable, row: int) -> dict[tuple[int, ...], float]:
    """Every node that either drafter proposes -> its larger mass."""
    out = lattice(drafter.tables, row, is_product=drafter.caps.is_product)
    text = SuffixDrafter()
    text.follow("r", HISTORIES[row])
    above, chain = 0.0, ()
    for slot in text.slots("r", HISTORIES[row], ()):
        for token, logprob in slot:
            path = (*chain, token)
            out[path] = max(out.get(path, 0.0), math.exp(above + logprob))
        above, chain = above + slot[0][1], (*chain, slot[0][0])
    return out


def draft(kind, drafter, rows, *, size=12, policy="ddtree", max_frontier=4, mix="suffix"):
    config = TreeConfig(policy=policy, max_draft_tokens=size, max_frontier=max_frontier, mix=mix)
    ticks = itertools.count()
    pol = kind(config, cost=CostModel(lambda q: 5e-3 + 1e-4 * q), timer=lambda: next(ticks) * 1e-3, vocab_size=VOCAB)
    inputs = inputs_for([HISTORIES[i] for i in rows])
    group = DraftGroup(drafter=pol.mixed(drafter), inputs=inputs, rows=list(range(len(rows))))
    out = pol.draft([group], [("v", "x", True)] * len(rows), inputs.anchor_token_ids, 10)
    assert not out.failures
    return out, pol


@pytest.mark.parametrize(("is_product", "has_edges"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", [TreePolicy, DevicePolicy])
@pytest.mark.parametrize("rows", [[0], [1], [0, 1, 2, 3]])
def test_the_tree_is_the_heaviest_nodes_of_both(is_product, has_edges, kind, rows):
    for seed, size in enumerate((1, 4, 9, 40)):
        drafter = OneTable(is_product=is_product, seed=seed, has_edges=has_edges)
        out, _ = draft(kind, drafter, rows, size=size)
        for b, row in enumerate(rows):
            want = union(drafter, row)
            got = paths_of(out, b)
            best = sorted(want.values(), reverse=True)[:size]
            assert sorted(got.values(), reverse=True) == pytest.approx(best, rel=1e-4)
            for path, mass in got.items():
                assert mass == pytest.approx(want[path], rel=1e-4)


def test_the_tree_holds_candidates_of_both_and_merges_equal_ones():
    drafter = OneTable(is_product=False)
    out, _ = draft(TreePolicy, drafter, [0], size=40)
    paths = set(paths_of(out, 0))
    model = {tuple(drafter.token_ids[0, :depth, 0].tolist()) for depth in (1, 2, 3)}
    assert model <= paths and {(5, 6, 7), (5, 6, 1)} & paths, "the text goes on 5 6, and so does the model, then 6"
    alone = lattice(drafter.tables, 0, is_product=False)
    assert len(paths) < len(alone) + sum(len(s) for s in _text_slots(0)), "5 is one node"


def _text_slots(row):
    text = SuffixDrafter()
    text.follow("r", HISTORIES[row])
    return text.slots("r", HISTORIES[row], ())


@pytest.mark.parametrize(("is_product", "has_edges"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("policy", ["adaptive", "bastion", "bundle"])
@pytest.mark.parametrize("rows", [[0], [0, 2, 3]])
def test_other_policies_take_mixed_candidates_too(is_product, has_edges, policy, rows):
    drafter = OneTable(is_product=is_product, has_edges=has_edges)
    out, _ = draft(TreePolicy, drafter, rows, size=16, policy=policy)
    for b, row in enumerate(rows):
        want = union(drafter, row)
        assert all(mass == pytest.approx(want[path], rel=1e-4) for path, mass in paths_of(out, b).items())
    assert sum(out.num_draft_tokens) > 0


def test_a_text_without_matches_leaves_the_models_tree_alone():
    drafter = OneTable(is_product=False)
    mixed, _ = draft(TreePolicy, drafter, [3], size=6)
    alone, _ = draft(TreePolicy, drafter, [3], size=6, mix="none")
    assert paths_of(mixed, 0) == paths_of(alone, 0)


def test_reentry_continues_the_models_leaves_with_both_and_the_texts_leaves_with_text():
    model, text = RandomDrafter(VOCAB, absent_share=0.0), SuffixDrafter()
    mixed, inputs = MixedDrafter(model, text), inputs_for([HISTORIES[0], HISTORIES[2]])
    proposal = mixed.propose(inputs)
    own, split = model.propose(inputs), 4
    assert proposal.restart == split and torch.equal(proposal.token_ids[:, :split, :3], own.token_ids)
    frontier = Frontier(
        request=torch.tensor([0, 0, 1]), slot=torch.tensor([1, split + 2, split]), token_ids=torch.tensor([30, 7, 20])
    )
    block = mixed.expand(inputs, proposal, frontier)
    leaf = Frontier(request=frontier.request[:1], slot=frontier.slot[:1], token_ids=frontier.token_ids[:1])
    assert torch.equal(block.token_ids[0, :split, :3], model.expand(inputs, own, leaf).token_ids[0])
    assert (block.logprobs[1:, :split] == -torch.inf).all(), "the model has no state below the text's leaves"
    assert proposal.token_ids[0, split : split + 2, 0].tolist() == [5, 6], "5 6 followed 1 2 most often"
    assert int(block.token_ids[1, split, 0]) == 8, "8 followed 5 6 7"
    assert int(block.token_ids[2, split, 0]) == 21, "21 followed 13 20"


@pytest.mark.parametrize("seed", range(6))
def test_host_and_device_build_the_same_mixed_trees_with_reentry(seed):
    trees, num_leaves = [], []
    for kind in (TreePolicy, DevicePolicy):
        out, pol = draft(kind, RandomDrafter(VOCAB, seed, absent_share=0.2), [seed % 3], size=14)
        trees.append({p: round(m, 4) for p, m in paths_of(out, 0).items()})
        num_leaves.append(out.num_leaves)
        pol.observe(out, accept(out.tree, torch.zeros_like(out.tree.token_ids)), verify_s=6e-3, round_s=9e-3)
    assert trees[0] == trees[1] and min(num_leaves) > 0


def test_calibration_tells_the_two_apart():
    """A text that is always right and a model that never is: the text's mass stays, the model's falls."""
    drafter, key = OneTable(is_product=False), ("v", "x", True)
    pol = TreePolicy(TreeConfig(policy="ddtree", max_draft_tokens=12, mix="suffix"), vocab_size=VOCAB)
    history = HISTORIES[0]
    chain, rounds = tuple(slot[0][0] for slot in _text_slots(0)), []
    for _ in range(60):
        inputs = inputs_for([history])
        group = DraftGroup(drafter=pol.mixed(drafter), inputs=inputs, rows=[0])
        out = pol.draft([group], [key], inputs.anchor_token_ids, 10)
        depths = out.tree.depths.tolist()
        drawn = torch.tensor([chain[d] if d < len(chain) else 31 for d in depths])
        pol.observe(out, accept(out.tree, drawn), verify_s=6e-3, round_s=9e-3)
        rounds.append(paths_of(out, 0))
    assert rounds[-1][chain[:4]] > 1.1 * rounds[0][chain[:4]]
    wrong = [sum(mass for path, mass in masses.items() if path[0] != chain[0]) for masses in (rounds[0], rounds[-1])]
    assert wrong[1] < wrong[0] / 3


def test_the_text_drafters_memory_of_a_request_ends_with_it():
    pol = TreePolicy(TreeConfig(mix="suffix"), vocab_size=VOCAB)
    drafter = pol.mixed(RandomDrafter(VOCAB))
    drafter.propose(inputs_for(HISTORIES))
    assert len(drafter.text._texts) == 4
    for i in range(4):
        pol.release(f"r{i}")
    assert drafter.text._texts == {}


def test_without_a_model_drafter_there_is_nothing_to_mix():
    none = NoneDrafter()
    assert TreePolicy(TreeConfig(mix="lookup")).mixed(none) is none
    drafter = RandomDrafter(VOCAB)
    assert TreePolicy(TreeConfig()).mixed(drafter) is drafter
    lookup = TreePolicy(TreeConfig(mix="lookup")).mixed(drafter)
    assert lookup.caps.name == "random+lookup" and lookup.caps.num_slots == 12
    assert draft_fixed(lookup, inputs_for([HISTORIES[2]]), 10).token_ids.numel() == 11
