"""Candidates: possible draft nodes of a drafter's requests, and the packed trees that the best of them form.

The one tree builder of the host: NumPy arrays, the candidates of all requests behind each other, so that nothing is
padded and nothing loops over nodes. A tree of n nodes is the n best candidates of its request: scores never rise along a
path, so these are closed under ancestors for every n (tree_speculation.md 4.4). A product table's slots offer the same
candidates below every parent: every ancestor of one of the N best paths is one of the N best of its own level, whether a
candidate's score depends on its parent or not, so the best N of each level are enough.

Shape legend: B requests of the round, G requests of one drafter, C candidates of all G requests (their roots included),
F nodes of a proposal, S draft slots, K candidates per slot, R rank classes, P nodes of a level that have children, M ranked candidates of all G requests (roots
included), N packed tree rows (roots included), W widest tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.trees.calibration import NUM_RANK_CLASSES
from paceline.serving.trees.tree import TreeBatch, TreeRows

ABSENT = np.float32(-np.inf)
OWNER, TOKEN, PARENT, DEPTH, CELL = range(5)
"""Rows of `columns`."""
_ROOT = -1
"""Token and cell of a root: no candidate has them, so that roots merge with nothing and calibrate nothing."""


@dataclass(slots=True)
class HostProposal:
    """A checked proposal as NumPy arrays."""

    token_ids: np.ndarray  # (F, S, K)
    logprobs: np.ndarray  # (F, S, K)
    widths: np.ndarray | None  # (F, S)
    edge_logprobs: np.ndarray | None  # (F, S - 1, K, K)
    is_empty: bool = False
    """All candidates are absent."""

    @staticmethod
    def read(proposal: Proposal, vocab_size: int | None = None) -> HostProposal:
        """Raises: ValueError on a wrong form, log-probabilities above 0, NaN, or token ids outside [0, vocab_size).

        Syncs: off the CPU.
        """
        widths, edges = proposal.widths, proposal.edge_logprobs
        out = HostProposal(
            _read(proposal.token_ids),
            _read(proposal.logprobs),
            None if widths is None else _read(widths),
            None if edges is None else _read(edges),
        )
        ids, logprobs = out.token_ids, out.logprobs
        if ids.shape != logprobs.shape or ids.ndim != 3 or ids.dtype.kind != "i" or logprobs.dtype.kind != "f":
            proposal.check_form()
        highest = float(np.maximum.reduce(logprobs, None))  # NaN wins a maximum
        out.is_empty = highest == ABSENT
        if out.edge_logprobs is not None:
            highest = float(np.maximum(highest, out.edge_logprobs.max()))
        if not highest <= 1e-3:
            raise ValueError(f"log-probabilities must be at most 0 (-inf = absent), got {highest}")
        if vocab_size is not None:
            ids = ids if ids.dtype == np.int64 else ids.astype(np.int64)
            if (
                int(np.maximum.reduce(ids.view(np.uint64), None)) >= vocab_size
            ):  # those below 0 are the highest unsigned numbers
                raise ValueError(f"proposed token ids must be in [0, {vocab_size}), got {ids.min()}..{ids.max()}")
        return out


def _read(column: torch.Tensor) -> np.ndarray:
    if not column.is_cpu:
        column = column.cpu()
    return column.float().numpy() if column.dtype == torch.bfloat16 else column.numpy()


def write(column: np.ndarray, device: torch.device) -> torch.Tensor:
    """The column on the device."""
    out = torch.from_numpy(column)
    return out if device.type == "cpu" else out.to(device)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all BLOCK proposals of a shape share: candidate node * S * K + slot * K + rank. Read only."""

    columns: np.ndarray  # (5, F * S * K) int64: owner = node, tokens 0, parents from 0 = the block's first candidate
    is_entry: np.ndarray  # (F * S * K,) bool, first slots: the parent is what the block hangs below
    late_cells: np.ndarray  # (F * S * K,) int64, cells of a block behind the first
    classes: np.ndarray  # (K,) int64, rank class
    ranks: np.ndarray  # (K,) int64


@lru_cache(maxsize=64)
def _make_layout(num_nodes: int, num_slots: int, num_candidates: int) -> _Layout:
    node, slot, rank = (a.ravel() for a in np.indices((num_nodes, num_slots, num_candidates)))
    ranks = np.arange(num_candidates)
    above = node * (num_slots * num_candidates) + (slot - 1) * num_candidates  # the chain of first candidates
    cells = slot * NUM_RANK_CLASSES + np.minimum(rank, NUM_RANK_CLASSES - 1)
    out = _Layout(
        columns=np.stack((node, np.zeros_like(node), above, slot + 1, cells)),
        is_entry=slot == 0,
        late_cells=cells + num_slots * NUM_RANK_CLASSES,
        classes=np.minimum(ranks, NUM_RANK_CLASSES - 1),
        ranks=ranks,
    )
    for array in (out.columns, out.is_entry, out.late_cells, out.classes, out.ranks):
        array.setflags(write=False)
    return out


