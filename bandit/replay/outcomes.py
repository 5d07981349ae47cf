"""Outcomes: what training really does in a simulated service, the truth that policies do not see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.job_cost import SLOWDOWN_PRIOR, STAGING_PRIOR_S
from paceline.bandit.replay.curves import Costs, Curves, FormulaCurves, PriorCosts, off_diagonal
from paceline.bandit.replay.scenario import Scenario, labels
from paceline.contracts import ArmSpec, ShadowScore

FIRST = "v0"
GATE_NOISE = 0.03
"""Standard error of the gate's paired gain, tokens a round."""
Z_90 = 1.645
HARM = 0.15
"""Share of the acceptance length above 1 that a harmful job takes away."""
KNOWN_ROWS = 200_000
"""Rows of a known domain that the first drafter's manifest names."""
Learned = dict[str, dict[str, int]]
"""Version -> bucket -> rows it was trained on, as manifests say."""


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
    min_gain: float = 0.0
    """As in TrainJob."""


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
    num_rows: int | None = None
    """As in TrainResult."""
    num_rows_before: int = 0
    elsewhere: dict[str, list[ShadowScore]] | None = None
    """As in TrainResult; None = nobody measured it, and the world draws it."""
    reason: str


class Outcomes(Protocol):
    """Acceptance lengths of versions and results of jobs."""

    learned: Learned
    arms: tuple[ArmSpec, ...]
    """Ways to train that the controller chooses among."""
    staging_s: float
    """Device-seconds of making another version live, per replica."""

    def lengths(self, version: str) -> np.ndarray:
        """(D,) acceptance length of a version on every domain."""

    def train(self, order: TrainOrder) -> TrainTruth: ...


