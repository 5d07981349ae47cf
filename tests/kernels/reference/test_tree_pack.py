"""Packed trees are serving's packed trees, followed by padding."""

import pytest
import torch

from paceline.kernels.reference.tree_build import build_trees, pack_trees, unpack_bits
from paceline.serving.trees.device import DeviceCandidates
from tests.helpers.trees import on_host, trees_of


def _candidates(batch, count):
    g = torch.Generator().manual_seed(3)
    parents = torch.arange(count).repeat(batch, 1) // 2 - 1
    depths, scores = torch.ones(batch, count, dtype=torch.int64), -torch.rand(batch, count, generator=g)
    for c in range(2, count):
        depths[:, c] = depths[:, (c // 2) - 1] + 1
        scores[:, c] += scores[:, (c // 2) - 1]
    tokens = torch.arange(count).repeat(batch, 1)
    return DeviceCandidates(token_ids=tokens, parents=parents, scores=scores, depths=depths, cells=tokens)


@pytest.mark.parametrize("padding", [0, 7])
def test_rows_equal_the_packed_trees_of_serving(padding):
    candidates, nodes, anchors = _candidates(3, 40), [12, 0, 33], torch.tensor([100, 101, 102])
    trees = build_trees(
        scores=candidates.scores, parents=candidates.parents, token_ids=candidates.token_ids, depths=candidates.depths,
        anchor_token_ids=anchors, num_nodes=torch.tensor([35] * 3), max_nodes=35, max_depth=8,
    )  # fmt: skip
    expected = trees_of(on_host(candidates).ranked(35), anchors, nodes)
    count = int(expected.cu_nodes[-1])
    packed = pack_trees(trees, expected.cu_nodes, count + padding)
    assert torch.equal(packed.token_ids[:count], expected.token_ids)
    assert torch.equal(packed.depths[:count], expected.depths)
    assert torch.equal(packed.request[:count], torch.repeat_interleave(torch.tensor([n + 1 for n in nodes])))
    width = expected.ancestors.shape[1]
    assert torch.equal(unpack_bits(packed.ancestor_bits, width)[:count], expected.ancestors)
    assert packed.is_row.tolist() == [True] * count + [False] * padding
    assert not packed.token_ids[count:].any() and not packed.depths[count:].any() and not packed.local[count:].any()


def test_offsets_of_another_batch_are_refused():
    candidates = _candidates(2, 4)
    trees = build_trees(
        scores=candidates.scores, parents=candidates.parents, token_ids=candidates.token_ids, depths=candidates.depths,
        anchor_token_ids=torch.zeros(2, dtype=torch.int64), num_nodes=torch.tensor([4, 4]), max_nodes=4, max_depth=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cu_nodes must have one entry more than the 2 trees"):
        pack_trees(trees, torch.tensor([0, 3]), 3)
