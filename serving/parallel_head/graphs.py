"""Parallel-head graphs: JetSpec's and DFlash's one block a round as captured work."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.serving.drafters.graph_inputs import MAX_GATHERED_BYTES
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal


class StaticHead:
    """The block as captured work. The drafter's weights may change in place; its pool must not move."""

    def __init__(
        self,
        caps: DrafterCaps,
        ingest: Callable[[DraftInputs], None],
        draft: Callable[[DraftInputs], Proposal],
        padding_slots: torch.Tensor,
        *,
        context_row_bytes: int,
    ) -> None:
        """ingest, draft: work without a host read; draft ingests, too. context_row_bytes: of a row of the drafter's K/V."""
        self.caps, self.padding_slots = caps, padding_slots
        self.ingest, self._draft, self._context_row_bytes = ingest, draft, context_row_bytes

    def takes(self, num_requests: int, width: int) -> bool:
        """Whether the contexts that it gathers are small enough."""
        return 2 * num_requests * width * self._context_row_bytes <= MAX_GATHERED_BYTES

    def propose(self, inputs: DraftInputs) -> Proposal:
        """The block."""
        return self._draft(inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called."""
        raise NotImplementedError("one block a round is drafted")
