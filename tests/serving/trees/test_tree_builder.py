"""The builder returns exactly the best tree of every size."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.builder import (
    Candidates,
    append_block,
    block_candidates,
    choose_frontier,
    merge_trees,
    rank_candidates,
    select_tree,
)


def proposal(rng, batch, slots, width, vocab=50, absent=0.2, has_widths=False):
    token_ids = np.stack([[rng.permutation(vocab)[:width] for _ in range(slots)] for _ in range(batch)])
    logprobs = -np.sort(rng.exponential(1.0, (batch, slots, width)), axis=2).astype(np.float32)
    keep = rng.integers(1, width + 1, (batch, slots)) if absent else np.full((batch, slots), width)
    logprobs[np.arange(width) >= keep[:, :, None]] = -np.inf
    widths = torch.from_numpy(rng.integers(0, width + 1, (batch, slots))) if has_widths else None
    return Proposal(token_ids=torch.from_numpy(token_ids), logprobs=torch.from_numpy(logprobs), widths=widths)


def all_paths(p, b, is_product, leaf_blocks=()):
    """Brute force: {path of tokens: best score} by enumeration."""
    slots, width = p.logprobs.shape[1:]
    keep = [width if p.widths is None else int(p.widths[b, s]) for s in range(slots)]
    options = [
        [(int(p.token_ids[b, s, k]), float(p.logprobs[b, s, k]), k) for k in range(keep[s])] for s in range(slots)
    ]
    out = {}
    for depth in range(1, slots + 1):
        for combo in itertools.product(*options[:depth]):
            if not is_product and any(k != 0 for _, _, k in combo[:-1]):
                continue
            score = sum(s for _, s, _ in combo)
            path = tuple(t for t, _, _ in combo)
            if score > -np.inf:
                out[path] = max(score, out.get(path, -np.inf))
    return out


def tree_paths(tree, b):
    lo, hi = tree.cu_nodes[b].item(), tree.cu_nodes[b + 1].item()
    parents, tokens = tree.parents[lo:hi].tolist(), tree.token_ids[lo:hi].tolist()
    paths = [()]
    for i in range(1, hi - lo):
        assert 0 <= parents[i] < i
        paths.append((*paths[parents[i]], tokens[i]))
        assert tree.depths[lo + i] == len(paths[i])
    for i in range(hi - lo):
        ancestors, j = set(), i
        while j >= 0:
            ancestors.add(j)
            j = parents[j]
        assert set(tree.ancestors[lo + i].nonzero()[:, 0].tolist()) == ancestors
    assert parents[0] == -1
    return paths[1:], tree.scores[lo + 1 : hi].tolist()


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("has_widths", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_tree_is_the_top_n_of_all_paths(is_product, has_widths, batch):
    rng = np.random.default_rng(batch)
    for _ in range(3):
        p = proposal(rng, batch, 4, 4, has_widths=has_widths)
        ranked = rank_candidates(block_candidates(p, is_product, 16), 16)
        num_nodes = rng.integers(0, 17, batch).tolist()
        anchors = torch.from_numpy(rng.integers(0, 50, batch))
        tree, _ = select_tree(ranked, anchors, num_nodes)
        assert tree.cu_nodes[-1] == tree.token_ids.numel() == tree.ancestors.shape[0]
        for b in range(batch):
            paths, scores = tree_paths(tree, b)
            oracle = all_paths(p, b, is_product)
            best = sorted(oracle.values(), reverse=True)[: num_nodes[b]]
            assert len(set(paths)) == len(paths)
            assert np.allclose(scores, best, atol=1e-5)
            assert np.allclose([oracle[path] for path in paths], scores, atol=1e-5)


def edged(rng, p):
    """The proposal with scores of its own below every parent, in no order, some absent."""
    batch, slots, width = p.logprobs.shape
    edges = -rng.exponential(1.0, (batch, slots - 1, width, width)).astype(np.float32)
    edges[rng.random(edges.shape) < 0.15] = -np.inf
    return dataclasses.replace(p, edge_logprobs=torch.from_numpy(edges))


def edged_paths(p, b, kappa=None):
    """Brute force: {path of tokens: score}, {path: rank of its last token below its parent}."""
    slots, width = p.logprobs.shape[1:]
    out, ranks = {}, {}
    for depth in range(1, slots + 1):
        for combo in itertools.product(range(width), repeat=depth):
            score = 0.0
            for s, k in enumerate(combo):
                own = p.logprobs[b, 0] if s == 0 else p.edge_logprobs[b, s - 1, combo[s - 1]]
                rank = int((own > own[k]).sum())
                keep = width if p.widths is None else int(p.widths[b, s])
                shift = 0.0 if kappa is None else float(kappa[b, s, min(rank, 2)])
                score += min(0.0, float(own[k]) + shift) if rank < keep else -np.inf
            if score > -np.inf:
                path = tuple(int(p.token_ids[b, s, k]) for s, k in enumerate(combo))
                out[path], ranks[path] = score, rank
    return out, ranks


@pytest.mark.parametrize("has_widths", [False, True])
@pytest.mark.parametrize("has_kappa", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_scores_that_depend_on_the_parent_give_the_top_n_of_all_paths(has_widths, has_kappa, batch):
    rng = np.random.default_rng(batch)
    for _ in range(3):
        p = edged(rng, proposal(rng, batch, 4, 4, absent=0, has_widths=has_widths))
        kappa = torch.from_numpy(rng.normal(0, 0.4, (batch, 4, 3)).astype(np.float32)) if has_kappa else None
        ranked = rank_candidates(block_candidates(p, True, 16, kappa), 16)
        num_nodes = rng.integers(0, 17, batch).tolist()
        tree, cells = select_tree(ranked, torch.from_numpy(rng.integers(0, 50, batch)), num_nodes)
        for b in range(batch):
            paths, scores = tree_paths(tree, b)
            oracle, ranks = edged_paths(p, b, kappa)
            assert len(set(paths)) == len(paths)
            assert np.allclose(scores, sorted(oracle.values(), reverse=True)[: num_nodes[b]], atol=1e-5)
            assert np.allclose([oracle[path] for path in paths], scores, atol=1e-5)
            own = cells[tree.cu_nodes[b] + 1 : tree.cu_nodes[b + 1]].tolist()
            assert own == [3 * (len(path) - 1) + min(ranks[path], 2) for path in paths]


def test_equal_scores_below_every_parent_change_no_tree():
    rng = np.random.default_rng(2)
    p = proposal(rng, 3, 4, 4)
    same = dataclasses.replace(p, edge_logprobs=p.logprobs[:, 1:, None].expand(-1, -1, 4, -1))
    trees = [
        select_tree(rank_candidates(block_candidates(x, True, 12), 12), torch.arange(3), [12] * 3)[0] for x in (p, same)
    ]
    assert [tree_paths(trees[0], b) for b in range(3)] == [tree_paths(trees[1], b) for b in range(3)]


@pytest.mark.parametrize("batch", [1, 5])
def test_second_block_continues_below_its_leaves(batch):
    rng = np.random.default_rng(7)
    p = proposal(rng, batch, 3, 3)
    cands = block_candidates(p, False, 32)
    leaves = choose_frontier(cands, 3)
    block = proposal(rng, leaves.candidates.numel(), 3, 3)
    tree, cells = select_tree(
        rank_candidates(append_block(cands, leaves, block), 32), torch.zeros(batch, dtype=torch.int64), [32] * batch
    )
    for b in range(batch):
        oracle = dict(all_paths(p, b, False))
        first = dict(oracle)
        for f in range(leaves.candidates.numel()):
            if leaves.frontier.request[f] != b:
                continue
            slot, token = int(leaves.frontier.slot[f]), int(leaves.frontier.token_ids[f])
            prefix = (*p.token_ids[b, :slot, 0].tolist(), token)
            assert not any(path[: len(prefix)] == prefix and len(path) > len(prefix) for path in first)
            for path, score in all_paths(block, f, False).items():
                oracle[prefix + path] = first[prefix] + score
        paths, scores = tree_paths(tree, b)
        assert np.allclose(scores, sorted(oracle.values(), reverse=True)[:32], atol=1e-5)
        assert np.allclose([oracle[path] for path in paths], scores, atol=1e-5)
    assert (cells[tree.parents < 0] == -1).all() and (cells[tree.parents >= 0] >= 0).all()


def test_siblings_with_the_same_token_are_merged_and_keep_all_children():
    # root -> 5 (a), root -> 5 (b); a -> 6, b -> 6, b -> 7
    cands = Candidates(
        token_ids=torch.tensor([[5, 5, 6, 6, 7]]),
        parents=torch.tensor([[-1, -1, 0, 1, 1]]),
        scores=torch.tensor([[-0.1, -0.2, -0.5, -0.3, -0.4]]),
        depths=torch.tensor([[1, 1, 2, 2, 2]]),
        cells=torch.zeros(1, 5, dtype=torch.int64),
    )
    tree, _ = select_tree(rank_candidates(cands, 5), torch.tensor([9]), [5])
    paths, scores = tree_paths(tree, 0)
    assert paths == [(5,), (5, 6), (5, 7)]
    assert np.allclose(scores, [-0.1, -0.3, -0.4])


def test_ties_keep_ancestors():
    p = Proposal(token_ids=torch.arange(8).view(1, 4, 2), logprobs=torch.zeros(1, 4, 2), widths=None)
    for n in range(9):
        tree_paths(select_tree(rank_candidates(block_candidates(p, False, 8), 8), torch.tensor([1]), [n])[0], 0)


def test_nothing_proposed_gives_roots():
    p = Proposal(
        token_ids=torch.zeros(2, 3, 2, dtype=torch.int64), logprobs=torch.full((2, 3, 2), -torch.inf), widths=None
    )
    cands = block_candidates(p, False, 4)
    assert choose_frontier(cands, 4).candidates.numel() == 0
    tree, _ = select_tree(rank_candidates(cands, 4), torch.tensor([3, 4]), [4, 4])
    assert tree.token_ids.tolist() == [3, 4] and tree.cu_nodes.tolist() == [0, 1, 2]


def test_merge_brings_parts_into_request_order():
    rng = np.random.default_rng(3)
    trees = []
    for batch in (2, 3):
        ranked = rank_candidates(block_candidates(proposal(rng, batch, 3, 3), False, 8), 8)
        trees.append(select_tree(ranked, torch.arange(batch) + 10 * batch, rng.integers(0, 8, batch).tolist())[0])
    merged = merge_trees([(trees[0], [3, 1]), (trees[1], [0, 2, 4])], 5)
    for b, (part, i) in enumerate([(1, 0), (0, 1), (1, 1), (0, 0), (1, 2)]):
        assert tree_paths(merged, b) == tree_paths(trees[part], i)
        assert merged.token_ids[merged.cu_nodes[b]] == trees[part].token_ids[trees[part].cu_nodes[i]]


def test_calibration_shifts_scores_but_never_above_the_parent():
    p = proposal(np.random.default_rng(0), 2, 4, 4, absent=0)
    cands = block_candidates(p, False, 16, torch.full((2, 4, 3), 3.0))
    parents = torch.where(cands.parents < 0, 0.0, cands.scores.gather(1, cands.parents.clamp(min=0)))
    assert (cands.scores <= parents).all()
