"""Which candidates of a product proposal, the same below every parent, are worth keeping? The best of each level.

Shape legend: F frontier nodes, S draft slots, K candidates per slot, R rank classes of the calibration, C candidates kept.
Every ancestor of one of the N best paths is one of the N best of its own level, because scores never rise along a path,
whether a candidate's score depends on its parent or not (tree_speculation.md 4.4).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from paceline.serving.drafters.interface import Proposal

_ABSENT = float("-inf")


def rank_edges(proposal: Proposal, kappa: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scores of the candidates of slots 1.. below each candidate of the slot before, best first, and their columns.

    In a mixed draft (`restart`) S counts the slots of its product table alone; those of the second chain have no such scores.
    kappa: (F, S, R) float32 added to the scores by the rank below the parent; a score stays at most 0.
    Returns: both (F, S - 1, K, K), cut to the proposal's widths by that rank; None when the proposal has no such scores.
    Syncs: none.
    """
    if proposal.edge_logprobs is None:
        return None
    scores, columns = proposal.edge_logprobs.sort(dim=-1, descending=True)
    rank, behind = torch.arange(scores.shape[3], device=scores.device), slice(1, 1 + scores.shape[1])
    if kappa is not None:
        scores = (scores + kappa[:, behind, None, rank.clamp(max=kappa.shape[2] - 1)]).clamp_(max=0.0)
    if proposal.widths is not None:
        scores = scores.masked_fill(rank >= proposal.widths[:, behind, None, None], _ABSENT)
    return scores, columns


@lru_cache(maxsize=64)
def _levels(num_slots: int, num_candidates: int, max_nodes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot of each of the C candidates, and the index at which the level before it begins (-1: the root's): (C,) int64."""
    slots: list[int] = []
    bases: list[int] = []
    count, base = 1, -1
    for slot in range(num_slots):
        count, before = min(max_nodes, count * num_candidates), len(slots)
        slots += [slot] * count
        bases += [base] * count
        base = before
    return torch.tensor(slots, device=device), torch.tensor(bases, device=device)


def best_of_levels(
    token_ids: torch.Tensor,
    logprobs: torch.Tensor,
    edges: tuple[torch.Tensor, torch.Tensor] | None,
    max_nodes: int,
    num_classes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, parents (-1 = root), path scores, depths and calibration cells (F, C) of the best `max_nodes` a level.

    Args:
        token_ids, logprobs: (F, S, K), calibrated, -inf = absent, falling in K.
        edges: of `rank_edges`; replaces logprobs behind the first slot.
        num_classes: rank classes; a cell is slot * num_classes + class of the rank below the parent.
    Syncs: none.
    """
    num_slots, num_candidates = logprobs.shape[1:]
    front = logprobs.new_zeros(logprobs.shape[0], 1)
    paths: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    for slot in range(num_slots):
        if slot == 0 or edges is None:
            scores = logprobs[:, slot, None]
        else:
            below = columns[-1][:, :, None].expand(-1, -1, num_candidates)
            scores = edges[0][:, slot - 1].gather(1, below)
        level = (front[:, :, None] + scores).flatten(1)
        front, place = level.topk(min(max_nodes, level.shape[1]), dim=1)
        paths.append(front)
        places.append(place)  # parent's place in the front before * K + rank below the parent
        if edges is not None:
            columns.append(place if slot == 0 else edges[1][:, slot - 1].gather(1, below).flatten(1).gather(1, place))
    slots, bases = _levels(num_slots, num_candidates, max_nodes, str(logprobs.device))
    every = torch.cat(places, 1)
    rank = every % num_candidates
    column = rank if edges is None else torch.cat(columns, 1)
    return (
        token_ids.flatten(1).gather(1, column + slots * num_candidates),
        every // num_candidates + bases,
        torch.cat(paths, 1),
        (slots + 1).expand_as(every),
        rank.clamp(max=num_classes - 1) + slots * num_classes,
    )
