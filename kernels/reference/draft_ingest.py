"""Draft ingest: new target features become the context K/V of a table drafter.

Shape legend: R new rows, F feature width (taps x target hidden size), Dd drafter hidden size, Lt drafter layers, P pool
rows, Hkv KV heads, Dh head dim, T positions of the rotary table.
g = RMSNorm(features @ fc) is shared by all layers; their K and V are one projection of it (tree_speculation.md 1.3, K8).
Rows are written once; a row whose pool row is negative is padding and writes nothing.
"""

from __future__ import annotations

import torch


def draft_ingest(
    *,
    features: torch.Tensor,
    fc: torch.Tensor,
    norm_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pool_rows: torch.Tensor,
    pool: torch.Tensor,
    eps: float,
) -> None:
    """Write K (normed per head if k_norm_weight is given, then rotated by halves) and V of every layer into `pool`.

    Args:
        features: (R, F). fc: (F, Dd). norm_weight: (Dd,).
        kv_weight: (Dd, Lt * 2 * Hkv * Dh), columns ordered as (layer, K or V, head, dim).
        k_norm_weight: (Lt, Dh) or None.
        cos, sin: (T, Dh / 2) float32 tables by position.
        positions: (R,) int64 in [0, T). pool_rows: (R,) int64, not repeated; negative = padding.
        pool: (Lt, P, 2, Hkv, Dh), written in place.
        eps: of both norms.
    """
    layers, _, _, heads, dim = pool.shape
    rows = pool_rows >= 0
    hidden = torch.mm(features, fc).float()
    hidden = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + eps) * norm_weight.float()
    kv = torch.mm(hidden.to(kv_weight.dtype), kv_weight).view(-1, layers, 2, heads, dim)[rows].float()
    keys, values = kv.unbind(2)  # (R, Lt, Hkv, Dh)
    if k_norm_weight is not None:
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps) * k_norm_weight.float()[:, None]
    c, s = (t[positions[rows]][:, None, None, :] for t in (cos, sin))
    a, b = keys.chunk(2, dim=-1)
    keys = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    pool[:, pool_rows[rows]] = torch.stack((keys, values), dim=2).transpose(0, 1).to(pool.dtype)
