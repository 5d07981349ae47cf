"""Gate: a learner's snapshot goes live when it beats the incumbent beyond chance on requests that it had not learned yet.

Both are scored on the same texts (exact replay), so the comparison is paired: the ratio of their tokens per round on each
request. Whether a snapshot is worth a swap is asked after every few requests, so the evidence is one that may be looked at
any time: the canary's permutation e-values, where a block is the two scores of one request. If the learner changes nothing,
either score is as likely to be its own; with "gains no more than m" its score is first lowered by log(1 + m). A learner
begins with no gain at all, so the evidence is a mixture over when it became true: the products from request 0, 1, 2, 4, 8, ...
on, with weights that sum to 1 (Shin, Ramdas & Rinaldo, "E-detectors", arXiv 2203.03532). How large the gain is says the mean of the newest requests, bootstrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.bootstrap import TILTS, interval, log_e_values, log_mixture, resampled
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


LOG_SURE = math.log(20.0)
"""Log evidence that is sure: wrong once in 20 learners that gain nothing, however often one looks."""
LOG_NOTHING = -1e9
"""Log evidence of a process that has not begun."""
MIN_REQUESTS = 4
"""Scored requests below which nothing is said."""
GRACE_REQUESTS = 16
"""Scored requests before a learner can be found to gain too little, behind those that it learned unscored: gains grow from
nothing."""
RECENT_REQUESTS = 32
"""Newest requests whose mean is the gain: the learner was another one long before."""
MAX_SCORE = 3.0
"""Log ratios are cut here (a factor of 20)."""


class Finding(Enum):
    """What the evidence says of a learner at a look."""

    OPEN = "open"
    """Not sure yet: the next request may tell."""
    BETTER = "better"
    """Its gain is surely above what a swap costs."""
    SHORT = "short"
    """It surely gains less than a swap costs."""


def _nothing() -> list[float]:
    return [LOG_NOTHING] * len(TILTS)


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


class Evidence(msgspec.Struct):
    """What the requests of a learner say of it against the incumbent; encodable, so that the next burst goes on with it.

    Every request enters once, scored before it is learned.
    """

    num_requests: int = 0
    """Of the learner's class."""
    more: list[float] = msgspec.field(default_factory=_nothing)
    """Log e-process by tilt against 'gains no more than a swap costs'."""
    less: list[float] = msgspec.field(default_factory=_nothing)
    """Log e-process by tilt against 'gains at least what a swap costs', from GRACE_REQUESTS on."""
    own: list[tuple[RequestScore, RequestScore]] = []
    """Newest RECENT_REQUESTS of the class: scores of learner and incumbent."""
    elsewhere: dict[str, list[tuple[RequestScore, RequestScore]]] = {}
    """Other class -> the same of it."""

    def add(self, learner: RequestScore, incumbent: RequestScore, *, min_gain: float) -> None:
        """Enter a request of the class. min_gain: relative rise of tokens per round that a swap costs, > -1."""
        score = _log_ratio(learner, incumbent) - math.log1p(min_gain)
        self.more = _grown(self.more, score, 1.0, self.num_requests)
        if self.num_requests >= GRACE_REQUESTS:
            self.less = _grown(self.less, score, -1.0, self.num_requests - GRACE_REQUESTS)
        self.num_requests += 1
        self.own = _newest(self.own, learner, incumbent, self.num_requests)

    def add_other(self, bucket: str, learner: RequestScore, incumbent: RequestScore) -> None:
        """Enter a request of another class: it says what a version is worth there, not whether it is made."""
        pairs = self.elsewhere.get(bucket, [])
        number = int(pairs[-1][0].request_id) + 1 if pairs else 1
        self.elsewhere[bucket] = _newest(pairs, learner, incumbent, number)

    def finding(self, min_gain: float) -> Finding:
        """What is sure now. BETTER also asks for a mean gain of the newest requests above min_gain."""
        if self.num_requests < MIN_REQUESTS:
            return Finding.OPEN
        if log_mixture(self.less) > LOG_SURE:
            return Finding.SHORT
        learner, incumbent = (pooled_acceptance_length(side) for side in zip(*self.own, strict=True))
        is_now = learner > incumbent * (1.0 + min_gain)
        return Finding.BETTER if is_now and log_mixture(self.more) > LOG_SURE else Finding.OPEN

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


def _log_ratio(learner: RequestScore, incumbent: RequestScore) -> float:
    ratio = math.log(learner.acceptance_length / incumbent.acceptance_length)
    return min(max(ratio, -MAX_SCORE), MAX_SCORE)


def _grown(logs: Sequence[float], score: float, sign: float, number: int) -> list[float]:
    """The e-process by tilt after the pair (score, 0), which is its pair `number`; sign -1: low scores are evidence."""
    found = log_e_values(np.multiply.outer(sign * np.asarray(TILTS), [score, 0.0]), np.array([True, False]))
    before = np.asarray(logs, dtype=np.float64)
    if (
        number & (number - 1) == 0
    ):  # 0 and the powers of 2: one more beginning, of weight 1 / (k (k + 1)), k = 1, 2, ...
        begun = number.bit_length() + 1
        before = np.logaddexp(before, -math.log(begun * (begun + 1)))
    return (before + found).tolist()
