"""Gain model: by how much a training job raises the acceptance length, with its posterior for every arm."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from paceline.contracts import Z90, ArmSpec

TAU_ROWS = 3000.0
"""Rows after which a full fine-tune has reached 1 - 1/e of what it can reach."""
POWER = 0.5
"""Stretching exponent of the curve: measured gains grow like the square root of rows at first."""
ARM_SHARE = {"calibration": 0.10, "head": 0.62, "lora": 0.7, "full": 1.0}
"""Prior gain of each parameter set relative to a full fine-tune on the same rows; lora is between SpecBlock (0.54) and parallel
heads (0.84)."""
K_MEAN, K_SD = 0.65, 0.25
"""Prior share of the headroom that training without end closes, over all buckets."""
AGAIN_MEAN, AGAIN_SD = 0.25, 0.2
"""Prior share of the headroom that endless training closes on text of which as many rows were learned before."""
BUCKET_SD = 0.35
"""Prior spread of that share between buckets."""
ARM_SD = 0.2
"""Prior spread of an arm's share, relative to it."""
MODEL_SD, MODEL_JOBS = 0.12, 2.0
"""Prior misfit of the curve itself, in units of the share, and how many jobs it weighs as much as: `paceline replay tables
--policies payoff,never --seeds 3` nets 5.1% with 2 and with 5."""
HISTORY_SHARE, HISTORY_SD = 0.8, 0.25
"""Mean and spread of ARM_SHARE for a job of an earlier service, of which only rows and lengths are recorded."""
DISCOUNT = 0.93
"""Weight that the evidence keeps at each new job; the rest returns to the prior."""


def learned_share(num_rows: float) -> float:
    """Share of the reachable gain after num_rows rows, in [0, 1): 1 - exp(-(rows / tau) ** power)."""
    return 1.0 - math.exp(-((max(num_rows, 0.0) / TAU_ROWS) ** POWER))


def further_share(before: float, after: float) -> float:
    """Share of the *remaining* gain that rows number before+1 .. after close, in [0, 1)."""
    left = 1.0 - learned_share(before)
    return max(learned_share(after) - learned_share(before), 0.0) / left if left > 1e-9 else 0.0


def newness(before: float, after: float, num_rows: float) -> float:
    """further_share of a job of num_rows rows over what it would close on a drafter that knew none of them, in [0, 1]."""
    return min(further_share(before, after) / max(learned_share(num_rows), 1e-9), 1.0)


