"""Building, packing and accepting chain on device tensors: what one leaves is what the next one takes, with no host read."""

import pytest
import torch

from paceline.kernels.reference import tree_accept as tree_accept_ref
from paceline.kernels.reference import tree_build as tree_build_ref
from paceline.kernels.reference.tree_build import pack_trees, unpack_bits

pytest.importorskip("triton")
from paceline.kernels.gpu import tree_accept, tree_build
from paceline.kernels.gpu.launch import is_interpreted

MAX_NODES, MAX_DEPTH, CANDIDATES, VOCAB = 12, 5, 32, 6
TWINS = {
    "reference": (tree_build_ref, tree_accept_ref),
    "triton": (tree_build, tree_accept),
}


def _inputs(batch, seed, device):
    g = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, CANDIDATES), -1)
    parents[:, 4:] = torch.arange(4, CANDIDATES) // 2 - 2
    depths, scores = torch.ones(batch, CANDIDATES, dtype=torch.int64), -torch.rand(batch, CANDIDATES, generator=g)
    for c in range(4, CANDIDATES):
        depths[:, c] = depths.gather(1, parents[:, c : c + 1])[:, 0] + 1
        scores[:, c] += scores.gather(1, parents[:, c : c + 1])[:, 0]
    rows = batch * (MAX_NODES + 1)
    tensors = {
        "scores": scores,
        "parents": parents,
        "token_ids": torch.randint(0, VOCAB, (batch, CANDIDATES), generator=g),
        "depths": depths,
        "anchor_token_ids": torch.arange(batch),
        "most": torch.full((batch,), MAX_NODES),
        "num_nodes": torch.randint(0, MAX_NODES + 1, (batch,), generator=g),
        "next_token_ids": torch.randint(0, VOCAB, (rows,), generator=g),
    }
    return {name: t.to(device) for name, t in tensors.items()}


def _round(twin, t):
    build, accept = TWINS[twin]
    batch = t["scores"].shape[0]
    trees = build.build_trees(
        scores=t["scores"], parents=t["parents"], token_ids=t["token_ids"], depths=t["depths"],
        anchor_token_ids=t["anchor_token_ids"], num_nodes=t["most"], max_nodes=MAX_NODES, max_depth=MAX_DEPTH,
    )  # fmt: skip
    # A smaller tree is a prefix of the full one, so a budget needs no second build.
    cu_rows = torch.nn.functional.pad((torch.minimum(t["num_nodes"], trees.num_nodes) + 1).cumsum(0), (1, 0))
    packed = pack_trees(trees, cu_rows, batch * (MAX_NODES + 1))
    found = accept.accept_rows(
        token_ids=packed.token_ids, cu_rows=cu_rows, ancestors=unpack_bits(packed.ancestor_bits, MAX_NODES + 1),
        next_token_ids=t["next_token_ids"],
    )  # fmt: skip
    return cu_rows, found.path, found.path_token_ids, found.num_accepted_tokens, found.bonus_token_ids


def test_a_round_on_device_tensors_agrees_with_the_references():
    accepted = 0
    for seed in range(3):
        inputs = _inputs(4, seed, "cuda" if torch.cuda.is_available() else "cpu")
        pair = [_round(twin, inputs) for twin in TWINS]
        for mine, theirs in zip(*pair, strict=True):
            assert torch.equal(mine, theirs)
        accepted += int(pair[0][3].sum())
    assert accepted > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or is_interpreted(), reason="needs a CUDA device")
def test_a_captured_round_replays_on_new_inputs():
    inputs = _inputs(4, 0, "cuda")
    _round("triton", inputs)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _round("triton", inputs)
    for seed in range(1, 4):
        fresh = _inputs(4, seed, "cuda")
        for name, tensor in fresh.items():
            inputs[name].copy_(tensor)
        graph.replay()
        for mine, theirs in zip(found, _round("reference", fresh), strict=True):
            assert torch.equal(mine, theirs)
