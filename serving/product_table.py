"""Which candidates of a product proposal, the same below every parent, are worth keeping? The best of each level.

Shape legend: F frontier nodes, S draft slots, K candidates per slot, R rank classes of the calibration, C candidates kept.
Every ancestor of one of the N best paths is one of the N best of its own level, because scores never rise along a path,
whether a candidate's score depends on its parent or not (tree_speculation.md 4.4).
"""

from __future__ import annotations

import torch

from paceline.serving.drafter import Proposal

_ABSENT = float("-inf")


def rank_edges(proposal: Proposal, kappa: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scores of the candidates of slots 1.. below each candidate of the slot before, best first, and their columns.

    kappa: (F, S, R) float32 added to the scores by the rank below the parent; a score stays at most 0.
    Returns: both (F, S - 1, K, K), cut to the proposal's widths by that rank; None when the proposal has no such scores.
    Syncs: none.
    """
    if proposal.edge_logprobs is None:
        return None
    scores, columns = proposal.edge_logprobs.sort(dim=-1, descending=True)
    rank = torch.arange(scores.shape[3], device=scores.device)
    if kappa is not None:
        scores = (scores + kappa[:, 1:, None, rank.clamp(max=kappa.shape[2] - 1)]).clamp_(max=0.0)
    if proposal.widths is not None:
        scores = scores.masked_fill(rank >= proposal.widths[:, 1:, None, None], _ABSENT)
    return scores, columns


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
    num_requests, num_slots, num_candidates = logprobs.shape
    front = logprobs.new_zeros(num_requests, 1)
    base, out = -1, []  # candidate index of the front's first column; the root is -1
    column = front.long()  # of the front's tokens among their slot's candidates
    for slot in range(num_slots):
        if slot == 0 or edges is None:
            scores = logprobs[:, slot, None, :]
        else:
            below = column[:, :, None].expand(-1, -1, num_candidates)
            scores = edges[0][:, slot - 1].gather(1, below)
        level = (front[:, :, None] + scores).flatten(1)
        front, flat = level.topk(min(max_nodes, level.shape[1]), dim=1)
        rank = flat % num_candidates
        cells = slot * num_classes + rank.clamp(max=num_classes - 1)
        parents = flat // num_candidates + base
        if slot == 0 or edges is None:
            column = rank
        else:
            column = edges[1][:, slot - 1].gather(1, below).flatten(1).gather(1, flat)
        out.append((token_ids[:, slot].gather(1, column), parents, front, torch.full_like(flat, slot + 1), cells))
        base = sum(part[0].shape[1] for part in out[:-1])
    ids, above, paths, depths, cells = (torch.cat(parts, 1) for parts in zip(*out, strict=True))
    return ids, above, paths, depths, cells
