"""Costs: bytes that a forward must move and operations that it must do, counted from the sizes of its matrices.

Bytes: every weight matrix once, the committed K and V that the rows attend to once for each request (all rows of a request
share one read), and the K and V that the forward keeps. Left out: activations, embedding rows, masks and logits, which
are small beside them. Operations: two for each multiplication with a weight, four times rows x keys x heads x head size for
attention; norms, activations and sampling are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.shapes.kernel_shapes import Shape

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
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * self.num_params

    @property
    def kv_bytes(self) -> int:
        return 0

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
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * self.num_params

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
        return sum(p.weight_bytes for p in self.parts)

    @property
    def kv_bytes(self) -> int:
        return sum(p.kv_bytes for p in self.parts)

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
