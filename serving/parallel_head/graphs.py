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
        draft: Callable[[DraftInputs], Proposal],
        padding_slots: torch.Tensor,
        *,
        context_row_bytes: int,
    ) -> None:
        """draft: ingests and proposes without a host read. context_row_bytes: of a row of the drafter's K/V, all layers."""
        self.caps, self.padding_slots = caps, padding_slots
        self._draft, self._context_row_bytes = draft, context_row_bytes

    def takes(self, num_requests: int, width: int) -> bool:
        """Whether the contexts that it gathers are small enough."""
        return 2 * num_requests * width * self._context_row_bytes <= MAX_GATHERED_BYTES

    def propose(self, inputs: DraftInputs) -> Proposal:
        """The block."""
        return self._draft(inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called."""
        raise NotImplementedError("one block a round is drafted")
