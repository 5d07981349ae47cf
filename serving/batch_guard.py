"""Does drafting in batches of this size really bring more tokens per second than plain decoding did?

The budget controller decides by what it expects. This guard compares what rounds of either kind really yielded, catching up
and all, and takes drafting away for a while where it yielded less.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW = 32.0
"""Drafted rounds before a verdict."""
LEAST_PLAIN = 2.5
"""Weight of the plain rounds to compare with: three, a little decayed."""
PLAIN_EVERY = 256
"""Rounds of which one is plain, whatever drafting yields."""
_DECAY = 1.0 - 1.0 / 128
LEAST = 1.0
"""Drafted over plain tokens per second below which drafting is taken away."""
CLEAR = 0.8
"""A share so low needs only a quarter of the window."""
FIRST_LOCK, LAST_LOCK = 512, 16_384
"""Rounds; doubled by every verdict against drafting, and back to the first by one for it."""


@dataclass(slots=True)
class _Yield:
    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds
        self.weight = self.weight * _DECAY + 1.0


@dataclass(slots=True)
class BatchGuard:
    """The record of one batch size (its log2)."""

    plain: _Yield = field(default_factory=_Yield)
    drafted: _Yield = field(default_factory=_Yield)
    lock: int = 0
    """Rounds left without drafting."""
    next_lock: int = FIRST_LOCK

    num_calls: int = 0

    def is_locked(self) -> bool:
        """Whether this round must not draft; call once a round. Now and then a plain round keeps the comparison honest."""
        self.num_calls += 1
        if self.lock > 0:
            self.lock -= 1
            return True
        return self.plain.weight < LEAST_PLAIN or self.num_calls % PLAIN_EVERY == 0

    def note(self, tokens: int, seconds: float, *, is_drafted: bool) -> None:
        """One round: tokens emitted and seconds taken, at the machine's speed of calibration."""
        (self.drafted if is_drafted else self.plain).add(tokens, seconds)
        if not is_drafted or self.drafted.weight < WINDOW / 4 or self.plain.weight < LEAST_PLAIN or self.lock:
            return
        drafted = self.drafted.tokens / self.drafted.seconds
        plain = self.plain.tokens / self.plain.seconds
        if self.drafted.weight < WINDOW and drafted > CLEAR * plain:
            return
        if drafted < LEAST * plain:
            self.lock, self.next_lock = self.next_lock, min(2 * self.next_lock, LAST_LOCK)
            self.drafted = _Yield()
        elif drafted > 1.03 * plain:
            self.next_lock = FIRST_LOCK
