"""Cost model: the device-seconds that a training job takes."""

from __future__ import annotations

import msgspec

from paceline.contracts import ArmSpec

TRAIN_PRIOR = {"calibration": (0.4, 0.1), "head": (0.6, 0.8), "lora": (1.2, 1.5), "full": (1.2, 1.5)}
"""Parameter set -> (fixed seconds, seconds per 1,000 rows) on one CPU thread."""
SHADOW_PRIOR = (0.2, 0.45)
"""The same of scoring, whatever is trained: every request is scored before it is learned."""
START_PRIOR_S = 1.0
"""Before the first row: 4 s of a CPU in a process that imports everything, 0.3 s in one that did so for an order before."""
STAGING_PRIOR_S = 0.1
"""Per replica."""
SLOWDOWN_PRIOR = 0.05
"""Relative slow-down of rounds while a job runs."""
SLOWDOWN_ROUNDS, MAX_SLOWDOWN_WEIGHT, MAX_SLOWDOWN = 1500.0, 0.25, 3.0
"""Rounds that the slow-down remembers, weight of one job at most, and the largest that is believed of one."""
MAX_LONGER = 10.0
"""Seconds from a job's order to its end over its device-seconds, at most: a busy core leaves a niced worker a tenth; what took
longer waited for a controller or a place."""
PRIOR_WEIGHT = 1.0
"""Jobs that the prior counts for."""
DISCOUNT = 0.8


class Scale(msgspec.Struct):
    """Discounted mean of measured over predicted, starting at one."""

    weight: float = PRIOR_WEIGHT
    total: float = PRIOR_WEIGHT

    def value(self) -> float:
        return self.total / self.weight

    def update(self, ratio: float) -> None:
        ratio = min(max(ratio, 0.01), 100.0)
        self.weight = self.weight * DISCOUNT + 1.0
        self.total = self.total * DISCOUNT + ratio


def prior_training_s(arm: ArmSpec) -> float:
    """Training time of an arm by the prior table, seconds; rehearsal rows come on top of arm.num_rows."""
    return _prior_s(TRAIN_PRIOR.get(arm.parameters, TRAIN_PRIOR["full"]), arm)


def prior_shadow_s(arm: ArmSpec) -> float:
    """Scoring time of an arm by the prior, seconds; its rehearsal rows are scored, too."""
    return _prior_s(SHADOW_PRIOR, arm)


def _prior_s(prior: tuple[float, float], arm: ArmSpec) -> float:
    fixed, per_1k = prior
    return fixed + per_1k * arm.num_rows / max(1.0 - arm.rehearsal_share, 0.1) / 1000.0


class JobCost(msgspec.Struct, frozen=True, kw_only=True):
    """Expected device-seconds of a job, by ledger kind; those of training and scoring are the trainer's."""

    training_s: float
    shadow_s: float
    interference_s: float
    staging_s: float
    price: float = 1.0
    """Of a second of the trainer, in seconds of serving."""
    duration: float = 1.0
    """Seconds from the job's order to its end over its device-seconds."""

    @property
    def wait_s(self) -> float:
        """Seconds until the job has ended."""
        return self.duration * (self.training_s + self.shadow_s)

    @property
    def total_s(self) -> float:
        """Seconds of serving that the job is worth."""
        return self.price * (self.training_s + self.shadow_s) + self.interference_s + self.staging_s


class CostModel(msgspec.Struct):
    """Linear priors per parameter set, scaled by what jobs really cost (an arm's jobs and, more weakly, all jobs), and their start."""

    all_jobs: Scale = msgspec.field(default_factory=Scale)
    by_arm: dict[str, Scale] = {}
    shadow: Scale = msgspec.field(default_factory=Scale)
    start: Scale = msgspec.field(default_factory=Scale)
    staging: Scale = msgspec.field(default_factory=Scale)
    duration: Scale = msgspec.field(default_factory=Scale)
    """Of seconds from a job's order to its end over its device-seconds: a niced worker waits, and its start takes time."""
    slowdown: float = SLOWDOWN_PRIOR
    num_measured: int = 0
    """Jobs that ran to their end, or at least up to their limit."""

    def predict(self, arm: ArmSpec, *, busy: float, num_replicas: int, price: float = 1.0) -> JobCost:
        """Cost of one job; busy = device-seconds that serving uses per second, price as in PolicyConfig.trainer_price."""
        training = prior_training_s(arm) * self._scale(arm) + START_PRIOR_S * self.start.value()
        shadow = prior_shadow_s(arm) * self.shadow.value()
        duration = self.duration.value()
        return JobCost(
            training_s=training,
            shadow_s=shadow,
            interference_s=max(self.slowdown, 0.0) * busy * (training + shadow) * duration,
            staging_s=self.staging_s(num_replicas),
            price=price,
            duration=duration,
        )

    def margin(self) -> float:
        """Factor by which a job may turn out dearer than predicted: 1.5 before any was measured, falling towards 1."""
        return 1.0 + 0.5 / (1.0 + self.num_measured)

    def staging_s(self, num_replicas: int) -> float:
        """Cost of making another version live on every replica."""
        return STAGING_PRIOR_S * num_replicas * self.staging.value()

    def update(self, arm: ArmSpec, train_s: float, shadow_s: float, start_s: float | None = None) -> None:
        """Learn from a finished job that was not cut short; seconds measured, start_s is a part of train_s, None = not told."""
        if start_s is not None:
            self.start.update(start_s / START_PRIOR_S)
        self._measured(arm, max(train_s - (start_s or 0.0), 0.0) / prior_training_s(arm))
        if shadow_s > 0:
            self.shadow.update(shadow_s / prior_shadow_s(arm))

    def update_duration(self, seconds: float, device_s: float) -> None:
        """Learn from a job that took `seconds` from its order to its end; serving is slowed down for as long."""
        if device_s > 0:
            self.duration.update(min(max(seconds / device_s, 1.0), MAX_LONGER))

    def update_staging(self, seconds: float, num_replicas: int) -> None:
        """Learn from a version that was made live on every replica; seconds of all of them together."""
        self.staging.update(seconds / (STAGING_PRIOR_S * max(num_replicas, 1)))

    def update_cut_short(self, arm: ArmSpec, train_s: float) -> None:
        """Learn from a job that was stopped: it would have cost at least this much, so only an excess teaches."""
        ratio = (train_s - START_PRIOR_S * self.start.value()) / prior_training_s(arm)
        if ratio > self._scale(arm):
            self._measured(arm, ratio)
        else:
            self.num_measured += 1

    def _scale(self, arm: ArmSpec) -> float:
        return self.by_arm.get(arm.name, self.all_jobs).value()

    def _measured(self, arm: ArmSpec, ratio: float) -> None:
        self.num_measured += 1
        start = self.all_jobs.value()
        self.by_arm.setdefault(arm.name, Scale(PRIOR_WEIGHT, PRIOR_WEIGHT * start)).update(ratio)
        self.all_jobs.update(ratio)

    def observe_slowdown(self, relative: float, num_rounds: int) -> None:
        """Blend in a measured relative slow-down; one below 0 is noise of the measurement, as others above 0 are."""
        weight = min(num_rounds / SLOWDOWN_ROUNDS, MAX_SLOWDOWN_WEIGHT)
        self.slowdown += weight * (min(max(relative, -MAX_SLOWDOWN), MAX_SLOWDOWN) - self.slowdown)
