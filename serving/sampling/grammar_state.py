"""Grammar state: the tokens that keep one answer inside its grammar, and its way through it.

Shape legend: V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from paceline.serving.sampling.bans import Bans


class Matcher(Protocol):
    """What is used of llguidance.LLMatcher; errors are a state of it, not exceptions."""

    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, sampled_token: int, /) -> bool: ...
    def rollback(self, num_tokens: int, /) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class GrammarState:
    """Where one answer stands in its grammar; used by the engine thread only.

    Drawn tokens move the state ahead of the committed answer. `keep` commits those that were emitted and takes the rest
    back, so that between rounds the state is exactly that of the committed tokens, whatever was cut.

    An answer may end where the grammar is complete: there the end-of-text tokens and the request's own stop tokens are
    allowed besides what the grammar goes on with. With `ignores_eos` an end-of-text token is allowed only where nothing
    else is, so the answer goes on for as long as the grammar lets it. A stop token that the grammar has as content is
    allowed there too, and ends the answer.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        *,
        eos_token_ids: Iterable[int],
        stop_token_ids: Iterable[int],
        ignores_eos: bool,
        renew: Callable[[], Matcher | None],
        may_be_others_fault: Callable[[], bool],
        bans: Bans | None = None,
    ) -> None:
        """Args:
        stop_token_ids: the request's own; those outside the vocabulary are never drawn.
        renew: gives a matcher before the first token in place of one with an error, which cannot be taken back; None = there
            is none.
        may_be_others_fault: whether a matcher that fails may owe it to other answers.
        bans: None = nothing is banned.
        """
        self._matcher, self._renew, self._may_be_others_fault = matcher, renew, may_be_others_fault
        self._consumed: list[int] = []  # tokens that the matcher has consumed, the uncommitted ones last
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._stop_ids = np.array(sorted(t for t in stop_token_ids if 0 <= t < vocab_size), dtype=np.int64)
        self._end_ids = frozenset((*self._eos_ids.tolist(), *self._stop_ids.tolist()))
        self._ignores_eos, self._bans = ignores_eos, bans
        self._num_ahead = 0  # tokens that the matcher has consumed and nobody has committed
        self._is_ended = False
        self.error: str | None = None
        """Why the grammar cannot be followed any further; stays until a token before the failure is taken back."""
        self.is_own_fault = True
        """Whether the answer fails the same way when its request is sent again; of an error only."""

    @property
    def num_ahead(self) -> int:
        """Uncommitted tokens that the grammar has taken; those drawn behind an error are not among them."""
        return self._num_ahead

    def allowed(self) -> np.ndarray | None:
        """(V,) bool, the tokens that may come next; None (anything) behind the end of the answer and after an error."""
        if self._is_ended or self.error is not None:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error() and self._begin_anew():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail(self._matcher.get_error())
            return None
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        can_end = bool(mask[self._eos_ids].any())
        mask[self._eos_ids] = False
        if can_end:
            mask[self._stop_ids] = True
        if self._bans is not None:
            mask[[*self._bans.always, *self._bans.behind(self._consumed[-self._bans.reach :])]] = False
        if can_end:
            if not self._ignores_eos or not mask.any():
                mask[self._eos_ids] = True
        elif not mask.any():
            self._fail(
                "no token of the vocabulary continues the answer" + (" without a bad word" if self._bans else "")
            )
            return None
        return mask

    def advance(self, token_id: int) -> None:
        """A token was drawn; it counts as uncommitted."""
        if self._is_ended or self.error is not None:
            return
        if token_id in self._end_ids:
            self._is_ended = True
        elif self._matcher.consume_token(token_id) or (self._begin_anew() and self._matcher.consume_token(token_id)):
            self._num_ahead += 1
            self._consumed.append(token_id)
        else:
            self._fail(self._matcher.get_error())

    def keep(self, num_tokens: int) -> None:
        """Commit the first `num_tokens` uncommitted tokens and take back the others."""
        surplus = self._num_ahead - num_tokens
        self._is_ended = self._is_ended and num_tokens > self._num_ahead
        self._num_ahead = 0
        if surplus <= 0:
            return
        del self._consumed[-surplus:]
        self.error = None
        if not (self._begin_anew() if self._matcher.is_error() else self._matcher.rollback(surplus)):
            self._fail(self._matcher.get_error())

    def rewind(self) -> None:
        """Take back every uncommitted token."""
        self.keep(0)

    def _begin_anew(self) -> bool:
        """Go on with a matcher whose lexer has met nothing but this answer; whether there is one that takes it."""
        fresh = self._renew()
        if fresh is None:
            return False
        self._matcher = fresh
        return all(map(fresh.consume_token, self._consumed))

    def _fail(self, reason: str) -> None:
        self.is_own_fault = not (self._matcher.is_error() and self._may_be_others_fault())
        self.error = f"the grammar cannot be followed: {reason.strip()[:300] or 'unknown reason'}"
