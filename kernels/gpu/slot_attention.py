"""Slot attention: draft blocks over paged drafter KV without gathering or concatenating it, in two Triton launches.

Shape legend: as in slot_attention_ref, which says what is computed; S splits of the committed keys, M = blocks of a
tile x K x G query rows of one KV head.
Blocks of a request share a tile, so its committed keys are read once for all of them; the query heads of a KV head are
rows of the same tile. Few requests with long contexts would leave most of the device idle, so the committed keys are cut
into S parts (S follows from shapes alone) that a second launch merges by their log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors, fold_keys, is_interpreted, num_processors

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TILES = {torch.float32: (16, 32), torch.bfloat16: (64, 64), torch.float16: (64, 64)}
"""Query rows and keys of a tile; float32 products run without tensor cores and keep more bytes in registers."""
_MIN_SPLIT_KEYS = 256
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_blocks", "num_tiles", "num_rows", "num_splits", "table_stride"])
def _partial_kernel(
    query,
    current,
    pool,
    slot_table,
    context_rows,
    own_slots,
    out_parts,
    out_lse,
    num_blocks,
    num_tiles,
    num_rows,
    num_splits,
    q_stride_b,
    q_stride_f,
    q_stride_k,
    q_stride_h,
    c_stride_b,
    c_stride_f,
    c_stride_k,
    pool_stride,
    table_stride,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    HKV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    N_CURRENT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)

    row = tl.arange(0, M)  # (block of the tile, slot, query head of the group)
    local = row // (K * G)
    slot = (row // G) % K
    head = kv_head * G + row % G
    block = tile * TILE + local
    exists = (local < TILE) & (block < num_blocks)
    rows = tl.load(context_rows + b * num_blocks + block, mask=exists, other=-1).to(tl.int32)
    own = tl.load(own_slots + b * num_blocks + block, mask=exists, other=0).to(tl.int32)
    is_live = rows >= 0
    limit = tl.where(is_live, rows * K + own, 0)  # committed keys that the row sees

    d = tl.arange(0, DIM_PADDED)
    is_dim = d < DIM
    place = b * q_stride_b + block.to(tl.int64) * q_stride_f + slot * q_stride_k + head * q_stride_h
    q = tl.load(query + place[:, None] + d[None, :], mask=is_live[:, None] & is_dim[None, :], other=0.0).to(DTYPE)

    acc = tl.zeros((M, DIM_PADDED), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    most = tl.max(limit, axis=0)
    share = tl.cdiv(tl.cdiv(most, num_splits), N) * N
    first = split * share
    last = tl.minimum(first + share, most)
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        inside = key < last
        pool_row = tl.load(slot_table + b * table_stride + key // K, mask=inside, other=0)
        at = pool_row * pool_stride + (key % K) * (2 * HKV * DIM) + kv_head * DIM
        mask = inside[:, None] & is_dim[None, :]
        k = tl.load(pool + at[:, None] + d[None, :], mask=mask, other=0.0).to(DTYPE)
        v = tl.load(pool + at[:, None] + (HKV * DIM + d)[None, :], mask=mask, other=0.0).to(DTYPE)
        visible = (key[None, :] < limit[:, None]) & inside[None, :]
        acc, top, total = fold_keys(q, k, v, visible, acc, top, total, scale)

    if split == 0:  # the blocks of the tile side by side, each visible to itself alone
        key = tl.arange(0, N_CURRENT)
        key_local = key // K
        key_slot = key % K
        key_block = tile * TILE + key_local
        inside = (key_local < TILE) & (key_block < num_blocks)
        is_used = tl.load(context_rows + b * num_blocks + key_block, mask=inside, other=-1) >= 0
        at = b * c_stride_b + key_block.to(tl.int64) * c_stride_f + key_slot * c_stride_k + kv_head * DIM
        mask = is_used[:, None] & is_dim[None, :]
        k = tl.load(current + at[:, None] + d[None, :], mask=mask, other=0.0).to(DTYPE)
        v = tl.load(current + at[:, None] + (HKV * DIM + d)[None, :], mask=mask, other=0.0).to(DTYPE)
        is_own = (key_local[None, :] == local[:, None]) & (key_slot[None, :] <= slot[:, None])
        visible = is_own & is_live[:, None] & is_used[None, :]
        acc, top, total = fold_keys(q, k, v, visible, acc, top, total, scale)

    is_seen = total > 0.0
    part = acc / tl.where(is_seen, total, 1.0)[:, None]
    lse = tl.where(is_seen, top + tl.log2(tl.where(is_seen, total, 1.0)), float("-inf"))
    out_row = ((b * num_blocks + block) * K + slot) * (HKV * G) + head
    to = split.to(tl.int64) * num_rows + out_row
    tl.store(out_parts + to[:, None] * DIM + d[None, :], part, mask=exists[:, None] & is_dim[None, :])
    tl.store(out_lse + to, lse, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    parts,
    lse,
    out,
    num_rows,
    num_splits,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM_PADDED)
    exists = row < num_rows
    mask = exists[:, None] & (d < DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in range(num_splits):
        top = tl.maximum(top, tl.load(lse + split * num_rows + row, mask=exists, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)  # padding: no split has seen a key
    acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(num_splits):
        at = split * num_rows + row
        weight = tl.exp2(tl.load(lse + at, mask=exists, other=float("-inf")) - top)
        acc += weight[:, None] * tl.load(parts + at[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        total += weight
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


def num_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """Parts to cut the committed keys into: enough programs for two waves, no part below 256 keys."""
    wanted = -(-2 * num_processors // max(num_programs, 1))
    return max(1, min(wanted, num_keys // _MIN_SPLIT_KEYS, 64))


def slot_attention(
    *,
    query: torch.Tensor,
    current: torch.Tensor,
    pool: torch.Tensor,
    slot_table: torch.Tensor,
    context_rows: torch.Tensor,
    own_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`slot_attention_ref.slot_attention` on the device; launches and shapes follow from the inputs' shapes alone.

    query and current may be views of one packed projection: their last dimensions must have stride 1.
    Raises: ValueError on a wrong shape, dtype, layout or device.  Syncs: none.
    """
    device = query.device
    check_tensors(device)
    check_tensor("query", query, (None, None, None, None, None), tuple(_DTYPES), is_contiguous=False)
    batch, blocks, slots, heads, dim = query.shape
    check_tensor("pool", pool, (None, slots, None), query.dtype, device, is_contiguous=False)
    width = pool.shape[2]
    if dim == 0 or width % (2 * dim) or width == 0 or heads % (width // (2 * dim)):
        raise ValueError(f"pool must hold keys and values of a divisor of {heads} heads of {dim}, got width {width}")
    if pool.stride(1) != width:
        raise ValueError(f"pool must hold the slots of a row without gaps, got strides {pool.stride()}")
    check_tensor("current", current, (batch, blocks, slots, width), query.dtype, device, is_contiguous=False)
    check_tensor("slot_table", slot_table, (batch, None), torch.int64, device, is_contiguous=False)
    check_tensor("context_rows", context_rows, (batch, blocks), torch.int64, device)
    check_tensor("own_slots", own_slots, (batch, blocks), torch.int64, device)
    out = torch.empty(query.shape, dtype=query.dtype, device=device)
    if out.numel() == 0:
        return out
    kv_heads = width // (2 * dim)
    groups = heads // kv_heads
    tile_rows, tile_keys = _TILES[query.dtype]
    padded = max(triton.next_power_of_2(dim), 16)
    is_wide = padded > 128  # twice the bytes of a key: some GPUs have 99 KiB of shared memory for a program
    tile = max(1, min(tile_rows // (slots * groups), blocks))
    tiles = -(-blocks // tile)
    splits = num_splits(batch * tiles * kv_heads, slot_table.shape[1] * slots, num_processors(device))
    num_rows = batch * blocks * slots * heads
    parts = torch.empty(splits, num_rows, dim, dtype=torch.float32, device=device)
    lse = torch.empty(splits, num_rows, dtype=torch.float32, device=device)
    _partial_kernel[(tiles * splits, kv_heads, batch)](
        query,
        current,
        pool,
        slot_table,
        context_rows,
        own_slots,
        parts,
        lse,
        blocks,
        tiles,
        num_rows,
        splits,
        *query.stride()[:4],
        *current.stride()[:3],
        pool.stride(0),
        slot_table.stride(0),
        scale * _LOG2_E,
        K=slots,
        G=groups,
        HKV=kv_heads,
        DIM=dim,
        DIM_PADDED=padded,
        TILE=tile,
        M=max(triton.next_power_of_2(tile * slots * groups), 16),
        N=min(tile_keys, 32) if is_wide else tile_keys,
        N_CURRENT=max(triton.next_power_of_2(tile * slots), 16),
        DTYPE=tl.float32 if is_interpreted() else _DTYPES[query.dtype],  # numpy sees bfloat16 as integers
        num_warps=8 if is_wide or query.dtype == torch.float32 else 4,  # fewer would spill registers
        num_stages=2,
    )
    rows = 16
    _merge_kernel[(triton.cdiv(num_rows, rows),)](
        parts, lse, out, num_rows, splits, DIM=dim, DIM_PADDED=padded, ROWS=rows, num_warps=4
    )
    return out
