"""Learning curves and job costs: what training brings and takes in a simulated service, by formula or by table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.bandit.beliefs.job_cost import TRAIN_PRIOR
from paceline.contracts import ArmSpec

SCORING_S = 2.0
"""Seconds of scoring that a job of a formula world takes."""


class Curves(Protocol):
    """What rows bring, before luck."""

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float) -> np.ndarray:
        """Share of the gap to the domain's ceiling that a job on so many of its rows closes; never falls with the rows."""


class Costs(Protocol):
    """What jobs take."""

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, float]:
        """(training, scoring) device-seconds of a job on so many rows; `factor` = the chance of its moment."""


@dataclass(frozen=True)
class FormulaCurves:
    """share(arm) * (1 - exp(-(rows / tau) ** power))."""

    tau: np.ndarray  # (D,) rows
    power: np.ndarray  # (D,)
    arm_share: dict[str, float]
    """Parameter set -> share; one that is missing has 1."""

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float) -> np.ndarray:
        curve = 1.0 - np.exp(-((np.maximum(rows, 0.0) / self.tau[domain]) ** self.power[domain]))
        return np.asarray(self.arm_share.get(arm.parameters, 1.0) * curve)


@dataclass(frozen=True)
class TableCurves:
    """Straight lines between points; flat after the last one. An arm without points brings nothing."""

    points: tuple[dict[str, tuple[np.ndarray, np.ndarray]], ...]
    """Domain -> parameter set -> ((P,) rows from 0 on, rising; (P,) closed share at each, from 0 on)."""

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float) -> np.ndarray:
        found = self.points[domain].get(arm.parameters)
        return np.zeros_like(rows, dtype=float) if found is None else np.asarray(np.interp(rows, *found))


@dataclass(frozen=True)
class PriorCosts:
    """The prior table of bandit/beliefs/job_cost.py times a factor."""

    train_factor: float = 1.0
    scoring_s: float = SCORING_S

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, float]:
        fixed, per_1k = TRAIN_PRIOR.get(arm.parameters, TRAIN_PRIOR["full"])
        growing = np.asarray(per_1k * rows / max(1.0 - arm.rehearsal_share, 0.1) / 1000.0)
        return self.train_factor * factor * (fixed + growing), self.scoring_s * factor


@dataclass(frozen=True)
class TableCosts:
    """Seconds fixed and by row of the arm, whatever its rehearsal."""

    by_arm: dict[str, tuple[float, float, float]]
    """Parameter set -> (fixed seconds, seconds a row, seconds of scoring)."""

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, float]:
        fixed, by_row, scoring = self.by_arm[arm.parameters]
        return factor * (fixed + by_row * np.asarray(rows)), scoring * factor


def off_diagonal(num_domains: int, value: float) -> np.ndarray:
    """(D, D) float64: the same value between any two domains, 0 from a domain to itself."""
    return value * (1.0 - np.eye(num_domains))
