"""SpecBlock network: its configuration, its parameters and what one layer computes.

Shape legend: R rows, K draft slots of a block, T = R * K drafter tokens, H drafter hidden size, E target embedding
size, F fused target feature size, Hq/Hkv query/KV heads, Dh head dim, V target vocabulary, Vd draft vocabulary.
Source: SpecBlock (arXiv 2605.07243). A row pairs the fused target feature at position j with the token at j + 1 and
owns K slots; slot k predicts the token at j + 2 + k. Two Llama layers with a shift between them, a rank head, and
re-entry from the hidden state of a slot (block 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    split_heads,
)

NUM_RANK_CLASSES = 4
NUM_RANK_FEATURES = 15
RANK_BOUNDS = (1, 4, 10)
"""Class c holds true ranks up to RANK_BOUNDS[c] (1-based); the last class is beyond all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecBlockConfig(OwnHeadConfig):
    """Architecture of a SpecBlock drafter."""

    title = "specblock"

    num_layers: int = 2
    num_slots: int = 4
    """Draft slots of a block (K in the paper)."""
    num_blocks: int = 2
    """Blocks that calibration knows; drafting uses two."""
    rank_topk: int = 20
    """Logits that the rank features are computed from."""
    rank_hidden: int = 64
    branching: tuple[int, ...] = (2, 4, 6, 4)
    """Candidates to keep per predicted rank class, the greedy one included."""
    compat_rope: bool = False
    """True: slots of block 2 repeat block 1's positions, as released weights expect."""
    block2_mask: str = "inference_matched"
    """'inference_matched' | 'train_compat' (block 2 also sees block-2 slots of earlier rows, in training only)."""
    has_shift: bool = True
    """False (ablation): slots get nothing from the slot before them between layers but attention."""
    inherits_hidden: bool = True
    """False (ablation): block 2 starts from the anchor row's projected features, not from the hidden state of the leaf's
    slot."""
    has_rank_head: bool = True
    """False (ablation): every slot keeps all candidates; path scores alone decide."""

    @property
    def delta_layers(self) -> dict[int, str]:
        """As DrafterConfig.delta_layers: the last one; what the others put out becomes keys and values of the text's rows."""
        return {self.num_layers - 1: f"layers.{self.num_layers - 1}."}

    def _checks(self) -> tuple[Check, ...]:
        return (
            (self.num_layers >= 1, "num_layers must be >= 1", self.num_layers),
            (1 <= self.num_slots <= 16, "num_slots must be in [1, 16]", self.num_slots),
            (2 <= self.num_blocks <= 3, "num_blocks must be 2 or 3", self.num_blocks),
            (self.rank_topk >= 10, "rank_topk must be >= 10", self.rank_topk),
            (self.num_draft_ids >= self.rank_topk, "the draft vocabulary must be >= rank_topk", self.num_draft_ids),
            (len(self.branching) == NUM_RANK_CLASSES, "branching must have 4 numbers", self.branching),
            (self.block2_mask in ("inference_matched", "train_compat"), "block2_mask is unknown", self.block2_mask),
            head_check(self),
        )


class SpecBlockLayer(nn.Module):
    """One pre-norm Llama layer with fused projections; attention itself is the caller's (masks differ per use)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        c = self.config = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv_proj = nn.Linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=False)
        add_output(self, c)

    def qkv(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, T, H) and angles (B or 1, T, Dh / 2) -> q (B, Hq, T, Dh), k and v (B, Hkv, T, Dh), rotated."""
        c = self.config
        return split_heads(self.qkv_proj(rms_norm(x, self.input_norm, c.rms_eps)), c, cos, sin)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: x (B, T, H), attended (B, Hq, T, Dh) -> (B, T, H)."""
        return finish_layer(self, x, attended.transpose(1, 2).flatten(2), self.config.rms_eps)


class SpecBlockModel(DrafterModel):
    """All trainable parameters of a drafter. The target's embedding is passed in where needed, never stored."""

    drafter_type = "specblock"
    config: SpecBlockConfig

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        c = self.config = config
        h = c.hidden_size
        self.cond_proj = nn.Linear(c.feature_size, h, bias=False)
        self.cond_norm = nn.Parameter(torch.ones(h))
        self.token_norm = nn.Parameter(torch.ones(c.embed_size))
        self.query_norm = nn.Parameter(torch.ones(h))
        self.queries = nn.Parameter(torch.randn(c.num_slots, h) * 0.02)
        self.fuse_proj = nn.Linear(2 * h + c.embed_size, h, bias=False)
        self.layers = nn.ModuleList(SpecBlockLayer(c) for _ in range(c.num_layers))
        num_shifts = c.num_layers - 1 if c.has_shift else 0
        self.shifts = nn.ModuleList(nn.Linear(2 * h, h, bias=False) for _ in range(num_shifts))
        for shift in self.shifts:  # each slot begins as itself: a random projection would replace the residual stream
            shift.weight = nn.Parameter(torch.eye(h, 2 * h))
        self.final_norm = nn.Parameter(torch.ones(h))
        self.lm_head = own_head(c)
        self.rank_in = nn.Linear(h + NUM_RANK_FEATURES, c.rank_hidden, bias=False)
        self.rank_out = nn.Linear(c.rank_hidden, NUM_RANK_CLASSES, bias=False)
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_blocks, c.num_slots))
        """Log of the factor on the logits per (temperature class: greedy, sampled; block; slot)."""
        add_vocabulary(self, c)

    def fuse(self, cond: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """cond (..., H) and embedded tokens (..., E) -> inputs of the K slots (..., K, H)."""
        c, w = self.config, self.fuse_proj.weight
        h, e = c.hidden_size, c.embed_size
        row = F.linear(rms_norm(cond, self.cond_norm, c.rms_eps), w[:, :h])
        row = row + F.linear(rms_norm(embedded, self.token_norm, c.rms_eps), w[:, h : h + e])
        slot = F.linear(rms_norm(self.queries, self.query_norm, c.rms_eps), w[:, h + e :])
        return row[..., None, :] + slot

    def block_layers(self) -> list[SpecBlockLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, SpecBlockLayer)]

    def shift(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Replace the residual stream (..., K, H) by a projection of each slot and the slot before it."""
        if not self.config.has_shift:
            return x
        before = torch.cat((x[..., :1, :], x[..., :-1, :]), dim=-2)
        return self.shifts[index](torch.cat((x, before), dim=-1))

    def rank_logits(self, z: torch.Tensor, top_logits: torch.Tensor) -> torch.Tensor:
        """Rank-class logits (..., 4) from normed hidden z (..., H) and top logits (..., rank_topk); inputs detached."""
        return self.rank_out(
            F.silu(self.rank_in(torch.cat((z.detach().float(), rank_features(top_logits.detach())), -1)))
        )


def rank_features(top_logits: torch.Tensor) -> torch.Tensor:
    """(..., k) float32 falling logits -> (..., 15): ten log-probs over the top k, three gaps, top prob, entropy."""
    logp = top_logits - top_logits.logsumexp(-1, keepdim=True)
    gaps = logp[..., :1] - logp[..., [1, 2, 4]]
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    return torch.cat((logp[..., :10], gaps, logp[..., :1].exp(), entropy), dim=-1)


def rank_class(rank: torch.Tensor) -> torch.Tensor:
    """0-based rank of the true token in the draft distribution -> class 0..3."""
    return sum(((rank >= bound).long() for bound in RANK_BOUNDS), torch.zeros_like(rank, dtype=torch.int64))
