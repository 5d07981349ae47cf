"""How are the K/V rows of a forward written into the pool? Plain torch reference.

Shape legend: R pool rows, N packed rows, Hkv KV heads, Dh head dim.
"""

from __future__ import annotations

import torch


def scatter_rows(pool: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write one layer's new K/V rows in place; `rows` must not repeat.

    Args:
        pool: (R, 2, Hkv, Dh), index 0 of the second axis is K, 1 is V.
        rows: (N,) int64 pool rows.
        keys, values: (N, Hkv, Dh), any strides.
    """
    pool.index_copy_(0, rows, torch.stack((keys, values), dim=1))
