"""Which path of each tree is accepted, and which KV rows move where? Plain torch reference.

Shape legend: B requests, W rows of a tree (root included, padded), V 32-bit words that hold W bits, N packed rows of the
round, D deepest draft token, L positions of a slot table.
The token drawn at a node decides, greedy or sampled alike: walk while it is one of the node's children. Lossless for
every tree that does not depend on the draws (tree_speculation.md, decision on verification).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True, slots=True)
class AcceptedPaths:
    """The accepted path of every request, before truncation by stop or length; -1 pads."""

    path: torch.Tensor  # (B, D + 1) int64, packed rows; column 0 = root
    num_accepted_tokens: torch.Tensor  # (B,) int64, bonus token excluded
    bonus_token_ids: torch.Tensor  # (B,) int64
    src_rows: torch.Tensor  # (B, D + 1) int64, scratch pool rows that hold the path's K/V
    dst_rows: torch.Tensor  # (B, D + 1) int64, pool rows of the positions they become

    @staticmethod
    def empty(num_requests: int, max_depth: int, device: torch.device) -> AcceptedPaths:
        """Buffers whose content is undefined."""

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(num_requests, *shape, dtype=torch.int64, device=device)

        width = max_depth + 1
        return AcceptedPaths(
            path=make(width),
            num_accepted_tokens=make(),
            bonus_token_ids=make(),
            src_rows=make(width),
            dst_rows=make(width),
        )


@dataclass(kw_only=True, slots=True)
class RowPaths:
    """The accepted path of every request of a packed round; -1 pads. Rows of requests without rows mean nothing."""

    path: torch.Tensor  # (B, W) int64, packed rows; column 0 = root
    path_token_ids: torch.Tensor  # (B, W) int64, tokens of the path's rows
    num_accepted_tokens: torch.Tensor  # (B,) int64, bonus token excluded
    bonus_token_ids: torch.Tensor  # (B,) int64


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
    """Walk every tree while the token drawn at a node is one of its children.

    Args:
        token_ids, parents, depths: (B, W) int64, trees as tree_build_ref.BuiltTrees; siblings have different tokens.
        ancestor_bits: (B, W, V) int32; not read here (the walk needs none).
        cu_nodes: (B + 1,) int64, offsets of each request's packed rows; row i of request b is cu_nodes[b] + i, and rows
            of a tree from cu_nodes[b + 1] - cu_nodes[b] on do not exist. Every request has its root at least.
        next_token_ids: (N,) int64, the token drawn at each packed row.
        scratch_rows: (N,) int64, pool row that holds each packed row's K/V.
        context_lens: (B,) int64, committed rows; the root's position.
        slot_table: (B, L) int64, pool row of each position; moves beyond L are dropped (-1).
        max_depth: D, at least the depth of every node.
    """
    batch, limit = token_ids.shape[0], slot_table.shape[1]
    out = AcceptedPaths.empty(batch, max_depth, token_ids.device)
    for b in range(batch):
        start = int(cu_nodes[b])
        count = int(cu_nodes[b + 1]) - start
        drawn = next_token_ids[start : start + count].tolist()
        children = {(int(parents[b, i]), int(token_ids[b, i])): i for i in range(1, count)}
        path = [0]
        while (path[-1], drawn[path[-1]]) in children:
            path.append(children[path[-1], drawn[path[-1]]])
        rows = [start + i for i in path]
        positions = range(int(context_lens[b]), int(context_lens[b]) + len(path))
        padding = [-1] * (max_depth + 1 - len(path))
        out.path[b] = torch.tensor(rows + padding)
        out.num_accepted_tokens[b] = len(path) - 1
        out.bonus_token_ids[b] = drawn[path[-1]]
        out.src_rows[b] = torch.tensor([int(scratch_rows[r]) if p < limit else -1 for r, p in zip(rows, positions, strict=True)] + padding)  # fmt: skip
        out.dst_rows[b] = torch.tensor([int(slot_table[b, p]) if p < limit else -1 for p in positions] + padding)
    return out


def accept_rows(
    *, token_ids: torch.Tensor, cu_rows: torch.Tensor, ancestors: torch.Tensor, next_token_ids: torch.Tensor
) -> RowPaths:
    """`accept_paths` over packed rows, without the moves: all nodes are judged at once.

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
