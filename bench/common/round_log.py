"""What did every decode round of a request propose, accept and emit? Counted by the engine, never from stream chunks.

The engine already reports each round to its feedback sink, after the round's tokens have been emitted; the recorder is
such a sink and only appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
