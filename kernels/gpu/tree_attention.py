"""Tree attention on a GPU: packed tree rows attend to their paged context and to their own ancestors.

Two phases (FlashAttention-2, arXiv 2307.08691; split contexts as in Flash-Decoding):

(a) Context: every row of a request sees all committed rows, so no mask. When there are too few tiles to fill the device,
    the context is cut into parts that run side by side, each leaving its normalised output and log-sum-exp.
(b) Own rows under their ancestor bits (or causal), then the parts of (a) are merged in by log-sum-exp. When tiles alone
    fill the device, this kernel walks the context itself and (a) is not launched.

The plan: a request's rows times its G query heads per KV head are its folded rows; a tile is BLOCK_M of them. How many
tiles a request needs is known on the device only, so the grid is the largest number that the shapes allow, and a table
says which request a tile belongs to, if any. Padding rows (beyond cu_rows[-1]) are tiles too: their output is zero.

The grid follows from shapes and the parts from each request's own context length, read on the
device: a captured graph runs every batch of its shapes, and a table wider than the contexts costs empty programs only.
Softmax and sums are float32; products are float32 (IEEE) or in the queries' 16-bit type with float32 sums. The
interpreter computes 16-bit products in float32, as its own 16-bit product is wrong (numpy sees bfloat16 as integers).

Shape legend: N packed rows, T tiles, B requests, L table length, R pool rows, H query heads, Hkv KV heads, G = H / Hkv,
Dh head dim, S parts of the context, U ancestor words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_integers, check_tensors, fold_keys, is_interpreted, num_processors

TILE_FIELDS = 5
"""int32 fields of a tile: request (-1 = padding rows), first folded row within the request, first packed row of the
request, rows of the request (0 = the tile is unused), context length."""
_MAX_BLOCK_M = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 64}
"""float32 products run without tensor cores and keep more bytes in registers."""


@dataclass(kw_only=True, slots=True)
class TilePlan:
    """Device tensors of one forward, shared by all layers; the integers follow from shapes."""

    tiles: torch.Tensor  # (T, TILE_FIELDS) int32
    slot_table: torch.Tensor  # (B, L) int64
    out_rows: torch.Tensor  # (N,) int64
    words: torch.Tensor | None  # (N, U) int32 bit patterns: bit j % 32 of word j // 32 = own row j is visible
    block_m: int  # folded rows of a tile
    num_groups: int  # G
    num_splits: int | None  # parts of the context that run side by side; None = chosen from the shapes


@triton.jit(do_not_specialize=["num_requests", "num_rows", "length"])
def _tile_kernel(
    cu_rows, context_lens, tiles, num_requests, num_rows, length, num_groups,
    FIELDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One program writes one tile: it lays the tiles of all requests end to end and finds its own place."""
    tile = tl.program_id(0)
    slot = tl.arange(0, BLOCK_B)  # requests, then the padding rows as one more
    is_request = slot < num_requests
    first = tl.load(cu_rows + slot, mask=slot <= num_requests, other=0).to(tl.int32)
    last = tl.load(cu_rows + slot + 1, mask=is_request, other=0).to(tl.int32)
    last = tl.where(is_request, last, num_rows)
    count = tl.where(slot <= num_requests, last - first, 0)
    context = tl.load(context_lens + slot, mask=is_request, other=0)
    context = tl.minimum(context, length).to(tl.int32)
    ends = tl.cumsum((count * num_groups + BLOCK_M - 1) // BLOCK_M, 0)
    owner = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
    is_owner = slot == owner  # nowhere for a tile past the last one
    record = tiles + tile * FIELDS
    tl.store(record, tl.where(owner < num_requests, owner, -1))
    tl.store(record + 1, (tile - begin) * BLOCK_M)
    tl.store(record + 2, tl.sum(tl.where(is_owner, first, 0), 0).to(tl.int32))
    tl.store(record + 3, tl.sum(tl.where(is_owner, count, 0), 0).to(tl.int32))
    tl.store(record + 4, tl.sum(tl.where(is_owner, context, 0), 0).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows", "width", "num_words"])
def _pack_kernel(ancestors, words, num_rows, width, num_words, stride_row, stride_column, BLOCK_R: tl.constexpr):
    """One program packs one word of BLOCK_R rows."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, 32)
    column = tl.program_id(1) * 32 + lane
    is_row = row < num_rows
    at = row.to(tl.int64)[:, None] * stride_row + column[None, :] * stride_column
    bit = tl.load(ancestors + at, mask=is_row[:, None] & (column < width)[None, :], other=0)
    # Summed in 64 bits: bit 31 is the sign of the 32-bit word.
    word = tl.sum((bit != 0).to(tl.int64) << lane.to(tl.int64)[None, :], 1)
    tl.store(words + row.to(tl.int64) * num_words + tl.program_id(1), word.to(tl.int32), mask=is_row)


def plan_attention(
    *,
    cu_rows: torch.Tensor,
    context_lens: torch.Tensor,
    slot_table: torch.Tensor,
    out_rows: torch.Tensor,
    ancestors: torch.Tensor | None,
    num_groups: int,
    dtype: torch.dtype,
) -> TilePlan:
    """Tile the packed rows and pack the ancestor matrix; two launches, all shapes follow from the arguments' shapes.

    Beyond the reference's contract: N may exceed cu_rows[-1] (padding rows: zero output, their out_rows and ancestors
    are not read) and requests may have no rows.

    Args:
        cu_rows: (B + 1,) int64 offsets of each request's packed rows, not decreasing.
        context_lens: (B,) int64 committed rows, at most L.
        slot_table: (B, L) int64 pool rows of positions; entries >= context_len are not read.
        out_rows: (N,) int64 pool rows that hold the packed rows' own K/V.
        ancestors: (N, W) bool, [i, j]: own row j is i or an ancestor of i; None = causal inside the request.
        num_groups: G.
        dtype: of the queries.
    Raises: ValueError on a wrong shape, dtype or device.
    Syncs: none.
    """
    batch, length = slot_table.shape
    num_rows = out_rows.shape[0]
    check_tensors(
        out_rows.device, cu_rows=cu_rows, context_lens=context_lens, slot_table=slot_table, ancestors=ancestors
    )
    check_integers(cu_rows=cu_rows, context_lens=context_lens, slot_table=slot_table, out_rows=out_rows)
    if cu_rows.shape != (batch + 1,) or context_lens.shape != (batch,):
        raise ValueError(
            f"cu_rows and context_lens must be ({batch + 1},) and ({batch},) beside a table of {batch} requests, "
            f"got {tuple(cu_rows.shape)} and {tuple(context_lens.shape)}"
        )
    if dtype not in _MAX_BLOCK_M:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if num_groups < 1:
        raise ValueError(f"num_groups must be >= 1, got {num_groups}")
    cu_rows, context_lens, out_rows = cu_rows.contiguous(), context_lens.contiguous(), out_rows.contiguous()
    block_m = _block_m(num_rows, batch, num_groups, dtype)
    num_tiles = (num_rows * num_groups + (batch + 1) * (block_m - 1)) // block_m  # >= tiles of any split of N
    tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=out_rows.device)
    if num_tiles:
        _tile_kernel[(num_tiles,)](
            cu_rows, context_lens, tiles, batch, num_rows, length, num_groups,
            FIELDS=TILE_FIELDS, BLOCK_M=block_m, BLOCK_B=triton.next_power_of_2(batch + 1), num_warps=1,
        )  # fmt: skip
    return TilePlan(
        tiles=tiles,
        slot_table=slot_table,
        out_rows=out_rows,
        words=None if ancestors is None else _pack(ancestors, num_rows),
        block_m=block_m,
        num_groups=num_groups,
        num_splits=None,
    )


def _block_m(num_rows: int, batch: int, num_groups: int, dtype: torch.dtype) -> int:
    """The average request's folded rows, within what the matrix units take (16) and the registers hold."""
    folded = -(-num_rows // max(batch, 1)) * num_groups
    return min(max(triton.next_power_of_2(max(folded, 1)), 16), _MAX_BLOCK_M[dtype])


def _pack(ancestors: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(N, W) bool -> (N, U) int32 words."""
    if ancestors.dtype != torch.bool or ancestors.dim() != 2 or ancestors.shape[0] != num_rows:
        raise ValueError(f"ancestors must be bool of ({num_rows}, W), got {ancestors.dtype} {tuple(ancestors.shape)}")
    width = ancestors.shape[1]
    num_words = max(1, -(-width // 32))
    words = torch.empty(num_rows, num_words, dtype=torch.int32, device=ancestors.device)
    if num_rows:
        block = 32
        _pack_kernel[(triton.cdiv(num_rows, block), num_words)](
            ancestors.view(torch.uint8), words, num_rows, width, num_words, *ancestors.stride(),
            BLOCK_R=block, num_warps=1,
        )  # fmt: skip
    return words


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MAX_HEAD_DIM = 256
_OWN_BLOCK = 32
"""Own keys per step under ancestor bits: one word per row."""
_MAX_SPLITS = 64
_MIN_PART = 128
"""Context rows below which a part costs more to merge than it saves."""


@triton.jit
def _load_query(
    query, start, first_row, count, kv_head, stride_row, stride_head, head_dim,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The tile's queries and, per folded row: its row in the request, its packed row, its head, whether it exists."""
    folded = start + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    is_row = folded < count * GROUPS
    local = folded // GROUPS
    row = (first_row + local).to(tl.int64)
    head = kv_head * GROUPS + folded % GROUPS
    at = row[:, None] * stride_row + head[:, None] * stride_head + column[None, :]
    loaded = tl.load(query + at, mask=is_row[:, None] & (column < head_dim)[None, :], other=0.0)
    return loaded.to(DTYPE), local, row, head, is_row


@triton.jit
def _attend_context(
    query, acc, peak, total, kv, table, low, high, scale, stride_slot, stride_pool, stride_value, head_dim,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Positions [low, high) of one request, visible to every row."""
    column = tl.arange(0, BLOCK_D)
    for begin in range(low, high, BLOCK_N):
        position = begin + tl.arange(0, BLOCK_N)
        is_key = position < high
        row = tl.load(table + position * stride_slot, mask=is_key, other=0)
        at = row[:, None] * stride_pool + column[None, :]
        is_element = is_key[:, None] & (column < head_dim)[None, :]
        key = tl.load(kv + at, mask=is_element, other=0.0).to(DTYPE)
        value = tl.load(kv + stride_value + at, mask=is_element, other=0.0).to(DTYPE)
        acc, peak, total = fold_keys(query, key, value, is_key[None, :], acc, peak, total, scale)
    return acc, peak, total


@triton.jit
def _part_length(context, num_splits, MIN_PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Context rows of a part: even parts, whole blocks, not too short (so that the last parts may be empty)."""
    even = (context + num_splits - 1) // num_splits
    return tl.maximum((even + BLOCK_N - 1) // BLOCK_N * BLOCK_N, MIN_PART)


@triton.jit(do_not_specialize=["stride_table", "num_rows", "num_splits"])
def _context_kernel(
    query, pool, table, tiles, partial, lse, scale, num_splits, num_rows, num_heads, head_dim,
    stride_query, stride_query_head, stride_table, stride_slot, stride_pool, stride_value, stride_kv_head,
    FIELDS: tl.constexpr, GROUPS: tl.constexpr, MIN_PART: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Phase (a): one program per tile, KV head and part of the context."""
    record = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = tl.load(record)
    start = tl.load(record + 1)
    first_row = tl.load(record + 2)
    count = tl.load(record + 3)
    context = tl.load(record + 4)
    part = _part_length(context, num_splits, MIN_PART, BLOCK_N)
    low = split * part
    if low >= context:  # also unused tiles and padding rows, whose context is 0
        return
    loaded, _, row, head, is_row = _load_query(
        query, start, first_row, count, kv_head, stride_query, stride_query_head, head_dim,
        GROUPS, BLOCK_M, BLOCK_D, DTYPE,
    )  # fmt: skip
    acc, peak, total = _attend_context(
        loaded,
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        pool + kv_head * stride_kv_head,
        table + request.to(tl.int64) * stride_table,
        low, tl.minimum(low + part, context), scale, stride_slot, stride_pool, stride_value, head_dim,
        BLOCK_N, BLOCK_D, DTYPE,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    at = (row + split * num_rows) * num_heads + head
    tl.store(lse + at, peak + tl.log2(total), mask=is_row)
    tl.store(
        partial + at[:, None] * head_dim + column[None, :],
        acc / total[:, None],
        mask=is_row[:, None] & (column < head_dim)[None, :],
    )


@triton.jit(do_not_specialize=["stride_table", "num_rows", "num_words", "num_splits"])
def _own_kernel(
    query, pool, table, tiles, out_rows, words, partial, lse, out, scale, num_splits, num_rows, num_words, num_heads,
    head_dim, stride_query, stride_query_head, stride_table, stride_slot, stride_pool, stride_value, stride_kv_head,
    FIELDS: tl.constexpr, GROUPS: tl.constexpr, IS_SPLIT: tl.constexpr, MIN_PART: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Phase (b): one program per tile and KV head; unless IS_SPLIT it attends to the context itself."""
    record = tiles + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    request = tl.load(record)
    start = tl.load(record + 1)
    first_row = tl.load(record + 2)
    count = tl.load(record + 3)
    context = tl.load(record + 4)
    if count == 0:
        return
    loaded, local, row, head, is_row = _load_query(
        query, start, first_row, count, kv_head, stride_query, stride_query_head, head_dim,
        GROUPS, BLOCK_M, BLOCK_D, DTYPE,
    )  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    column = tl.arange(0, BLOCK_D)
    is_column = column < head_dim
    kv = pool + kv_head * stride_kv_head
    if not IS_SPLIT:
        acc, peak, total = _attend_context(
            loaded, acc, peak, total, kv, table + tl.maximum(request, 0).to(tl.int64) * stride_table,
            0, context, scale, stride_slot, stride_pool, stride_value, head_dim, BLOCK_N, BLOCK_D, DTYPE,
        )  # fmt: skip
    high = tl.where(request < 0, 0, count)  # padding rows see nothing: their sum stays 0
    if IS_CAUSAL:
        high = tl.minimum(high, (start + BLOCK_M - 1) // GROUPS + 1)
    for begin in range(0, high, BLOCK_OWN):
        own = begin + tl.arange(0, BLOCK_OWN)
        is_key = own < high
        key_row = tl.load(out_rows + first_row + own, mask=is_key, other=0)
        at = key_row[:, None] * stride_pool + column[None, :]
        is_element = is_key[:, None] & is_column[None, :]
        key = tl.load(kv + at, mask=is_element, other=0.0).to(DTYPE)
        value = tl.load(kv + stride_value + at, mask=is_element, other=0.0).to(DTYPE)
        if IS_CAUSAL:
            is_visible = own[None, :] <= local[:, None]
        else:  # BLOCK_OWN is 32
            word = tl.load(words + row * num_words + begin // 32, mask=is_row, other=0)
            is_visible = ((word[:, None] >> tl.arange(0, BLOCK_OWN)[None, :]) & 1) != 0
        acc, peak, total = fold_keys(loaded, key, value, is_visible & is_key[None, :], acc, peak, total, scale)
    if IS_SPLIT:
        part = _part_length(context, num_splits, MIN_PART, BLOCK_N)
        for split in range((context + part - 1) // part):
            # A part counts as one key whose score is its log-sum-exp and whose value is its output.
            at = (row + split * num_rows) * num_heads + head
            score = tl.load(lse + at, mask=is_row, other=0.0)
            value = tl.load(
                partial + at[:, None] * head_dim + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
            )
            new_peak = tl.maximum(peak, score)
            decay = tl.exp2(peak - new_peak)
            weight = tl.exp2(score - new_peak)
            acc = acc * decay[:, None] + value * weight[:, None]
            total = total * decay + weight
            peak = new_peak
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row * num_heads + head)[:, None] * head_dim + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tree_attention(query: torch.Tensor, pool: torch.Tensor, plan: TilePlan, scale: float) -> torch.Tensor:
    """Attend from N packed rows to their context and own rows; the rows' own K/V must be in the pool already.

    Unlike the reference: padding rows, and rows without any visible key, yield zeros.

    Args:
        query: (N, H, Dh) float32, bfloat16 or float16, unit stride in Dh.
        pool: (R, 2, Hkv, Dh) of this layer, one of the same types, unit stride in Dh; rows may lie anywhere in it.
        plan: of plan_attention.
        scale: of the scores before the softmax.
    Returns: (N, H, Dh), the queries' type.
    Raises: ValueError on a wrong shape, type, stride or device.
    Syncs: none.
    """
    _check(query, pool, plan)
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = pool.shape[2]
    out = torch.empty(num_rows, num_heads, head_dim, dtype=query.dtype, device=query.device)
    num_tiles, (_, length) = plan.tiles.shape[0], plan.slot_table.shape
    if out.numel() == 0:
        return out
    splits = plan.num_splits
    if splits is None:
        splits = choose_num_splits(num_tiles * num_kv_heads, length, num_processors(query.device))
    block_n, num_warps = _launch_shape(query.dtype, pool.dtype, plan.block_m, head_dim)
    is_split = splits > 1 and length > 0
    partial = lse = out  # never read unless the context is split
    if is_split:
        partial = torch.empty(splits, num_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    scale_log2 = scale * math.log2(math.e)
    strides = (
        query.stride(0), query.stride(1), plan.slot_table.stride(0), plan.slot_table.stride(1),
        pool.stride(0), pool.stride(1), pool.stride(2),
    )  # fmt: skip
    dtype = query.dtype if query.dtype == pool.dtype and not is_interpreted() else torch.float32
    shared = {
        "FIELDS": TILE_FIELDS, "GROUPS": plan.num_groups, "MIN_PART": _MIN_PART,
        "BLOCK_M": plan.block_m, "BLOCK_N": block_n, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "DTYPE": _DTYPES[dtype], "num_warps": num_warps, "num_stages": 2,
    }  # fmt: skip
    if is_split:
        _context_kernel[(num_tiles, num_kv_heads, splits)](
            query, pool, plan.slot_table, plan.tiles, partial, lse, scale_log2, splits, num_rows, num_heads, head_dim,
            *strides, **shared,
        )  # fmt: skip
    words = plan.words
    _own_kernel[(num_tiles, num_kv_heads)](
        query, pool, plan.slot_table, plan.tiles, plan.out_rows, plan.tiles if words is None else words, partial, lse,
        out, scale_log2, splits, num_rows, 1 if words is None else words.shape[1], num_heads, head_dim, *strides,
        IS_SPLIT=is_split, IS_CAUSAL=words is None, BLOCK_OWN=block_n if words is None else _OWN_BLOCK, **shared,
    )  # fmt: skip
    return out


def choose_num_splits(num_programs: int, length: int, processors: int) -> int:
    """Parts of the context: enough for two programs per processor, none shorter than _MIN_PART rows."""
    wanted = 2 * processors // max(num_programs, 1)
    return max(1, min(wanted, -(-length // _MIN_PART), _MAX_SPLITS))


def _launch_shape(query_dtype: torch.dtype, pool_dtype: torch.dtype, block_m: int, head_dim: int) -> tuple[int, int]:
    """(keys per step, warps): K and V of two steps in flight stay within 64 KiB of shared memory.

    Fixed by shapes, not tuned by timing: a tuner would run kernels inside a graph capture.
    """
    block_d = triton.next_power_of_2(head_dim)
    is_half = query_dtype == pool_dtype and query_dtype != torch.float32
    block_n = 64 if is_half else 32
    if block_d > 128:
        block_n //= 2
    is_wide = block_m * block_d >= 64 * 128 if is_half else block_d >= 128  # fewer warps would spill registers
    return block_n, 8 if is_wide else 4


def _check(query: torch.Tensor, pool: torch.Tensor, plan: TilePlan) -> None:
    check_tensors(query.device, pool=pool, plan=plan.tiles)
    if query.dtype not in _DTYPES or pool.dtype not in _DTYPES:
        raise ValueError(f"query and pool must be float32, bfloat16 or float16, got {query.dtype} and {pool.dtype}")
    if query.dim() != 3 or pool.dim() != 4 or pool.shape[1] != 2 or pool.shape[3] != query.shape[2]:
        raise ValueError(
            f"query and pool must be (N, H, Dh) and (R, 2, Hkv, Dh), got {tuple(query.shape)} and {tuple(pool.shape)}"
        )
    if query.shape[0] != plan.out_rows.shape[0] or query.shape[1] != pool.shape[2] * plan.num_groups:
        raise ValueError(
            f"query must have {plan.out_rows.shape[0]} rows and {pool.shape[2] * plan.num_groups} heads as planned, "
            f"got {tuple(query.shape)}"
        )
    if query.shape[2] > _MAX_HEAD_DIM:
        raise ValueError(f"head dim must be <= {_MAX_HEAD_DIM}, got {query.shape[2]}")
    if query.stride(2) != 1 or pool.stride(3) != 1:
        raise ValueError("the last axis of query and pool must have stride 1, got another")
