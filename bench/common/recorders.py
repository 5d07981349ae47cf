"""Recorders: what every decode round proposed, accepted and emitted, and how often the drafter ran.

The engine reports each round to its feedback sink, after the round's tokens have been emitted; RoundRecorder is such a sink
and only appends. CountedDrafter passes every call on and counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal
from paceline.serving.engine.output import ROUND_COLUMNS

_AT = {name: i for i, name in enumerate(ROUND_COLUMNS)}


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
        self._rows: list[tuple] = []

    def record_round(self, row: tuple) -> None:
        self._rows.append(row)

    def take(self, request_ids: Sequence[str], max_tokens: Sequence[int]) -> tuple[tuple[Round, ...], ...]:
        """The rounds of these requests in order, and forget all rows.

        max_tokens: limit of each request's answer, of which prefill emits the first token.
        """
        rows: dict[str, list[tuple]] = {}
        for row in self._rows:
            rows.setdefault(row[_AT["request_id"]], []).append(row)
        self._rows = []
        return tuple(
            _rounds(rows.get(request_id, []), limit - 1)
            for request_id, limit in zip(request_ids, max_tokens, strict=True)
        )


def _rounds(rows: Sequence[tuple], room: int) -> tuple[Round, ...]:
    out = []
    for row in rows:
        emitted = row[_AT["num_emitted_tokens"]]
        out.append(
            Round(
                num_draft_tokens=row[_AT["num_draft_tokens"]],
                num_accepted_tokens=row[_AT["num_accepted_tokens"]],
                num_emitted_tokens=emitted,
                room=room,
                round_ms=row[_AT["share_ms"]] * row[_AT["batch_size"]],
            )
        )
        room -= emitted
    return tuple(out)


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
