"""EAGLE-3 drafting equals the training forward along every path of the tree, round after round."""

import numpy as np
import pytest
import torch

from paceline.adapt.families.eagle3 import unrolled_hidden
from paceline.config import TreeConfig
from paceline.serving.drafters.interface import Frontier
from paceline.serving.eagle3.drafter import EagleDrafter
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup
from tests.helpers.covering import pairwise
from tests.helpers.drafters import (
    TOLERANCE,
    Request,
    V,
    make_inputs,
    new_requests,
    prefill_chunked,
    text_batch,
    tiny_eagle,
)
from tests.helpers.trees import DevicePolicy, draft_fixed

pytestmark = pytest.mark.usefixtures("draft_forward")


@torch.no_grad()
def path_logits(model, embed, request, path):
    """(len(path) + 1, Vd): the training forward's logits at the newest row, unrolled over the tokens of a path."""
    n, tokens = request.context, request.tokens[: request.context + 1] + list(path)
    batch = text_batch(request.features[:n], tokens)
    states = unrolled_hidden(model, batch, embed, len(path) + 1)
    return torch.stack([model.lm_head(model.normed(h[0, -1])) for h in states])


def assert_slots_match(proposal, node, model, embed, request, path):
    """Every slot of one node of a proposal, whose first candidates continue `path`."""
    chain = proposal.token_ids[node, :, 0].tolist()
    logits = path_logits(model, embed, request, [*path, *chain[:-1]])[len(path) :]
    expected = logits.log_softmax(-1).topk(proposal.token_ids.shape[2])
    assert torch.allclose(proposal.logprobs[node], expected.values, atol=TOLERANCE)
    assert torch.allclose(
        proposal.logprobs[node], logits.log_softmax(-1).gather(1, proposal.token_ids[node]), atol=TOLERANCE
    )
    return chain


def check_round(drafter, model, embed, requests, spans, rng):
    """Propose, then re-enter twice at random candidates, also at ones that are not the first of their slot."""
    inputs = make_inputs(requests, spans)
    proposal = drafter.propose(inputs)
    owners, paths = list(range(len(requests))), [[] for _ in requests]
    for level in range(3):
        chains = [assert_slots_match(proposal, i, model, embed, requests[b], paths[i]) for i, b in enumerate(owners)]
        if level == 2:
            return
        nodes = [int(i) for i in rng.integers(len(owners), size=2 + 2 * len(requests))]
        slots = [int(s) for s in rng.integers(drafter.caps.num_slots, size=len(nodes))]
        tokens = [int(t) for t in rng.integers(V, size=len(nodes))]
        frontier = Frontier(
            request=torch.tensor([owners[i] for i in nodes]), slot=torch.tensor(slots),
            token_ids=torch.tensor(tokens), node=None if level == 0 else torch.tensor(nodes),
        )  # fmt: skip
        proposal = drafter.expand(inputs, proposal, frontier)
        paths = [[*paths[i], *chains[i][:s], t] for i, s, t in zip(nodes, slots, tokens, strict=True)]
        owners = [owners[i] for i in nodes]


CHANGES = (
    {}, {"num_slots": 1, "num_kv_heads": 4}, {"norm_before_residual": True}, {"rope_scaling": (8.0, 1.0, 4.0, 64.0)}
)  # fmt: skip


@pytest.mark.parametrize(("count", "scattered", "changes"), pairwise((1, 3), (False, True), CHANGES))
def test_drafting_equals_the_training_forward_over_rounds(count, scattered, changes):
    rng = np.random.default_rng(3)
    model, embed = tiny_eagle(**changes)
    drafter = EagleDrafter(model, embed, num_candidates=6)
    requests = new_requests(drafter, count, rng, scattered)
    prefill_chunked(drafter, requests)
    for _ in range(4):  # tree rows leave nothing behind: accepted rows come back with true features
        check_round(drafter, model, embed, requests, [(r.done, r.context) for r in requests], rng)
        for r in requests:
            r.done = r.context
            r.context += int(rng.integers(1, 6))


def test_a_batch_proposes_what_each_request_gets_alone():
    rng = np.random.default_rng(5)
    model, embed = tiny_eagle()
    drafter = EagleDrafter(model, embed, num_candidates=6)
    drafter.alloc(200)
    requests = [Request(f"r{i}", rng, 40, 12 + 7 * i, list(range(50 * i, 50 * i + 40))) for i in range(3)]
    together = make_inputs(requests, [(0, r.context) for r in requests])
    first = drafter.propose(together)
    leaves = Frontier(request=torch.tensor([2, 0, 2]), slot=torch.tensor([0, 2, 1]), token_ids=torch.tensor([4, 5, 6]))
    second = drafter.expand(together, first, leaves)
    for i, r in enumerate(requests):
        alone = make_inputs([r], [(0, r.context)])
        one = drafter.propose(alone)
        assert torch.equal(one.token_ids[0], first.token_ids[i])
        assert torch.allclose(one.logprobs[0], first.logprobs[i], atol=TOLERANCE)
        mine = (leaves.request == i).nonzero()[:, 0]
        if mine.numel():
            own = Frontier(request=torch.zeros_like(mine), slot=leaves.slot[mine], token_ids=leaves.token_ids[mine])
            assert torch.allclose(drafter.expand(alone, one, own).logprobs, second.logprobs[mine], atol=TOLERANCE)


