"""Canary test: evidence that a canary is worse than the incumbent, or not slower by a margin, valid at every look.

Unit: the request. Rounds of one request resemble each other, so a request enters once, with two scores: its log rate
v = log(emitted tokens / device-seconds of its rounds), and its log tokens per round, which says less about speed but is
free of the machine's noise. Which drafter it got was drawn by a hash of its id, independent of
everything else. Consecutive finished requests form blocks of a fixed size; in a block with n requests, k of them
canaries, and scores v, the e-value against "the drafter changes nothing" is

    E(theta) = exp(-theta * sum of v over the canaries) / mean over all k-subsets S of exp(-theta * sum of v over S).

Given the block's scores every subset is equally likely to be the canaries', so the mean of E is 1, whatever the scores:
traffic may drift, rounds may be shared, rates may have any distribution. The product over blocks is a test martingale,
a mixture over theta keeps it one, and by Ville's inequality it ever exceeds 1 / alpha with probability at most alpha.
Adding -log(1 - margin) to the canaries' scores and turning the sign of theta tests "slower by the margin or more": E falls
when a canary is slower still, so that the bound holds for the whole hypothesis. The same shift without turning the sign
tests "keeps its tokens per round but for the margin". What speaks against a canary is one mixture: slower, fewer tokens
per round by more than the margin, more errors.
Sources: Ramdas & Wang, "Hypothesis testing with e-values" (2024), and Koning, "Post-hoc and anytime valid permutation and
group invariance testing", arXiv 2310.01153 (exponential statistic over the orbit); Ville 1939.

Scores are made comparable first: each has the mean log rate of its stratum (bucket, class of batch size, greedy or not)
taken off, over all requests before the block and in it. That is the same for every subset, so validity is not touched;
strata only take noise away.

What it cannot see: requests of one round share the round's time equally, so while canaries and incumbents run in the
same rounds only the difference in accepted tokens counts, and a drafter whose passes take longer slows both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from paceline.bootstrap import TILTS, log_e_values, log_mixture

MAX_SCORE = 3.0
"""Centred scores are cut here (a factor of 20), so that one stalled request cannot hide the others."""
MIN_BLOCK, MAX_BLOCK = 4, 20
_MEMORY = 64.0
"""Requests that a stratum's mean remembers."""
WEIGHTS = {"speed": 0.45, "tokens_per_round": 0.45, "errors": 0.1}
"""Mixture of the evidence against a canary."""


class StratumSums(msgspec.Struct):
    """One stratum: sums over the requests of incumbent [0] and canary [1], and running means of both scores over all."""

    requests: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    tokens: list[float] = msgspec.field(default_factory=lambda: [0.0, 0.0])
    seconds: list[float] = msgspec.field(default_factory=lambda: [0.0, 0.0])
    rounds: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    weight: float = 0.0
    means: tuple[float, float] = (0.0, 0.0)
    """Log rate, log tokens per round."""

    def ratio(self) -> float | None:
        """Tokens per second of the canary over those of the incumbent; None while either has none."""
        if min(self.tokens) <= 0 or min(self.seconds) <= 0:
            return None
        return (self.tokens[1] / self.seconds[1]) / (self.tokens[0] / self.seconds[0])


