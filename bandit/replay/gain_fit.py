"""Gain of jobs that nobody ran: the gain model fitted on logged jobs, and checked on each one left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from paceline.bandit.beliefs.gain_model import GainModel, learned_share
from paceline.bandit.controller.decision_log import LoggedJob
from paceline.bandit.policies.pricing import headroom_of
from paceline.contracts import ArmSpec

MIN_JOBS = 5
"""Scored jobs below which the prior is used."""


class GainFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model with its error on jobs that it did not see."""

    model: GainModel
    num_jobs: int
    """Jobs with scores in the log."""
    is_prior: bool
    """The log has too few jobs, or they do not predict each other better than the prior does."""
    error: float | None
    """Root mean square leave-one-out error of the gain, tokens a round; None below two jobs."""
    prior_error: float | None
    """The same for the prior."""
    spread: float
    """Relative spread of a job's gain around the prediction, for the seeds of a replay."""

    def sentence(self) -> str:
        """What a report says about the fit."""
        if self.error is None or self.prior_error is None:
            return f"gain model: prior, because the log holds {self.num_jobs} scored jobs (at least {MIN_JOBS} are needed to fit one)"
        errors = f"leave-one-out error {self.error:.3f} tokens a round, of the prior {self.prior_error:.3f}"
        if self.num_jobs < MIN_JOBS:
            return f"gain model: prior, because the log holds {self.num_jobs} scored jobs (at least {MIN_JOBS} are needed to fit one); {errors}"
        if self.is_prior:
            return f"gain model: prior, because a fit on the log's {self.num_jobs} jobs does not predict them better; {errors}"
        return f"gain model: fitted on {self.num_jobs} jobs; {errors}"


def arm_share(model: GainModel, bucket: str, arm: ArmSpec) -> float:
    """Share of the gap that endless training with this arm closes, in [0, 1.5]."""
    return min(max(model.predict(bucket, arm, 1.0, 1.0)[0], 0.0), 1.5)


def fit_gains(jobs: Sequence[LoggedJob], best_length: float) -> GainFit:
    """Fit on scored jobs (refused ones too: they gained little) and validate by leaving each out."""
    scored = [j for j in jobs if j.result.candidate is not None and j.result.incumbent is not None]
    misses: list[float] = []
    prior_misses: list[float] = []
    for i, job in enumerate(scored):
        others = _fit([*scored[:i], *scored[i + 1 :]], best_length)
        misses.append(_gain(job) - _predict(others, job, best_length))
        prior_misses.append(_gain(job) - _predict(GainModel(), job, best_length))
    error = _root_mean_square(misses) if len(scored) >= 2 else None
    prior_error = _root_mean_square(prior_misses) if len(scored) >= 2 else None
    is_prior = len(scored) < MIN_JOBS or error is None or prior_error is None or error > prior_error
    model = GainModel() if is_prior else _fit(scored, best_length)
    level = sum(abs(_gain(j)) for j in scored) / len(scored) if scored else 0.0
    used = prior_error if is_prior else error
    spread = min(max(used / level, 0.05), 0.6) if used is not None and level > 0 else 0.3
    return GainFit(
        model=model, num_jobs=len(scored), is_prior=is_prior, error=error, prior_error=prior_error, spread=spread
    )


def _fit(jobs: Sequence[LoggedJob], best_length: float) -> GainModel:
    model = GainModel()
    for job in jobs:
        assert job.result.candidate is not None, "scored jobs"
        share, error = learned_share(job.num_learned), job.result.candidate.gain_error
        model.update(job.bucket, job.arm, _room(job, best_length), share, _gain(job), error)
    return model


def _predict(model: GainModel, job: LoggedJob, best_length: float) -> float:
    return model.predict(job.bucket, job.arm, _room(job, best_length), learned_share(job.num_learned))[0]


def _gain(job: LoggedJob) -> float:
    return 0.0 if job.result.candidate is None else job.result.candidate.gain_mean


def _room(job: LoggedJob, best_length: float) -> float:
    before = job.result.incumbent
    return headroom_of(1.0 if before is None else before.acceptance_length, best_length)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0
