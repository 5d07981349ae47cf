"""Policy memory: what policies remember from one epoch to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

EMA_WARM_UP = 3
"""Epochs before the means of `dual_ema` may trigger."""


class DualEma(msgspec.Struct):
    """Fast and slow exponential mean of the acceptance length of all adapted traffic, and what they started.

    TIDE's rule (arXiv 2602.05145, Alg. 1): collect when the fast mean falls below the slow one by a margin, train once
    enough rows are collected, stop collecting when a job did not pass the gate, until the next shift.
    """

    fast: float = 0.0
    slow: float = 0.0
    latest: float = 0.0
    num_epochs: int = 0
    is_collecting: bool = False
    at_trigger: dict[str, int] = {}
    """Bucket -> rows ever written when collecting began, or when the last job passed."""
    collected: dict[str, int] = {}
    """Bucket -> rows written since."""

    def update(
        self, length: float | None, rows_written: Mapping[str, int], *, fast: float, slow: float, margin: float
    ) -> None:
        """Fold one epoch; length None = no adapted traffic. `fast`, `slow` are the weights of the newest epoch."""
        if length is not None:
            if self.num_epochs == 0:
                self.fast = self.slow = length
            self.num_epochs, self.latest = self.num_epochs + 1, length
            self.fast += fast * (length - self.fast)
            self.slow += slow * (length - self.slow)
            has_dropped = self.num_epochs > EMA_WARM_UP and self.fast < (1.0 - margin) * self.slow
            if has_dropped and not self.is_collecting:
                self.is_collecting, self.at_trigger = True, dict(rows_written)
        self.collected = {}
        if self.is_collecting:
            self.collected = {b: max(n - self.at_trigger.get(b, 0), 0) for b, n in rows_written.items()}

    def job_ended(self, status: str, rows_written: Mapping[str, int]) -> None:
        """A job that is not deployed ends the collection (the latest level becomes the norm); an accepted one begins the next."""
        if status in ("rejected", "learning"):  # neither is deployed
            self.is_collecting, self.fast, self.slow = False, self.latest, self.latest
        if status in ("accepted", "rejected"):
            self.at_trigger, self.collected = dict(rows_written), {}


class HedgeWeights(msgspec.Struct):
    """Fixed-Share over versions (Herbster and Warmuth 1998); share = 0 is Hedge.

    With losses in [0, 1] and learning rate r, the weighted mean loss over T rounds exceeds that of the best version by
    at most ln(N) / r + r T / 8; with a share, a like bound holds against the best sequence of versions. A version without
    a loss this round sleeps: it keeps its weight relative to the others (Freund et al. 1997).
    """

    weights: dict[str, float] = {}

    def keep(self, versions: list[str]) -> None:
        """Hold weights for exactly these versions; a new one enters with the mean weight."""
        known = [v for v in versions if v in self.weights]
        mean = sum(self.weights[v] for v in known) / len(known) if known else 1.0
        self._normalise({v: self.weights.get(v, mean) for v in sorted(set(versions))})

    def _normalise(self, weights: dict[str, float]) -> None:
        total = sum(weights.values())
        if total > 0:
            self.weights = {v: w / total for v, w in weights.items()}
        else:
            self.weights = {v: 1.0 / len(weights) for v in weights}

    def update(self, losses: Mapping[str, float], *, rate: float, share: float) -> None:
        """Fold one round of losses in [0, 1] by version."""
        awake = {v: w for v, w in self.weights.items() if v in losses}
        mass = sum(awake.values())
        if mass > 0:
            least = min(losses[v] for v in awake)  # only differences matter; keeps exp() in range
            raised = {v: w * math.exp(-rate * (losses[v] - least)) for v, w in awake.items()}
            scale = mass / sum(raised.values())
            self.weights = {**self.weights, **{v: w * scale for v, w in raised.items()}}
        if self.weights:
            even = share / len(self.weights)
            self._normalise({v: (1.0 - share) * w + even for v, w in self.weights.items()})


class PolicyMemory(msgspec.Struct):
    """Memory of every policy, kept whichever one decides, so that a switch of policy starts warm."""

    ema: DualEma = msgspec.field(default_factory=DualEma)
    staleness_s: dict[str, float] = {}
    """Bucket -> device-seconds lost since its last job against the drafter that training would have given."""
    hedges: dict[str, HedgeWeights] = {}
    """Bucket -> weights of the versions there are."""

    def add_staleness(self, rates: Mapping[str, float], seconds: float) -> None:
        """Accrue `rates` (device-seconds per second, by bucket) over an epoch."""
        for bucket, rate in rates.items():
            self.staleness_s[bucket] = self.staleness_s.get(bucket, 0.0) + max(rate, 0.0) * seconds

    def job_started(self, bucket: str) -> None:
        """Its staleness is being dealt with."""
        self.staleness_s.pop(bucket, None)
