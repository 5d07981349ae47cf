"""How do scores that depend on the parent's token rank a product proposal's candidates below each parent?

Shape legend: F frontier nodes, S draft slots, K candidates per slot, R rank classes of the calibration.
"""

from __future__ import annotations

import torch

from paceline.serving.drafter import Proposal


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
        scores = scores.masked_fill(rank >= proposal.widths[:, 1:, None, None], float("-inf"))
    return scores, columns
