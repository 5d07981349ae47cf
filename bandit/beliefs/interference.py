"""Interference: device-seconds that serving lost because a training job ran beside it."""

from __future__ import annotations

import msgspec

from paceline.contracts import FeedbackSums

MIN_ROWS = 20
"""Rounds without training that a baseline needs."""
MEMORY_ROWS = 500.0
"""Rounds that a baseline remembers."""
FASTEST = 0.5
"""Least of the expected time that rounds beside a job are believed to have taken: less says that the baseline is wrong."""


class Mean(msgspec.Struct):
    """Count and mean of seconds."""

    n: float = 0.0
    mean: float = 0.0

    def add(self, value: float, count: float, memory: float = float("inf")) -> None:
        """Fold `count` values whose mean is `value`; past `memory` values the mean is exponential."""
        self.n = min(self.n + count, memory)
        self.mean += (value - self.mean) * min(count / self.n, 1.0)


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Interference of one epoch."""

    seconds: float
    """Device seconds above what the same rounds take without training; below 0 by chance, so that the sum has no bias."""
    relative: float
    """The same over the expected device seconds; signed."""
    share: float
    """The same over the device seconds of all rounds of the epoch, whoever's they were."""
    num_rounds: int


class Interference(msgspec.Struct):
    """Rounds matched by (batch size, drafted or not), with and without a job running."""

    idle: dict[int, Mean] = {}
    training: dict[int, Mean] = {}
    """Of the open epoch."""
    open_s: float = 0.0
    """Device seconds of all its rounds."""

    def fold(self, feedback: FeedbackSums) -> None:
        """Add its rounds."""
        for seen in feedback.rounds:
            means, memory = (self.training, float("inf")) if seen.is_training else (self.idle, MEMORY_ROWS)
            key = seen.batch_size * 2 + seen.is_drafted
            self.open_s += seen.num_rounds * seen.mean_s
            means.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds, memory)

    def close(self) -> Slowdown | None:
        """End the epoch. None when no job ran or no round has a baseline; unmatched rounds get the matched slow-down."""
        open_rows, self.training = self.training, {}
        open_s, self.open_s = self.open_s, 0.0
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
        believed = max(relative, FASTEST - 1.0)
        seconds = total * believed / (1.0 + believed)
        return Slowdown(seconds=seconds, relative=relative, share=seconds / max(open_s, total), num_rounds=rounds)
