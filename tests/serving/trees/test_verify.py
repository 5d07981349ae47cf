"""Whatever the tree, the emitted tokens are those of plain decoding."""

import itertools

import numpy as np
import pytest
import torch

from paceline.serving.sampling.draw import SamplingBatch, TokenCounts, draw_tokens, has_penalties
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept, accept_rows, accepted_rows, draw_all, owners, plan_of, verify
from tests.helpers.scripted_drafters import OracleDrafter, RandomDrafter, RejectedDrafter, RepeatDrafter
from tests.helpers.trees import draft_fixed, inputs_for


class TableTarget:
    """Logits are a function of the last two tokens."""

    def __init__(self, vocab, seed=0, scale=1.5):
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * scale

    def __call__(self, tokens):
        return self.table[tokens[-2], tokens[-1]]

    def over(self, tree, histories):
        rows = []
        for b, history in enumerate(histories):
            lo, hi = tree.cu_nodes[b].item(), tree.cu_nodes[b + 1].item()
            for i in range(lo, hi):
                path, j = [], i - lo
                while j > 0:
                    path.append(int(tree.token_ids[lo + j]))
                    j = int(tree.parents[lo + j])
                rows.append(self([*history, *reversed(path)]))
        return torch.stack(rows)


def emitted(plan, tree, b):
    path, bonus = plan.on_host()[b]
    assert tree.token_ids[path[1:]].tolist() == plan.accepted_tokens()[b] and path[0] == tree.cu_nodes[b]
    return [*plan.accepted_tokens()[b], bonus]


@pytest.fixture(params=[2**25, 40], ids=["", "in parts"])
def drawn_at_once(request, monkeypatch):
    """Draws at every node at once, or in parts of a few rows."""
    monkeypatch.setattr("paceline.serving.sampling.draw._MAX_DRAWN", request.param)


def decode(target, prompts, params, seeds, drafter, num_nodes, num_tokens):
    vocab = target.table.shape[0]
    histories = [list(p) for p in prompts]
    counts = [TokenCounts(p, vocab) if has_penalties(q) else None for p, q in zip(prompts, params, strict=True)]
    batch = SamplingBatch.from_params(params, seeds, counts)
    num_rounds = 0
    while min(len(h) - len(p) for h, p in zip(histories, prompts, strict=True)) < num_tokens:
        inputs = inputs_for(histories)
        tree = TreeBatch.roots(inputs.anchor_token_ids) if drafter is None else draft_fixed(drafter, inputs, num_nodes)
        logits = target.over(tree, histories)
        plan = verify(tree, logits, batch, inputs.context_lens)
        twin = accept(tree, draw_all(tree, logits, batch, inputs.context_lens))
        assert plan == twin
        for b, history in enumerate(histories):
            new = emitted(plan, tree, b)
            history.extend(new)
            if counts[b] is not None:
                counts[b].add(new)
        num_rounds += 1
    return [h[len(p) : len(p) + num_tokens] for h, p in zip(histories, prompts, strict=True)], num_rounds


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, presence_penalty=0.3),
    SamplingParams(temperature=1.2, min_p=0.05, frequency_penalty=0.5),
]