def test_an_expansion_can_be_repeated_from_the_same_proposal():
    rng = np.random.default_rng(6)
    model, embed = tiny_eagle()
    drafter = EagleDrafter(model, embed)
    drafter.alloc(40)
    inputs = make_inputs([Request("r", rng, 40, 9, list(range(40)))], [(0, 9)])
    first = drafter.propose(inputs)
    leaves = Frontier(request=torch.zeros(20, dtype=torch.int64), slot=torch.arange(20) % 3, token_ids=torch.arange(20))
    results = [drafter.expand(inputs, first, leaves) for _ in range(2)]
    assert torch.equal(results[0].logprobs, results[1].logprobs)
    drafter.propose(inputs)
    with pytest.raises(AssertionError, match="this round"):
        drafter.expand(inputs, results[0], leaves)


def test_logprobs_are_calibrated_by_temperature_class_and_depth():
    rng = np.random.default_rng(0)
    model, embed = tiny_eagle(num_steps=3)
    with torch.no_grad():
        model.log_beta.copy_(torch.randn_like(model.log_beta) * 0.3)
    drafter = EagleDrafter(model, embed, num_candidates=6)
    drafter.alloc(40)
    request = Request("r", rng, 40, 9, list(range(40)))
    for temperature, kind, divisor in ((0.0, 0, 1.0), (0.7, 1, 0.7)):
        inputs = make_inputs([request], [(0, 9)], temperature)
        proposal = drafter.propose(inputs)
        leaf = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=proposal.token_ids[:, 0, 0])
        again = drafter.expand(inputs, proposal, leaf)
        chain = proposal.token_ids[0, :2, 0].tolist()
        logits = path_logits(model, embed, request, chain)
        expected = (logits * model.log_beta[kind].exp()[:, None] / divisor).log_softmax(-1).topk(6).values
        assert torch.allclose(proposal.logprobs[0], expected, atol=TOLERANCE)
        assert torch.allclose(again.logprobs[0, :2], expected[1:], atol=TOLERANCE), "the same path, entered again"


def test_a_reduced_draft_vocabulary_proposes_target_ids_and_pays_for_coverage():
    rng = np.random.default_rng(2)
    model, embed = tiny_eagle(draft_vocab_size=30)
    with torch.no_grad():
        model.draft_token_ids.copy_(torch.arange(30) + 15)
        model.log_coverage.fill_(-0.25)
    drafter = EagleDrafter(model, embed, num_candidates=5)
    drafter.alloc(40)
    request = Request("r", rng, 40, 9, list(range(40)))
    proposal = drafter.propose(make_inputs([request], [(0, 9)]))
    chain = proposal.token_ids[0, :, 0].tolist()
    expected = path_logits(model, embed, request, chain[:-1]).log_softmax(-1).topk(5)
    assert proposal.token_ids[0].tolist() == (expected.indices + 15).tolist()
    assert torch.allclose(proposal.logprobs[0], expected.values - 0.25, atol=TOLERANCE)


def brute_force_tree(model, embed, request, num_nodes, max_frontier, num_candidates):
    """Path -> score of the best nodes of an EAGLE-3 tree, grown level by level with one full forward a node."""
    scores, level = {(): 0.0}, [()]
    for _ in range(model.config.max_depth):
        new = {}
        for path in level:
            top = path_logits(model, embed, request, path)[-1].log_softmax(-1).topk(num_candidates)
            new |= {
                (*path, t): scores[path] + p for t, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            }
        scores |= new
        level = sorted(new, key=new.__getitem__, reverse=True)[:max_frontier]
    best = sorted((p for p in scores if p), key=lambda p: (-scores[p], len(p)))[:num_nodes]
    return {path: scores[path] for path in best}


def paths_of(tree, request):
    """Path -> score of every draft node of one request's tree."""
    start, stop = tree.cu_nodes[request : request + 2].tolist()
    paths = {0: ()}
    for row in range(1, stop - start):
        paths[row] = (*paths[int(tree.parents[start + row])], int(tree.token_ids[start + row]))
    return {path: float(tree.scores[start + row]) for row, path in paths.items() if row}


@pytest.mark.parametrize("way", ["fixed", "alone", "batch", "device"])
def test_trees_grow_level_by_level_as_published(way):
    rng = np.random.default_rng(8)
    model, embed = tiny_eagle(num_slots=1, max_depth=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # sure enough of itself for deep trees
    drafter = EagleDrafter(model, embed, num_candidates=5)
    drafter.alloc(200)
    requests = [Request(f"r{i}", rng, 40, 12 + 7 * i, list(range(50 * i, 50 * i + 40))) for i in range(3)]
    requests = requests[:1] if way == "alone" else requests
    inputs = make_inputs(requests, [(0, r.context) for r in requests])
    if way == "fixed":
        tree = draft_fixed(drafter, inputs, 9, max_frontier=3)
    else:
        config = TreeConfig(max_draft_tokens=9, max_frontier=3, policy="fixed")
        kind = DevicePolicy if way == "device" else TreePolicy
        policy, keys = kind(config, vocab_size=V), [("v", "b", True)] * len(requests)
        group = DraftGroup(drafter=drafter, inputs=inputs, rows=list(range(len(requests))))
        out = policy.draft([group], keys, inputs.anchor_token_ids, 10)
        tree = out.tree
        assert not out.failures and out.num_leaves > 0
    depths = set()
    for i, request in enumerate(requests):
        got, want = paths_of(tree, i), brute_force_tree(model, embed, request, 9, 3, 5)
        assert got.keys() == want.keys() and got == pytest.approx(want, abs=1e-3)
        depths |= {len(p) for p in got}
    assert max(depths) == 4
