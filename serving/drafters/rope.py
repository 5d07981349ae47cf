"""Rotary embedding of drafters: angles, half-split rotation for training, adjacent pairs for drafting.

Shape legend: T drafter tokens, Hr rotated heads (queries and keys), Dh head dim. Drafting stores rotary pairs as
neighbours, so that float32 rotates by one complex product; `adjacent_pairs` reorders the weights.
"""

from __future__ import annotations

import math

import torch


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


def adjacent_pairs(head_dim: int, device: torch.device) -> torch.Tensor:
    """(Dh,) int64 order of a head's rows that turns half-split rotary pairs into adjacent ones."""
    return torch.arange(head_dim, device=device).view(2, -1).T.reshape(-1)


def pair_angles(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rotations as `rotate_pairs` takes them: (..., 1, Dh / 2) complex64 for float32, else (..., 2, 1, Dh / 2)."""
    table = torch.complex(cos, sin) if dtype == torch.float32 else torch.stack((cos, sin), -2)
    return table[..., None, :]


def rotate_pairs(qkv: torch.Tensor, angles: torch.Tensor, num_rotated: int, head_dim: int) -> None:
    """Rotate the first Hr heads of qkv (T, heads * Dh) in place. angles: (T, ...) of `pair_angles`."""
    shape, strides = (qkv.shape[0], num_rotated, head_dim // 2, 2), (qkv.shape[1], head_dim, 2, 1)
    pairs = qkv.as_strided(shape, strides)
    if qkv.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(angles)
    else:
        cos, sin = angles.unbind(1)
        a, b = pairs.float().unbind(-1)
        pairs.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1))
