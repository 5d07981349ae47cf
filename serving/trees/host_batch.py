"""How are the trees of a batch built on the CPU, where a torch operator costs more than its arithmetic?

What `tree_builder` does, on NumPy arrays: the candidates of all requests of a drafter lie one behind the other, so that
nothing is padded and only the best ones are ever gathered. Trees, order, scores and cells equal those of `tree_builder`.

Shape legend: B requests of the round, G requests of one drafter, C candidates of all G requests, F leaves, S draft slots,
K candidates per slot, R rank classes, M best candidates of all G requests, N packed tree rows (roots included), W widest
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.trees.builder import NUM_RANK_CLASSES, Candidates, block_candidates
from paceline.serving.trees.tree import TreeBatch

_ABSENT = np.float32(-np.inf)
_OWNER, _TOKEN, _PARENT, _DEPTH, _CELL = range(5)
"""Rows of `columns`."""


def check_proposal(proposal: Proposal, vocab_size: int | None) -> None:
    """Raises: ValueError on a wrong form, log-probabilities above 0, NaN, or token ids outside [0, vocab_size)."""
    proposal.check_form()
    highest = float(proposal.logprobs.numpy().max())  # NaN wins a maximum
    if proposal.edge_logprobs is not None:
        highest = float(np.maximum(highest, proposal.edge_logprobs.numpy().max()))
    if not highest <= 1e-3:
        raise ValueError(f"log-probabilities must be at most 0 (-inf = absent), got {highest}")
    if vocab_size is not None:
        ids = proposal.token_ids.numpy().astype(np.int64, copy=False)
        if int(ids.view(np.uint64).max()) >= vocab_size:  # those below 0 are the highest unsigned numbers
            raise ValueError(f"proposed token ids must be in [0, {vocab_size}), got {ids.min()}..{ids.max()}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all BLOCK proposals of a shape share: candidate node * S * K + slot * K + rank. Read only."""

    columns: np.ndarray  # (5, F * S * K) int64 as in BatchCandidates: owner = node, no tokens, parents -1 - node
    classes: np.ndarray  # (K,) int64, rank class
    ranks: np.ndarray  # (K,) int64


def _layout(num_nodes: int, num_slots: int, num_candidates: int, restart: int = 0) -> _Layout:
    """Of the next power of two of nodes or more: callers cut off what they need."""
    return _make_layout(1 << (num_nodes - 1).bit_length(), num_slots, num_candidates, restart)


@lru_cache(maxsize=64)
def _make_layout(num_nodes: int, num_slots: int, num_candidates: int, restart: int) -> _Layout:
    node, slot, rank = (a.ravel() for a in np.indices((num_nodes, num_slots, num_candidates)))
    ranks = np.arange(num_candidates)
    above = node * (num_slots * num_candidates) + (slot - 1) * num_candidates  # the chain of first candidates
    cells = slot * NUM_RANK_CLASSES + np.minimum(rank, NUM_RANK_CLASSES - 1)
    parents = np.where((slot > 0) & (slot != restart), above, -1 - node)
    depths = np.where(slot < restart, slot, slot - restart) + 1
    columns = np.stack((node, np.zeros_like(node), parents, depths, cells))
    out = _Layout(columns=columns, classes=np.minimum(ranks, NUM_RANK_CLASSES - 1), ranks=ranks)
    for array in (out.columns, out.classes, out.ranks):
        array.setflags(write=False)
    return out


def _path_scores(proposal: Proposal, kappa: np.ndarray) -> np.ndarray:
    """Path scores (F, S, K) float32 of a BLOCK proposal; -inf = absent. kappa: (F, S, R)."""
    num_nodes, num_slots, num_candidates = proposal.logprobs.shape
    layout = _layout(num_nodes, num_slots, num_candidates)
    scores = kappa.take(layout.classes, axis=2)
    scores += proposal.logprobs.numpy()
    np.minimum(scores, 0.0, out=scores)
    if proposal.widths is not None:
        scores[layout.ranks >= proposal.widths.numpy()[:, :, None]] = _ABSENT
    for chain in (scores[:, : proposal.restart], scores[:, proposal.restart :]) if proposal.restart else (scores,):
        path = chain[:, :, 0].cumsum(1, dtype=np.float64).astype(np.float32)
        chain[:, 1:] += path[:, :-1, None]
        chain[:, :, 0] = path
    return scores


@dataclass(slots=True)
class RankedBatch:
    """The best candidates of each request, request after request, by falling score (parents first on ties)."""

    columns: np.ndarray
    """(5, M) int64: owner, token id, parent, depth and cell as in BatchCandidates, but the parent is the row in the
    request's own tree: its rank + 1, 0 = root."""
    ranks: np.ndarray  # (M,) int64, 0 for a request's best
    scores: np.ndarray  # (M,) float32

    @property
    def owners(self) -> np.ndarray:
        """(M,) int64, index into the G requests."""
        return self.columns[_OWNER]


