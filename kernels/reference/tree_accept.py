"""Tree acceptance: the path of each tree that the drawn tokens accept. Plain torch reference.

Shape legend: B requests, W rows of the widest tree (root included), N packed rows of the round.
The token drawn at a node decides, greedy or sampled alike: walk while it is one of the node's children. Lossless for
every tree that does not depend on the draws (tree_speculation.md, decision on verification).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True, slots=True)
class RowPaths:
    """The accepted path of every request of a packed round; -1 pads. Rows of requests without rows mean nothing."""

    path: torch.Tensor  # (B, W) int64, packed rows; column 0 = root
    path_token_ids: torch.Tensor  # (B, W) int64, tokens of the path's rows
    num_accepted_tokens: torch.Tensor  # (B,) int64, bonus token excluded
    bonus_token_ids: torch.Tensor  # (B,) int64


def accept_rows(
    *, token_ids: torch.Tensor, cu_rows: torch.Tensor, ancestors: torch.Tensor, next_token_ids: torch.Tensor
) -> RowPaths:
    """Walk every tree while the token drawn at a node is one of its children: all nodes are judged at once.

    Rows from cu_rows[-1] on belong to no request; requests may have no rows.

    Args:
        token_ids, next_token_ids: (N,) int64. cu_rows: (B + 1,) int64.
        ancestors: (N, W) bool, of a row's own tree and itself; parents come before children. W bounds the path, because
            a tree of W rows has no depth beyond W - 1.
    Syncs: none.
    """
    num_rows, width = ancestors.shape
    num_requests = cu_rows.numel() - 1
    row = torch.arange(num_rows, device=token_ids.device)
    lane = torch.arange(width, device=token_ids.device)
    owner = torch.searchsorted(cu_rows[1:], row, right=True).clamp_(max=num_requests - 1)
    start = cu_rows[owner]
    # Parents come before children, so the parent is the last ancestor before the row itself; -1 for roots.
    above = torch.where(ancestors & (lane < (row - start)[:, None]), lane, -1).amax(1)
    matches = (above < 0) | (token_ids == next_token_ids[start + above.clamp(min=0)])
    packed = (start[:, None] + lane).clamp_(max=num_rows - 1)
    is_accepted = (row < cu_rows[-1]) & ~(ancestors & ~matches[packed]).any(1)
    depth = (ancestors.sum(1) - 1).clamp_(min=0)
    path = torch.full((num_requests * width,), -1, dtype=torch.int64, device=row.device)
    # At most one row of a depth is accepted: the maximum picks it out of the others' -1.
    path.scatter_reduce_(0, owner * width + depth, torch.where(is_accepted, row, -1), "amax")
    path = path.view(num_requests, width)
    num_accepted_tokens = ((path >= 0).sum(1) - 1).clamp_(min=0)
    last = path.gather(1, num_accepted_tokens[:, None])[:, 0].clamp_(min=0)
    return RowPaths(
        path=path,
        path_token_ids=torch.where(path < 0, -1, token_ids[path.clamp(min=0)]),
        num_accepted_tokens=num_accepted_tokens,
        bonus_token_ids=next_token_ids[last],
    )
