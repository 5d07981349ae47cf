"""A round's trees cut on the device are the heaviest nodes of all requests, each tree closed under ancestors."""

import numpy as np
import pytest
import torch

from paceline.serving.target_model.graph_capture import Staging
from paceline.serving.trees.device import DeviceCandidates, LargestTrees
from paceline.serving.trees.round_trees import RoundTrees
from tests.helpers.static_kernels import STATIC_KERNELS
from tests.helpers.trees import VOCAB, TwinDrafter, inputs_for

NODES, REQUESTS, ROWS = 8, 5, 40


def made(rng, count):
    """Static trees of `count` requests in shuffled lines, their staging, and the trees by line."""
    staging = Staging(torch.device("cpu"))
    trees = RoundTrees(
        staging, max_requests=REQUESTS, padding_line=REQUESTS, max_nodes=NODES, device=torch.device("cpu")
    )
    histories = [rng.integers(VOCAB, size=3).tolist() for _ in range(count)]
    proposal = TwinDrafter(VOCAB, int(rng.integers(1000))).propose(inputs_for(histories))
    candidates = DeviceCandidates.of(proposal, False, NODES, torch.zeros(*proposal.logprobs.shape[:2], 3))
    anchors = torch.tensor([h[-1] for h in histories])
    largest = LargestTrees.build(STATIC_KERNELS, candidates, anchors, NODES, 8)
    lines = torch.from_numpy(rng.permutation(count))
    facts = torch.zeros(count, 3, dtype=torch.float64)
    trees.put(lines, largest, torch.arange(count).double(), facts)
    return staging, trees, {int(line): i for i, line in enumerate(lines)}, largest, anchors[lines.argsort()].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_the_heaviest_nodes_of_all_requests_are_taken(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, REQUESTS + 1))
    staging, trees, of_line, largest, anchors = made(rng, count)
    limits = [int(rng.choice([0, NODES])) for _ in range(count)]
    floors = [min(int(rng.integers(0, 3)), limit) for limit in limits]
    budget = int(rng.integers(0, ROWS - count + 1))
    trees.decide(anchors, limits, floors, budget)
    staging.send()
    cut = trees.cut(ROWS, REQUESTS)

    masses = largest.masses.numpy()
    nodes = [
        (-masses[of_line[line], i] - 2.0 * (i < floors[line]), line)
        for line in range(count)
        for i in range(limits[line])
        if masses[of_line[line], i] > 0
    ]
    taken = sorted(nodes)[:budget]
    counts = [1 + sum(line == owner for _, owner in taken) for line in range(count)]
    assert np.diff(cut.cu_rows.numpy()).tolist() == counts + [0] * (REQUESTS - count)
    expected = largest.cut([counts[of] - 1 for of in sorted(range(count), key=lambda line: of_line[line])])
    for line in range(count):
        start, stop = cut.cu_rows[line], cut.cu_rows[line + 1]
        first, last = expected.cu_nodes[of_line[line]], expected.cu_nodes[of_line[line] + 1]
        for name in ("token_ids", "parents", "depths", "scores", "cells"):
            assert torch.equal(getattr(cut, name)[start:stop], getattr(expected, name)[first:last]), name
        width = expected.ancestors.shape[1]
        assert torch.equal(cut.ancestors[start:stop, :width], expected.ancestors[first:last])
        assert (cut.owners[start:stop] == line).all()
    assert not cut.is_row[cut.cu_rows[-1] :].any() and not cut.ancestors[cut.cu_rows[-1] :].any()


def test_a_request_without_a_draft_is_its_root():
    staging = Staging(torch.device("cpu"))
    trees = RoundTrees(staging, max_requests=2, padding_line=2, max_nodes=3, device=torch.device("cpu"))
    trees.decide([7, 9], [3, 3], [1, 1], 4)
    staging.send()
    cut = trees.cut(6, 2)
    assert cut.token_ids.tolist() == [7, 9, 0, 0, 0, 0] and cut.cu_rows.tolist() == [0, 1, 2]
    assert (
        cut.parents[:2].tolist() == [-1, -1]
        and cut.cells[:2].tolist() == [-1, -1]
        and cut.scores[:2].tolist() == [0, 0]
    )
