"""Which candidates form the best tree of N nodes?

Shape legend: B requests, C candidates of a request, F frontier leaves, S draft slots, K candidates per slot,
R rank classes, N packed tree rows (roots included), W widest tree.
Exact for every N because scores never rise along a path (tree_speculation.md 4.4): the N best candidates are closed
under ancestors. All functions are tensor operations over the batch; nothing loops over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.target_model.device import upload
from paceline.serving.trees.product_table import best_of_levels, rank_edges
from paceline.serving.trees.tree import TreeBatch

NUM_RANK_CLASSES = 3
"""Calibration distinguishes the first, the second and all later candidates of a slot."""
_ABSENT = float("-inf")


@dataclass(kw_only=True, slots=True)
class Candidates:
    """Possible draft nodes; a parent has a lower index than its children."""

    token_ids: torch.Tensor  # (B, C) int64
    parents: torch.Tensor  # (B, C) int64, candidate index, -1 = root
    scores: torch.Tensor  # (B, C) float32, log of the estimated path mass; -inf = absent
    depths: torch.Tensor  # (B, C) int64, 1 for children of the root
    cells: torch.Tensor  # (B, C) int64, calibration cell: (block * S + slot) * R + rank class


@dataclass(kw_only=True, slots=True)
class Leaves:
    """Where the next block continues, with the bookkeeping that `append_block` needs."""

    frontier: Frontier
    candidates: torch.Tensor  # (F,) int64, candidate index of each leaf
    columns: torch.Tensor  # (F,) int64, running number of the leaf inside its request
    scores: torch.Tensor  # (F,) float32
    num_columns: int | None = None
    """Leaves of every request, when all have the same number; None = read from `columns`."""


@dataclass(kw_only=True, slots=True)
class BlockPlace:
    """Where the candidates of the latest block stand; made by `reentry.block_place`, for drafters of more than two blocks."""

    first: int
    """Column of its first candidate."""
    num_slots: int
    num_candidates: int
    nodes: torch.Tensor  # (B, columns) int64, row of the proposal behind each running number of a leaf

    def frontier(self, candidates: Candidates, request: torch.Tensor, leaf: torch.Tensor) -> Frontier:
        """The frontier at candidates `leaf` (F,) of requests (F,), all of them in this block."""
        width, at = self.num_slots * self.num_candidates, leaf - self.first
        return Frontier(
            request=request,
            slot=at % width // self.num_candidates,
            token_ids=candidates.token_ids[request, leaf],
            node=self.nodes[request, at // width],
        )


@dataclass(kw_only=True, slots=True)
class RankedCandidates:
    """Candidates with equal (parent, token) merged, and their order by falling score (parents first on ties)."""

    candidates: Candidates
    order: torch.Tensor  # (B, C) int64
    scores: torch.Tensor  # (B, C) float32, falling


@lru_cache(maxsize=64)
def _block_layout(
    num_slots: int, num_candidates: int, block: int, device: str, restart: int = 0
) -> tuple[torch.Tensor, ...]:
    """Parents (-1 = block entry), depths, cells and rank classes of a BLOCK proposal, candidate s * K + k."""
    slot = torch.arange(num_slots, device=device).repeat_interleave(num_candidates)
    rank = torch.arange(num_candidates, device=device).repeat(num_slots)
    parents = torch.where((slot > 0) & (slot != restart), (slot - 1) * num_candidates, -1)
    classes = rank.clamp(max=NUM_RANK_CLASSES - 1)
    cells = (block * num_slots + slot) * NUM_RANK_CLASSES + classes
    return parents, torch.where(slot < restart, slot, slot - restart) + 1, cells, classes[:num_candidates]


def slot_logprobs(proposal: Proposal, kappa: torch.Tensor | None) -> torch.Tensor:
    """Conditional log-probabilities (F, S, K), calibrated, -inf beyond the widths. kappa: (F, S, R)."""
    logprobs = proposal.logprobs
    num_candidates = logprobs.shape[2]
    if kappa is not None:
        classes = _block_layout(logprobs.shape[1], num_candidates, 0, str(logprobs.device))[3]
        logprobs = (logprobs + kappa[:, :, classes]).clamp_(max=0.0)
    if proposal.widths is not None:
        columns = torch.arange(num_candidates, device=logprobs.device)
        logprobs = logprobs.masked_fill(columns >= proposal.widths[:, :, None], _ABSENT)
    return logprobs


def _chain_scores(logprobs: torch.Tensor, restart: int = 0) -> torch.Tensor:
    """Path scores of a BLOCK proposal: candidates of slot s hang below the chain of first candidates."""
    if restart:
        return torch.cat([_chain_scores(logprobs[:, :restart]), _chain_scores(logprobs[:, restart:])], 1)
    chain = logprobs[:, :, 0].cumsum(1).cummin(1).values  # cummin: a parallel scan may round upwards
    scores = logprobs.clone()
    scores[:, 1:] += chain[:, :-1, None]
    scores[:, :, 0] = chain
    return scores


def block_candidates(
    proposal: Proposal, is_product: bool, max_nodes: int, kappa: torch.Tensor | None = None
) -> Candidates:
    """Candidates of the first block; `proposal` has F = B.

    is_product: slot s offers the same candidates below every parent, with the parent's own scores where the proposal has
    edge_logprobs; then only the best `max_nodes` of each level are kept, which loses nothing for trees of at most
    max_nodes nodes. Otherwise alternatives branch off the chain only.
    kappa: (B, S, R) float32 added to the conditional log-probabilities (tree_speculation.md 4.3).
    """
    logprobs = slot_logprobs(proposal, kappa)
    num_requests, num_slots, num_candidates = logprobs.shape
    if is_product:
        at = proposal.restart or num_slots
        edges = rank_edges(proposal, kappa)
        best = best_of_levels(proposal.token_ids[:, :at], logprobs[:, :at], edges, max_nodes, NUM_RANK_CLASSES)
        table = Candidates(token_ids=best[0], parents=best[1], scores=best[2], depths=best[3], cells=best[4])
        return with_chain(table, proposal, logprobs) if proposal.restart else table
    parents, depths, cells, _ = _block_layout(num_slots, num_candidates, 0, str(logprobs.device), proposal.restart)
    return Candidates(
        token_ids=proposal.token_ids.reshape(num_requests, -1),
        parents=parents.expand(num_requests, -1),
        scores=_chain_scores(logprobs, proposal.restart).view(num_requests, -1),
        depths=depths.expand(num_requests, -1),
        cells=cells.expand(num_requests, -1),
    )


def with_chain(table: Candidates, proposal: Proposal, logprobs: torch.Tensor) -> Candidates:
    """A product table's candidates and those of the second chain in its proposal. logprobs: (B, S, K), calibrated."""
    at, base = proposal.restart, table.scores.shape[1]
    tail = Proposal(token_ids=proposal.token_ids[:, at:], logprobs=logprobs[:, at:], widths=None)
    chain = block_candidates(tail, False, 0)
    chain.parents = torch.where(chain.parents < 0, -1, chain.parents + base)
    chain.cells = chain.cells + at * NUM_RANK_CLASSES
    fields = ("token_ids", "parents", "scores", "depths", "cells")
    return Candidates(**{f: torch.cat([getattr(table, f), getattr(chain, f)], 1) for f in fields})


