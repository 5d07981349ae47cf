"""Tree building: the candidates that form the best tree of each request, in buffers of fixed shape. Plain torch reference.

Shape legend: B requests, C candidates of a request, W = max_nodes + 1 rows of a tree (root included), V 32-bit words
that hold W bits.
Exact for every node count because scores never rise along a path: the best n candidates are closed under ancestors, so
the tree of n nodes is also the first n + 1 rows of every larger tree. Packing takes such prefixes by gathers of fixed
shape into the N rows of one forward, which may exceed the trees' rows: the rest is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_CANDIDATES, MAX_NODES, MAX_DEPTH = 8192, 1023, 64
"""What the kernel takes of a request; the reference has no bounds."""


@dataclass(kw_only=True, slots=True)
class BuiltTrees:
    """One tree a request; row 0 is the root, parents come before children, rows beyond num_nodes are padding."""

    token_ids: torch.Tensor  # (B, W) int64, padding 0
    parents: torch.Tensor  # (B, W) int64, row of the parent; root and padding -1
    depths: torch.Tensor  # (B, W) int64, 0 for the root; padding 0
    scores: torch.Tensor  # (B, W) float32, 0 for the root; padding -inf
    candidates: torch.Tensor  # (B, W) int64, candidate that the row came from; root and padding -1
    ancestor_bits: torch.Tensor  # (B, W, V) int32; bit j % 32 of word j // 32: row j is this row or its ancestor
    num_nodes: torch.Tensor  # (B,) int64, root excluded

    @staticmethod
    def empty(num_requests: int, width: int, device: torch.device) -> BuiltTrees:
        """Buffers whose content is undefined."""

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(num_requests, *shape, dtype=dtype, device=device)

        return BuiltTrees(
            token_ids=make(width),
            parents=make(width),
            depths=make(width),
            scores=make(width, dtype=torch.float32),
            candidates=make(width),
            ancestor_bits=make(width, num_words(width), dtype=torch.int32),
            num_nodes=make(),
        )


def num_words(width: int) -> int:
    """32-bit words that hold one bit for each row of a tree."""
    return -(-width // 32)


def unpack_bits(ancestor_bits: torch.Tensor, width: int) -> torch.Tensor:
    """(..., V) int32 words -> (..., width) bool."""
    bits = (ancestor_bits[..., None] >> torch.arange(32, device=ancestor_bits.device)) & 1
    return bits.flatten(-2)[..., :width].bool()


def build_trees(
    *,
    scores: torch.Tensor,
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    depths: torch.Tensor,
    anchor_token_ids: torch.Tensor,
    num_nodes: torch.Tensor,
    max_nodes: int,
    max_depth: int,
) -> BuiltTrees:
    """Take candidates by falling score, lower indices first on ties, until a request has its nodes.

    Siblings with equal tokens become one node: the first taken stays and gets the other's children
    (specblock.md 2.3). Absent candidates (score -inf or NaN) are never taken.

    Args:
        scores: (B, C) float32, log of the path mass; a child's is at most its parent's.
        parents: (B, C) int64, candidate index below the child's, -1 = root.
        token_ids: (B, C) int64.
        depths: (B, C) int64, 1 for children of the root, at most max_depth.
        anchor_token_ids: (B,) int64, the roots' tokens.
        num_nodes: (B,) int64, draft nodes wanted, root excluded; negative counts as 0, more than max_nodes as max_nodes.
        max_nodes: W - 1.
        max_depth: bounds the work of the kernel; not read here.
    Raises: ValueError when a candidate would be taken before its parent.
    """
    out = BuiltTrees.empty(scores.shape[0], max_nodes + 1, scores.device)
    for b in range(scores.shape[0]):
        _build_one(
            out,
            b,
            scores[b].tolist(),
            parents[b].tolist(),
            token_ids[b].tolist(),
            depths[b].tolist(),
            int(anchor_token_ids[b]),
            min(int(num_nodes[b]), max_nodes),
        )
    return out


def _build_one(
    out: BuiltTrees,
    b: int,
    scores: list[float],
    parents: list[int],
    token_ids: list[int],
    depths: list[int],
    anchor_token_id: int,
    limit: int,
) -> None:
    row_of = {-1: 0}  # candidate -> row
    taken: dict[tuple[int, int], int] = {}  # (row of the parent, token) -> row
    rows: list[list[int]] = [[anchor_token_id, -1, 0, -1]]
    row_scores = [0.0]
    present = [c for c, score in enumerate(scores) if score > float("-inf")]
    for c in sorted(present, key=lambda c: -scores[c]):
        if len(rows) > limit:
            break
        if parents[c] not in row_of:
            raise ValueError(f"scores must not rise along a path, got candidate {c} above its parent {parents[c]}")
        key = (row_of[parents[c]], token_ids[c])
        if key not in taken:
            taken[key] = len(rows)
            rows.append([token_ids[c], key[0], depths[c], c])
            row_scores.append(scores[c])
        row_of[c] = taken[key]
    width, count = out.token_ids.shape[1], len(rows)
    columns = (out.token_ids, out.parents, out.depths, out.candidates)
    for column, values, padding in zip(columns, zip(*rows, strict=True), (0, -1, 0, -1), strict=True):
        column[b] = torch.tensor([*values, *[padding] * (width - count)])
    out.scores[b] = torch.tensor(row_scores + [float("-inf")] * (width - count))
    out.num_nodes[b] = count - 1
    above = torch.eye(width, 32 * num_words(width), dtype=torch.int64)  # padding sees itself: its attention is finite
    for row in range(1, count):
        above[row] |= above[rows[row][1]]
    words = (above.view(width, -1, 32) << torch.arange(32)).sum(2)
    out.ancestor_bits[b] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(kw_only=True, slots=True)
class PackedTrees:
    """The rows of all requests, request after request, then padding."""

    token_ids: torch.Tensor  # (N,) int64, padding 0
    depths: torch.Tensor  # (N,) int64, padding 0; position = context_len + depth
    request: torch.Tensor  # (N,) int64, padding B - 1
    local: torch.Tensor  # (N,) int64, row in the padded tree; padding 0
    ancestor_bits: torch.Tensor  # (N, V) int32, of the request's own rows; padding: those of its request's root
    is_row: torch.Tensor  # (N,) bool, False for padding


def pack_trees(trees: BuiltTrees, cu_nodes: torch.Tensor, num_rows: int) -> PackedTrees:
    """Take the first cu_nodes[b + 1] - cu_nodes[b] rows of every tree; a prefix of a built tree is a tree itself.

    Args:
        trees: with at least so many rows each.
        cu_nodes: (B + 1,) int64, offsets of each request's packed rows, B >= 1.
        num_rows: N, at least cu_nodes[-1] (rows beyond N are lost).
    Syncs: none.
    """
    batch, width = trees.token_ids.shape
    if batch < 1 or cu_nodes.shape != (batch + 1,):
        raise ValueError(f"cu_nodes must have one entry more than the {batch} trees, got {tuple(cu_nodes.shape)}")
    row = torch.arange(num_rows, device=cu_nodes.device)
    request = torch.searchsorted(cu_nodes[1:].contiguous(), row, right=True)
    is_row = request < batch
    request = request.clamp(max=batch - 1)
    local = torch.where(is_row, row - cu_nodes[request], 0)
    at = request * width + local
    return PackedTrees(
        token_ids=torch.where(is_row, trees.token_ids.view(-1)[at], 0),
        depths=torch.where(is_row, trees.depths.view(-1)[at], 0),
        request=request,
        local=local,
        ancestor_bits=trees.ancestor_bits.flatten(0, 1)[at],
        is_row=is_row,
    )
