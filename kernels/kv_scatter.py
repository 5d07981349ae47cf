"""How are the K/V rows of a forward written into the pool on a GPU? One launch for K and V of a layer.

Shape legend: R pool rows, N packed rows, Hkv KV heads, Dh head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.triton_launch import check_integers, check_tensors

_BLOCK = 1024


@triton.jit
def _scatter_kernel(
    pool, rows, keys, values, head_dim, row_size,
    key_row, key_head, key_column, value_row, value_head, value_column, pool_row, pool_value, pool_head, pool_column,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program moves BLOCK elements of one row, K and V."""
    source = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + source)
    if row < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = element < row_size
    head, column = element // head_dim, element % head_dim
    key = tl.load(keys + source * key_row + head * key_head + column * key_column, mask=is_element)
    value = tl.load(values + source * value_row + head * value_head + column * value_column, mask=is_element)
    at = pool + row * pool_row + head * pool_head + column * pool_column
    tl.store(at, key, mask=is_element)
    tl.store(at + pool_value, value, mask=is_element)


def scatter_rows(pool: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write one layer's new K/V rows in place; `rows` must not repeat.

    Beyond the reference's contract: negative rows are skipped, the mark of padding in batches of fixed shape. Rows >= R
    are undefined here, as finding them would stall the device; the reference refuses them.

    Args:
        pool: (R, 2, Hkv, Dh), index 0 of the second axis is K, 1 is V; any strides.
        rows: (N,) int64 pool rows.
        keys, values: (N, Hkv, Dh) of the pool's dtype, any strides.
    Raises: ValueError on a wrong shape, dtype or device.
    Syncs: none.
    """
    check_tensors(pool.device, rows=rows, keys=keys, values=values)
    check_integers(rows=rows)
    if pool.dim() != 4 or pool.shape[1] != 2:
        raise ValueError(f"pool must be (R, 2, Hkv, Dh), got {tuple(pool.shape)}")
    _, _, num_kv_heads, head_dim = pool.shape
    expected = (rows.shape[0], num_kv_heads, head_dim)
    if keys.shape != expected or values.shape != expected:
        raise ValueError(f"keys and values must be {expected}, got {tuple(keys.shape)} and {tuple(values.shape)}")
    if keys.dtype != pool.dtype or values.dtype != pool.dtype:
        raise ValueError(f"keys and values must be {pool.dtype} as the pool, got {keys.dtype} and {values.dtype}")
    row_size = num_kv_heads * head_dim
    if rows.shape[0] == 0 or row_size == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(row_size))
    _scatter_kernel[(rows.shape[0], triton.cdiv(row_size, block))](
        pool, rows.contiguous(), keys, values, head_dim, row_size, *keys.stride(), *values.stride(), *pool.stride(),
        BLOCK=block, num_warps=4 if block > 256 else 1,
    )  # fmt: skip
