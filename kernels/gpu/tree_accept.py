"""Tree acceptance on the device: the accepted path of each request without a host read, one Triton program a request.

Shape legend: as in the reference, which says what is computed.
Instead of walking, every node is judged at once: it is accepted when the token drawn at its parent is its own and no
ancestor missed, and missed nodes are one bit mask against the ancestor bits. The accepted nodes are the path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors
from paceline.kernels.reference.tree_accept import RowPaths

_MAX_WIDTH = 1024
_TILE_ELEMENTS = 4096
"""Of the block of ancestors that a program holds at once."""


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
