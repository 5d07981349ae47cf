"""How is the accepted path of each request found on the device, without a host read? One Triton program a request.

Shape legend: as in tree_accept_ref, which says what is computed.
Instead of walking, every node is judged at once: it is accepted when the token drawn at its parent is its own and no
ancestor missed, and missed nodes are one bit mask against the ancestor bits. The accepted nodes are the path.
Two launchers: padded trees with their moves (accept_paths), packed rows of the verify forward (accept_rows).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors
from paceline.kernels.reference.tree_accept import AcceptedPaths, RowPaths
from paceline.kernels.reference.tree_build import num_words

_MAX_WIDTH = 1024
_TILE_ELEMENTS = 4096
"""Of the block of ancestors that a program holds at once."""


@triton.jit(do_not_specialize=["width", "table_length", "max_depth"])
def _accept_kernel(
    token_ids,
    parents,
    depths,
    ancestor_bits,
    cu_nodes,
    next_token_ids,
    scratch_rows,
    context_lens,
    slot_table,
    out_path,
    out_accepted,
    out_bonus,
    out_src,
    out_dst,
    width,
    table_length,
    max_depth,
    W: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, W)
    start = tl.load(cu_nodes + b)
    count = tl.minimum(tl.load(cu_nodes + b + 1) - start, width)
    exists = row < count
    at = b * width + row
    parent = tl.load(parents + at, mask=exists, other=-1)
    token = tl.load(token_ids + at, mask=exists, other=-1)
    depth = tl.load(depths + at, mask=exists, other=-1).to(tl.int32)
    is_child = exists & (parent >= 0)
    drawn = tl.load(next_token_ids + start + parent, mask=is_child, other=0)
    is_missed = is_child & (token != drawn)
    is_cut = tl.zeros((W,), tl.int32)
    bit = tl.where(is_missed, tl.full((W,), 1, tl.int32) << (row & 31), 0)
    for word in tl.static_range(V):
        missed = tl.sum(tl.where((row >> 5) == word, bit, 0), axis=0)  # distinct bits: the sum is their union
        own = tl.load(ancestor_bits + at * V + word, mask=exists, other=0)
        is_cut = is_cut | (own & missed)
    is_accepted = exists & (is_cut == 0)

    level = tl.arange(0, D)
    on_level = is_accepted[None, :] & (depth[None, :] == level[:, None])
    node = tl.max(tl.where(on_level, row[None, :], -1), axis=1)  # (D,), at most one a level
    is_path = (node >= 0) & (level <= max_depth)
    accepted = tl.sum(is_path.to(tl.int32), axis=0) - 1
    last = tl.max(tl.where(level == accepted, node, 0), axis=0)
    packed = start + node
    position = tl.load(context_lens + b) + level
    moves = is_path & (position < table_length)
    src = tl.load(scratch_rows + packed, mask=moves, other=-1)
    dst = tl.load(slot_table + b * table_length + position, mask=moves, other=-1)
    to = b * (max_depth + 1) + level
    is_out = level <= max_depth
    tl.store(out_path + to, tl.where(is_path, packed, -1), mask=is_out)
    tl.store(out_src + to, src, mask=is_out)
    tl.store(out_dst + to, dst, mask=is_out)
    tl.store(out_accepted + b, accepted.to(tl.int64))
    tl.store(out_bonus + b, tl.load(next_token_ids + start + last))


def accept_paths(
    *,
    token_ids: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestor_bits: torch.Tensor,
    cu_nodes: torch.Tensor,
    next_token_ids: torch.Tensor,
    scratch_rows: torch.Tensor,
    context_lens: torch.Tensor,
    slot_table: torch.Tensor,
    max_depth: int,
) -> AcceptedPaths:
    """`tree_accept_ref.accept_paths` on the device; shapes of the result follow from B and max_depth alone.

    Raises: ValueError on a wrong shape, dtype, layout or device.  Syncs: none.
    """
    device = token_ids.device
    check_tensors(device)
    check_tensor("token_ids", token_ids, (None, None), torch.int64)
    shape = batch, width = token_ids.shape
    check_tensor("parents", parents, shape, torch.int64, device)
    check_tensor("depths", depths, shape, torch.int64, device)
    check_tensor("ancestor_bits", ancestor_bits, (*shape, num_words(width)), torch.int32, device)
    check_tensor("cu_nodes", cu_nodes, (batch + 1,), torch.int64, device)
    check_tensor("next_token_ids", next_token_ids, (None,), torch.int64, device)
    check_tensor("scratch_rows", scratch_rows, next_token_ids.shape, torch.int64, device)
    check_tensor("context_lens", context_lens, (batch,), torch.int64, device)
    check_tensor("slot_table", slot_table, (batch, None), torch.int64, device)
    if not 0 <= max_depth <= 127:
        raise ValueError(f"max_depth must be in [0, 127], got {max_depth}")
    if not 1 <= width <= _MAX_WIDTH:
        raise ValueError(f"token_ids must have 1 to {_MAX_WIDTH} rows a tree, got {width}")
    out = AcceptedPaths.empty(batch, max_depth, device)
    if batch == 0:
        return out
    padded = max(triton.next_power_of_2(width), 32)
    _accept_kernel[(batch,)](
        token_ids,
        parents,
        depths,
        ancestor_bits,
        cu_nodes,
        next_token_ids,
        scratch_rows,
        context_lens,
        slot_table,
        out.path,
        out.num_accepted_tokens,
        out.bonus_token_ids,
        out.src_rows,
        out.dst_rows,
        width,
        slot_table.shape[1],
        max_depth,
        W=padded,
        V=num_words(width),
        D=triton.next_power_of_2(max_depth + 1),
        num_warps=2 if padded <= 64 else 4,
    )
    return out


@triton.jit(do_not_specialize=["width", "ancestor_stride"])
def _accept_rows_kernel(
    token_ids,
    cu_rows,
    ancestors,
    next_token_ids,
    out_path,
    out_tokens,
    out_accepted,
    out_bonus,
    width,
    ancestor_stride,
    W: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a request: its rows from the root on, ROWS at a time."""
    b = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_rows + b)
    count = tl.minimum(tl.load(cu_rows + b + 1) - start, width).to(tl.int32)
    column = tl.arange(0, W)
    missed = tl.zeros((W,), tl.int32)
    path = tl.full((W,), -1, tl.int32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < count
        at = ancestors + (start + row)[:, None] * ancestor_stride + column[None, :]
        sees = tl.load(at, mask=exists[:, None] & (column < width)[None, :], other=0).to(tl.int32)
        is_before = (sees > 0) & (column[None, :] < row[:, None])
        above = tl.max(tl.where(is_before, column[None, :], -1), axis=1)  # parents come before children
        drawn = tl.load(next_token_ids + start + above, mask=exists & (above >= 0), other=0)
        token = tl.load(token_ids + start + row, mask=exists, other=0)
        is_missed = exists & (above >= 0) & (token != drawn)
        lands = (row[:, None] == column[None, :]) & is_missed[:, None]
        missed = tl.maximum(missed, tl.max(lands.to(tl.int32), axis=0))  # ancestors are in this block or before it
        is_cut = tl.max(sees * missed[None, :], axis=1) > 0
        depth = tl.sum(sees, axis=1) - 1
        on_level = (depth[:, None] == column[None, :]) & (exists & (is_cut == 0))[:, None]
        path = tl.maximum(path, tl.max(tl.where(on_level, row[:, None], -1), axis=0))  # at most one a level
    is_path = path >= 0
    accepted = tl.maximum(tl.sum(is_path.to(tl.int32), axis=0) - 1, 0)
    last = tl.max(tl.where(column == accepted, path, 0), axis=0)
    to = b * width + column
    is_out = column < width
    tokens = tl.load(token_ids + start + path, mask=is_path, other=-1)
    tl.store(out_path + to, tl.where(is_path, start + path, -1), mask=is_out)
    tl.store(out_tokens + to, tokens, mask=is_out)
    tl.store(out_accepted + b, accepted.to(tl.int64))
    tl.store(out_bonus + b, tl.load(next_token_ids + start + last, mask=count > 0, other=0))


def accept_rows(
    *, token_ids: torch.Tensor, cu_rows: torch.Tensor, ancestors: torch.Tensor, next_token_ids: torch.Tensor
) -> RowPaths:
    """`tree_accept_ref.accept_rows` on the device; shapes of the result follow from those of the arguments.

    Raises: ValueError on a wrong shape, dtype, layout or device.  Syncs: none.
    """
    device = token_ids.device
    check_tensors(device)
    check_tensor("token_ids", token_ids, (None,), torch.int64)
    check_tensor("next_token_ids", next_token_ids, token_ids.shape, torch.int64, device)
    check_tensor("cu_rows", cu_rows, (None,), torch.int64, device)
    check_tensor("ancestors", ancestors, (token_ids.numel(), None), torch.bool, device, is_contiguous=False)
    batch, width = cu_rows.numel() - 1, ancestors.shape[1]
    if not 1 <= width <= _MAX_WIDTH:
        raise ValueError(f"ancestors must have 1 to {_MAX_WIDTH} columns, got {width}")
    out = RowPaths(
        path=torch.empty(batch, width, dtype=torch.int64, device=device),
        path_token_ids=torch.empty(batch, width, dtype=torch.int64, device=device),
        num_accepted_tokens=torch.empty(batch, dtype=torch.int64, device=device),
        bonus_token_ids=torch.empty(batch, dtype=torch.int64, device=device),
    )
    if batch == 0:
        return out
    padded = max(triton.next_power_of_2(width), 16)
    _accept_rows_kernel[(batch,)](
        token_ids,
        cu_rows,
        ancestors.view(torch.uint8),
        next_token_ids,
        out.path,
        out.path_token_ids,
        out.num_accepted_tokens,
        out.bonus_token_ids,
        width,
        ancestors.stride(0),
        W=padded,
        ROWS=max(min(padded, _TILE_ELEMENTS // padded), 4),
        num_warps=2 if padded <= 32 else 4,
    )
    return out
