"""Build, budget and accept chain on device tensors: what one leaves is what the next one takes, with no host read."""

import pytest
import torch

from paceline.kernels.reference import tree_accept as tree_accept_ref
from paceline.kernels.reference import tree_budget as tree_budget_ref
from paceline.kernels.reference import tree_build as tree_build_ref

pytest.importorskip("triton")
from paceline.kernels.gpu import tree_accept, tree_budget, tree_build
from paceline.kernels.gpu.launch import is_interpreted

MAX_NODES, MAX_DEPTH, CANDIDATES, VOCAB = 12, 5, 32, 6
TWINS = {
    "reference": (tree_build_ref, tree_budget_ref, tree_accept_ref),
    "triton": (tree_build, tree_budget, tree_accept),
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
        "table_rows": torch.tensor([batch, 2 * batch, 4 * batch, rows]),
        "table_seconds": torch.tensor([1.0, 1.1, 1.2, 3.0]),
        "fixed_seconds": torch.tensor([0.2]),
        "min_nodes": torch.zeros(batch, dtype=torch.int64),
        "next_token_ids": torch.randint(0, VOCAB, (rows,), generator=g),
        "scratch_rows": torch.arange(1000, 1000 + rows),
        "context_lens": torch.randint(0, 20, (batch,), generator=g),
        "slot_table": torch.randint(0, 500, (batch, 40), generator=g),
    }
    return {name: t.to(device) for name, t in tensors.items()}


def _round(twin, t):
    build, budget, accept = TWINS[twin]
    batch = t["scores"].shape[0]
    trees = build.build_trees(
        scores=t["scores"], parents=t["parents"], token_ids=t["token_ids"], depths=t["depths"],
        anchor_token_ids=t["anchor_token_ids"], num_nodes=t["most"], max_nodes=MAX_NODES, max_depth=MAX_DEPTH,
    )  # fmt: skip
    nodes = budget.choose_budget(
        masses=trees.scores[:, 1:].exp().contiguous(), table_rows=t["table_rows"], table_seconds=t["table_seconds"],
        fixed_seconds=t["fixed_seconds"], min_nodes=t["min_nodes"], max_rows=batch * (MAX_NODES + 1), is_stepped=True,
    )  # fmt: skip
    # A smaller tree is a prefix of the full one, so the budget needs no second build.
    paths = accept.accept_paths(
        token_ids=trees.token_ids, parents=trees.parents, depths=trees.depths, ancestor_bits=trees.ancestor_bits,
        cu_nodes=nodes.cu_nodes, next_token_ids=t["next_token_ids"], scratch_rows=t["scratch_rows"],
        context_lens=t["context_lens"], slot_table=t["slot_table"], max_depth=MAX_DEPTH,
    )  # fmt: skip
    return nodes.num_nodes, nodes.cu_nodes, paths.path, paths.num_accepted_tokens, paths.bonus_token_ids, paths.src_rows, paths.dst_rows  # fmt: skip


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
