"""The builder returns exactly the best tree of every size."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.candidates import DEPTH, PARENT, TOKEN, Candidates, HostProposal, pack_trees
from tests.helpers.trees import candidates_of, trees_of


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
        num_nodes = rng.integers(0, 17, batch).tolist()
        anchors = torch.from_numpy(rng.integers(0, 50, batch))
        tree = trees_of(candidates_of(p, 16, is_product=is_product).ranked(16), anchors, num_nodes)
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
        kappa = rng.normal(0, 0.4, (batch, 4, 3)).astype(np.float32) if has_kappa else None
        ranked = candidates_of(p, 16, is_product=True, kappa=kappa).ranked(16)
        num_nodes = rng.integers(0, 17, batch).tolist()
        tree = trees_of(ranked, torch.from_numpy(rng.integers(0, 50, batch)), num_nodes)
        for b in range(batch):
            paths, scores = tree_paths(tree, b)
            oracle, ranks = edged_paths(p, b, kappa)
            assert len(set(paths)) == len(paths)
            assert np.allclose(scores, sorted(oracle.values(), reverse=True)[: num_nodes[b]], atol=1e-5)
            assert np.allclose([oracle[path] for path in paths], scores, atol=1e-5)
            own = tree.cells[tree.cu_nodes[b] + 1 : tree.cu_nodes[b + 1]].tolist()
            assert own == [3 * (len(path) - 1) + min(ranks[path], 2) for path in paths]


def test_equal_scores_below_every_parent_change_no_tree():
    rng = np.random.default_rng(2)
    p = proposal(rng, 3, 4, 4)
    same = dataclasses.replace(p, edge_logprobs=p.logprobs[:, 1:, None].expand(-1, -1, 4, -1))
    ranked = [candidates_of(x, 12, is_product=True).ranked(12) for x in (p, same)]
    trees = [trees_of(r, torch.arange(3), [12] * 3) for r in ranked]
    assert [tree_paths(trees[0], b) for b in range(3)] == [tree_paths(trees[1], b) for b in range(3)]


@pytest.mark.parametrize("batch", [1, 5])
def test_second_block_continues_below_its_leaves(batch):
    rng = np.random.default_rng(7)
    p = proposal(rng, batch, 3, 3)
    cands = candidates_of(p, 32, is_product=False)
    leaves = cands.leaves(3)
    frontier = cands.frontier(leaves, torch.device("cpu"))
    block = proposal(rng, len(leaves), 3, 3)
    more = cands.append(leaves, HostProposal.read(block))
    tree = trees_of(more.ranked(32), torch.zeros(batch, dtype=torch.int64), [32] * batch)
    for b in range(batch):
        oracle = dict(all_paths(p, b, False))
        first = dict(oracle)
        for f in range(len(leaves)):
            if frontier.request[f] != b:
                continue
            slot, token = int(frontier.slot[f]), int(frontier.token_ids[f])
            prefix = (*p.token_ids[b, :slot, 0].tolist(), token)
            assert not any(path[: len(prefix)] == prefix and len(path) > len(prefix) for path in first)
            for path, score in all_paths(block, f, False).items():
                oracle[prefix + path] = first[prefix] + score
        paths, scores = tree_paths(tree, b)
        assert np.allclose(scores, sorted(oracle.values(), reverse=True)[:32], atol=1e-5)
        assert np.allclose([oracle[path] for path in paths], scores, atol=1e-5)
    assert (tree.cells[tree.parents < 0] == -1).all() and (tree.cells[tree.parents >= 0] >= 0).all()


def test_siblings_with_the_same_token_are_merged_and_keep_all_children():
    # root -> 5 (a), root -> 5 (b); a -> 6, b -> 6, b -> 7
    columns = np.zeros((5, 6), dtype=np.int64)
    columns[TOKEN], columns[PARENT], columns[DEPTH] = [-1, 5, 5, 6, 6, 7], [0, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2]
    scores = np.array([0.0, -0.1, -0.2, -0.5, -0.3, -0.4], dtype=np.float32)
    tree = trees_of(Candidates(1, columns, scores, 1, (1, 1)).ranked(5), torch.tensor([9]), [5])
    paths, scores = tree_paths(tree, 0)
    assert paths == [(5,), (5, 6), (5, 7)]
    assert np.allclose(scores, [-0.1, -0.3, -0.4])


def test_ties_keep_ancestors():
    p = Proposal(token_ids=torch.arange(8).view(1, 4, 2), logprobs=torch.zeros(1, 4, 2), widths=None)
    for n in range(9):
        tree_paths(trees_of(candidates_of(p, 8, is_product=False).ranked(8), torch.tensor([1]), [n]), 0)


def test_nothing_proposed_gives_roots():
    p = Proposal(
        token_ids=torch.zeros(2, 3, 2, dtype=torch.int64), logprobs=torch.full((2, 3, 2), -torch.inf), widths=None
    )
    cands = candidates_of(p, 4, is_product=False)
    assert len(cands.leaves(4)) == 0
    tree = trees_of(cands.ranked(4), torch.tensor([3, 4]), [4, 4])
    assert tree.token_ids.tolist() == [3, 4] and tree.cu_nodes.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_groups_and_undrafted_requests_come_back_in_round_order(seed):
    rng = np.random.default_rng(seed)
    order = rng.permutation(9).tolist()
    num_nodes, anchors = rng.integers(0, 9, 9), torch.from_numpy(rng.integers(0, 50, 9))
    parts, alone = [], {}
    for number, rows in enumerate([order[:4], order[4:6], order[6:7]]):
        ranked = candidates_of(proposal(rng, len(rows), 3, 3), 8, is_product=number == 1).ranked(8)
        parts.append((ranked, rows))
        tree = trees_of(copy.deepcopy(ranked), anchors[rows], num_nodes[rows].tolist())
        alone |= {row: tree_paths(tree, i) for i, row in enumerate(rows)}
    tree = pack_trees(parts, num_nodes, anchors)
    assert tree.token_ids[tree.cu_nodes[:-1]].tolist() == anchors.tolist()
    for b in range(9):
        assert tree_paths(tree, b) == alone.get(b, ([], []))


def test_layouts_shared_between_rounds_cannot_be_written():
    first = proposal(np.random.default_rng(0), 2, 2, 2, vocab=2)
    before = candidates_of(first, 8, is_product=False)
    columns = before.columns.copy()
    before.ranked(8)  # merges equal siblings
    assert (before.columns == columns).all()
    assert (candidates_of(first, 8, is_product=False).columns == columns).all()


@pytest.mark.parametrize("token_id", [-1, 7, 2**62, -(2**62)])
def test_token_ids_outside_the_vocabulary_are_named(token_id):
    p = Proposal(token_ids=torch.tensor([[[0, token_id, 6]]]), logprobs=torch.full((1, 1, 3), -1.0), widths=None)
    with pytest.raises(ValueError, match=rf"must be in \[0, 7\), got .*{token_id}"):
        HostProposal.read(p, 7)
    HostProposal.read(p, None)


def test_calibration_shifts_scores_but_never_above_the_parent():
    p = proposal(np.random.default_rng(0), 2, 4, 4, absent=0)
    cands = candidates_of(p, 16, is_product=False, kappa=np.full((2, 4, 3), 3.0, dtype=np.float32))
    assert (cands.scores <= cands.scores[cands.columns[PARENT]]).all()