@pytest.mark.usefixtures("drawn_at_once")
@pytest.mark.parametrize("params", [MIXED, [SamplingParams(temperature=0.0)] * 3, [SamplingParams(temperature=1.0)]])
def test_tree_decoding_equals_plain_decoding_token_for_token(params):
    vocab, num = 12, len(params)
    target = TableTarget(vocab, scale=2.0)
    prompts = [[i % vocab, (3 * i + 1) % vocab] for i in range(num)]
    seeds = list(range(num))
    plain, plain_rounds = decode(target, prompts, params, seeds, None, 0, 40)
    texts = {f"r{i}": [*prompts[i], *plain[i]] for i in range(num)}
    drafters = [
        RandomDrafter(vocab, seed=1, num_candidates=5),
        RandomDrafter(vocab, seed=2, num_candidates=3, is_reentrant=False, is_product=True),
        RepeatDrafter(),
        OracleDrafter(texts),
        OracleDrafter(texts, hit_rate=0.6),
        RejectedDrafter(lambda h: h[-1]),
    ]
    for drafter in drafters:
        for num_nodes in (1, 9):
            got, num_rounds = decode(target, prompts, params, seeds, drafter, num_nodes, 40)
            assert got == plain
            if drafter is drafters[3] and num_nodes == 9:
                assert num_rounds <= plain_rounds / 4


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_output_law_is_the_targets_by_exact_enumeration(temperature):
    """All draws on a grid of uniforms: the law of the first two emitted tokens equals the target's product law."""
    vocab, grid = 4, 64
    target = TableTarget(vocab, seed=3)
    history = [1, 2]
    drafter = RandomDrafter(vocab, seed=5, num_candidates=2, absent_share=0.0)
    tree = draft_fixed(drafter, inputs_for([history]), 6)
    logits = target.over(tree, [history])
    probs = torch.softmax(logits.double() / temperature, -1)
    cdf = probs.cumsum(-1)
    points = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    law = np.zeros((vocab, vocab))
    # First the exact law of the walk, from each node's own distribution ...
    for nodes in itertools.product(range(vocab), repeat=2):
        drawn_at_root, second = nodes
        next_ids = torch.zeros(tree.token_ids.numel(), dtype=torch.int64)
        next_ids[0] = drawn_at_root
        child = ((tree.parents == 0) & (tree.token_ids == drawn_at_root)).nonzero()[:, 0]
        if child.numel():
            next_ids[child[0]] = second
            plan = accept(tree, next_ids)
            first_two = emitted(plan, tree, 0)[:2]
            assert first_two[0] == drawn_at_root and (len(first_two) == 1 or first_two[1] == second)
            law[drawn_at_root, second] += float(probs[0, drawn_at_root] * probs[child[0], second])
        else:
            assert emitted(accept(tree, next_ids), tree, 0) == [drawn_at_root]
            own = torch.softmax(target([*history, drawn_at_root]).double() / temperature, -1)
            law[drawn_at_root, second] += float(probs[0, drawn_at_root] * own[second])
    expected = np.zeros((vocab, vocab))
    for a, b in itertools.product(range(vocab), repeat=2):
        first = torch.softmax(target(history).double() / temperature, -1)[a]
        expected[a, b] = float(first * torch.softmax(target([*history, a]).double() / temperature, -1)[b])
    assert np.allclose(law, expected, atol=1e-12)
    # ... then that the drawing itself inverts those distributions, over a grid of uniforms.
    batch = SamplingBatch.from_params([SamplingParams(temperature=temperature)], [0])
    rows = torch.arange(tree.token_ids.numel()).repeat_interleave(grid)
    drawn = draw_tokens(
        logits[rows], torch.zeros_like(rows), torch.zeros_like(rows), batch, uniforms=points.repeat(len(rows) // grid)
    )
    assert drawn.tolist() == (cdf[rows] <= points.repeat(len(rows) // grid)[:, None]).sum(-1).tolist()


def test_empirical_law_of_seeds_matches_the_target():
    vocab, num = 4, 4000
    target = TableTarget(vocab, seed=3)
    drafter = RandomDrafter(vocab, seed=5, num_candidates=2)
    params = [SamplingParams(temperature=1.0)] * num
    histories = [[1, 2]] * num
    tree = draft_fixed(drafter, inputs_for(histories), 6)
    one = target.over(draft_fixed(drafter, inputs_for(histories[:1]), 6), histories[:1])
    batch = SamplingBatch.from_params(params, range(num))
    plan = verify(tree, one.repeat(num, 1), batch, torch.full((num,), 1))
    first = [emitted(plan, tree, b)[0] for b in range(num)]
    observed = np.bincount(first, minlength=vocab)
    expected = torch.softmax(target([1, 2]).double(), -1).numpy() * num
    chi2 = ((observed - expected) ** 2 / expected).sum()
    assert chi2 < 16.3  # 0.1% quantile at 3 degrees of freedom


def test_ragged_trees_with_roots_between():
    tree = TreeBatch(
        token_ids=torch.tensor([7, 1, 2, 3, 9, 8, 4]),
        parents=torch.tensor([-1, 0, 0, 1, -1, -1, 0]),
        depths=torch.tensor([0, 1, 1, 2, 0, 0, 1]),
        scores=torch.zeros(7),
        cu_nodes=torch.tensor([0, 4, 5, 7]),
        ancestors=torch.tensor(
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
            dtype=torch.bool,
        ),
    )
    assert owners(tree).tolist() == [0, 0, 0, 0, 1, 2, 2]
    plan = accept(tree, torch.tensor([1, 3, 0, 5, 6, 0, 2]))
    assert plan.on_host() == [([0, 1, 3], 5), ([4], 6), ([5], 0)]
    assert plan.accepted_tokens() == [[1, 3], [], []]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 16])
def test_the_hosts_walk_accepts_the_paths_of_the_kernels_reference(num_requests):
    rng, drafter = np.random.default_rng(5), RandomDrafter(24, is_reentrant=True)
    for _ in range(10):
        histories = rng.integers(0, 24, (num_requests, 3)).tolist()
        tree = draft_fixed(drafter, inputs_for(histories), int(rng.integers(0, 13)))
        rows = tree.on_host()
        drawn = torch.full_like(tree.token_ids, -1)
        for row in rng.permutation((tree.parents >= 0).nonzero()[:, 0].numpy()):
            if rng.random() < 0.8:  # some child of most nodes is what the target draws there
                drawn[rows.above[row]] = tree.token_ids[row]
        plan = accept(tree, drawn)
        expected = accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, drawn)
        values = drawn.numpy()
        assert plan == plan_of(rows, accepted_rows(rows, rows.token_ids == values[rows.above]), values)
        assert plan.on_host() == expected.on_host()
        assert plan.accepted_tokens() == expected.accepted_tokens()
