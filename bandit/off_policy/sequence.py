"""Sequence estimate: what another policy would have netted over a whole log, when its decisions change what comes after them.

Doubly robust estimate for sequences (Jiang and Li 2016, arXiv 1511.03722). Along the logged decisions k = 1, 2, ...

    value(k) = V(k) + w(k) (realised from k to k + 1 + value(k + 1) - Q(k))

with w = probability of the logged action under the evaluated policy / under the logging policy, V = model's net from here
to the end under the evaluated policy, Q = the same after the logged action. Where both policies are certain of the same
action (w = 1, V = Q) the realised net stands as it is; from the first decision on where the evaluated policy would never
have done what was done (w = 0), the model alone speaks. Unbiased when the propensities are right, whatever the model, as
long as the log may have done what the policy does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.special import stdtrit

Z95 = 1.959964


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A logged decision at which the evaluated policy's probabilities differ from the logged ones."""

    step: int
    """Step of the log; what happens from here on is in question."""
    weight: float
    """pi(logged action) / propensity; 0 ends the part of the log that bears on the policy."""
    values_s: list[float]
    """Model's net from here to the end under the policy, device-seconds; one a draw."""
    taken_s: list[float]
    """The same after the logged action; [] when weight is 0."""
    untried: float = 0.0
    """Probability that the policy gives to actions which the logging policy never would have taken here."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One log as one policy sees it."""

    realised_s: list[float]
    """Measured net of every step of the log, device-seconds."""
    branches: list[Branch]
    """In order of their steps; nothing after a weight of 0."""
    start_s: list[float]
    """Model's net of the whole log under the policy, one a draw."""
    is_act: list[bool]
    """Step -> whether the log did, or the policy might have done, anything but hold."""
    realised_error_s: float = 0.0
    """Standard error of the measurement of all of realised_s."""


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """Net of a policy over one log, device-seconds, with a 95% interval; by default of one that never acts."""

    total_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    ips_s: float = 0.0
    """Importance sampling without a model."""
    snips_s: float | None = 0.0
    """Self-normalised: weighted mean of the realised net per step, times the steps; None without any weight."""
    direct_s: float = 0.0
    """The model alone."""
    effective_decisions: float = 0.0
    """(sum of weights)^2 / sum of their squares over the acts, weights multiplied up from the start."""
    num_acts: int = 0
    agreement: float = 1.0
    """Share of the acts until which the log did what the policy may do; 1 without any."""
    final_weight: float = 1.0
    untried: float = 0.0
    """Largest probability given to an action that the logging policy never would have taken, before the weight fell to 0."""


def estimate(log: Trajectory) -> Net:
    """Doubly robust net of one log. The interval takes the branches as one martingale and adds the model's spread."""
    steps, branches = len(log.realised_s), log.branches
    cumulated = np.concatenate([[0.0], np.cumsum(log.realised_s)])
    ends = [*(b.step for b in branches[1:]), steps][: len(branches)]
    pieces = [float(cumulated[e] - cumulated[b.step]) for b, e in zip(branches, ends, strict=True)]
    total = ips = 0.0
    for b, piece in zip(reversed(branches), reversed(pieces), strict=True):
        taken = _mean(b.taken_s) if b.weight > 0 else 0.0
        total = _mean(b.values_s) + b.weight * (piece + total - taken)
        ips = b.weight * (piece + ips)
    before = float(cumulated[branches[0].step] if branches else cumulated[steps])
    total, ips = total + before, ips + before
    weights = np.ones(steps)
    variance, product = 0.0, 1.0
    for i, b in enumerate(branches):
        if b.weight > 0:
            product *= b.weight
            later = _mean(branches[i + 1].values_s) if i + 1 < len(branches) else 0.0
            variance += (product * (pieces[i] + later - _mean(b.taken_s))) ** 2
        else:
            variance += (product * _spread(b.values_s)) ** 2
            product = 0.0
        weights[b.step :] = product
    if branches and branches[0].weight > 0:
        variance += _spread(branches[0].values_s) ** 2 / max(len(branches[0].values_s), 1)
    used = float((weights > 0).mean()) if steps else 1.0
    variance += (used * log.realised_error_s) ** 2
    half = Z95 * math.sqrt(variance)
    acts = weights[np.asarray(log.is_act, dtype=bool)]
    squares = float((acts**2).sum())
    mass = float(weights.sum())
    return Net(
        total_s=total,
        low_s=total - half,
        high_s=total + half,
        ips_s=ips,
        snips_s=steps * float(weights @ np.asarray(log.realised_s)) / mass if mass > 0 else None,
        direct_s=_mean(log.start_s),
        effective_decisions=float(acts.sum()) ** 2 / squares if squares > 0 else 0.0,
        num_acts=len(acts),
        agreement=float((acts > 0).mean()) if len(acts) else 1.0,
        final_weight=product,
        untried=max((b.untried for b in branches), default=0.0),
    )


def pooled(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of independent logs' estimates, 95% by Student's t. Raises ValueError below two logs."""
    if len(values) < 2:
        raise ValueError(f"an interval over logs needs at least 2 of them, got {len(values)}")
    data = np.asarray(values, dtype=np.float64)
    half = float(stdtrit(len(data) - 1, 0.975)) * float(data.std(ddof=1)) / math.sqrt(len(data))
    mean = float(data.mean())
    return mean, mean - half, mean + half


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
