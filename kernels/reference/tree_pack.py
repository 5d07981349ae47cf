"""Tree packing: padded trees become the packed rows of one forward, by gathers of fixed shape; nothing read on the host.

Shape legend: B requests, W rows of a padded tree, V 32-bit words that hold W bits, N packed rows of the forward, which
may exceed the trees' rows: the rest is padding, as the captured graph of a larger total needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels.reference.tree_build import BuiltTrees


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
