"""How often does a drafter run? It passes every call on and counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCalls:
    """Calls of a drafter: one `propose` a drafted round, and an `expand` for each further block of it."""

    num_propose: int = 0
    num_expand: int = 0

    def __sub__(self, other: DraftCalls) -> DraftCalls:
        return DraftCalls(
            num_propose=self.num_propose - other.num_propose, num_expand=self.num_expand - other.num_expand
        )


class CountedDrafter:
    """A drafter around another one; what the protocol does not name (KV sizes, graphs) is the other one's own."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.caps = drafter.caps
        self._num_propose = self._num_expand = 0

    @property
    def calls(self) -> DraftCalls:
        """Calls so far, those of the engine's warm-up included."""
        return DraftCalls(num_propose=self._num_propose, num_expand=self._num_expand)

    def alloc(self, num_pool_rows: int) -> None:
        self._drafter.alloc(num_pool_rows)

    def ingest(self, inputs: DraftInputs) -> None:
        self._drafter.ingest(inputs)

    def propose(self, inputs: DraftInputs) -> Proposal:
        self._num_propose += 1
        return self._drafter.propose(inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        self._num_expand += 1
        return self._drafter.expand(inputs, proposal, frontier)

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)
