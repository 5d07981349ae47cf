"""Parallel draft head of JetSpec and DFlash: its configuration, its parameters and what one layer computes.

Shape legend: B requests, T context rows, A anchors, S draft slots, N = 1 + S block rows, H hidden size (the target's),
F fused target feature size, Hq/Hkv query/KV heads, Dh head dim, V/Vd target/draft vocabulary, r edge rank.
One call drafts S tokens: block rows [anchor, MASK x S] at positions a..a+S attend to keys and values that every layer
projects from the same fused features g = RMSNorm(W_fc f) of the committed rows, and to each other. Row k predicts the
token at a + k (in-place labels) through the target's own embedding and output head, or that head's rows of the draft
vocabulary, which are passed in, never stored.
Source: DFlash (bidirectional block) and JetSpec (causal block), tree_speculation.md 1.3-1.4 and 2; the edge correction
is the low-rank previous-token bias of DSpark, whose blocks have their labels one row earlier and no row more than slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.serving.drafters.network import (
    Check,
    DrafterConfig,
    DrafterModel,
    add_output,
    add_vocabulary,
    finish_layer,
    rms_norm,
    rotate,
    scaling_check,
)

DRAFTER_TYPES = {"jetspec": True, "dflash": False}
"""Drafter type -> whether its block is causal."""
MAX_EDGE_RANK = 256
_INITIAL_SCALE = 0.1
"""Of the mask vector and the edge table: about the scale of a trained token embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelHeadConfig(DrafterConfig):
    """Architecture of a parallel head; `hidden_size` is also the width of the target's embedding and output head."""

    title = "parallel_head"

    is_causal: bool
    """True (JetSpec): block row k sees rows 0..k; False (DFlash): every row of the block."""
    num_layers: int = 2
    num_slots: int = 8
    """Draft tokens of a block (S); the block has one row more, the anchor."""
    mask_token_id: int | None = None
    """Target token whose embedding fills the empty slots; None: a learned vector, for targets without such a token."""
    edge_rank: int = 0
    """Rank of the previous-token correction of the slot logits; 0 = none."""
    is_shifted: bool = False
    """True (DSpark): block row k, the anchor's among them, predicts the token at a + k + 1; a block has S rows."""
    corrects_first: bool = False
    """True (DSpark): the anchor corrects the first slot; False: the block reads the anchor, which is enough."""
    rope_scaling: tuple[float, ...] | None = None
    """Llama-3.1's four numbers, as rope_cos_sin takes them; None: angles are not scaled."""

    @property
    def delta_layers(self) -> dict[int, str]:
        """As DrafterConfig.delta_layers: all; keys and values of the text's rows are made of features alone."""
        return {i: f"layers.{i}." for i in range(self.num_layers)}

    def _checks(self) -> tuple[Check, ...]:
        mask = self.mask_token_id
        return (
            (self.num_layers >= 1, "num_layers must be >= 1", self.num_layers),
            (1 <= self.num_slots <= 31, "num_slots must be in [1, 31]", self.num_slots),
            (0 <= self.edge_rank <= MAX_EDGE_RANK, f"edge_rank must be in [0, {MAX_EDGE_RANK}]", self.edge_rank),
            (
                not self.corrects_first or (self.edge_rank > 0 and self.draft_vocab_size is None),
                "corrects_first must go with an edge_rank and without a draft_vocab_size",
                self.corrects_first,
            ),
            (mask is None or 0 <= mask < self.vocab_size, "mask_token_id must be in the vocabulary or null", mask),
            scaling_check(self.rope_scaling),
        )

    @property
    def num_rows(self) -> int:
        """Rows of a block (N), the anchor's first; the last S of them draft."""
        return self.num_slots if self.is_shifted else self.num_slots + 1

    @property
    def drafter_type(self) -> str:
        """Name under which drafters of this architecture are stored."""
        return next(name for name, is_causal in DRAFTER_TYPES.items() if is_causal == self.is_causal)

    @classmethod
    def _implied(cls, drafter_type: str) -> dict[str, Any]:
        return {"is_causal": DRAFTER_TYPES[drafter_type]} if drafter_type in DRAFTER_TYPES else {}


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
        add_output(self, c)

    def key_value(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (normed per head, rotated) and values (..., Hkv, Dh) of x (..., H) as it is; cos, sin (..., Dh / 2)."""
        c = self.config
        k, v = self.kv_proj(x).unflatten(-1, (2, c.num_kv_heads, c.head_dim)).unbind(-3)
        return rotate(rms_norm(k, self.k_norm, c.rms_eps), cos[..., None, :], sin[..., None, :]), v

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries (..., Hq, Dh) of normed block rows x (..., H), normed per head and rotated."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.head_dim))
        return rotate(rms_norm(q, self.q_norm, c.rms_eps), cos[..., None, :], sin[..., None, :])

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Input norm of block rows; context rows do not pass it."""
        return rms_norm(x, self.input_norm, self.config.rms_eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: x (..., H), attended (..., Hq * Dh) -> (..., H)."""
        return finish_layer(self, x, attended, self.config.rms_eps)


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
        self.lm_head = None
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_slots))
        """Log of the factor on the logits per (temperature class: greedy, sampled; slot)."""
        if c.edge_rank:
            self.edge_in = nn.Parameter(torch.randn(c.num_draft_ids, c.edge_rank) * _INITIAL_SCALE)
            self.edge_out = nn.Parameter(torch.zeros(c.num_draft_ids, c.edge_rank))  # the correction starts at zero
        add_vocabulary(self, c)

    def block_layers(self) -> list[ParallelHeadLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, ParallelHeadLayer)]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fused features g (..., H) of tapped hidden states (..., F), shared by all layers."""
        return rms_norm(self.cond_proj(features), self.cond_norm, self.config.rms_eps)

    def block_rows(self, anchor_token_ids: torch.Tensor, embed: torch.Tensor) -> torch.Tensor:
        """Inputs (..., N, H) of the blocks behind these anchors (...). embed: (V, H), the target's token embedding."""
        c = self.config
        mask = self.mask_embedding if c.mask_token_id is None else embed[c.mask_token_id]
        anchor = F.embedding(anchor_token_ids, embed)[..., None, :]
        return torch.cat((anchor, mask.to(anchor.dtype).expand(*anchor.shape[:-2], c.num_rows - 1, -1)), dim=-2)

    def edge_bias(self, previous_token_ids: torch.Tensor) -> torch.Tensor:
        """What a known previous token (...) adds to the logits of a slot, (..., Vd); ids of the draft vocabulary."""
        return F.linear(F.embedding(previous_token_ids, self.edge_in), self.edge_out)


def block_visibility(num_rows: int, is_causal: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """(N, N) bool: which rows of its own block a block row sees."""
    every = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device)
    return every.tril() if is_causal else every
