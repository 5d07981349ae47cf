"""Recorders: what every decode round proposed, accepted and emitted, and how often the drafter ran.

The engine reports each round to its feedback sink, after the round's tokens have been emitted; RoundRecorder is such a sink
and only appends. CountedDrafter passes every call on and counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.contracts import RoundStats
from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One decode round of one request; prefill, which emits the first token, is none."""

    num_draft_tokens: int
    """Proposed, root excluded; 0 = the round decoded plainly."""
    num_accepted_tokens: int
    """Draft tokens that the target agreed with, bonus excluded, before the end of the request cut the round."""
    num_emitted_tokens: int
    room: int = 1 << 30
    """Tokens that the request was still allowed when the round began."""
    round_ms: float = 0.0
    """The whole round, of all its requests."""

    @property
    def is_limited(self) -> bool:
        """With room for one token nothing is drafted: the round says nothing about the drafter."""
        return self.room < 2

    @property
    def is_cut(self) -> bool:
        """A stop or the length limit fell inside the round: what lies behind it is no text of the answer."""
        return self.num_emitted_tokens < self.num_accepted_tokens + 1

    @property
    def num_known(self) -> int:
        """Draft tokens known to be accepted within the answer."""
        return min(self.num_accepted_tokens, self.num_emitted_tokens)


class RoundRecorder:
    """A feedback sink that keeps the rows of one group of requests."""

    def __init__(self) -> None:
        self._parts: list[RoundStats] = []

    def record_rounds(self, rows: RoundStats) -> None:
        self._parts.append(rows)

    def take(self, request_ids: Sequence[str], max_tokens: Sequence[int]) -> tuple[tuple[Round, ...], ...]:
        """The rounds of these requests in order, and forget all rows.

        max_tokens: limit of each request's answer, of which prefill emits the first token.
        """
        room = {request_id: limit - 1 for request_id, limit in zip(request_ids, max_tokens, strict=True)}
        rounds: dict[str, list[Round]] = {request_id: [] for request_id in request_ids}
        for rows in self._parts:
            for i, request_id in enumerate(rows.request_id):
                if request_id not in rounds:
                    continue
                emitted = rows.num_emitted_tokens[i]
                rounds[request_id].append(
                    Round(
                        num_draft_tokens=rows.num_draft_tokens[i],
                        num_accepted_tokens=rows.num_accepted_tokens[i],
                        num_emitted_tokens=emitted,
                        room=room[request_id],
                        round_ms=rows.share_ms[i] * rows.batch_size[i],
                    )
                )
                room[request_id] -= emitted
        self._parts = []
        return tuple(tuple(rounds[request_id]) for request_id in request_ids)


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