def choose_frontier(candidates: Candidates, max_frontier: int, place: BlockPlace | None = None) -> Leaves:
    """The `max_frontier` heaviest leaves of each request; leaves are candidates without candidates below them.

    Inner chain nodes are left out: what would follow them is proposed already. place: take leaves of this block alone;
    None = of the first one, which is the only one. Syncs: one.
    """
    scores, index = _best_leaves(candidates, max_frontier, 0 if place is None else place.first)
    request, column = (scores > _ABSENT).nonzero(as_tuple=True)
    leaf = index[request, column]
    frontier = Frontier(
        request=request,
        slot=candidates.cells[request, leaf] // NUM_RANK_CLASSES,
        token_ids=candidates.token_ids[request, leaf],
    )
    return Leaves(
        frontier=frontier if place is None else place.frontier(candidates, request, leaf),
        candidates=leaf,
        columns=column,
        scores=scores[request, column],
    )


def dense_frontier(candidates: Candidates, max_frontier: int, place: BlockPlace | None = None) -> Leaves:
    """`choose_frontier` with the same number of leaves for every request; absent ones have score -inf. Syncs: none."""
    scores, index = _best_leaves(candidates, max_frontier, 0 if place is None else place.first)
    num_requests, width = index.shape
    request, leaf = torch.arange(num_requests, device=index.device).repeat_interleave(width), index.flatten()
    if place is None:
        slot, token_ids = candidates.cells.gather(1, index) // NUM_RANK_CLASSES, candidates.token_ids.gather(1, index)
        frontier = Frontier(request=request, slot=slot.flatten(), token_ids=token_ids.flatten())
    else:
        frontier = place.frontier(candidates, request, leaf.clamp(min=place.first))
    return Leaves(
        frontier=frontier,
        candidates=leaf,
        columns=torch.arange(width, device=index.device).repeat(num_requests),
        scores=scores.flatten(),
        num_columns=width,
    )


