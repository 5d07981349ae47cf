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
    """Interference of one epoch, or of one job."""

    seconds: float
    """Device seconds above what the same rounds take without training; below 0 by chance, so that the sum has no bias."""
    relative: float
    """The same over the expected device seconds; signed."""
    share: float
    """The same over the device seconds of all rounds of the epoch, whoever's they were."""
    num_rounds: int


class JobRounds(msgspec.Struct):
    """Rounds before, beside and behind one job."""

    owner: int
    """Number of its decision."""
    before: dict[int, Mean] = {}
    beside: dict[int, Mean] = {}
    after: dict[int, Mean] = {}
    """Behind the last one beside it."""
    booked_s: float = 0.0
    """What its epochs were found to have lost."""
    has_ended: bool = False

    def whole(self, *, needs_after: bool) -> Slowdown | None:
        """What all of it lost, less what was booked; None while too little is known.

        needs_after: else the rounds before it are enough, and nothing is left to be booked.
        """
        bases = {}
        for key, base in self.before.items():
            behind = self.after.get(key)
            if base.n >= MIN_ROWS and behind is not None and behind.n >= MIN_ROWS:
                bases[key] = (base.mean + behind.mean) / 2
            elif base.n >= MIN_ROWS and not needs_after:
                bases[key] = base.mean
        found = _slowdown(self.beside, bases)
        has_after = any(behind.n >= MIN_ROWS for behind in self.after.values())
        left_s = 0.0 if found is None or not has_after else found.seconds - self.booked_s
        return None if found is None else msgspec.structs.replace(found, seconds=left_s)


class Interference(msgspec.Struct):
    """Rounds matched by batch size and kind (plain, drafted, drafted from text), with and without a job running.

    An epoch beside a job is held against the rounds before it. A computer's speed drifts by more than a job slows it down, so
    once the job has ended all of it is held against the rounds before and behind it, and what was booked is put right.
    """

    idle: dict[int, Mean] = {}
    training: dict[int, Mean] = {}
    """Of the open epoch."""
    open_s: float = 0.0
    """Device seconds of all its rounds."""
    was_quiet: bool = True
    """Whether the latest epoch had no round beside a job."""
    job: JobRounds | None = None
    """The latest one, until all of it is booked."""

    def fold(self, feedback: FeedbackSums) -> None:
        """Add its rounds."""
        for seen in feedback.rounds:
            means, memory = (self.training, float("inf")) if seen.is_training else (self.idle, MEMORY_ROWS)
            key = -seen.batch_size if seen.is_from_text else seen.batch_size * 2 + seen.is_drafted
            self.open_s += seen.num_rounds * seen.mean_s
            means.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds, memory)
            job = self.job
            if job is not None and seen.is_training:
                job.beside.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds)
                job.after = {}
            elif job is not None and job.has_ended:
                job.after.setdefault(key, Mean()).add(seen.mean_s, seen.num_rounds)

    def close(self) -> Slowdown | None:
        """End the epoch. None when no job ran or no round has a baseline; unmatched rounds get the matched slow-down."""
        open_rows, self.training = self.training, {}
        open_s, self.open_s = self.open_s, 0.0
        self.was_quiet = not open_rows
        found = _slowdown(open_rows, {key: base.mean for key, base in self.idle.items() if base.n >= MIN_ROWS}, open_s)
        if self.job is not None and found is not None:
            self.job.booked_s += found.seconds
        return found

    def begin(self, owner: int) -> tuple[int, Slowdown] | None:
        """A job begins; the one before it is settled with what is known of it, as `settle` does."""
        before, found = self.job, None if self.job is None else self.job.whole(needs_after=False)
        self.job = JobRounds(owner, before={key: Mean(known.n, known.mean) for key, known in self.idle.items()})
        return None if before is None or found is None else (before.owner, found)

    def end(self) -> None:
        """The job has ended; rounds beside it may still be told of."""
        if self.job is not None:
            self.job.has_ended, self.job.after = True, {}

    def settle(self) -> tuple[int, Slowdown] | None:
        """(owner, slow-down) of a job that has ended: all of it, its `seconds` less what was booked. None until rounds behind it are
        known, and once it was told."""
        job = self.job
        if job is None or not job.has_ended or not self.was_quiet:
            return None
        found = job.whole(needs_after=True)
        if found is None and sum(seen.n for seen in job.after.values()) < MEMORY_ROWS:
            return None
        self.job = None
        return None if found is None else (job.owner, found)


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
