"""What does a parallel head compute for many anchors of logged requests that share one context each?

Shape legend: B requests of a batch, T context rows (padded at the end), A anchors of a request, S draft slots, N = 1 + S
block rows, H hidden size, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, V vocabulary.
A block behind anchor a sees the context rows t < a (the anchor's own feature does not exist while drafting) and its own
rows, those before each row or all of them; blocks do not see each other.
Source: tree_speculation.md 1.4 and 1.5 (JetSpec, DFlash).
"""

from __future__ import annotations

import torch

from paceline.adapt.row_batch import RowBatch
from paceline.serving.parallel_head_model import ParallelHeadModel, block_visibility
from paceline.serving.specblock_model import rope_cos_sin


def supervised_anchors(is_output: torch.Tensor) -> torch.Tensor:
    """(B, T + 1) bool: positions that the target wrote and behind which it wrote at least one more token."""
    out = torch.zeros_like(is_output)
    out[:, 1:-1] = is_output[:, 1:-1] & is_output[:, 2:]
    return out


def draw_anchors(
    is_output: torch.Tensor, num_anchors: int | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors of each request, all different: positions (B, A) int64 and which of them are real (B, A) bool.

    num_anchors: drawn at random per request; None = every supervised position. The draws come from the CPU, so that
    they are the same on every device.
    """
    allowed = supervised_anchors(is_output)
    most = max(1, int(allowed.sum(1).max()))
    order = torch.rand(allowed.shape, generator=generator).to(allowed.device).masked_fill(~allowed, -1.0)
    draws, anchors = order.topk(most if num_anchors is None else min(num_anchors, most), dim=1)
    is_real = draws >= 0
    return torch.where(is_real, anchors, 1), is_real


def anchored_forward(
    model: ParallelHeadModel, batch: RowBatch, embed: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Hidden states of the draft slots of every anchor, before the final norm: (B, A, S, H).

    Args:
        embed: (V, H), the target's token embedding.
        anchors: (B, A) int64 token positions, each at least 1.
    """
    c = model.config
    b, t = batch.features.shape[:2]
    rows = c.num_slots + 1
    device = anchors.device
    g = model.fuse(batch.features.to(model.cond_proj.weight.dtype))  # (B, T, H)
    context_angles = rope_cos_sin(torch.arange(t, device=device), c.head_dim, c.rope_theta, c.rope_scaling)
    steps = torch.arange(rows, device=device)
    block_angles = rope_cos_sin(
        anchors[..., None] + steps, c.head_dim, c.rope_theta, c.rope_scaling
    )  # (B, A, N, Dh / 2)
    x = model.block_rows(batch.token_ids.gather(1, anchors), embed).to(g.dtype)
    is_past = torch.arange(t, device=device) < anchors[..., None]  # (B, A, T)
    own = block_visibility(c.num_slots, c.is_causal, device)
    seen = torch.cat(
        (is_past[:, :, None].expand(-1, -1, rows, -1), own.expand(b, anchors.shape[1], -1, -1)), dim=3
    )  # (B, A, N, T + N)
    for layer in model.block_layers():
        context_k, context_v = layer.key_value(g, *context_angles)  # (B, T, Hkv, Dh)
        y = layer.enter(x)
        q = layer.query(y, *block_angles).unflatten(3, (c.num_kv_heads, -1))  # (B, A, N, Hkv, G, Dh)
        k, v = layer.key_value(y, *block_angles)  # (B, A, N, Hkv, Dh)
        # Two products share one softmax: the keys of other anchors' blocks are never multiplied.
        scores = torch.cat(
            (torch.einsum("banhgd,bthd->bhgant", q, context_k), torch.einsum("banhgd,bamhd->bhganm", q, k)), dim=-1
        )
        scores = scores.float() * c.head_dim**-0.5
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).to(v.dtype)
        out = torch.einsum("bhgant,bthd->banhgd", weights[..., :t], context_v)
        out = out + torch.einsum("bhganm,bamhd->banhgd", weights[..., t:], v)
        x = layer.finish(x, out.flatten(3))
    return x[:, :, 1:]
