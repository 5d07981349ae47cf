"""KV row moves: a forward's rows enter the pool, accepted scratch rows become canonical rows; plain torch reference.

Shape legend: Lt layers, R pool rows, N packed rows, M rows to copy, Hkv KV heads, Dh head dim.
"""

from __future__ import annotations

import torch


def commit_rows(pool: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
    """Copy pool rows for all layers, K and V, byte for byte.

    All rows are read before any is written, so sources and destinations may overlap; destinations must not repeat.

    Args:
        pool: (Lt, R, 2, Hkv, Dh).
        src_rows, dst_rows: (M,) int64 of equal length; M may be 0.
    """
    if src_rows.shape != dst_rows.shape:
        raise ValueError(f"dst_rows must have as many rows as src_rows ({src_rows.numel()}), got {dst_rows.numel()}")
    if src_rows.numel():
        pool.index_copy_(1, dst_rows, pool.index_select(1, src_rows))


def scatter_rows(pool: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write one layer's new K/V rows in place; `rows` must not repeat.

    Args:
        pool: (R, 2, Hkv, Dh), index 0 of the second axis is K, 1 is V.
        rows: (N,) int64 pool rows.
        keys, values: (N, Hkv, Dh), any strides.
    """
    pool.index_copy_(0, rows, torch.stack((keys, values), dim=1))