def _layout(num_nodes: int, num_slots: int, num_candidates: int) -> _Layout:
    """Of the next power of two of nodes or more: callers cut off what they need."""
    return _make_layout(1 << (num_nodes - 1).bit_length(), num_slots, num_candidates)


@lru_cache(maxsize=256)
def _first_columns(num_requests: int, num_slots: int, num_candidates: int) -> np.ndarray:
    """(5, G + G * S * K) int64, of the roots and a first BLOCK proposal; tokens are the proposal's. Read only."""
    layout = _layout(num_requests, num_slots, num_candidates)
    block = layout.columns[:, : num_requests * num_slots * num_candidates].copy()
    is_entry = layout.is_entry[: block.shape[1]]
    block[PARENT] = np.where(is_entry, block[OWNER], block[PARENT] + num_requests)
    columns = np.concatenate((root_columns(num_requests), block), 1)
    columns.setflags(write=False)
    return columns


@lru_cache(maxsize=64)
def root_columns(num_requests: int) -> np.ndarray:
    """(5, G) int64: a root is its own parent. Read only."""
    request = np.arange(num_requests)
    columns = np.stack((request, np.full_like(request, _ROOT), request, 0 * request, np.full_like(request, _ROOT)))
    columns.setflags(write=False)
    return columns


def slot_scores(proposal: HostProposal, kappa: np.ndarray | None) -> np.ndarray:
    """Conditional log-probabilities (F, S, K) float32, calibrated, -inf beyond the widths. kappa: (F or 1, S, R)."""
    num_slots, num_candidates = proposal.logprobs.shape[1:]
    layout = _layout(1, num_slots, num_candidates)
    if kappa is None:
        scores = proposal.logprobs.astype(np.float32)
    else:
        scores = np.add(proposal.logprobs, kappa.take(layout.classes, axis=2), dtype=np.float32, casting="same_kind")
    np.minimum(scores, 0.0, out=scores)
    if proposal.widths is not None:
        scores[layout.ranks >= proposal.widths[:, :, None]] = ABSENT
    return scores


def _hang_on_chain(scores: np.ndarray) -> np.ndarray:
    """Slot scores become path scores, in place: candidates of a slot hang below the chain of first candidates."""
    if scores.shape[1] > 1:
        scores[:, 1:] += scores[:, :-1, 0].cumsum(1, dtype=np.float64)[:, :, None]
    return scores


@dataclass(slots=True)
class Ranked:
    """The best candidates of each request, request after request, by falling score (parents first on ties), each
    request's root before them."""

    columns: np.ndarray
    """(5, M) int64: as in Candidates, but the parent is the row in the request's own tree; a root's is its own."""
    local: np.ndarray  # (M,) int64, row in the request's own tree, 0 = root
    scores: np.ndarray  # (M,) float32


