"""Evidence model: how large a gain must be for a burst's requests to make it sure."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from paceline.bandit.beliefs.gain_model import learned_share
from paceline.bootstrap import LOG_SURE, MIN_REQUESTS, TILTS, UNSCORED_REQUESTS
from paceline.contracts import TrainResult

PRIOR_ROWS, PRIOR_SD = 100.0, 0.15
"""Rows of a request, and standard deviation of the logarithm of a request's gain, before any burst told."""
DISCOUNT = 0.8
"""Weight that a bucket's earlier bursts keep at each new one."""
NEEDED = LOG_SURE + math.log(len(TILTS))
"""Log evidence of the best tilt at which the mixture of all is sure."""
POINTS = (np.arange(8) + 0.5) / 8
"""Where between its first and its last scored request a learner's gain is looked at."""
RISES = np.geomspace(0.01, 4.0, 60)
"""Relative rises of the acceptance length among which the least sure one is looked up."""


class Unsure(msgspec.Struct, frozen=True, kw_only=True):
    """Where a learner stands whose gain is not sure yet."""

    log_evidence: float | None
    """Of its gain since its base; None = not told."""
    gain: float
    """Tokens a round that its newest requests gained."""
    gain_se: float

    def blended(self, mean: float, sd: float, growth: float, misfit: float) -> tuple[float, float]:
        """Mean and standard deviation of the gain behind more rows: what is predicted, and what was measured grown by `growth`.

        The misfit of a curve stays from one burst of a learner to the next, unlike that between learners; more rows may meet
        another phase of it: `misfit`, tokens a round, is the standard deviation of that.
        """
        grown = self.gain * growth
        own = max(math.hypot(self.gain_se * growth, grown - self.gain, misfit), 1e-6)
        weight = sd**2 / (sd**2 + own**2)
        return mean + weight * (grown - mean), own * weight**0.5


class EvidenceModel(msgspec.Struct):
    """What requests say of a learner, by bucket; of one without bursts the mean over the others."""

    rows: dict[str, float] = {}
    """Mean rows of a request."""
    deviation: dict[str, float] = {}
    """Standard deviation of log(tokens per round of the learner / of its base) between requests."""

    def update(self, bucket: str, result: TrainResult) -> None:
        """Learn from a finished burst."""
        if result.num_rows and result.num_requests:
            _blend(self.rows, bucket, result.num_rows / result.num_requests)
        scores = result.candidate
        if scores is not None and scores.num_requests >= MIN_REQUESTS and math.isfinite(scores.gain_lower):
            error = scores.gain_error / scores.acceptance_length
            _blend(self.deviation, bucket, min(max(error * scores.num_requests**0.5, 0.02), 1.0))

    def sure_rise(
        self, bucket: str, rows_before: float, rows: float, least: float, log_evidence: float | None = None
    ) -> float:
        """Least relative rise of the acceptance length that a burst is expected to make sure; inf where none.

        A request adds log evidence of about m^2 / (m^2 + s^2) / 2, m = log of its gain over `least`, s =
        deviation: the growth of the permutation e-values of `paceline.bootstrap.GainTest` at the best tilt. Gains grow along
        the learning curve, and what speaks against one at its beginning does not count (E-detectors).

        Args:
            rows_before: that the learner has learned since its base. rows: of the burst.
            least: relative rise that a swap costs.
            log_evidence: of the learner's gain so far; None = none.
        """
        per_request = _known(self.rows, bucket, PRIOR_ROWS)
        last = (rows_before + rows) / per_request
        first = max(rows_before / per_request, float(UNSCORED_REQUESTS))
        if last - first < 1.0 or last - UNSCORED_REQUESTS < MIN_REQUESTS:
            return math.inf
        whole, log_least = learned_share(last * per_request), math.log1p(least)
        path = np.array([learned_share((first + share * (last - first)) * per_request) for share in POINTS]) / whole
        variance = _known(self.deviation, bucket, PRIOR_SD) ** 2
        needed = NEEDED if log_evidence is None else min(LOG_SURE - log_evidence, NEEDED)
        squares = np.maximum(np.log1p(np.outer(RISES, path)) - log_least, 0.0) ** 2
        growth = (0.5 * squares / (squares + variance)).mean(1) * (last - first)
        at = int(np.searchsorted(growth, needed))  # more of a rise is never less sure
        return float(RISES[at]) if at < len(RISES) else math.inf


def _blend(values: dict[str, float], bucket: str, value: float) -> None:
    values[bucket] = value if bucket not in values else DISCOUNT * values[bucket] + (1.0 - DISCOUNT) * value


def _known(values: dict[str, float], bucket: str, prior: float) -> float:
    others = list(values.values())
    return values.get(bucket, (prior + sum(others)) / (1 + len(others)))