def _best_leaves(candidates: Candidates, max_frontier: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and candidate indices (B, max_frontier) of the heaviest leaves from column `first` on, falling; -inf where
    there is none."""
    present = candidates.scores > _ABSENT
    num_children = torch.zeros(present.shape[0], present.shape[1] + 1, device=present.device)
    num_children.scatter_add_(1, candidates.parents + 1, present.float())
    leaf_scores = candidates.scores.masked_fill(num_children[:, 1:] > 0, _ABSENT)
    leaf_scores[:, :first] = _ABSENT
    return leaf_scores.topk(min(max_frontier, leaf_scores.shape[1]), dim=1)


def append_block(
    candidates: Candidates, leaves: Leaves, proposal: Proposal, kappa: torch.Tensor | None = None
) -> Candidates:
    """Candidates with the next block's BLOCK proposal (F leaves) added below its leaves. kappa: (F, S, R)."""
    num_leaves, num_slots, num_candidates = proposal.logprobs.shape
    if num_leaves == 0:
        return candidates
    num_requests, base = candidates.scores.shape
    restart = proposal.restart
    parents, depths, cells, _ = _block_layout(num_slots, num_candidates, 1, str(proposal.logprobs.device), restart)
    scores = _chain_scores(slot_logprobs(proposal, kappa), restart).view(num_leaves, -1) + leaves.scores[:, None]
    request, width = leaves.frontier.request, num_slots * num_candidates
    offsets = base + leaves.columns[:, None] * width
    new_parents = torch.where(parents < 0, leaves.candidates[:, None], parents + offsets)
    new_depths = depths + candidates.depths[request, leaves.candidates][:, None]
    num_columns = leaves.num_columns or int(leaves.columns.max()) + 1

    def join(old: torch.Tensor, new: torch.Tensor, absent: float) -> torch.Tensor:
        if num_leaves == num_requests * num_columns:  # leaves come request by request: already rectangular
            return torch.cat([old, new.reshape(num_requests, -1)], 1)
        padded = torch.full((num_requests, num_columns, width), absent, dtype=old.dtype, device=old.device)
        padded[request, leaves.columns] = new
        return torch.cat([old, padded.view(num_requests, -1)], 1)

    return Candidates(
        token_ids=join(candidates.token_ids, proposal.token_ids.reshape(num_leaves, -1), 0),
        parents=join(candidates.parents, new_parents, -1),
        scores=join(candidates.scores, scores, _ABSENT),
        depths=join(candidates.depths, new_depths, 1),
        cells=join(candidates.cells, cells.expand(num_leaves, -1), 0),
    )


def rank_candidates(candidates: Candidates, max_nodes: int) -> RankedCandidates:
    """Sort by falling score and merge siblings with the same token if any are among the best `max_nodes`.

    A merged node keeps the larger score and takes over the other's children (specblock.md 2.3). Syncs: one.
    """
    scores, order = candidates.scores.sort(dim=1, descending=True, stable=True)
    top = order[:, :max_nodes]
    keys = (candidates.parents.gather(1, top) << 32) + candidates.token_ids.gather(1, top)
    columns = torch.arange(top.shape[1], device=top.device)
    keys = torch.where(scores[:, :max_nodes] > _ABSENT, keys, -(2**62) - columns).sort(dim=1).values
    if top.shape[1] > 1 and bool((keys[:, 1:] == keys[:, :-1]).any()):
        candidates = _merge_duplicates(candidates, order, int(candidates.depths.max()))
        scores, order = candidates.scores.sort(dim=1, descending=True, stable=True)
    return RankedCandidates(candidates=candidates, order=order, scores=scores)


def rank_merged(candidates: Candidates, max_depth: int) -> RankedCandidates:
    """`rank_candidates` for all candidates, none deeper than max_depth; siblings are always merged. Syncs: none."""
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
    candidates = _merge_duplicates(candidates, order, max_depth)
    scores, order = candidates.scores.sort(dim=1, descending=True, stable=True)
    return RankedCandidates(candidates=candidates, order=order, scores=scores)


def _merge_duplicates(candidates: Candidates, order: torch.Tensor, max_depth: int) -> Candidates:
    """Merge level by level; the winner of each (parent, token) is the one that comes first in `order`."""
    num_candidates = order.shape[1]
    inverse = torch.empty_like(order)
    inverse.scatter_(1, order, torch.arange(num_candidates, device=order.device).expand_as(order))
    # Work in sorted order, where the winner is the first of its group.
    token_ids, scores, depths, cells = (
        x.gather(1, order) for x in (candidates.token_ids, candidates.scores, candidates.depths, candidates.cells)
    )
    parents = candidates.parents.gather(1, order)
    parents = torch.where(parents < 0, -1, inverse.gather(1, parents.clamp(min=0)))
    columns = torch.arange(num_candidates, device=order.device)
    for depth in range(1, max_depth + 1):
        is_level = (depths == depth) & (scores > _ABSENT)
        keys = torch.where(is_level, (parents << 32) + token_ids, -(2**62) - columns)
        winner = (keys[:, :, None] == keys[:, None, :]).int().argmax(2)  # first equal key
        scores = scores.masked_fill(winner != columns, _ABSENT)
        parents = torch.where(parents < 0, -1, winner.gather(1, parents.clamp(min=0)))
    return Candidates(token_ids=token_ids, parents=parents, scores=scores, depths=depths, cells=cells)


def select_tree(
    ranked: RankedCandidates,
    anchor_token_ids: torch.Tensor,
    num_nodes: Sequence[int],
    *,
    present: Sequence[int] | None = None,
    max_depth: int | None = None,
) -> tuple[TreeBatch, torch.Tensor]:
    """The best `num_nodes[b]` candidates of each request as packed trees, fewer where candidates run out.

    anchor_token_ids: (B,) int64. num_nodes: (B,) draft nodes, root excluded, at most rank_candidates' max_nodes.
    present: (B,) candidates that each request has, and max_depth: of any of them, where the caller knows both.
    Returns the trees, parents before children, and the calibration cell of every row (N,) int64, -1 for roots.
    Syncs: two, none when present and max_depth are given.
    """
    cands, device = ranked.candidates, anchor_token_ids.device
    num_requests = len(num_nodes)
    if present is None:
        present = (ranked.scores > _ABSENT).sum(1).tolist()
    counts = [min(int(n), p) for n, p in zip(num_nodes, present, strict=True)]
    num_columns = max(counts)
    if num_columns == 0:
        tree = TreeBatch.roots(anchor_token_ids)
        return tree, tree.parents
    order = ranked.order
    take = order[:, :num_columns]
    rank_of = torch.empty_like(order)
    rank_of.scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=device).expand_as(order))
    parents = cands.parents.gather(1, take)
    parents = torch.where(parents < 0, 0, rank_of.gather(1, parents.clamp(min=0)))
    zero = torch.zeros(num_requests, 1, dtype=torch.int64, device=device)
    parents = torch.cat([zero - 1, parents], 1)
    token_ids = torch.cat([anchor_token_ids[:, None], cands.token_ids.gather(1, take)], 1)
    depths = torch.cat([zero, cands.depths.gather(1, take)], 1)
    cells = torch.cat([zero - 1, cands.cells.gather(1, take)], 1)
    scores = torch.cat([zero.float(), ranked.scores[:, :num_columns]], 1)
    ancestors = _ancestors(parents, int(depths.max()) if max_depth is None else max_depth)
    if min(counts) == num_columns:
        flat = [x.flatten() for x in (token_ids, parents, depths, scores, cells)]
        ancestors = ancestors.flatten(0, 1)
        cu_nodes = torch.arange(0, num_requests * (num_columns + 1) + 1, num_columns + 1, device=device)
    else:
        lengths = torch.tensor([0, *(c + 1 for c in counts)])
        keep = upload((torch.arange(num_columns + 1) < lengths[1:, None]).flatten().nonzero()[:, 0], device)
        flat = [x.flatten()[keep] for x in (token_ids, parents, depths, scores, cells)]
        ancestors = ancestors.flatten(0, 1)[keep]
        cu_nodes = upload(lengths.cumsum(0), device)
    tree = TreeBatch(
        token_ids=flat[0], parents=flat[1], depths=flat[2], scores=flat[3], cu_nodes=cu_nodes, ancestors=ancestors
    )
    return tree, flat[4]


