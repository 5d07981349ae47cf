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
PRIOR_SD = 0.3
"""Prior spread of the relative saving around zero; a noisy estimate is pulled towards 'nothing saved'."""


class Booking(msgspec.Struct, frozen=True, kw_only=True):
    """Saving of one (bucket, version) since the last booking."""

    bucket: str
    version: str
    seconds: float
    standard_error_s: float
    num_tokens: int


class Pool(msgspec.Struct):
    """One adapted version in one bucket."""

    time_per_token: RatioSums = msgspec.field(default_factory=RatioSums)
    waiting_tokens: int = 0


class Savings(msgspec.Struct):
    """saving = adaptive tokens x (static - adaptive time per token), per bucket and version, shrunken by its noise.

    Both groups share rounds and are drawn by request id, so that the difference is causal; versions equal to the
    first one save nothing by definition.
    """

    static: dict[str, RatioSums] = {}
    adaptive: dict[str, dict[str, Pool]] = {}

    def close(self, observation: BucketObservation, first_version: str) -> list[Booking]:
        """Fold one bucket's epoch and return what can be booked."""
        bucket = observation.bucket
        keep = 0.5 ** ((observation.end - observation.start) / HALF_LIFE_S)
        static = self.static.setdefault(bucket, RatioSums())
        static.discount(keep)
        for stats in observation.stats:
            if stats.group == Group.STATIC:
                static.merge(stats.time_per_token)
        bookings = []
        for stats in observation.stats:
            if stats.group != Group.ADAPTIVE or stats.version in (first_version, ""):
                continue
            pool = self.adaptive.setdefault(bucket, {}).setdefault(stats.version, Pool())
            pool.time_per_token.discount(keep)
            pool.time_per_token.merge(stats.time_per_token)
            pool.waiting_tokens += stats.num_tokens
            booking = self._book(bucket, stats.version, pool, static)
            if booking is not None:
                bookings.append(booking)
        return bookings

    def _book(self, bucket: str, version: str, pool: Pool, static: RatioSums) -> Booking | None:
        per_token = shrunken_saving(static, pool.time_per_token)
        if per_token is None or pool.waiting_tokens == 0:
            return None
        saving, error = per_token
        tokens, pool.waiting_tokens = pool.waiting_tokens, 0
        return Booking(
            bucket=bucket, version=version, seconds=tokens * saving, standard_error_s=tokens * error, num_tokens=tokens
        )

    def reset_bucket(self, bucket: str) -> None:
        """Start the comparison anew (the bucket's text changed); what was booked stays booked.

        Tokens that still wait are let go: the samples to come say nothing about the text they belong to.
        """
        self.static.pop(bucket, None)
        for pool in self.adaptive.get(bucket, {}).values():
            pool.time_per_token = RatioSums()
            pool.waiting_tokens = 0


def shrunken_saving(static: RatioSums, adaptive: RatioSums) -> tuple[float, float] | None:
    """Posterior mean of the saving per token and its standard error, seconds; None below the minimum sample."""
    if min(static.n, adaptive.n) < MIN_REQUESTS or min(static.x, adaptive.x) < MIN_TOKENS:
        return None
    slow, fast = static.y / static.x, adaptive.y / adaptive.x
    variance = static.standard_error() ** 2 + adaptive.standard_error() ** 2
    prior = (PRIOR_SD * slow) ** 2
    weight = prior / (prior + variance) if prior > 0 else 0.0
    return weight * (slow - fast), math.sqrt(weight * variance)
