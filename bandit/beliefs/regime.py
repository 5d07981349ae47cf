"""Regimes: spans of like traffic, how long the present one will last, and drift of a bucket's text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from paceline.bandit.beliefs.belief import FAST
from paceline.bandit.beliefs.ratio import RatioSums

MIX_DISTANCE = 0.6
"""Total variation between the recent and the regime's mean bucket mix that ends a regime."""
PRIOR_REGIMES = 1.0
"""Past regimes that the prior horizon counts for."""
MAX_AGE_FACTOR = 24.0
"""Age beyond this multiple of the prior horizon promises no longer life."""
PRESENT_SHARE = 0.2
"""Share of a regime's tokens above which a bucket counts as one that the regime was about."""
PRIOR_GONE = 1.0
"""Past regimes without return that the prior counts for, when the return of a bucket is forecast."""
RETURN_FACTOR = 12.0
"""Returns are counted on for at most this multiple of the prior horizon, and for no longer than was observed so far or
WINDOW_FACTOR says."""
WINDOW_FACTOR = 4.0
"""Returns are counted on for at least this multiple of the prior horizon: a service outlives its first regimes."""
NEW_RETURNS = (1.0, 1.0)
"""Beta prior of the chance that a new bucket returns: counts of buckets before it that did, and that did not."""
MEAN_LAG = 8.0
"""How many times slower than the recent mix the regime's mean moves, at least."""
MAX_RESIDUALS = 96
CLIP = 6.0
"""Largest standardised residual, so that one odd epoch is no drift."""
SLACK, ALARM, LEAST_RESIDUALS = 0.5, 10.0, 3
"""Shift of the mean that is tolerated, cumulated excess that raises the alarm, residuals before the first one."""


def has_drifted(residuals: Sequence[float]) -> bool:
    """Page-Hinkley test for a shift of the mean, up or down; True when the last residual raises the alarm.

    The test begins anew behind an alarm. Source: Page 1954, "Continuous Inspection Schemes", Biometrika 41.
    """
    num, is_alarm = 0, False
    mean = up = down = lowest = highest = 0.0
    for value in residuals:
        if is_alarm or num == 0:
            num, mean, up, down, lowest, highest = 0, 0.0, 0.0, 0.0, math.inf, -math.inf
        num += 1
        mean += (value - mean) / num
        up, down = up + value - mean - SLACK, down + value - mean + SLACK
        lowest, highest = min(lowest, up), max(highest, down)
        is_alarm = num >= LEAST_RESIDUALS and max(up - lowest, highest - down) > ALARM
    return is_alarm


class BucketRegime(msgspec.Struct):
    """Drift watch of one bucket: acceptance length against its own past, version by version."""

    start: float
    rows_at_start: int = 0
    """Rows ever written to the trace store for this bucket when its text last changed."""
    expected: dict[str, RatioSums] = {}
    residuals: list[float] = []
    num_alarms: int = 0
    began: float = 0.0
    """When the name went to the present kind of text; 0 = no other had it."""
    set_back_s: float = 0.0
    """By how much the clock was set back since its text began."""

    @property
    def text_began(self) -> float:
        """When the present text began, by another kind's end or an alarm, as the clock said then: what was learned of it goes by
        this. 0 = it is the first one."""
        began = self.start if self.num_alarms else self.began
        return began + self.set_back_s if began else 0.0

    def set_back(self, by_s: float) -> None:
        """The clock was set back by so much."""
        self.start -= by_s
        self.began -= by_s if self.began else 0.0
        self.set_back_s += by_s

    def update(self, lengths: dict[str, RatioSums]) -> bool:
        """Fold one epoch's acceptance lengths by version; True on an alarm.

        Residuals are conditioned on the version, so a swap is no drift. The caller resets after an alarm.
        """
        total = weight = 0.0
        for version in sorted(lengths):
            seen, known = lengths[version], self.expected.setdefault(version, RatioSums())
            if seen.n >= 3 and known.n >= 6:
                value, reference = seen.ratio(), known.ratio()
                error = math.hypot(seen.standard_error(), known.standard_error())
                if value is not None and reference is not None and math.isfinite(error):
                    # within-bucket prompts differ: 3% of the level is always noise
                    z = (value - reference) / math.hypot(error, 0.03 * reference)
                    total += z * math.sqrt(seen.x)
                    weight += seen.x
            known.discount(0.98)
            known.merge(seen)
        if weight <= 0:
            return False
        self.residuals = [*self.residuals, min(max(total / math.sqrt(weight), -CLIP), CLIP)][-MAX_RESIDUALS:]
        return has_drifted(self.residuals)

    def reset(self, now: float, rows_written: int) -> None:
        """Begin anew after an alarm."""
        self.start, self.set_back_s = now, 0.0
        self.rows_at_start = rows_written
        self.expected = {}
        self.residuals = []
        self.num_alarms += 1


class Presence(msgspec.Struct):
    """How much one bucket was served in past regimes."""

    seconds: float = 0.0
    """Sum of duration times its share of the tokens."""
    num_regimes: int = 0
    """Past regimes in which it was more than PRESENT_SHARE of the tokens."""


