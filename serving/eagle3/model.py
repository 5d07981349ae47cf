"""The EAGLE-3 drafter network: its configuration, its parameters and what its one layer computes.

Shape legend: B requests, T drafter tokens, H drafter hidden size, E target embedding size, F fused target feature size,
Hq/Hkv query/KV heads, Dh head dim, V target vocabulary, Vd draft vocabulary.
Source: EAGLE-3 (arXiv 2503.01840). A row pairs a hidden state with the token behind it and predicts the token after that
one: the row at position j holds the fused target feature at j and the token at j + 1. Deeper rows hold the drafter's own
hidden state instead, the one that proposed their token.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """Architecture of an EAGLE-3 drafter; stored as config.json next to its weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    feature_size: int
    """Width of a fused feature row: tapped layers x target hidden size."""
    embed_size: int
    """Width of the target's token embedding."""
    num_slots: int = 1
    """Draft tokens that one call adds below a node, greedily one after the other; 1 = level by level, as published."""
    max_depth: int = 8
    """Deepest draft token; calls re-enter until it is reached."""
    num_steps: int = 5
    """Steps unrolled in training; calibration knows as many depths."""
    draft_vocab_size: int | None = None
    """None: the draft vocabulary is the target's."""
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, ...] | None = None
    """Llama-3.1's four numbers, as rope_cos_sin takes them; None: angles are not scaled."""
    norm_before_residual: bool = False
    """True: attention's residual is the normed hidden state; False, as published: the state before its norm."""

    def __post_init__(self) -> None:
        draft_ids = self.draft_vocab_size if self.draft_vocab_size is not None else self.vocab_size
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads", self.num_heads),
            (self.head_dim % 2 == 0, "head_dim must be even", self.head_dim),
            (1 <= self.num_slots <= 16, "num_slots must be in [1, 16]", self.num_slots),
            (self.num_slots <= self.max_depth <= 32, "max_depth must be in [num_slots, 32]", self.max_depth),
            (1 <= self.num_steps <= 16, "num_steps must be in [1, 16]", self.num_steps),
            (1 <= draft_ids <= self.vocab_size, "draft_vocab_size must be in [1, vocab_size]", draft_ids),
            (
                is_rope_scaling(self.rope_scaling),
                "rope_scaling must be null or 4 numbers > 0, low before high",
                self.rope_scaling,
            ),
        )
        for ok, rule, value in checks:
            if not ok:
                raise ConfigError(f"eagle3.{rule}, got {value!r}")

    @property
    def num_draft_ids(self) -> int:
        """Size of the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> EagleConfig:
        """Read the fields of a config.json; keys that are not settings of the network are ignored.

        Raises: ConfigError when a setting is missing or not allowed.
        """
        names = {f.name for f in dataclasses.fields(EagleConfig)}
        kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
        try:
            return EagleConfig(**kept)
        except TypeError as e:
            raise ConfigError(f"drafter config.json must hold every EAGLE-3 setting: {e}") from e


class EagleModel(DrafterModel):
    """All trainable parameters of a drafter. The target's embedding is passed in where needed, never stored."""

    drafter_type = "eagle3"
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c = self.config = config
        h = c.hidden_size
        self.fc = nn.Linear(c.feature_size, h, bias=False)
        self.embed_norm = nn.Parameter(torch.ones(c.embed_size))
        self.hidden_norm = nn.Parameter(torch.ones(h))
        self.qkv_proj = nn.Linear(c.embed_size + h, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, h, bias=False)
        self.post_norm = nn.Parameter(torch.ones(h))
        self.gate_up_proj = nn.Linear(h, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, h, bias=False)
        self.final_norm = nn.Parameter(torch.ones(h))
        self.lm_head = nn.Linear(h, c.num_draft_ids, bias=False)
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_steps))
        """Log of the factor on the logits per (temperature class: greedy, sampled; unrolled step)."""
        if c.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(c.draft_vocab_size))  # d2t: (Vd,) int64 target ids
            self.register_buffer("log_coverage", torch.zeros(()))  # log share of target tokens in the draft vocabulary
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def qkv(
        self, hidden: torch.Tensor, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, T, H), (B, T, E), angles (1, T, Dh / 2) -> q (B, Hq, T, Dh), k and v (B, Hkv, T, Dh); q, k rotated."""
        c, dtype = self.config, hidden.dtype
        tokens = F.rms_norm(embedded.to(dtype), (c.embed_size,), self.embed_norm.to(dtype), c.rms_eps)
        y = self.qkv_proj(torch.cat((tokens, self.normed(hidden, self.hidden_norm)), dim=-1))
        y = y.unflatten(-1, (c.num_heads + 2 * c.num_kv_heads, c.head_dim))
        qk, v = y[..., : c.num_heads + c.num_kv_heads, :], y[..., c.num_heads + c.num_kv_heads :, :]
        qk = rotate(qk, cos[..., None, :], sin[..., None, :]).transpose(1, 2)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v.transpose(1, 2)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: hidden (B, T, H), attended (B, Hq, T, Dh) -> (B, T, H)."""
        if self.config.norm_before_residual:
            hidden = self.normed(hidden, self.hidden_norm)
        x = hidden + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.normed(x, self.post_norm)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)

    def normed(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """RMS norm of (..., H); without a weight the final one, which the output head reads."""
        weight = self.final_norm if weight is None else weight
        return F.rms_norm(x, (self.config.hidden_size,), weight.to(x.dtype), self.config.rms_eps)
