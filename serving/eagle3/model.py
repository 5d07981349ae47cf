"""EAGLE-3 network: its configuration, its parameters and what its one layer computes.

Shape legend: B requests, T drafter tokens, H drafter hidden size, E target embedding size, F fused target feature size,
Hq/Hkv query/KV heads, Dh head dim, V target vocabulary, Vd draft vocabulary.
Source: EAGLE-3 (arXiv 2503.01840). A row pairs a hidden state with the token behind it and predicts the token after that
one: the row at position j holds the fused target feature at j and the token at j + 1. Deeper rows hold the drafter's own
hidden state instead, the one that proposed their token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.serving.drafters.network import (
    Check,
    DrafterModel,
    OwnHeadConfig,
    add_output,
    add_vocabulary,
    finish_layer,
    head_check,
    own_head,
    rms_norm,
    scaling_check,
    split_heads,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(OwnHeadConfig):
    """Architecture of an EAGLE-3 drafter."""

    title = "eagle3"

    num_slots: int = 1
    """Draft tokens that one call adds below a node, greedily one after the other; 1 = level by level, as published."""
    max_depth: int = 8
    """Deepest draft token; calls re-enter until it is reached."""
    num_steps: int = 5
    """Steps unrolled in training; calibration knows as many depths."""
    rope_scaling: tuple[float, ...] | None = None
    """Llama-3.1's four numbers, as rope_cos_sin takes them; None: angles are not scaled."""
    norm_before_residual: bool = False
    """True: attention's residual is the normed hidden state; False, as published: the state before its norm."""

    @property
    def delta_layers(self) -> dict[int, str]:
        """As DrafterConfig.delta_layers: the one layer's weights are the model's own."""
        return {0: ""}

    def _checks(self) -> tuple[Check, ...]:
        return (
            (1 <= self.num_slots <= 16, "num_slots must be in [1, 16]", self.num_slots),
            (self.num_slots <= self.max_depth <= 32, "max_depth must be in [num_slots, 32]", self.max_depth),
            (1 <= self.num_steps <= 16, "num_steps must be in [1, 16]", self.num_steps),
            scaling_check(self.rope_scaling),
            head_check(self),
        )


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
        add_output(self, c)
        self.final_norm = nn.Parameter(torch.ones(h))
        self.lm_head = own_head(c)
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_steps))
        """Log of the factor on the logits per (temperature class: greedy, sampled; unrolled step)."""
        add_vocabulary(self, c)

    def qkv(
        self, hidden: torch.Tensor, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, T, H), (B, T, E), angles (1, T, Dh / 2) -> q (B, Hq, T, Dh), k and v (B, Hkv, T, Dh); q, k rotated."""
        c = self.config
        tokens = rms_norm(embedded.to(hidden.dtype), self.embed_norm, c.rms_eps)
        y = self.qkv_proj(torch.cat((tokens, rms_norm(hidden, self.hidden_norm, c.rms_eps)), dim=-1))
        return split_heads(y, c, cos, sin)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: hidden (B, T, H), attended (B, Hq, T, Dh) -> (B, T, H)."""
        eps = self.config.rms_eps
        if self.config.norm_before_residual:
            hidden = rms_norm(hidden, self.hidden_norm, eps)
        return finish_layer(self, hidden, attended.transpose(1, 2).flatten(2), eps)