class GainModel(msgspec.Struct):
    """Discounted Bayesian linear regression of realised gain over headroom times curve.

    y = gain / (headroom * learned_share) = share_arm * (k * new + a * (1 - new) + d_bucket) + e_arm + noise, with new =
    `newness` and all coefficients Gaussian. a = 0 when rows like those learned before bring nothing more; k is shared by every arm and bucket, so one job teaches the others; discounting pulls the posterior back to the
    prior at each update (the D-LinUCB weighting, Russac et al. 2019, arXiv 1909.09146, eq. 4, with a prior mean).
    """

    names: list[str] = msgspec.field(default_factory=lambda: ["k", "again"])
    mean: list[float] = msgspec.field(default_factory=lambda: [K_MEAN, AGAIN_MEAN])
    cov: list[list[float]] = msgspec.field(default_factory=lambda: [[K_SD**2, 0.0], [0.0, AGAIN_SD**2]])
    prior_sd: list[float] = msgspec.field(default_factory=lambda: [K_SD, AGAIN_SD])
    num_jobs: int = 0
    misfit: tuple[float, float] = (0.0, 0.0)
    """Discounted number of jobs, and sum of their expected squared misfits relative to ARM_SHARE."""

    def misfit_sd(self, arm: ArmSpec) -> float:
        """Spread of gain / (headroom * learned_share) around the curve, as the jobs so far tell it."""
        num, total = self.misfit
        return ARM_SHARE.get(arm.parameters, 1.0) * math.sqrt((MODEL_JOBS * MODEL_SD**2 + total) / (MODEL_JOBS + num))

    def _index(self, name: str, prior_sd: float) -> int:
        if name not in self.names:
            self.names.append(name)
            self.mean.append(0.0)
            self.prior_sd.append(prior_sd)
            for row in self.cov:
                row.append(0.0)
            self.cov.append([0.0] * (len(self.names) - 1) + [prior_sd**2])
        return self.names.index(name)

    def _entries(self, bucket: str, arm: ArmSpec, new: float) -> dict[int, float]:
        """Coefficient -> its factor, all others have 0; new coefficients are added to the model."""
        share = ARM_SHARE.get(arm.parameters, 1.0)
        at_bucket = self._index(f"bucket:{bucket}", BUCKET_SD)
        at_arm = self._index(f"arm:{arm.name}", ARM_SD * share)
        return {0: share * new, 1: share * (1.0 - new), at_bucket: share, at_arm: 1.0}

    def _features(self, bucket: str, arm: ArmSpec, new: float = 1.0) -> np.ndarray:
        entries = self._entries(bucket, arm, new)
        x = np.zeros(len(self.names))
        x[list(entries)] = list(entries.values())
        return x

    def predict(
        self, bucket: str, arm: ArmSpec, headroom: float, share: float, new: float = 1.0
    ) -> tuple[float, float]:
        """Mean and standard deviation of the gain in acceptance length.

        headroom in tokens a round, share = learned_share of the job's rows, new = their `newness`, both in [0, 1].
        """
        x, scale = self._entries(bucket, arm, new), headroom * share
        mean = sum(a * self.mean[i] for i, a in x.items())
        variance = sum(a * b * self.cov[i][j] for i, a in x.items() for j, b in x.items()) + self.misfit_sd(arm) ** 2
        return mean * scale, math.sqrt(max(variance, 0.0)) * scale

    def draw(self, jobs: list[tuple[str, ArmSpec, float]], num: int, rng: np.random.Generator) -> np.ndarray:
        """(num, len(jobs)) float64: joint posterior draws of gain / (headroom * learned_share) of (bucket, arm, new).

        Jobs share coefficients, so that their draws move together; the misfit of the curve is not drawn.
        """
        for bucket, arm, _ in jobs:
            self._features(bucket, arm)  # every name has its column before any row is made
        rows = np.stack([self._features(bucket, arm, new) for bucket, arm, new in jobs])
        values, vectors = np.linalg.eigh(np.asarray(self.cov))
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        theta = np.asarray(self.mean) + rng.standard_normal((num, len(values))) @ root.T
        return theta @ rows.T

    def update(
        self,
        bucket: str,
        arm: ArmSpec,
        headroom: float,
        share: float,
        gain: float,
        gain_se: float,
        new: float = 1.0,
    ) -> None:
        """Learn from a finished job; gain in tokens a round as measured, also of one that the gate refused."""
        x = self._features(bucket, arm, new)
        misfit_sd = self.misfit_sd(arm)
        squared = self._learn(x, headroom * share, gain, gain_se, misfit_sd) / ARM_SHARE.get(arm.parameters, 1.0) ** 2
        num, total = self.misfit
        self.misfit = (DISCOUNT * num + 1.0, DISCOUNT * total + squared)
        self.num_jobs += 1

    def update_from_history(self, bucket: str, headroom: float, share: float, gain: float, gain_se: float) -> None:
        """Learn from a version that an earlier service trained, with an arm that is not known."""
        at = self._index(f"bucket:{bucket}", BUCKET_SD)
        x = np.zeros(len(self.names))
        x[0] = x[at] = HISTORY_SHARE
        self._learn(x, headroom * share, gain, gain_se, math.hypot(MODEL_SD, HISTORY_SD))

    def _learn(self, x: np.ndarray, scale: float, gain: float, gain_se: float, misfit_sd: float) -> float:
        """The expected square of what is neither the coefficients' error nor the measurement's (the E step of an EM)."""
        scale = max(scale, 1e-3)
        self._discount()
        mean, cov = np.asarray(self.mean), np.asarray(self.cov)
        noise = (gain_se / scale) ** 2 + misfit_sd**2
        error = min(max(gain / scale, -1.0), 3.0) - float(x @ mean)
        variance = float(x @ cov @ x) + noise
        gained = cov @ x / variance
        mean = mean + gained * error
        cov = cov - np.outer(gained, x @ cov)
        self.mean, self.cov = mean.tolist(), ((cov + cov.T) / 2).tolist()
        part = misfit_sd**2 / variance
        return misfit_sd**2 * (1.0 - part) + (part * error) ** 2

    def _discount(self) -> None:
        prior_mean = np.zeros(len(self.names))
        prior_mean[:2] = K_MEAN, AGAIN_MEAN
        prior = np.diag(1.0 / np.asarray(self.prior_sd) ** 2)
        precision = np.linalg.inv(np.asarray(self.cov))
        blended = DISCOUNT * precision + (1.0 - DISCOUNT) * prior
        cov = np.linalg.inv(blended)
        mean = cov @ (DISCOUNT * precision @ np.asarray(self.mean) + (1.0 - DISCOUNT) * prior @ prior_mean)
        self.mean, self.cov = mean.tolist(), ((cov + cov.T) / 2).tolist()

    def reset_bucket(self, bucket: str) -> None:
        """Forget what was learned about one bucket (its text changed); shared coefficients stay."""
        i = self._index(f"bucket:{bucket}", BUCKET_SD)
        self.mean[i] = 0.0
        for j in range(len(self.names)):
            self.cov[i][j] = self.cov[j][i] = 0.0
        self.cov[i][i] = self.prior_sd[i] ** 2

    def drop_bucket(self, bucket: str) -> None:
        """Keep nothing of a bucket; what the others' jobs taught of everything else stays (its marginal)."""
        if (name := f"bucket:{bucket}") in self.names:
            i = self.names.index(name)
            del self.names[i], self.mean[i], self.prior_sd[i], self.cov[i]
            for row in self.cov:
                del row[i]