class CanaryTest(msgspec.Struct):
    """Both tests of one canary; encodable, so that a restart forgets nothing."""

    share: float
    """Probability that a request is a canary, in (0, 1)."""
    margin: float
    """Relative loss of speed that promotion tolerates, in (0, 1)."""
    slower: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(TILTS))
    """Log e-process per tilt against 'the canary is not slower'."""
    fewer: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(TILTS))
    """Log e-process per tilt against 'the canary keeps its tokens per round but for the margin'."""
    fast_enough: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(TILTS))
    """Log e-process per tilt against 'the canary is slower by the margin or more'."""
    block: list[tuple[str, bool, float, float]] = []
    """(stratum, is canary, log rate, log tokens per round) of the open block."""
    strata: dict[str, StratumSums] = {}
    errors: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    """Requests that ended in an error: incumbent, canary."""

    @property
    def block_size(self) -> int:
        return block_size(self.share)

    @property
    def num_requests(self) -> tuple[int, int]:
        """Finished requests of incumbent and canary."""
        sums = [s.requests for s in self.strata.values()]
        return sum(r[0] for r in sums), sum(r[1] for r in sums)

    def add(self, stratum: str, is_canary: bool, tokens: float, seconds: float, rounds: int) -> None:
        """Enter one finished request; `seconds` of device time and `rounds` must be > 0."""
        sums = self.strata.setdefault(stratum, StratumSums())
        arm = int(is_canary)
        sums.requests[arm] += 1
        sums.tokens[arm] += tokens
        sums.seconds[arm] += seconds
        sums.rounds[arm] += rounds
        tokens = max(tokens, 0.5)
        self.block = [*self.block, (stratum, is_canary, math.log(tokens / seconds), math.log(tokens / rounds))]
        if len(self.block) >= self.block_size:
            self._close_block()

    def _close_block(self) -> None:
        for stratum, _, *scores in self.block:
            sums = self.strata[stratum]
            kept = min(sums.weight, _MEMORY - 1.0)
            rate, tokens = ((m * kept + s) / (kept + 1.0) for m, s in zip(sums.means, scores, strict=True))
            sums.means, sums.weight = (rate, tokens), kept + 1.0
        means = np.array([self.strata[stratum].means for stratum, *_ in self.block])
        centred = np.clip(np.array([b[2:] for b in self.block]) - means, -MAX_SCORE, MAX_SCORE)  # (n, 2)
        arms = np.array([is_canary for _, is_canary, *_ in self.block])
        self.block = []
        allowed = centred - np.where(arms, math.log1p(-self.margin), 0.0)[:, None]
        tilts, t = np.array(TILTS), len(TILTS)
        of_speed, of_tokens = np.multiply.outer(tilts, centred[:, 0]), np.multiply.outer(tilts, allowed[:, 1])
        terms = np.concatenate([-of_speed, -of_tokens, np.multiply.outer(tilts, allowed[:, 0])])
        found = log_e_values(terms, arms)
        self.slower = _plus(self.slower, found[:t])
        self.fewer = _plus(self.fewer, found[t : 2 * t])
        self.fast_enough = _plus(self.fast_enough, found[2 * t :])

    def evidence_against(self) -> dict[str, float]:
        """Log evidence against the canary by kind: speed, tokens_per_round, errors."""
        return {
            "speed": log_mixture(self.slower),
            "tokens_per_round": log_mixture(self.fewer),
            "errors": log_error_evidence(self.errors[0], self.errors[1], self.share),
        }

    def evidence_worse(self) -> float:
        """Log of the mixture of all evidence against the canary; above log(1 / alpha) it should go."""
        against = self.evidence_against()
        return float(np.logaddexp.reduce([math.log(w) + against[kind] for kind, w in WEIGHTS.items()]))

    def evidence_fast_enough(self) -> float:
        """Log evidence that the canary is not slower than the margin allows."""
        return log_mixture(self.fast_enough)

    def ratio(self) -> float | None:
        """Estimate of the canary's speed over the incumbent's: strata weighed by what their smaller side holds."""
        logs, weights = [], []
        for sums in self.strata.values():
            ratio = sums.ratio()
            if ratio is not None:
                a, b = sums.requests
                logs.append(math.log(ratio))
                weights.append(a * b / (a + b))
        return math.exp(float(np.average(logs, weights=weights))) if logs else None


def _plus(logs: Sequence[float], more: np.ndarray) -> list[float]:
    return [a + float(b) for a, b in zip(logs, more, strict=True)]


def block_size(share: float) -> int:
    """Requests of a block: about one of the rarer arm, so that little evidence waits in an open block."""
    return int(min(MAX_BLOCK, max(MIN_BLOCK, round(1.0 / min(share, 1.0 - share)))))


def log_error_evidence(num_incumbent: int, num_canary: int, share: float) -> float:
    """Log evidence that errors prefer the canary.

    Each failed request is a canary's with probability `share` if the drafter has nothing to do with it: likelihood ratio
    against a higher probability, mixed over a grid between `share` and 1. A test martingale in the failed requests.
    """
    if num_canary == 0 and num_incumbent == 0:
        return 0.0
    higher = share + (1.0 - share) * (np.arange(8) + 0.5) / 8
    logs = num_canary * np.log(higher / share) + num_incumbent * np.log((1 - higher) / (1 - share))
    return log_mixture(logs.tolist())


def batch_class(batch_size: float) -> str:
    """Class of a mean batch size: 1, 2-3, 4-7, 8-15, ..."""
    low = 2 ** int(math.log2(max(1.0, batch_size) + 1e-9))
    return "1" if low == 1 else f"{low}-{2 * low - 1}"
