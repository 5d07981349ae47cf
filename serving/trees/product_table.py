"""Product table: the candidates of a proposal whose slots offer the same candidates below every parent.

Every ancestor of one of the N best paths is one of the N best of its own level, because scores never rise along a path,
whether a candidate's score depends on its parent or not (tree_speculation.md 4.4): the best N of each level are enough.

Shape legend: G requests, S draft slots, K candidates per slot, R rank classes, P nodes of a level that have children.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from paceline.serving.trees.calibration import NUM_RANK_CLASSES
from paceline.serving.trees.candidates import ABSENT, CELL, PARENT, Candidates, HostProposal, root_columns, slot_scores


def table_candidates(
    proposal: HostProposal, max_nodes: int, kappa: np.ndarray | None = None, bundle_width: int | None = None
) -> Candidates:
    """Candidates of a product proposal, and of the second chain in it (`restart`), which is a BLOCK chain.

    Args:
        max_nodes: of the largest tree wanted.
        kappa: (G or 1, S, R) float32, added to the conditional log-probabilities by the rank below the parent.
        bundle_width: keep the heaviest so many children of each of a level's `max_nodes` best nodes, for trees that add
            them together; None = keep the `max_nodes` best nodes of each level.
    """
    logprobs = slot_scores(proposal, kappa)
    num_requests, num_slots, num_candidates = logprobs.shape
    end, base = proposal.restart or num_slots, num_requests
    edges = _ranked_edges(proposal, kappa)
    width = num_candidates if bundle_width is None else min(bundle_width, num_candidates)
    request = np.arange(num_requests)[:, None]
    front = np.zeros((num_requests, 1), dtype=np.float32)
    above = request  # (G, P) index of each parent
    held = 0 * request  # (G, P) its column in its slot
    levels: list[tuple[np.ndarray, ...]] = []  # columns, ranks below the parent, parents, scores: (G, P or P * W) each
    for slot in range(end):
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
    slots = np.arange(end).repeat(sizes)
    column, rank, parents, scores = (np.concatenate([level[i] for level in levels], 1) for i in range(4))
    token_ids = proposal.token_ids[request, slots, column]
    cells = slots * NUM_RANK_CLASSES + np.minimum(rank, NUM_RANK_CLASSES - 1)
    block = np.stack(np.broadcast_arrays(request, token_ids, parents, slots + 1, cells))
    order = _level_order(num_requests, tuple(sizes))
    columns = np.concatenate((root_columns(num_requests), block.reshape(5, -1).take(order, 1)), 1)
    every = np.concatenate((np.zeros(num_requests, dtype=np.float32), scores.ravel().take(order)))
    if proposal.restart:
        columns, every = _with_chain(columns, every, proposal, logprobs)
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
    (G, S - 1, K, K); None when the proposal has no such scores. In a mixed draft S counts the table's own slots."""
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


def _with_chain(
    columns: np.ndarray, scores: np.ndarray, proposal: HostProposal, logprobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """With the candidates of the second chain in the proposal. logprobs: (G, S, K), calibrated."""
    at, num_requests, base = proposal.restart, len(logprobs), len(scores)
    chain = Candidates.of(HostProposal(proposal.token_ids[:, at:], logprobs[:, at:], None, 0, None))
    new = chain.columns[:, num_requests:]
    new[PARENT] += np.where(new[PARENT] < num_requests, 0, base - num_requests)
    new[CELL] += at * NUM_RANK_CLASSES
    return np.concatenate((columns, new), 1), np.concatenate((scores, chain.scores[num_requests:]))