class ArmPosterior(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the reachable gain (headroom) that endless training with an arm would close, in [0, 1] and beyond.

    low and high hold the central 90%; the misfit of the curve is not part of it.
    """

    arm: str
    bucket: str | None
    """None = over all buckets."""
    mean: float
    low: float
    high: float
    prior_mean: float
    prior_low: float
    prior_high: float


def arm_posteriors(gains: GainModel) -> list[ArmPosterior]:
    """One row for each arm that was ever priced, and one for each arm and bucket; reads only, nothing is learned."""
    mean, cov = np.asarray(gains.mean), np.asarray(gains.cov)
    buckets = [n.removeprefix("bucket:") for n in gains.names if n.startswith("bucket:")]
    rows = []
    for name in (n for n in gains.names if n.startswith("arm:")):
        at_arm = gains.names.index(name)
        share = gains.prior_sd[at_arm] / ARM_SD  # the prior spread of an arm is proportional to its share
        for bucket in (None, *buckets):
            x = np.zeros(len(gains.names))
            x[0], x[at_arm] = share, 1.0
            if bucket is not None:
                x[gains.names.index(f"bucket:{bucket}")] = share
            middle, sd = float(x @ mean), math.sqrt(max(float(x @ cov @ x), 0.0))
            prior_sd = share * math.hypot(K_SD, ARM_SD)
            rows.append(
                ArmPosterior(
                    arm=name.removeprefix("arm:"), bucket=bucket,
                    mean=middle, low=middle - Z90 * sd, high=middle + Z90 * sd,
                    prior_mean=share * K_MEAN, prior_low=share * K_MEAN - Z90 * prior_sd,
                    prior_high=share * K_MEAN + Z90 * prior_sd,
                )
            )  # fmt: skip
    return rows


def regime_starts(start: float, lengths: list[float]) -> list[float]:
    """When the present and the remembered regimes began, oldest first, seconds since the epoch."""
    starts = [start]
    for length in reversed(lengths):
        starts.append(starts[-1] - length)
    return starts[::-1]
