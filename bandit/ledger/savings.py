"""Savings: device-seconds that adapted drafters saved against the hold-back group, per bucket and version."""

from __future__ import annotations

import math

import msgspec

from paceline.bandit.beliefs.observation import BucketObservation
from paceline.bandit.beliefs.ratio import RatioSums
from paceline.contracts import Group

MIN_REQUESTS = 4
MIN_TOKENS = 64
"""Sample that each group needs before anything is booked; tokens emitted before that are booked when it is reached."""
HALF_LIFE_S = 120.0
WINDOW_REQUESTS = 30.0
"""Hold-back requests of a window. The bias of a ratio is at most its standard error times the relative error of the mean length
(Hartley and Ross 1954): a fifth of it, where lengths spread as much as their mean."""
PRIOR_SD = 0.3
"""Prior spread of the relative saving around zero; a noisy estimate is pulled towards 'nothing saved'."""


class Booking(msgspec.Struct, frozen=True, kw_only=True):
    """Saving of one (bucket, version) since the last booking."""

    bucket: str
    version: str
    seconds: float
    standard_error_s: float
    num_tokens: int


class Window(msgspec.Struct):
    """Epochs of one version, of which the whole is to be booked at the hold-back's time per token of the whole."""

    static: RatioSums = msgspec.field(default_factory=RatioSums)
    tokens: int = 0
    valued_s: float = 0.0
    """What they would have taken, as it was booked so far."""

    def missing(self) -> float:
        """Seconds that `valued_s` lacks; 0 below the minimum sample."""
        return self.tokens * self.static.y / self.static.x - self.valued_s if _is_sample(self.static) else 0.0


def _is_sample(sums: RatioSums) -> bool:
    return sums.n >= MIN_REQUESTS and sums.x >= MIN_TOKENS


class Pool(msgspec.Struct):
    """One adapted version in one bucket."""

    time_per_token: RatioSums = msgspec.field(default_factory=RatioSums)
    """Of the latest minutes: how sure the comparison is."""
    waiting_tokens: int = 0
    """That came while there was no hold-back to compare them with; valued as the later ones are."""
    waiting_s: float = 0.0
    """How long they came, HALF_LIFE_S at most."""
    tokens: int = 0
    """The others since the latest booking."""
    took_s: float = 0.0
    """What these took."""
    window: Window = msgspec.field(default_factory=Window)
    weight: float = 0.0
    """Of the latest booking."""

    def wait(self, num_tokens: int, seconds: float) -> None:
        """Keep an epoch's tokens until there is a hold-back, of HALF_LIFE_S at most: its first requests say nothing of hours
        before them."""
        self.waiting_tokens += num_tokens
        self.waiting_s += seconds
        if self.waiting_s > HALF_LIFE_S:
            self.waiting_tokens = int(self.waiting_tokens * HALF_LIFE_S / self.waiting_s)
            self.waiting_s = HALF_LIFE_S


class Savings(msgspec.Struct):
    """saving = adaptive tokens x static time per token - what they took, per bucket and version, shrunken by its noise.

    Both groups share rounds and are drawn by request id, so that the difference is causal; versions equal to the
    first one save nothing by definition. The hold-back is small, so its time per token is that of the latest minutes, which
    values what is new too late; so every WINDOW_REQUESTS of it, and where the comparison starts anew, the difference to its
    time per token of the whole window is booked. Comparisons start anew where versions have become worse: what is late then
    would be missing in one direction. What the adaptive tokens took is booked as it was.
    """

    static: dict[str, RatioSums] = {}
    adaptive: dict[str, dict[str, Pool]] = {}

    def close(self, observation: BucketObservation, first_version: str, undisturbed: float = 1.0) -> list[Booking]:
        """Fold one bucket's epoch and return what can be booked.

        undisturbed: share of the epoch's device time that it would have taken without the jobs beside it. What they cost is
        booked as interference; the saving is what the version would have saved without them.
        """
        bucket = observation.bucket
        keep = 0.5 ** ((observation.end - observation.start) / HALF_LIFE_S)
        static = self.static.setdefault(bucket, RatioSums())
        static.discount(keep)
        epoch = RatioSums()
        for stats in observation.stats:
            if stats.group == Group.STATIC:
                epoch.merge(stats.time_per_token.scaled(undisturbed))
        static.merge(epoch)
        bookings = []
        for stats in observation.stats:
            if stats.group != Group.ADAPTIVE or stats.version in (first_version, ""):
                continue
            pool = self.adaptive.setdefault(bucket, {}).setdefault(stats.version, Pool())
            pool.time_per_token.discount(keep)
            taken = stats.time_per_token.scaled(undisturbed)
            seconds = taken.ratio()
            if seconds is None or static.n < 1.0:
                pool.wait(stats.num_tokens, observation.end - observation.start)
            else:
                pool.time_per_token.merge(taken)
                pool.tokens += stats.num_tokens
                pool.took_s += stats.num_tokens * seconds
                pool.window.tokens += stats.num_tokens
                pool.window.static.merge(epoch)
            booking = self._book(bucket, stats.version, pool, static)
            if booking is not None:
                bookings.append(booking)
        return bookings

    def _book(self, bucket: str, version: str, pool: Pool, static: RatioSums) -> Booking | None:
        adaptive, tokens = pool.time_per_token, pool.waiting_tokens + pool.tokens
        if not (_is_sample(static) and _is_sample(adaptive)) or tokens == 0:
            return None
        slow, fast = static.y / static.x, adaptive.y / adaptive.x
        variance = static.standard_error() ** 2 + adaptive.standard_error() ** 2
        prior = (PRIOR_SD * slow) ** 2
        pool.weight = weight = prior / (prior + variance) if prior > 0 else 0.0
        seconds = pool.waiting_tokens * (slow - fast) + pool.tokens * slow - pool.took_s
        window = pool.window
        window.valued_s += pool.tokens * slow
        pool.waiting_tokens, pool.waiting_s, pool.tokens, pool.took_s = 0, 0.0, 0, 0.0
        if window.static.n >= WINDOW_REQUESTS:
            seconds += window.missing()
            pool.window = Window()
        return Booking(
            bucket=bucket, version=version, seconds=weight * seconds,
            standard_error_s=tokens * math.sqrt(weight * variance), num_tokens=tokens,
        )  # fmt: skip

    def reset_bucket(self, bucket: str) -> list[Booking]:
        """Start the comparison anew (the bucket's text changed); returns what its windows lacked.

        Tokens that still wait are let go: the samples to come say nothing about the text they belong to.
        """
        self.static.pop(bucket, None)
        found = []
        for version, pool in self.adaptive.pop(bucket, {}).items():
            pool.window.tokens -= pool.tokens
            seconds = pool.weight * pool.window.missing()
            if seconds:
                found.append(
                    Booking(bucket=bucket, version=version, seconds=seconds, standard_error_s=0.0, num_tokens=0)
                )
        return found
