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
    """Rounds matched by batch size and kind (plain, drafted, drafted from text), with and without a job running.

    An epoch beside a job is held against the rounds before the job. A computer's speed drifts by more than a job slows it down,
    so once the job has ended all of it is held against the rounds before and behind it, and what was booked is put right.
    """

    idle: dict[int, Mean] = {}
    training: dict[int, Mean] = {}
    """Of the open epoch."""
    open_s: float = 0.0
    """Device seconds of all its rounds."""
    job: dict[int, Mean] = {}
    """Rounds beside the job since it began."""
    before: dict[int, Mean] = {}
    """`idle` when it began."""
    after: dict[int, Mean] = {}
    """Rounds since its last one."""
    booked_s: float = 0.0
    """What `close` found of it."""

    def fold(self, feedback: FeedbackSums) -> None:
        """Add its rounds."""
        for seen in feedback.rounds:
            means, memory = (self.training, float("inf")) if seen.is_training else (self.idle, MEMORY_ROWS)
            key = -seen.batch_size if seen.is_from_text else seen.batch_size * 2 + seen.is_drafted
            self.open_s += seen.num_rounds * seen.mean_s
            if seen.is_training:
                if not self.job:
                    self.before = {key: Mean(known.n, known.mean) for key, known in self.idle.items()}
                self.job.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds)
                self.after = {}
            elif self.job:
                self.after.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds)
            means.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds, memory)

    def close(self) -> Slowdown | None:
        """End the epoch. None when no job ran or no round has a baseline; unmatched rounds get the matched slow-down."""
        open_rows, self.training = self.training, {}
        open_s, self.open_s = self.open_s, 0.0
        found = _slowdown(open_rows, {key: base.mean for key, base in self.idle.items() if base.n >= MIN_ROWS}, open_s)
        self.booked_s += 0.0 if found is None else found.seconds
        return found

    def settle(self) -> Slowdown | None:
        """What the job took in all, less what was booked of it; None until rounds behind it are known. Called once an epoch is
        closed that had none beside it."""
        bases = {
            key: (base.mean + self.after[key].mean) / 2
            for key, base in self.before.items()
            if base.n >= MIN_ROWS and key in self.after and self.after[key].n >= MIN_ROWS
        }
        whole = _slowdown(self.job, bases)
        if whole is None and sum(seen.n for seen in self.after.values()) < MEMORY_ROWS:
            return None
        found = None if whole is None else msgspec.structs.replace(whole, seconds=whole.seconds - self.booked_s)
        self.job, self.before, self.after, self.booked_s = {}, {}, {}, 0.0
        return found


def _slowdown(rows: dict[int, Mean], bases: dict[int, float], open_s: float = 0.0) -> Slowdown | None:
    """Rounds against what like ones take without a job; those without a base get the others' slow-down. None with too few."""
    total = sum(seen.n * seen.mean for seen in rows.values())
    matched = [(seen, bases[key]) for key, seen in rows.items() if key in bases]
    rounds, expected = int(sum(seen.n for seen, _ in matched)), sum(seen.n * base for seen, base in matched)
    if rounds < MIN_ROWS or expected <= 0:
        return None
    relative = sum(seen.n * seen.mean for seen, _ in matched) / expected - 1.0
    believed = max(relative, FASTEST - 1.0)
    seconds = total * believed / (1.0 + believed)
    return Slowdown(seconds=seconds, relative=relative, share=seconds / max(open_s, total), num_rounds=rounds)
