"""The parallel draft head of JetSpec and DFlash: its configuration, its parameters and what one layer computes.

Shape legend: B requests, T context rows, A anchors, S draft slots, N = 1 + S block rows, H hidden size (the target's),
F fused target feature size, Hq/Hkv query/KV heads, Dh head dim, V target vocabulary, r edge rank.
One call drafts S tokens: block rows [anchor, MASK x S] at positions a..a+S attend to keys and values that every layer
projects from the same fused features g = RMSNorm(W_fc f) of the committed rows, and to each other. Row k predicts the
token at a + k (in-place labels) through the target's own embedding and output head, which are passed in, never stored.
Source: DFlash (bidirectional block) and JetSpec (causal block), tree_speculation.md 1.3-1.4 and 2; the edge correction
is the low-rank previous-token bias of DSpark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError
from paceline.serving.drafters.family import DrafterModel
from paceline.serving.specblock.model import is_rope_scaling, rotate

DRAFTER_TYPES = {"jetspec": True, "dflash": False}
"""Drafter type -> whether its block is causal."""
MAX_EDGE_RANK = 64
_INITIAL_SCALE = 0.1
"""Of the mask vector and the edge table: about the scale of a trained token embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelHeadConfig:
    """Architecture of a parallel head; stored as config.json next to its weights."""

    is_causal: bool
    """True (JetSpec): block row k sees rows 0..k; False (DFlash): every row of the block."""
    hidden_size: int
    """Also the width of the target's embedding and output head, which the head shares."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    feature_size: int
    """Width of a fused feature row: tapped layers x target hidden size."""
    num_layers: int = 2
    num_slots: int = 8
    """Draft tokens of a block (S); the block has one row more, the anchor."""
    mask_token_id: int | None = None
    """Target token whose embedding fills the empty slots; None: a learned vector, for targets without such a token."""
    edge_rank: int = 0
    """Rank of the previous-token correction of the slot logits; 0 = none."""
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, ...] | None = None
    """Llama-3.1's four numbers, as rope_cos_sin takes them; None: angles are not scaled."""

    def __post_init__(self) -> None:
        mask = self.mask_token_id
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads", self.num_heads),
            (self.head_dim % 2 == 0, "head_dim must be even", self.head_dim),
            (self.num_layers >= 1, "num_layers must be >= 1", self.num_layers),
            (1 <= self.num_slots <= 31, "num_slots must be in [1, 31]", self.num_slots),
            (0 <= self.edge_rank <= MAX_EDGE_RANK, f"edge_rank must be in [0, {MAX_EDGE_RANK}]", self.edge_rank),
            (mask is None or 0 <= mask < self.vocab_size, "mask_token_id must be in the vocabulary or null", mask),
            (
                is_rope_scaling(self.rope_scaling),
                "rope_scaling must be null or 4 numbers > 0, low before high",
                self.rope_scaling,
            ),
        )
        for ok, rule, value in checks:
            if not ok:
                raise ConfigError(f"parallel_head.{rule}, got {value!r}")

    @property
    def drafter_type(self) -> str:
        """Name under which drafters of this architecture are stored."""
        return next(name for name, is_causal in DRAFTER_TYPES.items() if is_causal == self.is_causal)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ParallelHeadConfig:
        """Read the fields of a config.json; keys that are not settings of the network are ignored.

        Raises: ConfigError when a setting is missing or not allowed.
        """
        names = {f.name for f in dataclasses.fields(ParallelHeadConfig)}
        kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
        try:
            return ParallelHeadConfig(**kept)
        except TypeError as e:
            raise ConfigError(f"drafter config.json must hold every parallel head setting: {e}") from e


