"""The SpecBlock drafter network: its configuration, its parameters and what one layer computes.

Shape legend: R rows, K draft slots of a block, T = R * K drafter tokens, H drafter hidden size, E target embedding
size, F fused target feature size, Hq/Hkv query/KV heads, Dh head dim, V target vocabulary, Vd draft vocabulary.
Source: SpecBlock (arXiv 2605.07243). A row pairs the fused target feature at position j with the token at j + 1 and
owns K slots; slot k predicts the token at j + 2 + k. Two Llama layers with a shift between them, a rank head, and
re-entry from the hidden state of a slot (block 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ConfigError
from paceline.serving.drafters.family import DrafterModel

NUM_RANK_CLASSES = 4
NUM_RANK_FEATURES = 15
RANK_BOUNDS = (1, 4, 10)
"""Class c holds true ranks up to RANK_BOUNDS[c] (1-based); the last class is beyond all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecBlockConfig:
    """Architecture of a SpecBlock drafter; stored as config.json next to its weights."""

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
    num_layers: int = 2
    num_slots: int = 4
    """Draft slots of a block (K in the paper)."""
    num_blocks: int = 2
    """Blocks that calibration knows; drafting uses two."""
    draft_vocab_size: int | None = None
    """None: the draft vocabulary is the target's."""
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0
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

    def __post_init__(self) -> None:
        checks = (
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads", self.num_heads),
            (self.head_dim % 2 == 0, "head_dim must be even", self.head_dim),
            (self.num_layers >= 1, "num_layers must be >= 1", self.num_layers),
            (1 <= self.num_slots <= 16, "num_slots must be in [1, 16]", self.num_slots),
            (2 <= self.num_blocks <= 3, "num_blocks must be 2 or 3", self.num_blocks),
            (self.rank_topk >= 10, "rank_topk must be >= 10", self.rank_topk),
            (self.vocab_size >= self.rank_topk, "vocab_size must be >= rank_topk", self.vocab_size),
            (len(self.branching) == NUM_RANK_CLASSES, "branching must have 4 numbers", self.branching),
            (self.block2_mask in ("inference_matched", "train_compat"), "block2_mask is unknown", self.block2_mask),
        )
        for ok, rule, value in checks:
            if not ok:
                raise ConfigError(f"specblock.{rule}, got {value!r}")

    @property
    def num_draft_ids(self) -> int:
        """Size of the draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "branching": list(self.branching)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SpecBlockConfig:
        """Read the fields of a config.json; keys that are not settings of the network are ignored.

        Raises: ConfigError when a setting is missing or not allowed.
        """
        names = {f.name for f in dataclasses.fields(SpecBlockConfig)}
        kept: dict[str, Any] = {k: tuple(v) if k == "branching" else v for k, v in values.items() if k in names}
        try:
            return SpecBlockConfig(**kept)
        except TypeError as e:
            raise ConfigError(f"drafter config.json must hold every SpecBlock setting: {e}") from e


def rope_cos_sin(
    positions: torch.Tensor, head_dim: int, theta: float, scaling: tuple[float, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the rotary angles, (..., head_dim / 2) float32 each.

    scaling: Llama-3.1's (factor, low frequency factor, high frequency factor, original context): frequencies that turn
    less than `low` times in the original context are divided by the factor, those above `high` kept, mixed in between.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    if scaling is not None:
        factor, low, high, context = scaling
        kept = ((context * inverse / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inverse = inverse * (kept + (1 - kept) / factor)
    angles = positions.to(torch.float64)[..., None] * inverse
    return angles.cos().float(), angles.sin().float()


def is_rope_scaling(scaling: tuple[float, ...] | None) -> bool:
    """Whether rope_cos_sin takes these."""
    return scaling is None or (len(scaling) == 4 and min(scaling) > 0 and scaling[1] < scaling[2])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (..., heads, Dh) by half-split pairs; cos and sin are (..., 1, Dh / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SpecBlockLayer(nn.Module):
    """One pre-norm Llama layer with fused projections; attention itself is the caller's (masks differ per use)."""

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        c = self.config = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv_proj = nn.Linear(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def qkv(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, T, H) and angles (B or 1, T, Dh / 2) -> q (B, Hq, T, Dh), k and v (B, Hkv, T, Dh), rotated."""
        c = self.config
        y = self.qkv_proj(F.rms_norm(x, (c.hidden_size,), self.input_norm.to(x.dtype), c.rms_eps))
        y = y.unflatten(-1, (c.num_heads + 2 * c.num_kv_heads, c.head_dim))
        qk, v = y[..., : c.num_heads + c.num_kv_heads, :], y[..., c.num_heads + c.num_kv_heads :, :]
        qk = rotate(qk, cos[..., None, :], sin[..., None, :]).transpose(1, 2)
        return qk[:, : c.num_heads], qk[:, c.num_heads :], v.transpose(1, 2)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection and MLP with their residuals: x (B, T, H), attended (B, Hq, T, Dh) -> (B, T, H)."""
        c = self.config
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(F.rms_norm(x, (c.hidden_size,), self.post_norm.to(x.dtype), c.rms_eps)).chunk(
            2, -1
        )
        return x + self.down_proj(F.silu(gate) * up)


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
        self.final_norm = nn.Parameter(torch.ones(h))
        self.lm_head = nn.Linear(h, c.num_draft_ids, bias=False)
        self.rank_in = nn.Linear(h + NUM_RANK_FEATURES, c.rank_hidden, bias=False)
        self.rank_out = nn.Linear(c.rank_hidden, NUM_RANK_CLASSES, bias=False)
        self.log_beta = nn.Parameter(torch.zeros(2, c.num_blocks, c.num_slots))
        """Log of the factor on the logits per (temperature class: greedy, sampled; block; slot)."""
        if c.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(c.draft_vocab_size))  # (Vd,) int64 target ids
            self.register_buffer("log_coverage", torch.zeros(()))  # log share of target tokens in the draft vocabulary
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def fuse(self, cond: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """cond (..., H) and embedded tokens (..., E) -> inputs of the K slots (..., K, H)."""
        c, w = self.config, self.fuse_proj.weight
        h, e = c.hidden_size, c.embed_size
        dtype = cond.dtype
        row = F.linear(F.rms_norm(cond, (h,), self.cond_norm.to(dtype), c.rms_eps), w[:, :h])
        row = row + F.linear(F.rms_norm(embedded, (e,), self.token_norm.to(dtype), c.rms_eps), w[:, h : h + e])
        slot = F.linear(F.rms_norm(self.queries, (h,), self.query_norm, c.rms_eps), w[:, h + e :])
        return row[..., None, :] + slot

    def shift(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Replace the residual stream (..., K, H) by a projection of each slot and the slot before it."""
        if not self.config.has_shift:
            return x
        before = torch.cat((x[..., :1, :], x[..., :-1, :]), dim=-2)
        return self.shifts[index](torch.cat((x, before), dim=-1))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm: what the output head and the rank head read."""
        return F.rms_norm(x, (self.config.hidden_size,), self.final_norm.to(x.dtype), self.config.rms_eps)

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
