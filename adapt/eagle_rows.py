"""What does EAGLE-3 compute for packed rows of logged requests, step after step of the training-time test?

Shape legend: B requests of a batch, T rows (padded at the end), H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim,
V target vocabulary. Row j of step 0 holds the fused feature at j and the token at j + 1; row j of step t holds its own
hidden state of step t - 1 and the token at j + 1 + t, and predicts the token at j + 2 + t.
A row of step t sees what the t-th token below an anchor sees in serving: the true-feature rows 0..j of step 0 and, on its
own diagonal, the rows of steps 1..t. Source: EAGLE-3 (arXiv 2503.01840), figure 6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from paceline.adapt.row_batch import RowBatch
from paceline.serving.eagle_model import EagleModel
from paceline.serving.specblock_model import rope_cos_sin


def unrolled_hidden(model: EagleModel, batch: RowBatch, embed: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """Hidden states (B, T, H), before the final norm, of steps 0..num_steps-1. embed: (V, E), the target's embedding."""
    c = model.config
    rows = batch.features.shape[1]
    hidden = F.linear(batch.features.to(model.fc.weight.dtype), model.fc.weight)
    groups = c.num_heads // c.num_kv_heads
    token_ids = F.pad(batch.token_ids, (0, num_steps))
    positions = torch.arange(rows, device=hidden.device)
    future = torch.ones(rows, rows, dtype=torch.bool, device=hidden.device).triu_(1)
    every_k: list[torch.Tensor] = []
    every_v: list[torch.Tensor] = []
    for step in range(num_steps):
        embedded = F.embedding(token_ids[:, 1 + step : 1 + step + rows], embed)
        cos, sin = rope_cos_sin((positions + step)[None], c.head_dim, c.rope_theta, c.rope_scaling)
        q, k, v = model.qkv(hidden, embedded, cos, sin)
        every_k.append(k.repeat_interleave(groups, 1))
        every_v.append(v.to(k.dtype).repeat_interleave(groups, 1))
        if step == 0:
            attended = F.scaled_dot_product_attention(q, every_k[0], every_v[0], is_causal=True)
        else:
            attended = _attend_diagonals(q, every_k, every_v, future)
        hidden = model.finish(hidden, attended)
        yield hidden


def _attend_diagonals(
    q: torch.Tensor, every_k: list[torch.Tensor], every_v: list[torch.Tensor], future: torch.Tensor
) -> torch.Tensor:
    """q and each k, v (B, Hq, T, Dh): causal over step 0, own row only over later steps -> (B, Hq, T, Dh)."""
    q = q * q.shape[-1] ** -0.5
    rows = q.shape[2]
    context = (q @ every_k[0].transpose(2, 3)).float().masked_fill(future, float("-inf"))
    own = torch.stack([(q * k).sum(-1) for k in every_k[1:]], dim=-1).float()
    shares = torch.cat((context, own), dim=-1).softmax(-1).to(q.dtype)
    out = shares[..., :rows] @ every_v[0]
    for i, v in enumerate(every_v[1:]):
        out = out + shares[..., rows + i, None] * v
    return out