class ParallelHeadLayer(nn.Module):
    """One pre-norm Qwen3 layer whose keys and values also come straight from the fused features."""

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        c = self.config = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.kv_proj = nn.Linear(c.hidden_size, 2 * c.num_kv_heads * c.head_dim, bias=False)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def key_value(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed per head, rotated) and values (..., Hkv, Dh) of x (..., H) as it is; cos, sin (..., Dh / 2)."""
        c = self.config
        k, v = self.kv_proj(x).unflatten(-1, (2, c.num_kv_heads, c.head_dim)).unbind(-3)
        k = F.rms_norm(k, (c.head_dim,), self.k_norm.to(k.dtype), c.rms_eps)
        return rotate(k, cos[..., None, :], sin[..., None, :]), v

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries (..., Hq, Dh) of normed block rows x (..., H), normed per head and rotated."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))
        q = F.rms_norm(q, (c.head_dim,), self.q_norm.to(q.dtype), c.rms_eps)
        return rotate(q, cos[..., None, :], sin[..., None, :])

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Input norm of block rows; context rows do not pass it."""
        return F.rms_norm(x, (self.config.hidden_size,), self.input_norm.to(x.dtype), self.config.rms_eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: x (..., H), attended (..., Hq * Dh) -> (..., H)."""
        c = self.config
        x = x + self.o_proj(attended)
        y = F.rms_norm(x, (c.hidden_size,), self.post_norm.to(x.dtype), c.rms_eps)
        gate, up = self.gate_up_proj(y).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class ParallelHeadModel(DrafterModel):
    """All trainable parameters of a parallel head."""

    config: ParallelHeadConfig

    def __init__(self, config: ParallelHeadConfig) -> None:
        super().__init__()
        c = self.config = config
        self.drafter_type = config.drafter_type
        self.register_buffer("is_causal", torch.tensor(c.is_causal))  # weights of the other kind have the same shapes
        self.cond_proj = nn.Linear(c.feature_size, c.hidden_size, bias=False)
        self.cond_norm = nn.Parameter(torch.ones(c.hidden_size))
        if c.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.randn(c.hidden_size) * _INITIAL_SCALE)
        self.layers = nn.ModuleList(ParallelHeadLayer(c) for _ in range(c.num_layers))
        self.final_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_slots))
        """Log of the factor on the logits per (temperature class: greedy, sampled; slot)."""
        if c.edge_rank:
            self.edge_in = nn.Parameter(torch.randn(c.vocab_size, c.edge_rank) * _INITIAL_SCALE)
            self.edge_out = nn.Parameter(torch.zeros(c.vocab_size, c.edge_rank))  # the correction starts at zero

    def block_layers(self) -> list[ParallelHeadLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, ParallelHeadLayer)]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fused features g (..., H) of tapped hidden states (..., F), shared by all layers."""
        y = self.cond_proj(features)
        return F.rms_norm(y, (self.config.hidden_size,), self.cond_norm.to(y.dtype), self.config.rms_eps)

    def block_rows(self, anchor_token_ids: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
        """Inputs (..., N, H) of the blocks behind these anchors (...). embed: (V, H), the target's token embedding."""
        c = self.config
        mask = self.mask_embedding if c.mask_token_id is None else embed[c.mask_token_id]
        anchor = F.embedding(anchor_token_ids, embed)[..., None, :]
        return torch.cat((anchor, mask.to(anchor.dtype).expand(*anchor.shape[:-2], c.num_slots, -1)), dim=-2)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm: what the target's output head reads."""
        return F.rms_norm(x, (self.config.hidden_size,), self.final_norm.to(x.dtype), self.config.rms_eps)

    def edge_bias(self, previous_token_ids: torch.Tensor) -> torch.Tensor:
        """What a known previous token (...) adds to the logits of a slot, (..., V)."""
        return F.linear(F.embedding(previous_token_ids, self.edge_in), self.edge_out)


def block_visibility(num_slots: int, is_causal: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """(N, N) bool: which rows of its own block a block row sees."""
    every = torch.ones(num_slots + 1, num_slots + 1, dtype=torch.bool, device=device)
    return every.tril() if is_causal else every
