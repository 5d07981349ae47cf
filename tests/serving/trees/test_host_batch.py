"""On the CPU, batches get exactly the trees, scores, cells and paths that the tensor builder and walk give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees import builder as tree_builder
from paceline.serving.trees.builder import Leaves, RankedCandidates
from paceline.serving.trees.host_batch import BatchCandidates, RankedBatch, check_proposal, pack_trees
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept, accept_rows

KINDS = {
    "plain": {},
    "ragged": {"has_widths": True, "absent": 0.2},
    "nearly empty": {"has_widths": True, "absent": 0.8},
    "ties": {"has_ties": True},
    "ragged ties": {"has_ties": True, "has_widths": True, "absent": 0.2},
    "equal siblings": {"vocab": 3, "absent": 0.1},
    "equal siblings with ties": {"vocab": 3, "has_ties": True, "has_widths": True},
}


def proposal(rng, num_nodes, slots, width, *, has_widths=False, has_ties=False, absent=0.0, vocab=10**6):
    logprobs = -rng.exponential(1.0, (num_nodes, slots, width))
    if has_ties:
        logprobs = np.round(logprobs * 2) / 2
    logprobs = -np.sort(-logprobs, axis=2).astype(np.float32)
    logprobs[rng.random(logprobs.shape) < absent] = -np.inf
    token_ids = rng.integers(0, vocab, logprobs.shape)
    widths = torch.from_numpy(rng.integers(0, width + 1, (num_nodes, slots))) if has_widths else None
    by_slot = torch.from_numpy(np.ascontiguousarray(logprobs.swapaxes(0, 1)))  # drafters may stack slot after slot
    return Proposal(token_ids=torch.from_numpy(token_ids), logprobs=by_slot.transpose(0, 1), widths=widths)


def packed(p):
    return Proposal(token_ids=p.token_ids, logprobs=p.logprobs.contiguous(), widths=p.widths)


def corrections(rng, num_nodes, slots, has_ties):
    kappa = rng.normal(0.0, 0.5, (num_nodes, slots, tree_builder.NUM_RANK_CLASSES)).astype(np.float32)
    return np.round(kappa * 2) / 2 if has_ties else -abs(kappa)  # rises end in ties at log-probability 0


def both(
    rng: np.random.Generator, num_requests: int, limit: int, *, is_product: bool, is_reentrant: bool, kind: str
) -> tuple[RankedBatch, RankedCandidates]:
    """The same proposals ranked by either implementation."""
    options = KINDS[kind]
    slots, width = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    first = proposal(rng, num_requests, slots, width, **options)
    kappa = corrections(rng, num_requests, slots, "has_ties" in options)
    host = BatchCandidates.of(first, is_product, limit, kappa)
    reference = tree_builder.block_candidates(packed(first), is_product, limit, torch.from_numpy(kappa))
    if is_reentrant:
        leaves = host.leaves(max_frontier=3)
        owners, masses = host.owners_and_masses(leaves)
        expected = tree_builder.choose_frontier(reference, 3)
        frontier = host.frontier(leaves)
        assert frontier.request.tolist() == expected.frontier.request.tolist()
        assert masses == pytest.approx(expected.scores.double().exp().tolist(), rel=1e-12)
        if "has_ties" not in options and not is_product:  # topk leaves open which of equal leaves it takes
            assert frontier.slot.tolist() == expected.frontier.slot.tolist()
            assert frontier.token_ids.tolist() == expected.frontier.token_ids.tolist()
        columns = np.arange(len(leaves)) - np.searchsorted(owners, owners)
        kept = columns < rng.integers(0, 4, num_requests)[owners]  # the budget takes the heaviest of each request
        leaves, owners, columns = leaves[kept], owners[kept], columns[kept]
        if len(leaves):
            block = proposal(rng, len(leaves), slots, width, **options)
            kappa = corrections(rng, len(leaves), slots, "has_ties" in options)
            offset = owners * reference.scores.shape[1]
            same = Leaves(
                frontier=host.frontier(leaves),
                candidates=torch.from_numpy(leaves - offset),
                columns=torch.from_numpy(columns),
                scores=reference.scores[torch.from_numpy(owners), torch.from_numpy(leaves - offset)],
            )
            reference = tree_builder.append_block(reference, same, packed(block), torch.from_numpy(kappa))
            host = host.append(leaves, block, kappa)
    return host.ranked(limit), tree_builder.rank_candidates(reference, limit)


def assert_same_trees(host: TreeBatch, reference: TreeBatch) -> None:
    for name in ("token_ids", "parents", "depths", "scores", "cu_nodes", "ancestors"):
        ours, theirs = getattr(host, name), getattr(reference, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert host.counts == reference.cu_nodes.diff().tolist()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_equal_those_of_the_tensor_builder(kind, is_product, is_reentrant):
    rng = np.random.default_rng(1)
    for num_requests in [1, 2, 3, 4, 5, 16, 17] * 3:
        limit = int(rng.integers(1, 17))
        host, reference = both(rng, num_requests, limit, is_product=is_product, is_reentrant=is_reentrant, kind=kind)
        masses = np.full((num_requests, limit), -np.inf, dtype=np.float32)
        masses[host.owners, host.ranks] = host.scores
        num_found = min(limit, reference.scores.shape[1])
        assert (masses[:, :num_found] == reference.scores[:, :num_found].numpy()).all()
        num_nodes = rng.integers(0, limit + 1, num_requests)
        anchors = torch.from_numpy(rng.integers(0, 50, num_requests))
        tree, cells = pack_trees([(host, range(num_requests))], num_nodes, anchors)
        expected, expected_cells = tree_builder.select_tree(reference, anchors, num_nodes.tolist())
        assert_same_trees(tree, expected)
        assert torch.equal(cells, expected_cells)


@pytest.mark.parametrize("seed", range(20))
def test_groups_and_undrafted_requests_come_back_in_round_order(seed):
    rng = np.random.default_rng(seed)
    order = rng.permutation(9).tolist()
    groups, rest = [order[:4], order[4:6], order[6:7]], order[7:]
    num_nodes, anchors = rng.integers(0, 9, 9), torch.from_numpy(rng.integers(0, 50, 9))
    parts, trees, cells = [], [], []
    for number, rows in enumerate(groups):
        host, reference = both(rng, len(rows), 8, is_product=number == 1, is_reentrant=number != 1, kind="ragged")
        parts.append((host, rows))
        tree, tree_cells = tree_builder.select_tree(reference, anchors[rows], num_nodes[rows].tolist())
        trees.append((tree, rows))
        cells.append(tree_cells)
    trees.append((TreeBatch.roots(anchors[rest]), rest))
    cells.append(torch.full((len(rest),), -1))
    tree, tree_cells = pack_trees(parts, num_nodes, anchors)
    index, _ = tree_builder.merge_order([(t.cu_nodes, rows) for t, rows in trees], 9)
    width = int(tree.ancestors.shape[1])  # the reference is as wide as the widest part before it was cut
    expected = tree_builder.merge_trees(trees, 9)
    assert not expected.ancestors[:, width:].any()
    expected.ancestors = expected.ancestors[:, :width]
    assert_same_trees(tree, expected)
    assert torch.equal(tree_cells, torch.cat(cells)[index])


@pytest.mark.parametrize("kind", ["plain", "ragged", "ties"])
def test_batches_accept_the_paths_of_the_tensor_walk(kind):
    rng = np.random.default_rng(5)
    for num_requests in [2, 3, 16] * 20:
        host, _ = both(rng, num_requests, 12, is_product=False, is_reentrant=True, kind=kind)
        anchors = torch.from_numpy(rng.integers(0, 50, num_requests))
        tree, _ = pack_trees([(host, range(num_requests))], rng.integers(0, 13, num_requests), anchors)
        start = torch.repeat_interleave(tree.cu_nodes[:-1], tree.cu_nodes.diff())
        drawn = torch.full_like(tree.token_ids, -1)
        for row in rng.permutation((tree.parents >= 0).nonzero()[:, 0].numpy()):
            if rng.random() < 0.8:  # some child of most nodes is what the target draws there
                drawn[start[row] + tree.parents[row]] = tree.token_ids[row]
        plan = accept(tree, drawn)
        expected = accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, drawn)
        assert plan.on_host() == expected.on_host()
        assert plan.accepted_tokens(tree) == expected.accepted_tokens(tree)
        depth = plan.path.shape[1]
        assert torch.equal(plan.path, expected.path[:, :depth]) and (expected.path[:, depth:] == -1).all()
        assert torch.equal(plan.num_accepted_tokens, expected.num_accepted_tokens)
        assert torch.equal(plan.bonus_token_ids, expected.bonus_token_ids)


def test_layouts_shared_between_rounds_cannot_be_written():
    rng = np.random.default_rng(0)
    first = proposal(rng, 2, 2, 2, vocab=2)
    kappa = np.zeros((2, 2, 3), dtype=np.float32)
    before = BatchCandidates.of(first, False, 8, kappa)
    columns = before.columns.copy()
    before.ranked(8)  # merges equal siblings
    assert (before.columns == columns).all()
    assert (BatchCandidates.of(first, False, 8, kappa).columns == columns).all()


@pytest.mark.parametrize("token_id", [-1, 7, 2**62, -(2**62)])
def test_token_ids_outside_the_vocabulary_are_named(token_id):
    p = Proposal(token_ids=torch.tensor([[[0, token_id, 6]]]), logprobs=torch.full((1, 1, 3), -1.0), widths=None)
    with pytest.raises(ValueError, match=rf"must be in \[0, 7\), got .*{token_id}"):
        check_proposal(p, 7)
    check_proposal(p, None)
