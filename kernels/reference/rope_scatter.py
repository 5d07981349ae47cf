"""RoPE scatter: head norm, RoPE and K/V write of fresh projections; plain torch reference.

Shape legend: N packed rows, H/Hkv query/KV heads, Dh head dim, P positions, R pool rows.
"""

from __future__ import annotations

import torch


def rope_scatter(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    is_adjacent: bool = False,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write K/V rows into one layer's pool, return the rotated queries.

    Computed in float32 and rounded once, where the result is stored; a model that rounds after each operator differs
    in the last bits of 16-bit types. RoPE pairs element d with d + Dh / 2 (NeoX halves, arXiv 2104.09864), or, if
    is_adjacent, 2 d with 2 d + 1. Negative rows are not written.

    Args:
        query: (N, H, Dh); key, value: (N, Hkv, Dh).
        pool: (R, 2, Hkv, Dh) of this layer; rows are written in the pool's dtype.
        rows: (N,) int64 pool rows, which must not repeat, or negative.
        positions: (N,) int64 in [0, P).
        cos, sin: (P, Dh), a pair's two columns where its two elements are.
        q_norm, k_norm: (Dh,) weights of the RMS norm over each head; None = no norm.
        eps: of the RMS norm.
        is_adjacent: pairs are neighbours instead of halves.
    Returns: (N, H, Dh) of the query's dtype.
    """
    table = cos[positions].float()[:, None], sin[positions].float()[:, None]
    turned = _turn(_normalise(key.float(), k_norm, eps), *table, is_adjacent)
    is_kept = rows >= 0
    pool[rows[is_kept], 0] = turned[is_kept].to(pool.dtype)
    pool[rows[is_kept], 1] = value[is_kept].to(pool.dtype)
    return _turn(_normalise(query.float(), q_norm, eps), *table, is_adjacent).to(query.dtype)


def _normalise(heads: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_adjacent: bool) -> torch.Tensor:
    if is_adjacent:
        first, second = heads[..., ::2], heads[..., 1::2]
        return heads * cos + torch.stack((-second, first), -1).flatten(-2) * sin
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin
