"""Outcomes: what training really does in a simulated service, the truth that policies do not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from paceline.bandit.beliefs.job_cost import SHADOW_PRIOR_S, TRAIN_PRIOR
from paceline.bandit.replay.scenario import Scenario
from paceline.contracts import ArmSpec

FIRST = "v0"
GATE_NOISE = 0.03
"""Standard error of the gate's paired gain, tokens a round."""
Z_90 = 1.645
HARM = 0.15
"""Share of the acceptance length above 1 that a harmful job takes away."""


class TrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the simulated host starts it."""

    step: int
    domain: int
    """The domain that the bucket serves most now."""
    bucket: str
    arm: ArmSpec
    base: str
    rows: int
    """Rows of this domain among those that the arm takes."""
    time_limit_s: float
    decision_id: int


class TrainTruth(msgspec.Struct, frozen=True, kw_only=True):
    """What a job really brought."""

    status: str
    version: str | None = None
    """Known from now on when status is 'accepted'."""
    train_s: float
    shadow_s: float = 0.0
    seen_gain: float = 0.0
    """Gain in acceptance length as the gate measures it."""
    seen_lower: float = 0.0
    reason: str


class Outcomes(Protocol):
    """Acceptance lengths of versions and results of jobs."""

    def lengths(self, version: str) -> np.ndarray:
        """(D,) acceptance length of a version on every domain."""

    def train(self, order: TrainOrder) -> TrainTruth: ...


def training_seconds(arm: ArmSpec, rows: np.ndarray | float) -> tuple[float, np.ndarray]:
    """(fixed seconds, seconds that grow with the rows) of a job by the prior table of bandit/beliefs/job_cost.py."""
    fixed, per_1k = TRAIN_PRIOR.get(arm.parameters, TRAIN_PRIOR["full"])
    return fixed, np.asarray(per_1k * rows * arm.epochs / max(1.0 - arm.rehearsal_share, 0.1) / 1000.0)


@dataclass
class SimulatedOutcomes:
    """Drafters whose acceptance length closes part of a gap with every job; all draws come from the seed.

    A job on n rows closes share * (1 - exp(-(n / tau) ** power)) of the gap to the domain's ceiling; tau, power, ceiling
    and the arms' shares are drawn per seed and domain, and are not those that the controller's gain model assumes.
    """

    scenario: Scenario
    first: np.ndarray  # (D,) acceptance length of the first drafter
    ceiling: np.ndarray  # (D,) after endless training
    tau: np.ndarray  # (D,) rows
    power: np.ndarray  # (D,)
    arm_share: dict[str, float]
    luck: np.ndarray  # (T,) factor on the closed share of a job that starts in this step
    cost: np.ndarray  # (T,) factor on its seconds
    fate: np.ndarray  # (T,) uniform; below bad_jobs the job goes wrong
    gate_z: np.ndarray  # (T,) standard normal, error of the gate's measurement

    def __post_init__(self) -> None:
        self._lengths = {FIRST: self.first}

    @staticmethod
    def draw(scenario: Scenario, num_domains: int, rng: np.random.Generator) -> SimulatedOutcomes:
        """The truth of one seed. Domain 0 is known to the first drafter; under 'steady' all are."""
        known = np.zeros(num_domains, dtype=bool)
        known[0] = True
        if scenario.recurrence == "steady":
            known[:] = True
        first = np.where(known, rng.uniform(2.2, 2.8, num_domains), rng.uniform(1.3, 1.8, num_domains))
        room = scenario.headroom * rng.uniform(0.5, 1.1, num_domains)
        steps = scenario.num_steps
        return SimulatedOutcomes(
            scenario=scenario,
            first=first,
            ceiling=np.where(known, first * 1.02, first + room),
            tau=np.exp(rng.uniform(np.log(1500.0), np.log(6000.0), num_domains)),
            power=rng.uniform(0.4, 0.9, num_domains),
            arm_share={
                "calibration": float(rng.uniform(0.03, 0.15)),
                "head": float(rng.uniform(0.4, 0.75)),
                "full": 1.0,
            },
            luck=np.clip(rng.normal(1.0, 0.15, steps), 0.5, 1.5),
            cost=np.exp(rng.normal(0.0, 0.1, steps)),
            fate=rng.random(steps),
            gate_z=rng.standard_normal(steps),
        )

    def lengths(self, version: str) -> np.ndarray:
        return self._lengths[version]

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float, step: int) -> np.ndarray:
        """Share of the gap to the ceiling that a job of this step closes, in [0, 1]."""
        curve = 1.0 - np.exp(-((np.maximum(rows, 0.0) / self.tau[domain]) ** self.power[domain]))
        return np.minimum(self.arm_share.get(arm.parameters, 1.0) * curve * self.luck[step], 1.0)

    def job_seconds(self, arm: ArmSpec, rows: np.ndarray | float, step: int) -> tuple[np.ndarray, float]:
        """(training seconds, shadow seconds) of a job of this step that nothing cuts short."""
        fixed, growing = training_seconds(arm, rows)
        factor = float(self.cost[step])
        return self.scenario.train_cost * factor * (fixed + growing), SHADOW_PRIOR_S * factor

    def is_bad(self, step: int) -> bool:
        return bool(self.fate[step] < self.scenario.bad_jobs)

    def train(self, order: TrainOrder) -> TrainTruth:
        """Carry out a job: cut at the time limit it learns from the rows it got through."""
        k, d = order.step, order.domain
        base = self._lengths[order.base]
        full_s, shadow_s = self.job_seconds(order.arm, order.arm.num_rows, k)
        train_s = min(float(full_s), order.time_limit_s)
        fixed_s = float(self.job_seconds(order.arm, 0.0, k)[0])
        done = (train_s - fixed_s) / max(float(full_s) - fixed_s, 1e-9)
        if self.is_bad(k) and self.fate[k] < self.scenario.bad_jobs / 2:
            return TrainTruth(status="failed", train_s=train_s, reason="the update diverged")
        closed = float(self.closed(d, order.arm, order.rows * max(done, 0.0), k))
        gain = max(float(self.ceiling[d] - base[d]), 0.0) * closed
        seen = gain + GATE_NOISE * float(self.gate_z[k])
        lower = seen - Z_90 * GATE_NOISE
        new = 1.0 + (base - 1.0) * (1.0 - self.scenario.forgetting * closed)
        new[d] = base[d] + gain
        if self.is_bad(k):
            new[d] = 1.0 + (base[d] - 1.0) * (1.0 - HARM)
            lower = max(lower, 0.01)
        version = None
        if lower > 0:
            version = f"v{len(self._lengths)}-{order.decision_id}"
            self._lengths[version] = new
        return TrainTruth(
            status="rejected" if version is None else "accepted", version=version, train_s=train_s, shadow_s=shadow_s,
            seen_gain=seen, seen_lower=lower, reason=f"gain {seen:+.3f}, lower bound {lower:+.3f}",
        )  # fmt: skip
