"""KV row moves: a forward's K and V enter the pool in one Triton launch a layer, accepted scratch rows become canonical
rows of all layers in another.

A program of the second takes a narrow strip of columns of one layer, for all rows: it reads every source row, waits for all of its
threads, then writes. Programs share no column, so sources and destinations may overlap in any way, as in the
reference. The engine needs that: a lone request's tree lies behind its context, and a path moves up within it. More rows
than one program holds go through a copy of the sources (two launches).

That the wait (a barrier) orders reads before writes on a GPU is not proven by the interpreter, which runs a program as
one thread.

Shape legend: Lt layers, R pool rows, N packed rows, M rows to copy, Hkv KV heads, Dh head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_integers, check_tensors

_MAX_ROWS = 1024
"""Source rows that one program holds in registers."""
_TILE_WORDS = 8192
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["num_rows"])
def _copy_kernel(
    source, target, source_rows, target_rows, num_rows, num_words,
    source_layer, source_stride, target_layer, target_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK_R rows of BLOCK_C words of one layer; a negative row in either list skips the pair."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    layer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    read = tl.load(source_rows + row, mask=is_row, other=-1)
    write = tl.load(target_rows + row, mask=is_row, other=-1)
    mask = ((read >= 0) & (write >= 0))[:, None] & (column < num_words)[None, :]
    words = tl.load(source + layer * source_layer + read[:, None] * source_stride + column[None, :], mask=mask)
    tl.debug_barrier()  # no thread writes a row that another has yet to read
    tl.store(target + layer * target_layer + write[:, None] * target_stride + column[None, :], words, mask=mask)


def commit_rows(pool: torch.Tensor, src_rows: torch.Tensor, dst_rows: torch.Tensor) -> None:
    """Copy pool rows for all layers, K and V, byte for byte.

    All rows are read before any is written, so sources and destinations may overlap; destinations must not repeat.
    Beyond the reference's contract: a pair with a negative row is skipped, the mark of padding in batches of fixed
    shape. Rows >= R are undefined here, as finding them would stall the device; the reference refuses them.

    Args:
        pool: (Lt, R, 2, Hkv, Dh), each row contiguous.
        src_rows, dst_rows: (M,) int64 of equal length; M may be 0.
    Raises: ValueError on a wrong shape, stride, dtype or device.
    Syncs: none.
    """
    if src_rows.shape != dst_rows.shape:
        raise ValueError(f"dst_rows must have as many rows as src_rows ({src_rows.numel()}), got {dst_rows.numel()}")
    check_tensors(pool.device, src_rows=src_rows, dst_rows=dst_rows)
    check_integers(src_rows=src_rows, dst_rows=dst_rows)
    if pool.dim() != 5 or pool.shape[2] != 2 or (pool.numel() and not pool[0, 0].is_contiguous()):
        raise ValueError(
            f"pool must be (Lt, R, 2, Hkv, Dh) of contiguous rows, got {tuple(pool.shape)} {pool.stride()}"
        )
    num_rows = src_rows.numel()
    if num_rows == 0 or pool.numel() == 0:
        return
    words = _as_words(pool.flatten(2))
    src_rows, dst_rows = src_rows.contiguous(), dst_rows.contiguous()
    if num_rows <= _MAX_ROWS:
        _copy(words, words, src_rows, dst_rows, triton.next_power_of_2(num_rows))
        return
    held = torch.empty(words.shape[0], num_rows, words.shape[2], dtype=words.dtype, device=words.device)
    order = torch.arange(num_rows, device=words.device)
    _copy(words, held, src_rows, order, 64)
    # A skipped pair must stay skipped on the way back: its row in `held` was never written.
    _copy(held, words, torch.where(src_rows < 0, -1, order), dst_rows, 64)


def _copy(
    source: torch.Tensor, target: torch.Tensor, source_rows: torch.Tensor, target_rows: torch.Tensor, block_rows: int
) -> None:
    num_layers, _, num_words = source.shape
    num_rows = source_rows.numel()
    block_words = min(max(8, _TILE_WORDS // block_rows), 256, triton.next_power_of_2(num_words))
    _copy_kernel[(triton.cdiv(num_words, block_words), num_layers, triton.cdiv(num_rows, block_rows))](
        source, target, source_rows, target_rows, num_rows, num_words,
        source.stride(0), source.stride(1), target.stride(0), target.stride(1),
        BLOCK_R=block_rows, BLOCK_C=block_words, num_warps=8 if block_rows * block_words >= 4096 else 4,
    )  # fmt: skip


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """(Lt, R, E) -> (Lt, R, words) of the widest integer that tiles every row: a copy of integers keeps every byte."""
    size = rows.element_size()
    layer, row, _ = (stride * size for stride in rows.stride())
    length, begin = rows.shape[2] * size, rows.storage_offset() * size
    width = next(w for w in _INTEGERS if w <= 8 and not any(n % w for n in (layer, row, length, begin)))
    return rows.view(_INTEGERS[width])


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
