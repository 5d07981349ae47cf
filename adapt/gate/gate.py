"""Gate: a learner's snapshot goes live when it beats the incumbent beyond chance on requests that it had not learned yet.

Both are scored on the same texts (exact replay), so the comparison is paired: the ratio of their tokens per round on each
request. Whether a snapshot is worth a swap is asked after every few requests, by a test that may be looked at any time
(`paceline.bootstrap.GainTest`). How large the gain is says the mean of the newest requests, bootstrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.bootstrap import RECENT_REQUESTS, GainTest, interval, resampled
from paceline.contracts import ShadowScore
from paceline.errors import ConfigError


class RequestScore(NamedTuple):
    """Replay of one request with one drafter version."""

    request_id: str
    num_tokens: int
    """Tokens emitted by rounds (all output tokens but the first, which prefill emits)."""
    num_rounds: int
    num_unseen_tokens: float = 0.0
    """Tokens that the last round is expected to have emitted beyond the end of the text."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, bonus tokens included, before truncation at the end of the text."""
        return (self.num_tokens + self.num_unseen_tokens) / self.num_rounds


def pooled_acceptance_length(scores: Sequence[RequestScore]) -> float:
    """Tokens over rounds of all requests together; `scores` must not be empty."""
    return sum(s.num_tokens + s.num_unseen_tokens for s in scores) / sum(s.num_rounds for s in scores)


class Finding(Enum):
    """What the evidence says of a learner at a look."""

    OPEN = "open"
    """Not sure yet: the next request may tell."""
    BETTER = "better"
    """Its gain is surely above what a swap costs."""
    SHORT = "short"
    """It surely gains less than a swap costs."""


def paired_lower_bound(
    differences: Sequence[float], rng: np.random.Generator, *, confidence: float = 0.9, num_resamples: int = 2000
) -> float:
    """Lower end of the two-sided bootstrap interval of the mean of paired differences; -inf for a single value."""
    d = np.asarray(differences, dtype=np.float64)
    if d.size == 0 or not np.isfinite(d).all():
        raise ConfigError(f"differences must be finite and at least one, got {d.size}")
    columns = np.array([d, np.ones(d.size)])
    mean, means = resampled(columns, lambda sums: sums[0] / sums[1], num_resamples=num_resamples, seed=rng)
    ends = interval(mean, means, d.size, level=confidence, digits=9)
    return float("-inf") if ends is None else ends[0]


def score_version(
    version: str, scores: Sequence[RequestScore], incumbent: Sequence[RequestScore], rng: np.random.Generator
) -> ShadowScore:
    """Summarise a version: pooled acceptance_length and its paired gain over the incumbent on the same requests.

    Raises: ConfigError when the two do not cover the same requests.
    """
    base = {s.request_id: s for s in incumbent}
    if len(base) != len(incumbent) or {s.request_id for s in scores} != set(base) or len(scores) != len(base):
        raise ConfigError("paired scores must cover the same requests, each once")
    if not scores:
        raise ConfigError("paired scores must hold at least one request, got none")
    gains = [s.acceptance_length - base[s.request_id].acceptance_length for s in scores]
    return ShadowScore(
        version=version,
        acceptance_length=pooled_acceptance_length(scores),
        num_requests=len(scores),
        num_tokens=sum(s.num_tokens for s in scores),
        gain_mean=float(np.mean(gains)),
        gain_lower=paired_lower_bound(gains, rng),
    )


def _log_ratio(learner: RequestScore, incumbent: RequestScore) -> float:
    return math.log(learner.acceptance_length / incumbent.acceptance_length)


class Evidence(msgspec.Struct):
    """What the requests of a learner say of it against the incumbent; encodable, so that the next burst goes on with it.

    Every request enters once, scored before it is learned.
    """

    test: GainTest = msgspec.field(default_factory=GainTest)
    """Of the requests of the learner's class."""
    own: list[tuple[RequestScore, RequestScore]] = []
    """Newest RECENT_REQUESTS of the class: scores of learner and incumbent."""
    elsewhere: dict[str, list[tuple[RequestScore, RequestScore]]] = {}
    """Other class -> the same of it."""

    def add(self, learner: RequestScore, incumbent: RequestScore, *, min_gain: float) -> None:
        """Enter a request of the class. min_gain: relative rise of tokens per round that a swap costs, > -1."""
        self.test.add(_log_ratio(learner, incumbent), min_gain)
        self.own = _newest(self.own, learner, incumbent, self.test.num_requests)

    def add_other(self, bucket: str, learner: RequestScore, incumbent: RequestScore) -> None:
        """Enter a request of another class: it says what a version is worth there, not whether it is made."""
        pairs = self.elsewhere.get(bucket, [])
        number = int(pairs[-1][0].request_id) + 1 if pairs else 1
        self.elsewhere[bucket] = _newest(pairs, learner, incumbent, number)

    @property
    def log_ratios(self) -> list[float]:
        """Log of the learner's tokens per round over the incumbent's, of the newest requests of the class."""
        return [_log_ratio(learner, incumbent) for learner, incumbent in self.own]

    def finding(self, min_gain: float) -> Finding:
        """What is sure now. BETTER also asks for a mean gain of the newest requests above min_gain."""
        if self.test.is_less():
            return Finding.SHORT
        if not self.test.is_more():
            return Finding.OPEN
        learner, incumbent = (pooled_acceptance_length(side) for side in zip(*self.own, strict=True))
        return Finding.BETTER if learner > incumbent * (1.0 + min_gain) else Finding.OPEN

    def scores(self, version: str, incumbent: str, rng: np.random.Generator) -> list[ShadowScore]:
        """[learner's, incumbent's] scores over the newest requests of its class. Raises: ConfigError without any."""
        return _scored(self.own, version, incumbent, rng)

    def scores_elsewhere(self, version: str, incumbent: str, rng: np.random.Generator) -> dict[str, list[ShadowScore]]:
        """Other class -> the same over its newest requests."""
        return {b: _scored(pairs, version, incumbent, rng) for b, pairs in sorted(self.elsewhere.items())}


def _scored(
    pairs: Sequence[tuple[RequestScore, RequestScore]], version: str, incumbent: str, rng: np.random.Generator
) -> list[ShadowScore]:
    new, old = [learner for learner, _ in pairs], [before for _, before in pairs]
    return [score_version(version, new, old, rng), score_version(incumbent, old, old, rng)]


def _newest(
    pairs: Sequence[tuple[RequestScore, RequestScore]], learner: RequestScore, incumbent: RequestScore, number: int
) -> list[tuple[RequestScore, RequestScore]]:
    """With one more pair, under a number: who sent the request is nothing to keep."""
    pair = (learner._replace(request_id=str(number)), incumbent._replace(request_id=str(number)))
    return [*pairs, pair][-RECENT_REQUESTS:]