@dataclass(slots=True)
class Candidates:
    """Possible draft nodes of G requests, their roots first; a parent has a lower index than its children."""

    num_requests: int
    columns: np.ndarray
    """(5, C) int64: owner (index into the G requests), token id, parent (candidate index), depth (0 for roots),
    calibration cell (-1 for roots)."""
    scores: np.ndarray  # (C,) float32, log of the estimated path mass, at most 0; -inf = absent
    first: int
    """Index of the latest block's first candidate."""
    shape: tuple[int, int]
    """(S, K) of the latest block."""

    @staticmethod
    def of(proposal: HostProposal, kappa: np.ndarray | None = None) -> Candidates:
        """Of the first block of a BLOCK proposal. kappa: (G or 1, S, R) float32, added to the conditional
        log-probabilities (tree_speculation.md 4.3)."""
        num_requests, num_slots, num_candidates = proposal.logprobs.shape
        columns = _first_columns(num_requests, num_slots, num_candidates).copy()
        columns[TOKEN, num_requests:] = proposal.token_ids.ravel()
        scores = np.zeros(columns.shape[1], dtype=np.float32)
        scores[num_requests:] = _hang_on_chain(slot_scores(proposal, kappa)).ravel()
        return Candidates(num_requests, columns, scores, num_requests, (num_slots, num_candidates))

    def leaves(self, max_frontier: int, limit: int | None = None) -> np.ndarray:
        """The latest block's `max_frontier` heaviest candidates of each request without candidates below them, (F,) int64.

        limit: of nodes; leaves that are not among their request's best so many are left out, because scores never rise
        along a path: nothing below them can become a node.
        """
        best, _ = self.best(len(self.scores) if limit is None else limit)
        if limit is not None and self._has_twins(best):  # fewer nodes when they are merged
            return self.leaves(max_frontier)
        is_open = best >= self.first
        if self.first == self.num_requests or self.shape[0] > 1:  # one slot alone hangs below what came before
            has_child = np.zeros(len(self.scores), dtype=bool)
            has_child[self.columns[PARENT, self.first :][self.scores[self.first :] > ABSENT]] = True
            is_open &= ~has_child[best]
        leaves = best[is_open]
        if self.num_requests == 1:
            return leaves[:max_frontier]
        owners = self.columns[OWNER, leaves]
        return leaves[np.arange(len(leaves)) - owners.searchsorted(np.arange(self.num_requests))[owners] < max_frontier]

    def _has_twins(self, index: np.ndarray) -> bool:
        """Whether siblings among these candidates hold the same token."""
        keys = ((self.columns[PARENT].take(index) << 32) + self.columns[TOKEN].take(index)).tolist()
        return len(set(keys)) < len(keys)

    def frontier(self, leaves: np.ndarray, device: torch.device) -> Frontier:
        """Where the next block continues: leaves of the latest one."""
        num_slots, num_candidates = self.shape
        owners, token_ids, _, _, cells = self.columns.take(leaves, 1)
        slots, nodes = cells // NUM_RANK_CLASSES, None
        if self.first > self.num_requests:
            nodes = write((leaves - self.first) // (num_slots * num_candidates), device)
            slots -= num_slots
        return Frontier(
            request=write(owners, device), slot=write(slots, device), token_ids=write(token_ids, device), node=nodes
        )

    def append(self, leaves: np.ndarray, proposal: HostProposal, kappa: np.ndarray | None = None) -> Candidates:
        """With the next block's BLOCK proposal (F leaves) added below its leaves. kappa: (F or 1, S, R) float32."""
        num_leaves, num_slots, num_candidates = proposal.logprobs.shape
        old, size = len(self.scores), proposal.logprobs.size
        layout = _layout(num_leaves, num_slots, num_candidates)
        scores = _hang_on_chain(slot_scores(proposal, kappa))
        scores += self.scores[leaves, None, None]
        at = leaves.repeat(num_slots * num_candidates)
        new = self.columns.take(at, 1)
        new[TOKEN] = proposal.token_ids.ravel()
        new[PARENT] = np.where(layout.is_entry[:size], at, layout.columns[PARENT, :size] + old)
        new[DEPTH] += layout.columns[DEPTH, :size]
        new[CELL] = layout.late_cells[:size]
        columns, every = np.concatenate((self.columns, new), 1), np.concatenate((self.scores, scores.ravel()))
        return Candidates(self.num_requests, columns, every, old, (num_slots, num_candidates))

    def masses(self, index: np.ndarray) -> np.ndarray:
        """Path masses (F,) float64 of these candidates."""
        return np.exp(self.scores[index].astype(np.float64))

    def ranked(self, limit: int) -> Ranked:
        """The best `limit` candidates of each request, siblings with the same token merged if any are among them."""
        best, local = self.best(limit)
        return self.merged().ranked(limit) if self._has_twins(best) else self.take(best, local)

    def best(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Each request's root and its best `limit` candidates, parents first, and their ranks: (M,) int64 each."""
        return _best(self.scores, self.columns[OWNER], self.num_requests, limit + 1)

    def take(self, order: np.ndarray, local: np.ndarray) -> Ranked:
        """These candidates (M,), request after request, parents before children, with their rows (M,) in their trees."""
        columns = self.columns.take(order, 1)
        row_of = np.empty(len(self.scores), dtype=np.int64)
        row_of[order] = local
        columns[PARENT] = row_of[columns[PARENT]]
        return Ranked(columns, local, self.scores[order])

    def merged(self) -> Candidates:
        """Siblings with equal tokens merged level by level; the better one takes over the other's children
        (specblock.md 2.3)."""
        order, _ = self.best(len(self.scores))
        levels = self.columns[DEPTH, order]
        columns, scores, kept_as = self.columns.copy(), self.scores.copy(), np.arange(len(self.scores))
        for depth in range(1, int(levels.max()) + 1):
            level = order[levels == depth]
            above = columns[PARENT, level] = kept_as[columns[PARENT, level]]
            keys = (above << 32) + columns[TOKEN, level]
            _, first, group = np.unique(keys, return_index=True, return_inverse=True)
            kept_as[level] = level[first[group]]
        scores[kept_as != np.arange(len(scores))] = ABSENT
        return Candidates(self.num_requests, columns, scores, self.first, self.shape)


def _best(scores: np.ndarray, owners: np.ndarray, num_requests: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of each request's `limit` best present candidates, request after request by falling score, on ties in their
    own order, and their ranks."""
    # Scores are at most 0, so their magnitudes rise as scores fall, and so do the bits of the magnitudes.
    magnitudes = np.abs(scores).view(np.int32)
    if num_requests == 1:
        order = magnitudes.argsort(kind="stable")[:limit]
        if len(order) and scores[order[-1]] == ABSENT:
            order = order[scores[order] > ABSENT]
        return order, np.arange(len(order))
    order = ((owners << 32) + magnitudes).argsort(kind="stable")
    ordered = owners[order]
    ranks = np.arange(len(order)) - ordered.searchsorted(np.arange(num_requests))[ordered]
    is_kept = (ranks < limit) & (scores[order] > ABSENT)
    return order[is_kept], ranks[is_kept]


def pack_trees(
    parts: Sequence[tuple[Ranked, Sequence[int]]], num_nodes: np.ndarray, anchor_token_ids: torch.Tensor
) -> TreeBatch:
    """The best `num_nodes[b]` candidates of each request as packed trees in request order, fewer where they run out.

    Args:
        parts: candidates of each drafter and the round's request of each of its G requests; a request in no part gets its
            root alone.
        num_nodes: (B,) int64, draft nodes, root excluded.
        anchor_token_ids: (B,) int64.
    Returns: the trees on the anchors' device, parents before children, with their calibration cells.  Syncs: off the CPU.
    """
    num_requests, device = len(num_nodes), anchor_token_ids.device
    columns, local, scores = _join(parts, num_requests)
    kept = (local <= num_nodes[columns[OWNER]]).nonzero()[0]
    if len(kept) < len(local):
        columns, local, scores = columns.take(kept, 1), local.take(kept), scores.take(kept)
    size, roots = len(local), (local == 0).nonzero()[0]
    owners, token_ids, parents, depths, cells = columns
    token_ids[roots] = _read(anchor_token_ids)
    above = roots[owners] + parents
    parents[roots] = -1
    cu_nodes = np.full(num_requests + 1, size)
    cu_nodes[:-1] = roots
    max_depth, width = int(np.maximum.reduce(depths)), int(np.maximum.reduce(local)) + 1
    ancestors = np.zeros((size, width), dtype=bool)
    ancestors.ravel()[np.arange(0, size * width, width) + local] = True
    stride = above
    for _ in range(max_depth.bit_length()):  # the stride doubles, roots stay above themselves
        ancestors |= ancestors.take(stride, 0)
        stride = stride.take(stride)
    return TreeBatch(
        token_ids=write(token_ids, device),
        parents=write(parents, device),
        depths=write(depths, device),
        scores=write(scores, device),
        cu_nodes=write(cu_nodes, device),
        ancestors=write(ancestors, device),
        cells=write(cells, device),
        rows=TreeRows(
            token_ids=token_ids,
            depths=depths,
            scores=scores,
            cells=cells,
            above=above,
            owners=owners,
            roots=roots,
            max_depth=max_depth,
        ),
        counts=(cu_nodes[1:] - roots).tolist(),
    )


def _join(
    parts: Sequence[tuple[Ranked, Sequence[int]]], num_requests: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns (owners the round's requests), rows in their trees and scores of all parts, and roots of all other requests,
    in request order."""
    ranked, requests = parts[0]
    if list(requests) == list(range(num_requests)):
        return ranked.columns, ranked.local, ranked.scores
    columns, local, scores = [], [], []
    for ranked, requests in parts:
        own = ranked.columns.copy()
        own[OWNER] = np.array(requests)[own[OWNER]]
        columns.append(own)
        local.append(ranked.local)
        scores.append(ranked.scores)
    rest = np.setdiff1d(np.arange(num_requests), [r for _, requests in parts for r in requests])
    roots = root_columns(num_requests)[:, rest]
    roots[PARENT] = 0
    columns.append(roots)
    local.append(np.zeros(len(rest), dtype=np.int64))
    scores.append(np.zeros(len(rest), dtype=np.float32))
    joined = np.concatenate(columns, 1)
    order = joined[OWNER].argsort(kind="stable")
    return joined.take(order, 1), np.concatenate(local)[order], np.concatenate(scores)[order]


def table_candidates(
    proposal: HostProposal, max_nodes: int, kappa: np.ndarray | None = None, bundle_width: int | None = None
) -> Candidates:
    """Candidates of a product proposal.

    Args:
        max_nodes: of the largest tree wanted.
        kappa: (G or 1, S, R) float32, added to the conditional log-probabilities by the rank below the parent.
        bundle_width: keep the heaviest so many children of each of a level's `max_nodes` best nodes, for trees that add
            them together; None = keep the `max_nodes` best nodes of each level.
    """
    logprobs = slot_scores(proposal, kappa)
    num_requests, num_slots, num_candidates = logprobs.shape
    base = num_requests
    edges = _ranked_edges(proposal, kappa)
    width = num_candidates if bundle_width is None else min(bundle_width, num_candidates)
    request = np.arange(num_requests)[:, None]
    front = np.zeros((num_requests, 1), dtype=np.float32)
    above = request  # (G, P) index of each parent
    held = 0 * request  # (G, P) its column in its slot
    levels: list[tuple[np.ndarray, ...]] = []  # columns, ranks below the parent, parents, scores: (G, P or P * W) each
    for slot in range(num_slots):
        if slot == 0 or edges is None:
            scores = front[:, :, None] + logprobs[:, slot, None, :width]
        else:
            scores = front[:, :, None] + edges[0][request, slot - 1, held, :width]
        scores = scores.reshape(num_requests, -1)
        best = np.abs(scores).view(np.int32).argsort(axis=1, kind="stable")[:, :max_nodes]  # falling, as in Candidates
        kept = best if bundle_width is None else np.arange(scores.shape[1])[None].repeat(num_requests, 0)
        front = scores[request, best]
        parent, rank = np.divmod(kept, width)
        column = rank if slot == 0 or edges is None else edges[1][request, slot - 1, held[request, parent], rank]
        levels.append((column, rank, above[request, parent], front if bundle_width is None else scores))
        above = base + request * kept.shape[1] + (np.arange(kept.shape[1]) if bundle_width is None else best)
        held = column if bundle_width is None else column[request, best]
        base += kept.size
    sizes = [level[0].shape[1] for level in levels]
    slots = np.arange(num_slots).repeat(sizes)
    column, rank, parents, scores = (np.concatenate([level[i] for level in levels], 1) for i in range(4))
    token_ids = proposal.token_ids[request, slots, column]
    cells = slots * NUM_RANK_CLASSES + np.minimum(rank, NUM_RANK_CLASSES - 1)
    block = np.stack(np.broadcast_arrays(request, token_ids, parents, slots + 1, cells))
    order = _level_order(num_requests, tuple(sizes))
    columns = np.concatenate((root_columns(num_requests), block.reshape(5, -1).take(order, 1)), 1)
    every = np.concatenate((np.zeros(num_requests, dtype=np.float32), scores.ravel().take(order)))
    return Candidates(num_requests, columns, every, num_requests, (num_slots, num_candidates))


@lru_cache(maxsize=64)
def _level_order(num_requests: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Positions in (G, C) by level, in a level by request: (G * C,) int64. Read only."""
    bounds = np.cumsum((0, *sizes))
    grid = np.arange(num_requests * bounds[-1]).reshape(num_requests, -1)
    order = np.concatenate([grid[:, a:b].ravel() for a, b in itertools.pairwise(bounds)])
    order.setflags(write=False)
    return order


def _ranked_edges(proposal: HostProposal, kappa: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Scores of the candidates of slots 1.. below each candidate of the slot before, best first, and their columns, both
    (G, S - 1, K, K); None when the proposal has no such scores."""
    if proposal.edge_logprobs is None:
        return None
    columns = (-proposal.edge_logprobs).argsort(axis=-1, kind="stable")
    scores = np.take_along_axis(proposal.edge_logprobs, columns, -1).astype(np.float32, copy=False)
    rank, behind = np.arange(scores.shape[3]), slice(1, 1 + scores.shape[1])
    if kappa is not None:
        scores += kappa[:, behind, None, :].take(np.minimum(rank, NUM_RANK_CLASSES - 1), axis=3)
        np.minimum(scores, 0.0, out=scores)
    if proposal.widths is not None:
        is_beyond = rank >= proposal.widths[:, behind, None, None]
        scores = np.where(is_beyond, ABSENT, scores)
    return scores, columns
