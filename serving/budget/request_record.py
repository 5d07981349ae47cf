"""How well do drafts work for one request, and does it sit out because they do not?

Requests of one traffic class differ: the ones that last longest are often those that the drafter follows worst. What a
request's own last rounds accepted is the best forecast of its next ones.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROUNDS = 12
"""Drafted rounds before a request's own record counts."""
RETRY_ROUNDS = 3
"""Drafted rounds that a request gets when its rest is over."""
FIRST_REST, LAST_REST = 16, 256
_RATE = 0.1
MARGIN = 0.6
"""Share of the break-even below which a request sits out: answers begin worse than they go on."""


@dataclass(slots=True)
class DraftRecord:
    """One request's record; the engine thread only."""

    accepted: float = 0.0
    """EMA of accepted tokens per drafted round."""
    num_rounds: int = 0
    """Drafted rounds behind it, capped at MIN_ROUNDS."""
    rest: int = 0
    """Rounds left to sit out."""
    next_rest: int = FIRST_REST

    @property
    def is_known(self) -> bool:
        return self.num_rounds >= MIN_ROUNDS

    def note(self, num_accepted_tokens: int) -> None:
        """One drafted round."""
        self.num_rounds = min(self.num_rounds + 1, MIN_ROUNDS)
        self.accepted += max(_RATE, 1 / self.num_rounds) * (num_accepted_tokens - self.accepted)

    def sit_out(self, break_even: float) -> bool:
        """Whether to leave the request out of this round: call once a round in which its class is drafted for.

        break_even: accepted tokens per round at which drafting for one more request pays.
        """
        if self.rest > 0:
            self.rest -= 1
            if self.rest == 0:  # a short trial, of which the first rounds outweigh the past
                self.num_rounds = MIN_ROUNDS - RETRY_ROUNDS
            return True
        if not self.is_known:
            return False
        if self.accepted >= MARGIN * break_even:
            self.next_rest = FIRST_REST
            return False
        self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LAST_REST)
        return True
