"""Interference: device-seconds that serving lost because a training job ran beside it."""

from __future__ import annotations

import msgspec

from paceline.bandit.beliefs.observation import FeedbackSums
from paceline.contracts import FeedbackBatch

MIN_ROWS = 20
"""Rounds without training that a baseline needs."""
MEMORY_ROWS = 500.0
"""Rounds that a baseline remembers."""


class Mean(msgspec.Struct):
    """Count and mean of seconds."""

    n: float = 0.0
    mean: float = 0.0

    def add(self, value: float, memory: float = float("inf")) -> None:
        """Fold one value; past `memory` values the mean is exponential."""
        self.n = min(self.n + 1.0, memory)
        self.mean += (value - self.mean) / self.n

    def add_many(self, value: float, count: float, memory: float = float("inf")) -> None:
        """Fold `count` values whose mean is `value`."""
        self.n = min(self.n + count, memory)
        self.mean += (value - self.mean) * min(count / self.n, 1.0)


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Interference of one epoch."""

    seconds: float
    """Device seconds above what the same rounds take without training; >= 0."""
    relative: float
    """The same over the expected device seconds; signed."""
    num_rounds: int


class Interference(msgspec.Struct):
    """Rounds matched by (batch size, drafted or not), with and without a job running."""

    idle: dict[int, Mean] = {}
    training: dict[int, Mean] = {}
    """Of the open epoch."""

    def fold(self, batch: FeedbackBatch | FeedbackSums) -> None:
        """Add a batch's rows."""
        if isinstance(batch, FeedbackSums):
            for seen in batch.rounds:
                key = seen.batch_size * 2 + seen.is_drafted
                if seen.is_training:
                    self.training.setdefault(key, Mean()).add_many(seen.mean_s, seen.num_rounds)
                else:
                    self.idle.setdefault(key, Mean()).add_many(seen.mean_s, seen.num_rounds, MEMORY_ROWS)
            return
        for size, drafted, ms, busy in zip(
            batch.batch_size, batch.num_draft_tokens, batch.share_ms, batch.is_training, strict=True
        ):
            key = size * 2 + (drafted > 0)
            if busy:
                self.training.setdefault(key, Mean()).add(ms / 1000.0)
            else:
                self.idle.setdefault(key, Mean()).add(ms / 1000.0, MEMORY_ROWS)

    def close(self) -> Slowdown | None:
        """End the epoch. None when no job ran or no round has a baseline; unmatched rounds get the matched slow-down."""
        open_rows, self.training = self.training, {}
        extra = expected = total = 0.0
        rounds = 0
        for key, seen in open_rows.items():
            total += seen.n * seen.mean
            base = self.idle.get(key)
            if base is not None and base.n >= MIN_ROWS:
                extra += seen.n * (seen.mean - base.mean)
                expected += seen.n * base.mean
                rounds += int(seen.n)
        if rounds < MIN_ROWS or expected <= 0:
            return None
        relative = extra / expected
        return Slowdown(
            seconds=max(total * relative / max(1.0 + relative, 1e-3), 0.0), relative=relative, num_rounds=rounds
        )
