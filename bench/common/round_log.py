"""What did every decode round of a request propose, accept and emit? Counted by the engine, never from stream chunks.

The engine already reports each round to its feedback sink, after the round's tokens have been emitted; the recorder is
such a sink and only appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.contracts import RoundStats


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
