"""Kernel shapes: sizes that 8B targets give the kernels, and the least bytes of a round.

Sizes are those of the models' config.json files (meta-llama/Llama-3.1-8B, Qwen/Qwen3-8B); drafter sizes are those of
SpecBlock (arXiv 2605.07243) and of a five-layer table drafter (JetSpec, DFlash) for such a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated as A
from typing import Any

from paceline.records import Setting

NUM_SLOTS = 4
"""Draft slots of a SpecBlock block."""
NUM_LEAVES = 10
"""Leaves of a request that SpecBlock's second block continues."""
NUM_CANDIDATES = 8
"""Candidates of a slot."""
DRAFT_LAYERS = 5
"""Layers, and tapped target layers, of a table drafter."""
ACCEPTED_TOKENS = 4
"""Accepted tokens of a round that commits and ingests are sized for (fewer where the tree is smaller)."""
_SCALE = {"context": 64, "requests": 8, "heads": 4, "head_dim": 4, "hidden_size": 16, "ffn_size": 16, "vocab_size": 64, "num_layers": 16}  # fmt: skip
"""What sizes are divided by for a run on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One target and one batch."""

    model: str
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context: int = 1
    """Committed rows of each request."""
    requests: int = 1
    nodes: int = 1
    """Draft nodes of each request, root excluded."""

    @property
    def num_rows(self) -> int:
        """Packed rows of the verify forward."""
        return self.requests * (self.nodes + 1)

    @property
    def num_new_rows(self) -> int:
        """Rows that a round commits, and that a drafter ingests."""
        return self.requests * (min(self.nodes, ACCEPTED_TOKENS) + 1)

    @property
    def kv_width(self) -> int:
        """Elements of K and V of one row in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def scaled_down(self) -> Shape:
        """The same shape small enough for references on a CPU; no size falls below 1, ratios of heads are kept."""

        def down(name: str) -> int:
            return max(1, getattr(self, name) // _SCALE[name])

        sizes: dict[str, Any] = {name: down(name) for name in _SCALE}
        return replace(self, kv_heads=max(1, self.kv_heads // _SCALE["heads"]), **sizes)


_COMMON = {"heads": 32, "kv_heads": 8, "head_dim": 128, "hidden_size": 4096}
MODELS = {
    "llama-3.1-8b": Shape(model="llama-3.1-8b", num_layers=32, ffn_size=14336, vocab_size=128256, **_COMMON),
    "qwen3-8b": Shape(model="qwen3-8b", num_layers=36, ffn_size=12288, vocab_size=151936, **_COMMON),
}
Models = A[tuple[str, ...], Setting(f"Comma list of {', '.join(MODELS)}.", choices=tuple(MODELS), non_empty=True)]
"""Option of the targets whose sizes are used."""


def weight_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Bytes of weights that a forward reads: all layers and the output head; of the embedding only single rows."""
    s = shape
    attention = s.hidden_size * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    layer = attention + 3 * s.hidden_size * s.ffn_size
    return element_bytes * (s.num_layers * layer + s.hidden_size * s.vocab_size)


def kv_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Bytes of committed K and V that a verify forward reads once, all layers and requests."""
    return element_bytes * shape.requests * shape.context * shape.num_layers * shape.kv_width


def floor_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Least bytes of a round's verify forward: weights once, committed K and V once."""
    return weight_bytes(shape, element_bytes) + kv_bytes(shape, element_bytes)