@dataclass(slots=True)
class BatchCandidates:
    """Possible draft nodes of G requests; a parent has a lower index than its children."""

    num_requests: int
    columns: np.ndarray
    """(5, C) int64: owner (index into the G requests), token id, parent (candidate index; -1 - owner = root), depth (1 for
    children of the root), calibration cell."""
    scores: np.ndarray  # (C,) float32, log of the estimated path mass; -inf = absent
    first: int = 0
    """Index of the latest block's first candidate."""
    shape: tuple[int, int] = (0, 0)
    """(S, K) of the latest block, where it is not the first."""

    @staticmethod
    def of(proposal: Proposal, is_product: bool, max_nodes: int, kappa: np.ndarray) -> BatchCandidates:
        """Candidates of the first block (`tree_builder.block_candidates`). kappa: (G, S, R) float32."""
        num_requests, num_slots, num_candidates = proposal.logprobs.shape
        if is_product:
            return BatchCandidates._of_table(block_candidates(proposal, True, max_nodes, torch.from_numpy(kappa)))
        layout = _layout(num_requests, num_slots, num_candidates, proposal.restart)
        size = proposal.logprobs.numel()
        columns = layout.columns[:, :size].copy()
        columns[_TOKEN] = proposal.token_ids.numpy().ravel()
        return BatchCandidates(num_requests, columns, _path_scores(proposal, kappa).ravel())

    @staticmethod
    def _of_table(table: Candidates) -> BatchCandidates:
        num_requests, width = table.scores.shape
        parents, owner = table.parents.numpy(), np.arange(num_requests)[:, None]
        parents = np.where(parents < 0, -1 - owner, parents + owner * width)
        fields = (owner.repeat(width, 1), table.token_ids.numpy(), parents, table.depths.numpy(), table.cells.numpy())
        return BatchCandidates(num_requests, np.stack(fields).reshape(5, -1), table.scores.numpy().ravel())

    def leaves(self, max_frontier: int) -> np.ndarray:
        """The latest block's `max_frontier` heaviest candidates of each request without candidates below them, (F,) int64."""
        present = (self.scores > _ABSENT).nonzero()[0]
        has_child = np.zeros(len(self.scores) + self.num_requests, dtype=bool)  # roots at the end: indices below 0
        has_child[self.columns[_PARENT][present]] = True
        present = present[~has_child[present]]
        return self._best(present if self.first == 0 else present[present >= self.first], max_frontier)[0]

    def owners_and_masses(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Request (F,) int64 and path mass (F,) float64 of these candidates."""
        return self.columns[_OWNER][index], np.exp(self.scores[index].astype(np.float64))

    def frontier(self, leaves: np.ndarray) -> Frontier:
        """Where the next block continues: leaves of the latest one."""
        frontier = Frontier(
            request=torch.from_numpy(self.columns[_OWNER][leaves]),
            slot=torch.from_numpy(self.columns[_CELL][leaves] // NUM_RANK_CLASSES),
            token_ids=torch.from_numpy(self.columns[_TOKEN][leaves]),
        )
        if self.first > 0:
            num_slots, num_candidates = self.shape
            node, at = np.divmod(leaves - self.first, num_slots * num_candidates)
            frontier.node, frontier.slot = torch.from_numpy(node), torch.from_numpy(at // num_candidates)
        return frontier

    def append(self, leaves: np.ndarray, proposal: Proposal, kappa: np.ndarray) -> BatchCandidates:
        """With the next block's BLOCK proposal (F leaves) added below its leaves. kappa: (F, S, R) float32."""
        num_leaves, num_slots, num_candidates = proposal.logprobs.shape
        old, size = len(self.scores), proposal.logprobs.numel()
        scores = _path_scores(proposal, kappa)
        scores += self.scores[leaves, None, None]
        columns = np.empty((5, old + size), dtype=np.int64)
        columns[:, :old] = self.columns
        new, at = columns[:, old:], leaves.repeat(num_slots * num_candidates)
        new[:] = _layout(num_leaves, num_slots, num_candidates, proposal.restart).columns[:, :size]
        new[_OWNER] = self.columns[_OWNER][at]
        new[_TOKEN] = proposal.token_ids.numpy().ravel()
        new[_PARENT] = np.where(new[_PARENT] < 0, at, new[_PARENT] + old)
        new[_DEPTH] += self.columns[_DEPTH][at]
        new[_CELL] += num_slots * NUM_RANK_CLASSES
        every = np.concatenate([self.scores, scores.ravel()])
        return BatchCandidates(self.num_requests, columns, every, first=old, shape=(num_slots, num_candidates))

    def ranked(self, limit: int) -> RankedBatch:
        """The best `limit` candidates of each request, siblings with the same token merged if any are among them
        (`tree_builder.rank_candidates`)."""
        best, ranks = self._best((self.scores > _ABSENT).nonzero()[0], limit)
        columns = self.columns.take(best, 1)
        keys = (columns[_PARENT] << 32) + columns[_TOKEN]
        keys.sort()
        if (keys[1:] == keys[:-1]).any():
            merged = self._merged()
            best, ranks = merged._best((merged.scores > _ABSENT).nonzero()[0], limit)
            columns = merged.columns.take(best, 1)
        row_of = np.zeros(len(self.scores) + self.num_requests, dtype=np.int64)  # roots at the end: indices below 0
        row_of[best] = ranks + 1
        columns[_PARENT] = row_of[columns[_PARENT]]
        return RankedBatch(columns, ranks, self.scores[best])

    def _falling(self, index: np.ndarray) -> np.ndarray:
        """These candidates request after request, by falling score, on ties in their own order."""
        # Scores are at most 0, so their magnitudes rise as scores fall, and so do the bits of the magnitudes.
        keys = (self.columns[_OWNER][index] << 32) + np.abs(self.scores[index]).view(np.int32)
        return index[keys.argsort(kind="stable")]

    def _best(self, index: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """The best `limit` of these candidates (rising indices) of each request, and their ranks."""
        order = self._falling(index)
        owners = self.columns[_OWNER][order]
        counts = np.bincount(owners, minlength=self.num_requests)
        ranks = np.arange(len(order)) - (counts.cumsum() - counts)[owners]
        is_kept = ranks < limit
        return order[is_kept], ranks[is_kept]

    def _merged(self) -> BatchCandidates:
        """Siblings with equal tokens merged level by level; the better one takes over the other's children."""
        order = self._falling((self.scores > _ABSENT).nonzero()[0])
        levels = self.columns[_DEPTH][order]
        columns, scores, kept_as = self.columns.copy(), self.scores.copy(), np.arange(len(self.scores))
        for depth in range(1, int(levels.max()) + 1):
            level = order[levels == depth]
            above = columns[_PARENT][level]
            above = np.where(above < 0, above, kept_as[above])
            columns[_PARENT, level] = above
            keys = (above << 32) + columns[_TOKEN][level]
            _, first, group = np.unique(keys, return_index=True, return_inverse=True)
            kept_as[level] = level[first[group]]
        scores[kept_as != np.arange(len(scores))] = _ABSENT
        return BatchCandidates(self.num_requests, columns, scores)


def pack_trees(
    parts: Sequence[tuple[RankedBatch, Sequence[int]]], num_nodes: np.ndarray, anchor_token_ids: torch.Tensor
) -> tuple[TreeBatch, torch.Tensor]:
    """The best `num_nodes[b]` candidates of each request as packed trees in request order, fewer where they run out.

    Args:
        parts: candidates of each drafter and the round's request of each of its G requests; a request in no part gets its
            root alone.
        num_nodes: (B,) int64, draft nodes, root excluded.
        anchor_token_ids: (B,) int64.
    Returns: the trees, parents before children, and the calibration cell of every row (N,) int64, -1 for roots.
    """
    picked = [_pick(part, requests, num_nodes) for part, requests in parts]
    if len(picked) == 1:
        columns, ranks, values = picked[0]
    else:
        columns, ranks, values = (np.concatenate(p, -1) for p in zip(*picked, strict=True))
    counts = np.bincount(columns[_OWNER], minlength=len(num_nodes)) + 1
    cu_nodes = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=cu_nodes[1:])
    start, size, local = cu_nodes[columns[_OWNER]], int(cu_nodes[-1]), ranks + 1
    rows = start + local
    packed = np.zeros((5, size), dtype=np.int64)
    packed[_PARENT] = packed[_CELL] = -1
    packed[_TOKEN][cu_nodes[:-1]] = anchor_token_ids.numpy()
    packed[:, rows] = columns
    scores = np.zeros(size, dtype=np.float32)
    scores[rows] = values
    above = np.arange(size)
    above[rows] = start + columns[_PARENT]
    ancestors = np.zeros((size, int(counts.max())), dtype=bool)
    ancestors[cu_nodes[:-1], 0] = True
    ancestors[rows, local] = True
    for _ in range(int(packed[_DEPTH].max()).bit_length()):  # `above` doubles its stride, roots stay above themselves
        ancestors |= ancestors[above]
        above = above[above]
    tree = TreeBatch(
        token_ids=torch.from_numpy(packed[_TOKEN]),
        parents=torch.from_numpy(packed[_PARENT]),
        depths=torch.from_numpy(packed[_DEPTH]),
        scores=torch.from_numpy(scores),
        cu_nodes=torch.from_numpy(cu_nodes),
        ancestors=torch.from_numpy(ancestors),
        counts=counts.tolist(),
    )
    return tree, torch.from_numpy(packed[_CELL])


def _pick(part: RankedBatch, requests: Sequence[int], num_nodes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Columns (their owner the request of the round), ranks and scores of the candidates that become nodes."""
    owners = np.array(requests)[part.owners]
    kept = (part.ranks < num_nodes[owners]).nonzero()[0]
    columns = part.columns.take(kept, 1)
    columns[_OWNER] = owners[kept]
    return columns, part.ranks[kept], part.scores[kept]
