"""Bootstrap: sums over resamples of the samples, and intervals that cover what they say even for few samples.

A sample is what was drawn independently: a prompt, a group of requests, a seed. What belongs to one sample (both sides of
a comparison, all chunks of an answer) is drawn together.
Shape legend: C columns, n samples, R resamples.
Source: Hesterberg 2015, "What Teachers Should Know About the Bootstrap", arXiv 1411.5279 (narrowness of the percentile
interval: normal instead of t quantiles, and a variance with n instead of n - 1).

Its kin for evidence that is looked at while it grows are permutation e-values: of a block of which chance chose the marked
samples, the mean over all choices is 1, so that a product over blocks exceeds 1 / alpha at any time with probability at most
alpha. Sources: Koning, "Post-hoc and anytime valid permutation and group invariance testing", arXiv 2310.01153; Ville 1939.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from paceline.contracts import BurstPlan

LEVEL = 0.95
TILTS = (1.0, 2.5, 6.0, 15.0)
"""theta of the mixture, per unit of log rate; best is effect / variance: 0.1 / 0.2^2 = 2.5, 0.7 / 0.2^2 = 17."""
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
UNSCORED_REQUESTS = 16
"""Requests since its base that a learner learns unscored: its mean, over as many steps, holds the base's weights still."""
SCORED_TOGETHER = 8
"""Requests of the class that a burst scores side by side, then learns, then looks at its evidence."""
SURE_EVERY = 2
"""What surely gains is scored every so many such chunks only: scoring takes two fifths of the time, but says what it gains by now."""
MAX_SCORE = 3.0
"""Log ratios are cut here (a factor of 20)."""
_CHUNK = 4_000_000
"""Counts held at once."""


