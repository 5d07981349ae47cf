"""Costs: bytes and operations of a round's forwards, of the target and of each drafter at its published size for it.

Bytes: every weight matrix once, the committed K and V that the rows attend to once for each request (all rows of a request
share one read), and the K and V that the forward keeps. Left out: activations, embedding rows, masks and logits, which
are small beside them. Operations: two for each multiplication with a weight, four times rows x keys x heads x head size for
attention; norms, activations and sampling are left out.

| drafter | layout | calls a round |
|---|---|---|
| SpecBlock (arXiv 2605.07243) | condition 3H -> H, fusion 3H -> H, 2 layers, shift 2H -> H, own head over 32000 tokens, rank head | one per block of 4 tokens: block 1 over the newly accepted rows, block 2 over some leaves |
| EAGLE-3 (arXiv 2503.01840) | features 3H -> H, 1 layer whose attention reads 2H, own head over 32000 tokens | one per depth, the best `topk` nodes of the depth before in each |
| DFlash (arXiv 2602.06036) and JetSpec | features 5H -> H, 5 layers of the target's family, the target's own head | one, over a block of 16 rows: an anchor and 15 draft tokens |

DFlash's block is bidirectional and JetSpec's causal: their matrices and costs are equal. For Llama-3.1-8B, for which neither is
published, the layers are Llama's. K draft slots, H hidden size, r newly accepted rows of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated as A

from paceline.bench.shapes.kernel_shapes import ACCEPTED_TOKENS, DRAFT_LAYERS, NUM_LEAVES, NUM_SLOTS, Shape
from paceline.records import Setting, record
from paceline.serving.specblock.model import NUM_RANK_CLASSES, NUM_RANK_FEATURES

ELEMENT_BYTES = 2
"""bfloat16 weights, K and V."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCost:
    """One matrix without bias."""

    name: str
    inputs: int
    outputs: int
    rows: int
    """Of all requests."""
    num_vectors: int = 0
    """Elements of norms and other vectors that belong to this part."""
    is_targets: bool = False
    """True: the target's own matrix, so no parameter of a drafter."""

    @property
    def num_params(self) -> int:
        return self.inputs * self.outputs + self.num_vectors

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersCost:
    """`count` equal decoder layers: grouped-query attention and a gated MLP, no biases."""

    name: str
    shape: Shape
    """Hidden, head and MLP sizes; `requests` is the batch."""
    count: int
    rows: int
    """Query rows of all requests."""
    kv_rows: int
    """Committed rows of K and V that each request's queries read, per layer."""
    kept_rows: int
    """Rows of K and V that all requests write and keep, per layer."""
    kv_only_rows: int = 0
    """Further rows of all requests that get K and V but no query (context features of a table drafter)."""
    input_factor: int = 1
    """Inputs of the attention projections over the hidden size: EAGLE-3 has 2 (token and feature side by side)."""
    num_vectors: int = 0
    """Elements of the norms of one layer."""

    @property
    def num_params(self) -> int:
        s = self.shape
        attention = s.hidden_size * s.head_dim * (self.input_factor * (s.heads + 2 * s.kv_heads) + s.heads)
        return self.count * (attention + 3 * s.hidden_size * s.ffn_size + self.num_vectors)

    @property
    def kv_bytes(self) -> int:
        rows = self.shape.requests * self.kv_rows + self.kept_rows
        return ELEMENT_BYTES * self.count * rows * self.shape.kv_width

    @property
    def flops(self) -> int:
        s = self.shape
        projections = 2 * self.rows * (self.num_params // self.count - self.num_vectors)
        projections += 2 * self.kv_only_rows * self.input_factor * s.hidden_size * s.kv_width
        return self.count * (projections + 4 * self.rows * self.kv_rows * s.heads * s.head_dim)


Part = LinearCost | LayersCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """One call of a model."""

    name: str
    parts: tuple[Part, ...]

    @property
    def num_own_params(self) -> int:
        """Parameters without those borrowed from the target."""
        return sum(p.num_params for p in self.parts if not (isinstance(p, LinearCost) and p.is_targets))

    @property
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * sum(p.num_params for p in self.parts)

    @property
    def kv_bytes(self) -> int:
        return sum(p.kv_bytes for p in self.parts if isinstance(p, LayersCost))

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> int:
        return sum(p.flops for p in self.parts)


def verify_forward(shape: Shape) -> Forward:
    """The target over `shape.nodes` draft nodes and a root of each request; 0 nodes is a plain decode round."""
    rows = shape.num_rows
    layers = LayersCost(
        name="layers", shape=shape, count=shape.num_layers, rows=rows, kv_rows=shape.context, kept_rows=shape.num_new_rows,
        num_vectors=_layer_vectors(shape),
    )  # fmt: skip
    head = LinearCost(name="head", inputs=shape.hidden_size, outputs=shape.vocab_size, rows=rows, num_vectors=shape.hidden_size)  # fmt: skip
    return Forward(name="verify" if shape.nodes else "plain", parts=(layers, head))


def _layer_vectors(shape: Shape) -> int:
    """Two norms; Qwen3 also norms the heads of queries and keys."""
    return 2 * shape.hidden_size + (2 * shape.head_dim if shape.model.startswith("qwen3") else 0)


def total(forwards: Sequence[Forward]) -> dict[str, int]:
    """Sums over the calls of a round."""
    return {
        "weight_bytes": sum(f.weight_bytes for f in forwards), "kv_bytes": sum(f.kv_bytes for f in forwards),
        "bytes": sum(f.num_bytes for f in forwards), "flops": sum(f.flops for f in forwards),
    }  # fmt: skip


DRAFT_VOCAB = 32_000
TAPS = 3
"""Target layers whose hidden states SpecBlock and EAGLE-3 read."""
SPECBLOCK_LAYERS = 2
RANK_HIDDEN = 256
MAX_DEPTH = 2 * NUM_SLOTS
"""SpecBlock drafts two blocks."""
DRAFT_BLOCK = 16
"""Rows of a DFlash or JetSpec block."""


@record()
class DraftPlan:
    """What is drafted each round."""

    depth: A[
        int,
        Setting(f"Deepest token of SpecBlock (two blocks of {NUM_SLOTS}) and EAGLE-3, equal; a DFlash block always has 15.", ge=1, le=MAX_DEPTH),
    ] = 8  # fmt: skip
    topk: A[int, Setting("Nodes that EAGLE-3 continues at each depth.", ge=1)] = 10
    leaves: A[int, Setting("Leaves that SpecBlock's second block continues.", ge=1)] = NUM_LEAVES
    accepted: A[
        int, Setting("Accepted tokens of the round before, which the first call takes in with the bonus token.", ge=0)
    ] = ACCEPTED_TOKENS

    @property
    def num_new(self) -> int:
        """Rows of a request that the first call takes in."""
        return self.accepted + 1


def specblock_forwards(shape: Shape, plan: DraftPlan) -> list[Forward]:
    """Block 1, and block 2 where the depth asks for one."""
    forwards = [_specblock_block(shape, plan, is_first=True)]
    if plan.depth > NUM_SLOTS:
        forwards.append(_specblock_block(shape, plan, is_first=False))
    return forwards


def _specblock_block(shape: Shape, plan: DraftPlan, *, is_first: bool) -> Forward:
    """A block over its rows (block 1: newly accepted ones, block 2: leaves); block 1's heads see the newest row only.

    The fusion multiplies condition and token once a row and the learned queries once a call.
    """
    h, b = shape.hidden_size, shape.requests
    rows = b * (plan.num_new if is_first else plan.leaves)
    read = b * NUM_SLOTS if is_first else rows * NUM_SLOTS  # rows that the output heads see
    parts: list[Part] = [LinearCost(name="condition", inputs=TAPS * h, outputs=h, rows=rows)] if is_first else []
    parts += [
        LinearCost(name="fusion of rows", inputs=2 * h, outputs=h, rows=rows, num_vectors=2 * h),
        LinearCost(name="fusion of slots", inputs=h, outputs=h, rows=NUM_SLOTS, num_vectors=(1 + NUM_SLOTS) * h),
        LayersCost(
            name="layers", shape=shape, count=SPECBLOCK_LAYERS, rows=rows * NUM_SLOTS, kv_rows=shape.context * NUM_SLOTS,
            kept_rows=rows * NUM_SLOTS if is_first else 0, num_vectors=2 * h,
        ),
        LinearCost(name="shift", inputs=2 * h, outputs=h, rows=rows * NUM_SLOTS),
        LinearCost(name="head", inputs=h, outputs=DRAFT_VOCAB, rows=read, num_vectors=h),
        LinearCost(name="rank head in", inputs=h + NUM_RANK_FEATURES, outputs=RANK_HIDDEN, rows=read),
        LinearCost(name="rank head out", inputs=RANK_HIDDEN, outputs=NUM_RANK_CLASSES, rows=read),
    ]  # fmt: skip
    return Forward(name="block 1" if is_first else "block 2", parts=tuple(parts))


def eagle3_forwards(shape: Shape, plan: DraftPlan) -> list[Forward]:
    """One call per depth: the first over the newly accepted rows, the others over `topk` nodes each."""
    h, b = shape.hidden_size, shape.requests

    def step(name: str, rows: int, read: int, earlier: int, *, has_features: bool) -> Forward:
        features = LinearCost(name="features", inputs=TAPS * h, outputs=h, rows=rows)
        layer = LayersCost(
            name="layer", shape=shape, count=1, rows=rows, kv_rows=shape.context + earlier, kept_rows=rows, input_factor=2,
            num_vectors=3 * h,
        )  # fmt: skip
        head = LinearCost(name="head", inputs=h, outputs=DRAFT_VOCAB, rows=read, num_vectors=h)
        return Forward(name=name, parts=(features, layer, head) if has_features else (layer, head))

    first = step("step 1", b * plan.num_new, b, 0, has_features=True)
    rows = b * plan.topk
    return [first, *(step(f"step {i}", rows, rows, (i - 2) * plan.topk, has_features=False) for i in range(2, plan.depth + 1))]  # fmt: skip


def table_forwards(shape: Shape, plan: DraftPlan) -> list[Forward]:
    """DFlash's and JetSpec's one call; the head is the target's and sees the draft rows, not the anchor."""
    h, b = shape.hidden_size, shape.requests
    new, block = b * plan.num_new, b * DRAFT_BLOCK
    parts = (
        LinearCost(name="features", inputs=DRAFT_LAYERS * h, outputs=h, rows=new, num_vectors=2 * h),
        LayersCost(
            name="layers", shape=shape, count=DRAFT_LAYERS, rows=block, kv_rows=shape.context, kept_rows=new, kv_only_rows=new,
            num_vectors=2 * h + 2 * shape.head_dim,
        ),
        LinearCost(
            name="target's head", inputs=h, outputs=shape.vocab_size, rows=b * (DRAFT_BLOCK - 1), is_targets=True
        ),
    )  # fmt: skip
    return [Forward(name="block of 16", parts=parts)]


DRAFTERS: dict[str, Callable[[Shape, DraftPlan], list[Forward]]] = {
    "specblock": specblock_forwards,
    "eagle3": eagle3_forwards,
    "jetspec": table_forwards,
    "dflash": table_forwards,
}


def num_params(forwards: list[Forward]) -> int:
    """Parameters of a drafter; its first call touches all of them."""
    return forwards[0].num_own_params
