"""How does a re-entrant drafter go on below the leaves of its latest block, block after block?

`reenter` does so whatever it costs, for shadow scoring and fixed budgets; TreePolicy asks its budget before every block.
Shape legend: B requests, F leaves, S draft slots, R rank classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal
from paceline.serving.trees.builder import BlockPlace, Candidates, Leaves, append_block, choose_frontier


def block_place(before: Candidates, leaves: Leaves, proposal: Proposal) -> BlockPlace:
    """Where `append_block(before, leaves, proposal)` puts the new candidates. Syncs: one unless leaves are dense."""
    num_requests, first = before.scores.shape
    request, columns = leaves.frontier.request, leaves.columns
    num_columns = leaves.num_columns or int(columns.max()) + 1
    nodes = torch.zeros(num_requests, num_columns, dtype=torch.int64, device=columns.device)
    nodes[request, columns] = torch.arange(columns.numel(), device=columns.device)
    return BlockPlace(
        first=first, num_slots=proposal.logprobs.shape[1], num_candidates=proposal.logprobs.shape[2], nodes=nodes
    )


def reenter(
    drafter: Drafter,
    inputs: DraftInputs,
    proposal: Proposal,
    candidates: Candidates,
    max_frontier: int,
    *,
    kappa: torch.Tensor | None = None,
    leaves: Leaves | None = None,
    requests: torch.Tensor | None = None,
    check: Callable[[torch.Tensor], None] = lambda logprobs: None,
) -> Candidates:
    """Candidates with all later blocks of a re-entrant drafter: the heaviest leaves of each block, whatever they cost.

    Args:
        candidates: of the first block, B requests.
        kappa: (B, S, R) corrections of later blocks' log-probabilities; None = none.
        leaves: of the first block, where the caller chose them already.
        requests: (B,) int64 index of each of these requests into those of `inputs`; None = the same.
        check: of each later block's log-probabilities; raises what it finds.
    """
    if not drafter.caps.is_reentrant or max_frontier == 0:
        return candidates
    place = None
    for block in range(1, drafter.caps.num_blocks):
        if leaves is None:
            leaves = choose_frontier(candidates, max_frontier, place)
        if leaves.candidates.numel() == 0:
            return candidates
        own = leaves.frontier
        frontier = own
        if requests is not None:
            node = own.node if block > 1 else None
            frontier = Frontier(request=requests[own.request], slot=own.slot, token_ids=own.token_ids, node=node)
        proposal = drafter.expand(inputs, proposal, frontier)
        check(proposal.logprobs)
        if block + 1 < drafter.caps.num_blocks:
            place = block_place(candidates, leaves, proposal)
        candidates = append_block(candidates, leaves, proposal, None if kappa is None else kappa[own.request])
        leaves = None
    return candidates
