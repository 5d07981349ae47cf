"""Kernel cases: what each kernel gets to do in the benchmark, and the bytes it must move.

Shape legend: B requests, N packed rows (roots included), R new rows, C candidates, W rows of a tree, L committed rows,
P pool rows, F leaves, K draft slots, Lt layers, H/Hkv heads, Dh head dim, V vocabulary, e bytes of an element.
Bytes count every input that must be read and every output that must be written once, indices included where they are
not negligible; K and V of a request count once, however many rows attend to them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.shapes.kernel_shapes import DRAFT_LAYERS, NUM_CANDIDATES, NUM_LEAVES, NUM_SLOTS, Shape
from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference.tree_build import pack_trees, unpack_bits

_PAGE_ROWS = 16
_TREE_CANDIDATES = NUM_SLOTS * NUM_CANDIDATES * (1 + NUM_LEAVES)
_MAX_DEPTH = 2 * NUM_SLOTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where and with what a case runs."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels

    @property
    def element_bytes(self) -> int:
        return torch.empty(0, dtype=self.dtype).element_size()

    def twin(self, module: str, function: str) -> Callable[..., Any]:
        """A kernel's launcher or its reference, as the chosen backend has it."""
        side = "gpu" if self.kernels.backend == "triton" else "reference"
        return getattr(importlib.import_module(f"paceline.kernels.{side}.{module}"), function)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def long(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kernel: which sizes matter, what it moves, how it is set up."""

    depends: tuple[str, ...]
    """Fields of the shape that the work depends on; shapes equal in these are measured once."""
    formula: str
    count_bytes: Callable[[Shape, int], int]
    """Bytes of a shape, by element size."""
    prepare: Callable[[Shape, Bench], Callable[[], Any]]
    """Makes the inputs and returns the call to be timed, which gives what the kernel computes or has written to."""


def _paged(shape: Shape, bench: Bench, spare: int = 0) -> tuple[torch.Tensor, int]:
    """A slot table (B, L) of shuffled pages, and the number of pool rows with `spare` rows behind them."""
    pages = -(-shape.context // _PAGE_ROWS)
    order = torch.randperm(shape.requests * pages, device=bench.device) * _PAGE_ROWS
    rows = (order[:, None] + torch.arange(_PAGE_ROWS, device=bench.device)).view(shape.requests, -1)
    return rows[:, : shape.context].contiguous(), shape.requests * pages * _PAGE_ROWS + spare


def _offsets(shape: Shape, bench: Bench) -> torch.Tensor:
    return torch.arange(shape.requests + 1, device=bench.device) * (shape.nodes + 1)


def _tree_attention(shape: Shape, bench: Bench) -> Callable[[], Any]:
    table, start = _paged(shape, bench)
    width = shape.nodes + 1
    own = torch.eye(width, dtype=torch.bool)
    for row in range(1, width):  # a binary tree
        own[row] |= own[(row - 1) // 2]
    plan = bench.kernels.plan_attention(
        cu_rows=_offsets(shape, bench),
        context_lens=bench.long([shape.context] * shape.requests),
        slot_table=table,
        out_rows=start + torch.arange(shape.num_rows, device=bench.device),
        ancestors=own.repeat(shape.requests, 1).to(bench.device),
        num_groups=shape.heads // shape.kv_heads,
        dtype=bench.dtype,
    )
    pool = bench.randn(start + shape.num_rows, 2, shape.kv_heads, shape.head_dim)
    query = bench.randn(shape.num_rows, shape.heads, shape.head_dim)
    return lambda: bench.kernels.tree_attention(query, pool, plan, shape.head_dim**-0.5)


def _scatter(shape: Shape, bench: Bench) -> Callable[[], Any]:
    pool = bench.randn(4 * shape.num_rows, 2, shape.kv_heads, shape.head_dim)
    rows = torch.randperm(4 * shape.num_rows, device=bench.device)[: shape.num_rows]
    keys, values = (bench.randn(shape.num_rows, shape.kv_heads, shape.head_dim) for _ in range(2))

    def run() -> torch.Tensor:
        bench.kernels.scatter_rows(pool, rows, keys, values)
        return pool

    return run


def _commit(shape: Shape, bench: Bench) -> Callable[[], Any]:
    moved = shape.num_new_rows
    pool = bench.randn(shape.num_layers, 4 * moved, 2, shape.kv_heads, shape.head_dim)
    order = torch.randperm(4 * moved, device=bench.device)

    def run() -> torch.Tensor:
        bench.kernels.commit_rows(pool, order[:moved], order[moved : 2 * moved])
        return pool

    return run


def _topk(shape: Shape, bench: Bench) -> Callable[[], Any]:
    topk_lse: Callable[..., Any] = bench.kernels.topk_lse  # type: ignore[attr-defined,unused-ignore]
    logits = bench.randn(shape.num_rows, shape.vocab_size)
    return lambda: topk_lse(logits, NUM_CANDIDATES)


def _candidates(shape: Shape, bench: Bench) -> dict[str, Any]:
    """Arguments of build_trees: a block of slots with alternatives, then blocks below its leaves."""
    count = _TREE_CANDIDATES
    parents, depths = torch.full((count,), -1), torch.ones(count, dtype=torch.int64)
    per_block = NUM_SLOTS * NUM_CANDIDATES
    scores = -torch.rand(shape.requests, count)
    for c in range(count):
        block, slot = c // per_block, c % per_block // NUM_CANDIDATES
        if slot:
            parents[c] = block * per_block + (slot - 1) * NUM_CANDIDATES
        elif block:
            parents[c] = NUM_CANDIDATES * NUM_SLOTS - block
        if parents[c] >= 0:
            depths[c] = depths[parents[c]] + 1
            scores[:, c] += scores[:, parents[c]]
    return {
        "scores": scores.to(bench.device),
        "parents": bench.long(parents.repeat(shape.requests, 1)),
        "token_ids": bench.long(torch.randint(0, 50, (shape.requests, count))),
        "depths": bench.long(depths.repeat(shape.requests, 1)),
        "anchor_token_ids": bench.long([0] * shape.requests),
        "num_nodes": bench.long([shape.nodes] * shape.requests),
        "max_nodes": shape.nodes,
        "max_depth": _MAX_DEPTH,
    }


def _build(shape: Shape, bench: Bench) -> Callable[[], Any]:
    build_trees, inputs = bench.twin("tree_build", "build_trees"), _candidates(shape, bench)
    return lambda: build_trees(**inputs)


def _accept(shape: Shape, bench: Bench) -> Callable[[], Any]:
    accept_rows = bench.twin("tree_accept", "accept_rows")
    trees = bench.twin("tree_build", "build_trees")(**_candidates(shape, bench))
    cu_rows = torch.nn.functional.pad((trees.num_nodes + 1).cumsum(0), (1, 0))
    packed = pack_trees(trees, cu_rows, shape.num_rows)
    inputs = {
        "token_ids": packed.token_ids,
        "cu_rows": cu_rows,
        "ancestors": unpack_bits(packed.ancestor_bits, shape.nodes + 1),
        "next_token_ids": bench.long(torch.randint(0, 50, (shape.num_rows,))),
    }
    return lambda: accept_rows(**inputs)


def _ingest(shape: Shape, bench: Bench) -> Callable[[], Any]:
    draft_ingest = bench.twin("draft_ingest", "draft_ingest")
    rows, hidden, width = shape.num_new_rows, shape.hidden_size, DRAFT_LAYERS * shape.kv_width
    inputs: dict[str, Any] = {
        "features": bench.randn(rows, DRAFT_LAYERS * hidden),
        "fc": bench.randn(DRAFT_LAYERS * hidden, hidden),
        "norm_weight": bench.randn(hidden),
        "kv_weight": bench.randn(hidden, width),
        "k_norm_weight": bench.randn(DRAFT_LAYERS, shape.head_dim),
        "cos": torch.ones(64, shape.head_dim // 2, device=bench.device),
        "sin": torch.zeros(64, shape.head_dim // 2, device=bench.device),
        "positions": bench.long([0] * rows),
        "pool_rows": torch.randperm(4 * rows, device=bench.device)[:rows],
        "pool": bench.randn(DRAFT_LAYERS, 4 * rows, 2, shape.kv_heads, shape.head_dim),
        "eps": 1e-6,
    }

    def run() -> torch.Tensor:
        draft_ingest(**inputs)
        return inputs["pool"]

    return run


def _slots(shape: Shape, bench: Bench) -> Callable[[], Any]:
    slot_attention = bench.twin("slot_attention", "slot_attention")
    table, num_rows = _paged(shape, bench)
    blocks = (shape.requests, NUM_LEAVES)
    inputs = {
        "query": bench.randn(*blocks, NUM_SLOTS, shape.heads, shape.head_dim),
        "current": bench.randn(*blocks, NUM_SLOTS, shape.kv_width),
        "pool": bench.randn(num_rows, NUM_SLOTS, shape.kv_width),
        "slot_table": table,
        "context_rows": torch.full(blocks, shape.context - 1, dtype=torch.int64, device=bench.device),
        "own_slots": bench.long(torch.arange(NUM_LEAVES) % NUM_SLOTS + 1).expand(blocks).contiguous(),
        "scale": shape.head_dim**-0.5,
    }
    return lambda: slot_attention(**inputs)


def _tree_words(shape: Shape) -> int:
    return -(-(shape.nodes + 1) // 32)


def _rope(shape: Shape, bench: Bench) -> Callable[[], Any]:
    pool = bench.randn(4 * shape.num_rows, 2, shape.kv_heads, shape.head_dim)
    rows = torch.randperm(4 * shape.num_rows, device=bench.device)[: shape.num_rows]
    heads = shape.heads + 2 * shape.kv_heads
    split = bench.randn(shape.num_rows, heads, shape.head_dim).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    cos, sin = (bench.randn(shape.num_rows, shape.head_dim) for _ in range(2))
    positions, norm = torch.arange(shape.num_rows, device=bench.device), bench.randn(shape.head_dim)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return bench.kernels.rope_scatter(*split, pool, rows, positions, cos, sin, q_norm=norm, k_norm=norm), pool

    return run


def _add_norm(shape: Shape, bench: Bench) -> Callable[[], Any]:
    x, weight = bench.randn(shape.num_rows, shape.hidden_size), bench.randn(shape.hidden_size)
    delta = torch.zeros_like(x)  # the stream stays what it is, however often this runs
    return lambda: bench.kernels.add_norm(x, delta, weight, 1e-6)


def _silu_mul(shape: Shape, bench: Bench) -> Callable[[], Any]:
    gate_up = bench.randn(shape.num_rows, 2 * shape.ffn_size)
    return lambda: bench.kernels.silu_mul(gate_up)


_HEADS = ("heads", "kv_heads", "head_dim")
CASES: dict[str, Case] = {
    "tree_attention": Case(
        depends=(*_HEADS, "context", "requests", "nodes"),
        formula="e * (B * L + N) * 2 Hkv Dh + e * 2 * N * H Dh + 8 * B * L",
        count_bytes=lambda s, e: (
            e * (s.requests * s.context + s.num_rows) * s.kv_width
            + e * 2 * s.num_rows * s.heads * s.head_dim
            + 8 * s.requests * s.context
        ),
        prepare=_tree_attention,
    ),
    "slot_attention": Case(
        depends=(*_HEADS, "context", "requests"),
        formula="e * B * (L + F) * K * 2 Hkv Dh + e * 2 * B * F * K * H Dh + 8 * B * L",
        count_bytes=lambda s, e: (
            e * s.requests * (s.context + NUM_LEAVES) * NUM_SLOTS * s.kv_width
            + e * 2 * s.requests * NUM_LEAVES * NUM_SLOTS * s.heads * s.head_dim
            + 8 * s.requests * s.context
        ),
        prepare=_slots,
    ),
    "rope_scatter": Case(
        depends=(*_HEADS, "requests", "nodes"),
        formula="e * N * (2 H Dh + 2 * 2 Hkv Dh + 2 Dh)",
        count_bytes=lambda s, e: e * s.num_rows * (2 * s.heads * s.head_dim + 2 * s.kv_width + 2 * s.head_dim),
        prepare=_rope,
    ),
    "add_norm": Case(
        depends=("hidden_size", "requests", "nodes"),
        formula="e * 4 * N * h, h = hidden size",
        count_bytes=lambda s, e: e * 4 * s.num_rows * s.hidden_size,
        prepare=_add_norm,
    ),
    "silu_mul": Case(
        depends=("ffn_size", "requests", "nodes"),
        formula="e * 3 * N * f, f = width of the gated layer",
        count_bytes=lambda s, e: e * 3 * s.num_rows * s.ffn_size,
        prepare=_silu_mul,
    ),
    "scatter_rows": Case(
        depends=("kv_heads", "head_dim", "requests", "nodes"),
        formula="e * 2 * N * 2 Hkv Dh",
        count_bytes=lambda s, e: e * 2 * s.num_rows * s.kv_width,
        prepare=_scatter,
    ),
    "commit_rows": Case(
        depends=("num_layers", "kv_heads", "head_dim", "requests", "num_new_rows"),
        formula="e * 2 * Lt * R * 2 Hkv Dh",
        count_bytes=lambda s, e: e * 2 * s.num_layers * s.num_new_rows * s.kv_width,
        prepare=_commit,
    ),
    "draft_ingest": Case(
        depends=("hidden_size", "kv_heads", "head_dim", "num_new_rows"),
        formula="e * (5 h * h + h * 5 * 2 Hkv Dh) + e * R * (5 h + 5 * 2 Hkv Dh), h = hidden size",
        count_bytes=lambda s, e: (
            e * DRAFT_LAYERS * s.hidden_size * (s.hidden_size + s.kv_width)
            + e * s.num_new_rows * DRAFT_LAYERS * (s.hidden_size + s.kv_width)
        ),
        prepare=_ingest,
    ),
    "topk_lse": Case(
        depends=("vocab_size", "requests", "nodes"),
        formula="e * N * V + 20 * N * k",
        count_bytes=lambda s, e: e * s.num_rows * s.vocab_size + 20 * s.num_rows * NUM_CANDIDATES,
        prepare=_topk,
    ),
    "tree_build": Case(
        depends=("requests", "nodes"),
        formula="28 * B * C + B * W * (36 + 4 * ceil(W / 32))",
        count_bytes=lambda s, e: 28 * s.requests * _TREE_CANDIDATES + s.num_rows * (36 + 4 * _tree_words(s)),
        prepare=_build,
    ),
    "tree_accept": Case(
        depends=("requests", "nodes"),
        formula="N * (W + 16) + B * (16 * W + 24)",
        count_bytes=lambda s, e: s.num_rows * (s.nodes + 17) + s.requests * (16 * s.nodes + 40),
        prepare=_accept,
    ),
}
