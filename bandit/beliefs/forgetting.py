"""Forgetting model: what a job costs the buckets that it does not train on, learned from earlier jobs."""

from __future__ import annotations

import math

import msgspec

from paceline.bandit.beliefs.gain_model import ARM_SHARE, learned_share
from paceline.bandit.beliefs.recall import ScoreTable
from paceline.contracts import ArmSpec

FORGET_REHEARSED, FORGET_BARE = 0.07, 0.25
"""Relative loss of acceptance length on other buckets after endless training, with and without rehearsal rows."""
SCALE_SD = 1.0
"""Prior spread of the factor on `forgetting`, whose prior mean is 1."""
LOSS_SD = 0.02
"""Misfit of one version's loss in one bucket, relative to its acceptance length."""
DISCOUNT = 0.9
"""Weight that the evidence keeps at each new observation; the rest returns to the prior."""
MIN_OBSERVED_ROUNDS = 60
MAX_LOSS = 0.6
SEEN = (-2.0, 5.0)
"""Bounds of one measured factor."""
MAX_AWAITED = 256


def forgetting(arm: ArmSpec) -> float:
    """Prior relative fall of the acceptance length on buckets that the job does not train on."""
    if arm.parameters == "calibration":
        return 0.0
    limit = FORGET_REHEARSED if arm.rehearsal_share >= 0.2 else FORGET_BARE
    return limit * ARM_SHARE.get(arm.parameters, 1.0) * learned_share(arm.num_rows)


class AwaitedLoss(msgspec.Struct, frozen=True):
    """A version whose loss in a bucket is not yet known."""

    length: float
    """Acceptance length of its base there."""
    standard_error: float
    expected: float
    """Relative loss by the prior curve."""


class ForgettingModel(msgspec.Struct):
    """Discounted Bayesian estimate of one factor: realised over expected relative loss of acceptance length.

    Gaussian with known noise, as in GainModel; every (version, bucket) pair teaches once, as soon as the version has
    served enough rounds of a bucket that it was not trained on.
    """

    scale: float = 1.0
    variance: float = SCALE_SD**2
    num_seen: int = 0
    awaited: dict[str, dict[str, AwaitedLoss]] = {}
    """Bucket -> version -> what is awaited."""

    def loss(self, arm: ArmSpec) -> float:
        """Expected relative fall of the acceptance length on other buckets after a job, in [0, MAX_LOSS]."""
        return min(max(self.scale, 0.0) * forgetting(arm), MAX_LOSS)

    def expect(self, trained: str, version: str, base_version: str, arm: ArmSpec, table: ScoreTable) -> None:
        """Await what `version`, trained on bucket `trained`, loses in every other bucket where its base was served."""
        expected = forgetting(arm)
        if expected <= 0:
            return
        for bucket, scores in table.scores.items():
            base = scores.get(base_version)
            if bucket == trained or base is None or base.realised.x < MIN_OBSERVED_ROUNDS:
                continue
            length = base.realised.ratio()
            if length is not None and length > 1.0:
                waiting = self.awaited.setdefault(bucket, {})
                waiting[version] = AwaitedLoss(length, base.realised.standard_error(), expected)
                while len(waiting) > MAX_AWAITED:
                    del waiting[next(iter(waiting))]

    def observe(self, table: ScoreTable) -> None:
        """Learn from awaited versions that have served enough by now."""
        for bucket, waiting in self.awaited.items():
            for version in list(waiting):
                score = table.scores.get(bucket, {}).get(version)
                length = score.realised.ratio() if score is not None else None
                if score is None or length is None or score.realised.x < MIN_OBSERVED_ROUNDS:
                    continue
                before = waiting.pop(version)
                error = math.hypot(score.realised.standard_error(), before.standard_error) / before.length
                if math.isfinite(error):
                    self._learn(1.0 - length / before.length, before.expected, math.hypot(error, LOSS_SD))

    def _learn(self, loss: float, expected: float, loss_sd: float) -> None:
        precision = DISCOUNT / self.variance + (1 - DISCOUNT) / SCALE_SD**2
        mean = (DISCOUNT * self.scale / self.variance + (1 - DISCOUNT) / SCALE_SD**2) / precision
        noise = (loss_sd / expected) ** 2
        seen = min(max(loss / expected, SEEN[0]), SEEN[1])  # one text that changed unnoticed must not veto every job
        gain = (1.0 / precision) / (1.0 / precision + noise)
        self.scale = mean + gain * (seen - mean)
        self.variance = (1.0 - gain) / precision
        self.num_seen += 1

    def reset_bucket(self, bucket: str) -> None:
        """The bucket's text changed: lengths of before it say nothing about a loss."""
        self.awaited.pop(bucket, None)