def resample_counts(num_samples: int, num_resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each sample is drawn: (r, n) blocks that make up num_resamples rows."""
    share = np.full(num_samples, 1 / num_samples)
    rows = max(1, _CHUNK // num_samples)
    for at in range(0, num_resamples, rows):
        yield rng.multinomial(num_samples, share, size=min(rows, num_resamples - at))


def resampled(
    columns: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    num_resamples: int = 4000,
    seed: int | np.random.Generator = 0,
) -> tuple[float, np.ndarray]:
    """The statistic of the columns' sums, and of the sums over bootstrap resamples of the samples.

    Args:
        columns: (C, n), n >= 1; a sample is drawn with all its columns.
        statistic: (C, R) sums -> (R,) values.
    Returns: the value over all samples; (R,) values over resamples.
    """
    columns = np.asarray(columns, dtype=np.float64)
    rng = np.random.default_rng(seed)
    sums = [columns @ counts.T for counts in resample_counts(columns.shape[1], num_resamples, rng)]
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no round at all
        return float(statistic(columns.sum(1, keepdims=True))[0]), statistic(np.concatenate(sums, axis=1))


def interval(
    value: float,
    values: np.ndarray,
    num_samples: int,
    *,
    level: float = LEVEL,
    is_positive: bool = False,
    digits: int = 4,
) -> list[float] | None:
    """Ends of the two-sided percentile interval, their distances from `value` stretched by sqrt(n / (n - 1)) t / z.

    Args:
        value: over all samples. values: (R,) over resamples; those that are not finite are left out.
        is_positive: the quantity cannot be negative: distances are taken in its logarithm where that exists.
        digits: of the rounded ends.
    Returns: None where one sample, or no finite value, gives none.
    """
    from scipy import stats  # takes a second, which most importers never need

    values = values[np.isfinite(values)]
    if num_samples < 2 or not len(values):
        return None
    is_log = is_positive and value > 0 and values.min() > 0
    at, spread = (math.log(value), np.log(values)) if is_log else (value, values)
    upper = (1 + level) / 2
    stretch = math.sqrt(num_samples / (num_samples - 1)) * stats.t.ppf(upper, num_samples - 1) / stats.norm.ppf(upper)
    ends = at + stretch * (np.quantile(spread, [1 - upper, upper]) - at)
    ends = np.exp(np.minimum(ends, 700.0)) if is_log else ends.clip(0) if is_positive else ends
    return [round(float(end), digits) for end in ends]


def expanded_level(num_samples: int, level: float = LEVEL) -> float:
    """Level of the percentile interval that covers `level`, for statistics whose distances mean little (percentiles)."""
    from scipy import stats

    t = stats.t.ppf((1 + level) / 2, num_samples - 1)
    return float(2 * stats.norm.cdf(math.sqrt(num_samples / (num_samples - 1)) * t) - 1)


def mean_interval(
    values: Sequence[float], *, level: float = LEVEL, is_positive: bool = False, digits: int = 4
) -> tuple[float, list[float] | None]:
    """The mean of at least one value, and its interval."""
    mean, means = resampled(np.array([values, np.ones(len(values))]), lambda sums: sums[0] / sums[1])
    return mean, interval(mean, means, len(values), level=level, is_positive=is_positive, digits=digits)


def ratio_interval(
    tops: Sequence[float], bottoms: Sequence[float], *, digits: int = 4
) -> tuple[float, list[float] | None]:
    """sum(tops) / sum(bottoms), both positive and sampled in pairs, and its interval."""
    value, values = resampled(np.array([tops, bottoms]), lambda sums: sums[0] / sums[1])
    return value, interval(value, values, len(tops), is_positive=True, digits=digits)


def rate_ratio(
    a: np.ndarray | Sequence[Sequence[float]], b: np.ndarray | Sequence[Sequence[float]], *, is_paired: bool = True
) -> tuple[float, list[float] | None]:
    """Rate of `a` over rate of `b` with its interval; a rate is sum(tokens) / sum(seconds).

    Args:
        a, b: (2, n) tokens and seconds. is_paired: sample i of both is the same prompt or group, and both are drawn
            together, so that a hard one counts on both sides or on neither; otherwise each is resampled by itself.
    """
    if is_paired:
        value, values = resampled(np.array([*a, *b]), lambda s: (s[0] / s[1]) / (s[2] / s[3]))
    else:
        own, over = (resampled(np.array(x), lambda s: s[0] / s[1], seed=i) for i, x in enumerate((a, b)))
        value, values = own[0] / over[0], own[1] / over[1]
    return value, interval(value, values, min(len(a[0]), len(b[0])), is_positive=True)


def log_e_values(terms: np.ndarray, is_marked: np.ndarray) -> np.ndarray:
    """(t,) log e-values of one block, one for each tilt; zeros when the block has none that are marked, or none that are not.

    Args:
        terms: (t, n) float, tilt times score; negative tilts reward low scores of the marked samples.
        is_marked: (n,) bool.
    """
    n, k = terms.shape[1], int(np.sum(is_marked))
    if k in (0, n):
        return np.zeros(len(terms))
    sums = np.full((len(terms), k + 1), -np.inf)  # log of the elementary symmetric polynomials so far
    sums[:, 0] = 0.0
    for j in range(n):
        sums[:, 1:] = np.logaddexp(sums[:, 1:], sums[:, :-1] + terms[:, j : j + 1])
    log_subsets = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return terms[:, is_marked].sum(axis=1) - (sums[:, k] - log_subsets)


def log_mixture(logs: Sequence[float]) -> float:
    """Log of the mean of e-processes given by their logs."""
    return float(np.logaddexp.reduce(np.asarray(logs, dtype=np.float64)) - math.log(len(logs)))


def _nothing() -> list[float]:
    return [LOG_NOTHING] * len(TILTS)


class GainTest(msgspec.Struct):
    """Whether a learner gains more than a swap costs, asked after every few requests: the permutation e-values of above, where
    a block is the two scores of one request.

    If the learner changes nothing, either score is as likely to be its own; with "gains no more than m" its score is first
    lowered by log(1 + m). A learner begins with no gain at all, so the evidence is a mixture over when it became true: the
    products from request 0, 1, 2, 4, 8, ... on, with weights that sum to 1 (Shin, Ramdas & Rinaldo, "E-detectors",
    arXiv 2203.03532). Every request enters once, scored before it is learned.
    """

    num_requests: int = 0
    more: list[float] = msgspec.field(default_factory=_nothing)
    """Log e-process by tilt against 'gains no more than a swap costs'."""
    less: list[float] = msgspec.field(default_factory=_nothing)
    """Log e-process by tilt against 'gains at least what a swap costs', from GRACE_REQUESTS on."""

    def add(self, log_ratio: float, min_gain: float) -> None:
        """Enter a request: log of the learner's tokens per round over the incumbent's; min_gain > -1: what a swap costs."""
        score = min(max(log_ratio, -MAX_SCORE), MAX_SCORE) - math.log1p(min_gain)
        self.more = _grown(self.more, score, 1.0, self.num_requests)
        if self.num_requests >= GRACE_REQUESTS:
            self.less = _grown(self.less, score, -1.0, self.num_requests - GRACE_REQUESTS)
        self.num_requests += 1

    @property
    def log_evidence(self) -> float:
        """That it gained more, at some time."""
        return log_mixture(self.more)

    def is_more(self) -> bool:
        """It surely gained more, at some time."""
        return self.num_requests >= MIN_REQUESTS and self.log_evidence > LOG_SURE

    def is_less(self) -> bool:
        """It surely gains less."""
        return self.num_requests >= MIN_REQUESTS and log_mixture(self.less) > LOG_SURE


def will_pay(
    plan: BurstPlan, min_gain: float, recent: Sequence[float], *, num_read: float, num_left: float, left_s: float
) -> bool:
    """Whether what is left of a burst pays for itself: the rise that is to be hoped for behind it is above what a swap costs,
    and as far above as the seconds that are left are of those planned.

    What is hoped for is the mean of the newest requests and one standard error, grown with the root of the requests, or what
    was expected as long as little is scored. Gains rise by at most that root (see bandit/beliefs/gain_model.py).

    Args:
        recent: log ratios of the newest requests. num_read: requests that the learner has read since its base.
        num_left: requests that it would still read. left_s: device-seconds that these would take.
    """
    rise, num = plan.rise, len(recent)
    if num >= SCORED_TOGETHER:
        middle = max(num_read - num / 2, 1.0)
        growth = ((num_read + num_left) / middle) ** 0.5
        rise = math.expm1(float(np.mean(recent)) + float(np.std(recent, ddof=1)) / num**0.5) * growth
    return rise > min_gain + max(plan.pay_rise - min_gain, 0.0) * left_s / plan.seconds


def _grown(logs: Sequence[float], score: float, sign: float, number: int) -> list[float]:
    """The e-process by tilt after the pair (score, 0), which is its pair `number`; sign -1: low scores are evidence."""
    before: Sequence[float] = logs
    if (
        number & (number - 1) == 0
    ):  # 0 and the powers of 2: one more beginning, of weight 1 / (k (k + 1)), k = 1, 2, ...
        begun = number.bit_length() + 1
        before = [_log_sum(log, -math.log(begun * (begun + 1))) for log in logs]
    # log_e_values of a pair, written out: simulations add millions
    return [log + math.log(2.0) - _log_sum(0.0, -sign * tilt * score) for log, tilt in zip(before, TILTS, strict=True)]


def _log_sum(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))