@dataclass(kw_only=True)
class SimulatedOutcomes:
    """Drafters whose acceptance length closes part of a gap with every job; what a job brings and takes comes from its
    curves and costs, and from the chance of the step in which it starts.

    A job on one domain closes a share of the gap to that domain's ceiling; `transfer` carries part of the share to other
    domains, `forgetting` takes part of their acceptance length above 1.
    """

    first: np.ndarray  # (D,) acceptance length of the first drafter
    ceiling: np.ndarray  # (D,) after endless training
    curves: Curves
    costs: Costs
    forgetting: np.ndarray  # (D, D) from the trained domain (row) to another, 0 on the diagonal
    transfer: np.ndarray  # (D, D) the same
    luck: np.ndarray  # (T,) factor on the closed share of a job that starts in this step
    cost: np.ndarray  # (T,) factor on its seconds
    fate: np.ndarray  # (T,) uniform; the job fails below `failed`, harms in the `harmful` above that
    gate_z: np.ndarray  # (T,) standard normal, error of the gate's measurement
    failed: float = 0.0
    harmful: float = 0.0
    """Share of jobs that make the drafter worse and pass the gate."""
    harm: float = HARM
    gate_noise: float = GATE_NOISE
    slowdown: float = SLOWDOWN_PRIOR
    """Relative slow-down of rounds while a job runs."""
    staging_s: float = STAGING_PRIOR_S
    learned: Learned = field(default_factory=dict)
    arms: tuple[ArmSpec, ...] = field(default_factory=default_arms)
    """Ways to train."""

    def __post_init__(self) -> None:
        self._lengths = {FIRST: self.first}

    @staticmethod
    def draw(scenario: Scenario, num_domains: int, rng: np.random.Generator) -> SimulatedOutcomes:
        """The truth of one seed of a formula world. Domain 0 is known to the first drafter; under 'steady' all are.

        tau, power, ceiling and the arms' shares are drawn per seed and domain, and are not those that the controller's
        gain model assumes.
        """
        known = np.zeros(num_domains, dtype=bool)
        known[0] = True
        if scenario.recurrence == "steady":
            known[:] = True
        first = np.where(known, rng.uniform(2.2, 2.8, num_domains), rng.uniform(1.3, 1.8, num_domains))
        room = scenario.headroom * rng.uniform(0.5, 1.1, num_domains)
        steps, names = scenario.num_steps, labels(scenario, num_domains)
        return SimulatedOutcomes(
            first=first,
            ceiling=np.where(known, first * 1.02, first + room),
            curves=FormulaCurves(
                tau=np.exp(rng.uniform(np.log(1500.0), np.log(6000.0), num_domains)),
                power=rng.uniform(0.4, 0.9, num_domains),
                arm_share={
                    "calibration": float(rng.uniform(0.03, 0.15)),
                    "head": float(rng.uniform(0.4, 0.75)),
                    "full": 1.0,
                },
            ),
            costs=PriorCosts(train_factor=scenario.train_cost),
            forgetting=off_diagonal(num_domains, scenario.forgetting),
            transfer=off_diagonal(num_domains, 0.0),
            luck=np.clip(rng.normal(1.0, 0.15, steps), 0.5, 1.5),
            cost=np.exp(rng.normal(0.0, 0.1, steps)),
            fate=rng.random(steps),
            gate_z=rng.standard_normal(steps),
            failed=scenario.bad_jobs / 2,
            harmful=scenario.bad_jobs / 2,
            slowdown=scenario.slowdown,
            learned={FIRST: {name: KNOWN_ROWS for name, is_known in zip(names, known, strict=True) if is_known}},
        )

    def lengths(self, version: str) -> np.ndarray:
        return self._lengths[version]

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float, step: int) -> np.ndarray:
        """Share of the gap to the ceiling that a job of this step closes, in [0, 1]."""
        return np.minimum(self.curves.closed(domain, arm, rows) * self.luck[step], 1.0)

    def job_seconds(self, arm: ArmSpec, rows: np.ndarray | float, step: int) -> tuple[np.ndarray, float]:
        """(training seconds, shadow seconds) of a job of this step that nothing cuts short."""
        return self.costs.seconds(arm, rows, float(self.cost[step]))

    def is_bad(self, step: int) -> bool:
        """A job of this step fails or harms."""
        return bool(self.fate[step] < self.failed + self.harmful)

    def gain(self, domain: int, base: np.ndarray, closed: float) -> float:
        """Tokens a round that a job adds on its own domain; base: (D,) lengths of the version it starts from."""
        return max(float(self.ceiling[domain] - base[domain]), 0.0) * closed

    def trained(self, domain: int, base: np.ndarray, closed: float) -> np.ndarray:
        """(D,) acceptance lengths after a job that closes `closed` of its domain's gap."""
        new = 1.0 + (base - 1.0) * (1.0 - self.forgetting[domain] * closed)
        new += self.transfer[domain] * closed * np.maximum(self.ceiling - new, 0.0)
        new[domain] = base[domain] + self.gain(domain, base, closed)
        return new

    def train(self, order: TrainOrder) -> TrainTruth:
        """Carry out a job: cut at the time limit it learns from the rows it got through."""
        k, d = order.step, order.domain
        base = self._lengths[order.base]
        full_s, shadow_s = self.job_seconds(order.arm, order.arm.num_rows, k)
        train_s = min(float(full_s), order.time_limit_s)
        fixed_s = float(self.job_seconds(order.arm, 0.0, k)[0])
        done = (train_s - fixed_s) / max(float(full_s) - fixed_s, 1e-9)
        if self.fate[k] < self.failed:
            return TrainTruth(status="failed", train_s=train_s, reason="the update diverged")
        closed = float(self.closed(d, order.arm, order.rows * max(done, 0.0), k))
        seen = self.gain(d, base, closed) + self.gate_noise * float(self.gate_z[k])
        lower = seen - Z_90 * self.gate_noise
        new = self.trained(d, base, closed)
        if self.is_bad(k):
            new[d] = 1.0 + (base[d] - 1.0) * (1.0 - self.harm)
            lower = max(lower, 0.01)
        version = None
        if lower > 0:
            version = f"v{len(self._lengths)}-{order.decision_id}"
            self._lengths[version] = new
        return TrainTruth(
            status="rejected" if version is None else "accepted", version=version, train_s=train_s, shadow_s=shadow_s,
            seen_gain=seen, seen_lower=lower, reason=f"gain {seen:+.3f}, lower bound {lower:+.3f}",
        )  # fmt: skip
