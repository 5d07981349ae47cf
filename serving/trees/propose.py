"""Propose loop: a drafter's blocks, each below the leaves of the one before that are worth it.

Shape legend: B requests of the round, G requests of one drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal
from paceline.serving.trees.tree import TreeBatch


@dataclass(kw_only=True, slots=True)
class DraftGroup:
    """The requests of a round that share one drafter."""

    drafter: Drafter
    inputs: DraftInputs
    rows: list[int]
    """(G,) index of each request of `inputs` into the round's B requests."""


@dataclass(kw_only=True, slots=True)
class RoundDraft:
    """The trees of a round and what `TreePolicy.observe` needs to learn from them."""

    tree: TreeBatch
    keys: list[DraftKey | None]  # (B,)
    num_draft_tokens: list[int]  # (B,)
    is_drafted: list[bool]  # (B,) whether a drafter was called for the request and succeeded
    draft_s: float = 0.0
    """Seconds spent in drafters and in building trees."""
    model_s: float = 0.0
    """Part of draft_s spent inside drafters."""
    expand_s: float = 0.0
    """Part of draft_s spent in re-entry."""
    num_leaves: int = 0
    """Leaves at which drafters were re-entered."""
    failures: dict[int, str] = field(default_factory=dict)
    """Index into `groups` -> reason, for drafters that raised or proposed invalid log-probabilities; their requests got
    roots."""
    starved: list[int] = field(default_factory=list)
    """Those of the groups for which there was no memory: no fault of their drafters."""
    context_rows: int = 0
    longest_context: int | None = None
    """Rows of the request with most of them; None: not told."""
    num_new_rows: int = 0
    num_cells: list[int] = field(default_factory=list)
    """(B,) cells of each request's first block, cells beyond belong to re-entered blocks; empty when none was."""
    frontier_mass: list[float] = field(default_factory=list)  # (B,) or empty

    @staticmethod
    def planned(keys: list[DraftKey | None], context_rows: int, longest_context: int) -> RoundDraft:
        """A round whose trees are not known yet. keys: (B,)."""
        return RoundDraft(
            tree=TreeBatch.roots(torch.empty(0, dtype=torch.int64)), keys=keys, num_draft_tokens=[],
            is_drafted=[False] * len(keys), context_rows=context_rows, longest_context=longest_context,
        )  # fmt: skip


class Blocks(Protocol):
    """Where the blocks of one drafter's requests gather, on the host or on the device."""

    def begin(self, proposal: Proposal) -> None:
        """Take the first block."""

    def frontier(self) -> Frontier | None:
        """Leaves of the latest block at which to go on; None = none are worth it."""

    def extend(self, proposal: Proposal) -> None:
        """Take the block below the latest frontier."""


def propose_blocks(
    drafter: Drafter, inputs: DraftInputs, blocks: Blocks, out: RoundDraft, timer: Callable[[], float]
) -> bool:
    """Call the drafter for its first block and below every frontier that `blocks` names; False when it proposes nothing.

    Errors of the drafter and of `blocks` pass through. Mutates: blocks; new rows and seconds in `out`.
    """
    out.num_new_rows += inputs.new_token_ids.numel()
    start = timer()
    proposal = drafter.propose(inputs)
    out.model_s += timer() - start
    if proposal.logprobs.shape[1] == 0:
        return False
    blocks.begin(proposal)
    for _ in range(drafter.caps.num_blocks - 1 if drafter.caps.is_reentrant else 0):
        frontier = blocks.frontier()
        if frontier is None:
            break
        start = timer()
        proposal = drafter.expand(inputs, proposal, frontier)
        out.model_s += timer() - start
        blocks.extend(proposal)
        out.expand_s += timer() - start
    return True