class MixRegime(msgspec.Struct):
    """The mix of buckets over time; a regime ends when the mix moves or a bucket's text drifts."""

    start: float
    mean: dict[str, float] = {}
    recent: dict[str, float] = {}
    num_epochs: int = 0
    lengths: list[float] = []
    """Durations of past regimes, seconds."""
    origin: float | None = None
    """When the first regime began."""
    past: dict[str, Presence] = {}

    def update(self, tokens: dict[str, int], epoch_start: float, weight: float = FAST) -> bool:
        """Fold one epoch's tokens per bucket; True when a new regime begins with this epoch.

        weight: of this epoch in the recent mix, belief.epoch_weight of all traffic.
        """
        total = sum(tokens.values())
        if total <= 0:
            return False
        mix = {b: n / total for b, n in tokens.items() if n > 0}
        if not self.recent:
            self.recent = dict(mix)
        names = sorted(set(self.recent) | set(mix))
        self.recent = {b: (1 - weight) * self.recent.get(b, 0.0) + weight * mix.get(b, 0.0) for b in names}
        if self.mean and _distance(self.recent, self.mean) > MIX_DISTANCE:
            self.begin(epoch_start)
            self.recent = dict(mix)
        is_new = self.num_epochs == 0
        self.num_epochs += 1
        # the mean must lag behind the recent mix, else a change would carry both along and never show
        step = 1.0 / self.num_epochs
        if self.num_epochs * weight > 1.0:
            step = min(step, weight / MEAN_LAG)
        names = sorted(set(self.mean) | set(mix))
        self.mean = {b: (1 - step) * self.mean.get(b, 0.0) + step * mix.get(b, 0.0) for b in names}
        return is_new

    def begin(self, now: float) -> None:
        """End the current regime at `now` and begin another."""
        if self.origin is None:
            self.origin = self.start
        if now > self.start:
            duration = now - self.start
            self.lengths = [*self.lengths, duration][-64:]
            for bucket, share in self.mean.items():
                presence = self.past.setdefault(bucket, Presence())
                presence.seconds += share * duration
                presence.num_regimes += share >= PRESENT_SHARE
        self.start, self.mean, self.num_epochs = now, {}, 0

    def set_back(self, by_s: float) -> None:
        """The clock was set back by so much."""
        self.start -= by_s
        if self.origin is not None:
            self.origin -= by_s

    def forget(self, bucket: str) -> None:
        """The text behind a bucket changed: what it was will not return under this name."""
        self.past.pop(bucket, None)

    def horizon_s(self, now: float, prior_s: float, wait_s: float = 0.0, ends_at: float = math.inf) -> float:
        """Expected seconds of the regime that come after the next `wait_s` seconds, none of them behind `ends_at`.

        Prior: a Lomax life of shape 3 and scale 2 prior_s, whose mean residual is prior_s + age / 2 (what has lasted
        will last); evidence: mean residual of past regimes that outlived this age. Weighted by their numbers.
        """
        age = max(now - self.start, 0.0)
        scale = 2.0 * prior_s + min(age, MAX_AGE_FACTOR * prior_s)  # of the residual life, Lomax again
        prior = 0.5 * scale / (1.0 + wait_s / scale) ** 2
        longer = [length - age for length in self.lengths if length > age]
        after = sum(max(left - wait_s, 0.0) for left in longer)
        expected = (PRIOR_REGIMES * prior + after) / (PRIOR_REGIMES + len(longer))
        return min(expected, max(ends_at - now - wait_s, 0.0))

    def returning_s(
        self, bucket: str, now: float, prior_s: float, wait_s: float = 0.0, ends_at: float = math.inf
    ) -> float:
        """Expected seconds, at its present share of the tokens, for which a bucket will be served in later regimes, as far as
        they lie behind the next `wait_s` seconds and before `ends_at`.

        Share of past time that was its own, carried forward for as long as was observed: it keeps its version, so that
        every visit counts in full. See `_return_of_new` for a bucket that this regime brought.
        """
        presence = self.past.get(bucket)
        share = self.mean.get(bucket, 0.0)
        if share <= 0 or self.origin is None or self.start <= self.origin:
            return 0.0
        observed = self.start - self.origin
        later = max(ends_at - now - max(self.horizon_s(now, prior_s), wait_s), 0.0)
        window = min(max(now - self.origin, WINDOW_FACTOR * prior_s), RETURN_FACTOR * prior_s, later)
        if presence is None or presence.num_regimes == 0:
            return self._return_of_new(bucket, window)
        trust = presence.num_regimes / (presence.num_regimes + PRIOR_GONE)
        return trust * window * (presence.seconds / observed) / max(share, PRESENT_SHARE)

    def _return_of_new(self, bucket: str, window: float) -> float:
        """The same for a bucket that this regime brought: as likely as those before it came back, an equal share of time."""
        known = [p for name, p in self.past.items() if p.num_regimes > 0 and name != bucket]
        if not known or self.mean.get(bucket, 0.0) < PRESENT_SHARE:
            return 0.0
        back = sum(p.num_regimes > 1 for p in known)
        chance = (NEW_RETURNS[0] + back) / (sum(NEW_RETURNS) + len(known))
        return chance * window / (len(known) + 1) / max(self.mean[bucket], PRESENT_SHARE)


def _distance(a: dict[str, float], b: dict[str, float]) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {**a, **b})