def _ancestors(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """(B, W, W) bool, ancestor or self, by squaring (I + parent matrix)."""
    num_requests, width = parents.shape
    reach = torch.zeros(num_requests, width, width + 1, device=parents.device)
    # Column 0 of the padded matrix takes the roots' parents; absent rows may point anywhere and are dropped later.
    reach.scatter_(2, (parents + 1).clamp_(max=width)[:, :, None], 1.0)
    reach = reach[:, :, 1:] + torch.eye(width, device=parents.device)
    steps = 1
    while steps < max_depth:
        reach = reach.bmm(reach).clamp_(max=1.0)
        steps *= 2
    return reach > 0


def merge_trees(
    parts: Sequence[tuple[TreeBatch, Sequence[int]]],
    num_requests: int,
    order: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TreeBatch:
    """One TreeBatch in request order from parts, each with the request indices of its trees.

    Every request must occur in exactly one part. order: what `merge_order` says, where the caller knows it.
    """
    if len(parts) == 1 and list(parts[0][1]) == list(range(num_requests)):
        return parts[0][0]
    width = max(tree.ancestors.shape[1] for tree, _ in parts)
    pad = torch.nn.functional.pad
    ancestors = torch.cat([pad(tree.ancestors, (0, width - tree.ancestors.shape[1])) for tree, _ in parts])
    index, cu_nodes = order or merge_order([(tree.cu_nodes, requests) for tree, requests in parts], num_requests)
    return TreeBatch(
        token_ids=torch.cat([t.token_ids for t, _ in parts])[index],
        parents=torch.cat([t.parents for t, _ in parts])[index],
        depths=torch.cat([t.depths for t, _ in parts])[index],
        scores=torch.cat([t.scores for t, _ in parts])[index],
        cu_nodes=cu_nodes,
        ancestors=ancestors[index],
    )


def merge_order(
    parts: Sequence[tuple[torch.Tensor, Sequence[int]]], num_requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row permutation (N,) and cu_nodes (B + 1,) that bring concatenated parts into request order."""
    starts, counts, base = [0] * num_requests, [0] * num_requests, 0
    for cu_nodes, requests in parts:
        bounds = cu_nodes.tolist()
        for i, request in enumerate(requests):
            starts[request], counts[request] = base + bounds[i], bounds[i + 1] - bounds[i]
        base += bounds[-1]
    device = parts[0][0].device
    length = torch.tensor(counts, device=device)
    cu = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    shift = torch.tensor(starts, device=device) - cu[:-1]
    return torch.repeat_interleave(shift, length) + torch.arange(base, device=device), cu
