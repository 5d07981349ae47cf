"""Round trees: the largest trees of a round's requests in static tensors, from which captured work cuts the round's own.

The host says beforehand how many nodes the round has. Which requests get them follows from the masses of this round's
candidates, which it has not read: the heaviest nodes of all requests are taken, and because masses fall within a request
those are the first rows of its tree.

Shape legend: B requests, G requests of one drafter, C candidates of a request, W rows of the largest tree (root included),
N packed rows of a captured round, V 32-bit words that hold W bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from paceline.kernels.reference.tree_build import BuiltTrees, num_words, pack_trees, unpack_bits
from paceline.serving.target_model.graph_capture import Staging
from paceline.serving.trees.device import LargestTrees


@dataclass(kw_only=True, slots=True)
class CutTrees:
    """Packed rows of a round, request after request, then padding."""

    token_ids: torch.Tensor  # (N,) int64, padding 0
    parents: torch.Tensor  # (N,) int64, row of the own tree, -1 for roots
    depths: torch.Tensor  # (N,) int64
    scores: torch.Tensor  # (N,) float32
    cells: torch.Tensor  # (N,) int64, -1 for roots
    owners: torch.Tensor  # (N,) int64, padding B - 1
    is_row: torch.Tensor  # (N,) bool
    cu_rows: torch.Tensor  # (B + 1,) int64
    ancestors: torch.Tensor  # (N, W) bool, padding: nothing


class RoundTrees:
    """Static trees of up to `max_requests` requests, and what the host has decided about them."""

    def __init__(
        self, staging: Staging, *, max_requests: int, padding_line: int, max_nodes: int, device: torch.device
    ) -> None:
        """padding_line: one behind those of the requests, which belongs to none."""
        self.padding_line = padding_line
        lines, self._width = padding_line + 1, max_nodes + 1
        self._built = BuiltTrees.empty(lines, self._width, device)
        for tensor, value in (
            (self._built.token_ids, 0), (self._built.parents, -1), (self._built.depths, 0), (self._built.candidates, -1),
            (self._built.ancestor_bits, 0), (self._built.num_nodes, 0), (self._built.scores, float("-inf")),
        ):  # fmt: skip
            tensor.fill_(value)
        self._built.scores[:, 0] = 0.0  # roots: what a request without a draft is
        self._built.ancestor_bits[:, :, 0] = 1
        self._cells = torch.full((lines, self._width), -1, device=device)
        self._leaf_mass = torch.zeros(lines, dtype=torch.float64, device=device)
        self._facts = torch.zeros(lines, 3, dtype=torch.float64, device=device)
        self.anchors, self._limits, self._floors = (staging.reserve(max_requests) for _ in range(3))
        self._counts = staging.reserve(2)
        self._lane = torch.arange(self._width - 1, device=device)

    @property
    def num_words(self) -> int:
        """V."""
        return num_words(self._width)

    def decide(self, anchors: Sequence[int], limits: Sequence[int], floors: Sequence[int], num_nodes: int) -> None:
        """Stage what the next `cut` gives: (B,) newest tokens, nodes of a request at most, those that it gets whatever
        they weigh, and the nodes of all together."""
        self.anchors.set(anchors)
        self._limits.set(limits)
        self._floors.set(floors)
        self._counts.set((len(anchors), num_nodes))

    # ---- captured -----------------------------------------------------------------------------------------------
    def put(
        self, lines: torch.Tensor, trees: LargestTrees, leaf_mass: torch.Tensor | None, facts: torch.Tensor
    ) -> None:
        """Take the trees of a drafter's requests into these lines (G,). leaf_mass: (G,). facts: (G, 3)."""
        built = trees.built
        cells = trees.cells.gather(1, built.candidates.clamp(min=0))
        mass = torch.zeros_like(facts[:, 0]) if leaf_mass is None else leaf_mass
        for static, value in (
            (self._built.token_ids, built.token_ids), (self._built.parents, built.parents),
            (self._built.depths, built.depths), (self._built.scores, built.scores),
            (self._built.ancestor_bits, built.ancestor_bits),
            (self._cells, torch.where(built.candidates < 0, -1, cells)), (self._leaf_mass, mass), (self._facts, facts),
        ):  # fmt: skip
            static.index_copy_(0, lines, value)

    def cut(self, num_rows: int, num_requests: int) -> CutTrees:
        """The round's trees in N rows of B requests; fewer are padded.  Syncs: none."""
        b, built, (requests, budget) = num_requests, self._built, self._counts.tensor.unbind(0)
        anchors, limits, floors = (f.tensor[:b] for f in (self.anchors, self._limits, self._floors))
        masses = self._masses(b)
        is_open = (masses > 0) & (self._lane < limits[:, None])
        weights = torch.where(is_open, masses + 2.0 * (self._lane < floors[:, None]), 0.0).flatten()
        best = weights.topk(min(num_rows, weights.numel()))
        is_taken = (best.values > 0) & (torch.arange(best.values.numel(), device=weights.device) < budget)
        owners = best.indices // self._lane.numel()
        nodes = torch.zeros_like(limits).scatter_add_(0, owners, is_taken.long())
        counts = torch.where(torch.arange(b, device=nodes.device) < requests, nodes + 1, 0)
        cu_rows = pad(counts.cumsum(0), (1, 0))
        trees = BuiltTrees(
            token_ids=built.token_ids[:b], parents=built.parents[:b], depths=built.depths[:b], scores=built.scores[:b],
            candidates=built.candidates[:b], ancestor_bits=built.ancestor_bits[:b], num_nodes=built.num_nodes[:b],
        )  # fmt: skip
        packed = pack_trees(trees, cu_rows, num_rows)
        at, is_root = packed.request * self._width + packed.local, packed.local == 0
        token_ids = torch.where(is_root & packed.is_row, anchors[packed.request], packed.token_ids)
        return CutTrees(
            token_ids=token_ids,
            parents=built.parents.view(-1)[at],
            depths=packed.depths,
            scores=built.scores.view(-1)[at],
            cells=self._cells.view(-1)[at],
            owners=packed.request,
            is_row=packed.is_row,
            cu_rows=cu_rows,
            ancestors=unpack_bits(packed.ancestor_bits, self._width) & packed.is_row[:, None],
        )

    def told(self, num_requests: int) -> list[torch.Tensor]:
        """What the host reads of the requests (B,), float64: masses (B * (W - 1),), leaf masses (B,), facts (B * 3,)."""
        b = num_requests
        return [self._masses(b).flatten(), self._leaf_mass[:b], self._facts[:b].flatten()]

    def _masses(self, num_requests: int) -> torch.Tensor:
        """(B, W - 1) float64 path masses of the draft nodes, falling, 0 = absent."""
        return self._built.scores[:num_requests, 1:].double().exp()
