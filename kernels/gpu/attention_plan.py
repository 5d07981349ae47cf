"""Attention plan: the tile of query rows that each attention program takes; planned on the device.

A request's rows times its G query heads per KV head are its folded rows; a tile is BLOCK_M of them. How many tiles a
request needs is known on the device only, so the grid is the largest number that the shapes allow, and a table says
which request a tile belongs to, if any. Padding rows (beyond cu_rows[-1]) are tiles too: their output is zero.

Shape legend: B requests, N packed rows (all requests and padding), W widest tree, L table length, T tiles,
G query heads per KV head, U = ceil(W / 32) ancestor words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_integers, check_tensors

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
