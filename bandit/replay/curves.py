"""Learning curves and job costs: what training brings and takes in a simulated service, by formula or by table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.bandit.beliefs.job_cost import SHADOW_PRIOR, TRAIN_PRIOR
from paceline.contracts import ArmSpec


class Curves(Protocol):
    """What rows bring, before luck."""

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float) -> np.ndarray:
        """Share of the gap between the first drafter and the domain's ceiling that a learner has closed behind so many of its
        rows; never falls with the rows."""


class Costs(Protocol):
    """What jobs take."""

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, np.ndarray]:
        """(training, scoring) device-seconds of a burst on so many rows, all scored; `factor` = the chance of its moment."""


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
    """The prior tables of bandit/beliefs/job_cost.py times factors."""

    train_factor: float = 1.0
    scoring_factor: float = 1.0

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, np.ndarray]:
        thousands = np.asarray(rows) / max(1.0 - arm.rehearsal_share, 0.1) / 1000.0
        fixed, per_1k = TRAIN_PRIOR.get(arm.parameters, TRAIN_PRIOR["full"])
        training = self.train_factor * factor * (fixed + per_1k * thousands)
        return training, self.scoring_factor * factor * (SHADOW_PRIOR[0] + SHADOW_PRIOR[1] * thousands)


@dataclass(frozen=True)
class TableCosts:
    """Seconds fixed and by row of the arm, whatever its rehearsal."""

    by_arm: dict[str, tuple[float, float, float, float]]
    """Parameter set -> (fixed seconds and seconds a row of training, the same of scoring)."""

    def seconds(self, arm: ArmSpec, rows: np.ndarray | float, factor: float) -> tuple[np.ndarray, np.ndarray]:
        fixed, by_row, scoring, scoring_by_row = self.by_arm[arm.parameters]
        rows = np.asarray(rows)
        return factor * (fixed + by_row * rows), factor * (scoring + scoring_by_row * rows)


def off_diagonal(num_domains: int, value: float) -> np.ndarray:
    """(D, D) float64: the same value between any two domains, 0 from a domain to itself."""
    return value * (1.0 - np.eye(num_domains))
