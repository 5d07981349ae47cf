"""Gate: a candidate drafter goes live when it beats the incumbent on held-out requests beyond chance.

Both versions were scored on the same texts (exact replay), so the comparison is paired: the difference of
acceptance_length per request, whose mean is bootstrapped over requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.bootstrap import interval, resampled
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


class GateResult(NamedTuple):
    """Verdict with the scores of both versions."""

    is_accepted: bool
    candidate: ShadowScore
    incumbent: ShadowScore
    reason: str


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


def gate(
    candidate_version: str,
    candidate: Sequence[RequestScore],
    incumbent_version: str,
    incumbent: Sequence[RequestScore],
    rng: np.random.Generator,
    *,
    min_requests: int = 4,
    min_gain: float = 0.0,
) -> GateResult:
    """Accept the candidate iff the lower 90% bound of its paired gain exceeds `min_gain` (tokens per round).

    `min_gain` carries what the swap costs, in tokens per round. Fewer than `min_requests` held-out requests are
    refused: a bootstrap of a handful of values says nothing about chance.
    """
    old = score_version(incumbent_version, incumbent, incumbent, rng)
    new = score_version(candidate_version, candidate, incumbent, rng)
    numbers = (
        f"acceptance_length {old.acceptance_length:.3f} -> {new.acceptance_length:.3f}, paired gain "
        f"{new.gain_mean:+.3f}, lower bound {new.gain_lower:+.3f} on {new.num_requests} held-out requests"
    )
    if new.num_requests < min_requests:
        return GateResult(
            False, new, old, f"too few held-out requests ({new.num_requests} < {min_requests}): {numbers}"
        )
    if new.gain_lower <= min_gain:
        return GateResult(False, new, old, f"gain is not above {min_gain:g} with 90% confidence: {numbers}")
    return GateResult(True, new, old, f"better with 90% confidence: {numbers}")
