"""How do the trees that the tree kernel builds become the packed trees of a round?

The kernel builds the largest tree that a request may get, once: the tree of n nodes is the first n + 1 rows of it. So the
scores of its rows are all that the budget has to know, and the round's trees are cut from it by gathers.

Shape legend: G requests of one drafter, C candidates, W rows of the largest tree (root included), N packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.kernels.dispatch import Kernels
from paceline.kernels.tree_build_ref import MAX_CANDIDATES, MAX_DEPTH, MAX_NODES, BuiltTrees, unpack_bits
from paceline.kernels.tree_pack import pack_trees
from paceline.serving.draft_tree import TreeBatch
from paceline.serving.tree_builder import Candidates
from paceline.serving.upload import upload


@dataclass(slots=True)
class LargestTrees:
    """The largest trees of a drafter's requests; what `RankedCandidates` are to torch's way of building."""

    built: BuiltTrees
    cells: torch.Tensor  # (G, C) int64, calibration cell of each candidate

    @property
    def scores(self) -> torch.Tensor:
        """(G, W - 1) float32 scores of the draft nodes, falling, -inf = absent."""
        return self.built.scores[:, 1:]

    def cut(self, num_nodes: Sequence[int]) -> tuple[TreeBatch, torch.Tensor]:
        """`tree_builder.select_tree`: the best `num_nodes[g]` candidates of each request, at most as many as it has.

        Returns the trees and the calibration cell of every row (N,) int64, -1 for roots.  Syncs: none.
        """
        built = self.built
        lengths = torch.tensor([0, *(n + 1 for n in num_nodes)])
        cu_nodes = upload(lengths.cumsum(0), built.token_ids.device)
        packed = pack_trees(built, cu_nodes, int(lengths.sum()))
        at = packed.request * built.token_ids.shape[1] + packed.local
        candidates = built.candidates.view(-1)[at]
        tree = TreeBatch(
            token_ids=packed.token_ids,
            parents=built.parents.view(-1)[at],
            depths=packed.depths,
            scores=built.scores.view(-1)[at],
            cu_nodes=cu_nodes,
            ancestors=unpack_bits(packed.ancestor_bits, max(num_nodes) + 1),
        )
        return tree, torch.where(candidates < 0, -1, self.cells[packed.request, candidates.clamp(min=0)])


def build_largest(
    kernels: Kernels, candidates: Candidates, anchor_token_ids: torch.Tensor, max_nodes: int, max_depth: int
) -> LargestTrees | None:
    """The trees of `max_nodes` nodes, siblings with equal tokens merged; None where the kernel does not take so much.

    candidates: scores of any float dtype. anchor_token_ids: (G,) int64. max_depth: of any candidate.  Syncs: none.
    """
    num_requests, num_candidates = candidates.scores.shape
    if num_candidates > MAX_CANDIDATES or max_nodes > MAX_NODES or max_depth > MAX_DEPTH:
        return None
    built = kernels.build_trees(
        scores=candidates.scores.float().contiguous(),
        parents=candidates.parents.contiguous(),
        token_ids=candidates.token_ids.long().contiguous(),
        depths=candidates.depths.contiguous(),
        anchor_token_ids=anchor_token_ids.contiguous(),
        num_nodes=anchor_token_ids.new_full((num_requests,), max_nodes),
        max_nodes=max_nodes,
        max_depth=max_depth,
    )
    return LargestTrees(built, candidates.cells)
