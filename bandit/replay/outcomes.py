"""Outcomes: what training really does in a simulated service, the truth that policies do not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.job_cost import SLOWDOWN_PRIOR, STAGING_PRIOR_S
from paceline.bandit.replay.curves import Costs, Curves, FormulaCurves, PriorCosts, off_diagonal
from paceline.bandit.replay.scenario import Scenario, labels
from paceline.bootstrap import RECENT_REQUESTS, SCORED_TOGETHER, SURE_EVERY, UNSCORED_REQUESTS, GainTest, will_pay
from paceline.contracts import Z90, ArmSpec, BurstPlan, ShadowScore, TrainResult

FIRST = "v0"
REFUSED = "refused"
"""Name of a snapshot that did not become a version."""
GATE_NOISE = 0.03
"""Standard error of the paired gain of RECENT_REQUESTS requests, tokens a round."""
KNOWN_GRID = np.concatenate([[0.0], np.geomspace(1.0, 2.0**21, 500), np.geomspace(2.0**21, 2.0**31, 240)[1:]])
"""Rows between which it is looked up how many a version has learned; they reach beyond the last point of any table."""
HARM = 0.15
"""Share of the acceptance length above 1 that a harmful job takes away."""
KNOWN_ROWS = 200_000
"""Rows of a known domain that the first drafter's manifest names."""
Learned = dict[str, dict[str, int]]
"""Version -> bucket -> rows it was trained on, as manifests say."""


class TrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A burst as the simulated host starts it."""

    step: int
    domain: int
    """The domain that the bucket serves most now."""
    bucket: str
    arm: ArmSpec
    base: str
    rows: int
    """Rows of this domain among those that the arm takes, which no learner has read."""
    rows_per_request: float
    time_limit_s: float
    decision_id: int
    min_gain: float = 0.0
    """As in TrainJob."""
    plan: BurstPlan | None = None
    """As in TrainJob."""


class TrainTruth(msgspec.Struct, frozen=True, kw_only=True):
    """What a job really brought."""

    status: str
    version: str | None = None
    """Known from now on when status is 'accepted'."""
    train_s: float
    shadow_s: float = 0.0
    start_s: float | None = 0.0
    """As in TrainResult; simulated ones start at once."""
    seen_gain: float | None = None
    """Gain in acceptance length as measured; None = nothing was scored."""
    seen_lower: float = 0.0
    num_scored: int = 20
    """Requests that these are of."""
    num_rows: int | None = None
    """As in TrainResult."""
    num_requests: int | None = None
    log_evidence: float | None = None
    num_rows_before: int = 0
    elsewhere: dict[str, list[ShadowScore]] | None = None
    """As in TrainResult; None = nobody measured it, and the world draws it."""
    reason: str


def real_truth(result: TrainResult, versions: Mapping[str, str]) -> TrainTruth:
    """What a real burst brought. versions: name in the result -> name in the replay; others keep theirs."""
    score, names = result.candidate, dict(versions)
    made = result.version if result.status == "accepted" else None
    if made is None and score is not None:
        names[score.version] = REFUSED
    return TrainTruth(
        status=result.status, version=None if made is None else names.get(made, made), train_s=result.train_s,
        shadow_s=result.shadow_s, start_s=result.start_s, reason=result.reason, num_rows=result.num_rows,
        num_requests=result.num_requests, log_evidence=result.log_evidence, num_rows_before=result.num_rows_before,
        seen_gain=None if score is None else score.gain_mean,
        seen_lower=0.0 if score is None else score.gain_lower,
        num_scored=0 if score is None else score.num_requests,
        elsewhere={
            bucket: [msgspec.structs.replace(s, version=names.get(s.version, s.version)) for s in scores]
            for bucket, scores in result.elsewhere.items()
        },
    )  # fmt: skip


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


@dataclass
class SimulatedLearner:
    """What a bucket's learner is between two bursts."""

    base: str
    parameters: str
    domain: int
    rows: float = 0.0
    """Read since its base."""
    test: GainTest = field(default_factory=GainTest)
    recent: list[float] = field(default_factory=list)
    """Log ratios of the newest RECENT_REQUESTS."""


@dataclass(kw_only=True)
class SimulatedOutcomes:
    """Learners that close part of a gap with every row, by curves; what they take comes from costs and from the chance of the
    step in which a burst starts. Bursts end as those of adapt/online/burst.py do: by the same test, request by request.

    A version is where a learner stood when its gain was sure; the next burst goes on behind it. Reading one domain closes a
    share of the gap to that domain's ceiling; `transfer` carries part of the share to other domains, `forgetting` takes part
    of their acceptance length above 1.
    """

    first: np.ndarray  # (D,) acceptance length of the first drafter
    ceiling: np.ndarray  # (D,) after endless training
    curves: Curves
    costs: Costs
    forgetting: np.ndarray  # (D, D) from the trained domain (row) to another, 0 on the diagonal
    transfer: np.ndarray  # (D, D) the same
    luck: np.ndarray  # (D,) rows of the curves that a row of the domain is worth
    cost: np.ndarray  # (T,) factor on the seconds of a burst that starts in this step
    fate: np.ndarray  # (T,) uniform; the burst fails below `failed`, harms in the `harmful` above that
    noise_seed: int
    """Of what single requests say."""
    failed: float = 0.0
    harmful: float = 0.0
    """Share of bursts that make the drafter worse and are found better."""
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
        self._learners: dict[str, SimulatedLearner] = {}
        self._known: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}

    @staticmethod
    def draw(scenario: Scenario, num_domains: int, rng: np.random.Generator) -> SimulatedOutcomes:
        """The truth of one seed of a formula world. Domain 0 is known to the first drafter; under 'steady' all are.

        tau, power, ceiling, luck and the arms' shares are drawn per seed and domain, and are not those that the controller's
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
            costs=PriorCosts(train_factor=scenario.train_cost, scoring_factor=scenario.train_cost),
            forgetting=off_diagonal(num_domains, scenario.forgetting),
            transfer=off_diagonal(num_domains, 0.0),
            luck=np.clip(rng.normal(1.0, 0.3, num_domains), 0.4, 1.8),
            cost=np.exp(rng.normal(0.0, 0.1, steps)),
            fate=rng.random(steps),
            noise_seed=int(rng.integers(2**31)),
            failed=scenario.bad_jobs / 2,
            harmful=scenario.bad_jobs / 2,
            slowdown=scenario.slowdown,
            learned={FIRST: {name: KNOWN_ROWS for name, is_known in zip(names, known, strict=True) if is_known}},
        )

    def lengths(self, version: str) -> np.ndarray:
        return self._lengths[version]

    def share(self, domain: int, length: np.ndarray | float) -> np.ndarray:
        """Share of the gap between the first drafter and the ceiling that an acceptance length has closed, in [0, 1]."""
        gap = float(self.ceiling[domain] - self.first[domain])
        return (
            np.clip((np.asarray(length) - self.first[domain]) / gap, 0.0, 1.0) if gap > 0 else 0.0 * np.asarray(length)
        )

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray, share: np.ndarray) -> np.ndarray:
        """(R, J) float64: share of the gap that is left that rows (R,) close where `share` (J,) of the whole one is closed.

        A version knows as many rows as would have brought it where it is, whatever did.
        """
        key = (domain, arm.parameters)
        if key not in self._known:
            curve = np.maximum.accumulate(self.curves.closed(domain, arm, KNOWN_GRID))
            rises = np.concatenate([[True], np.diff(curve) > 1e-12])
            self._known[key] = (curve[rises], KNOWN_GRID[rises])
        known = np.interp(share, *self._known[key])  # (J,)
        before = self.curves.closed(domain, arm, known)
        after = self.curves.closed(domain, arm, known + self.luck[domain] * np.asarray(rows)[:, None])
        return np.clip((after - before) / np.maximum(1.0 - np.maximum(before, share), 1e-12), 0.0, 1.0)

    def most_closed(self, domain: int, arm: ArmSpec, rows: np.ndarray) -> np.ndarray:
        """(R,) float64: `closed` where it is most, whatever is closed already."""
        return self.closed(domain, arm, rows, np.linspace(0.0, 0.99, 34)).max(axis=1)

    def job_seconds(self, arm: ArmSpec, rows: np.ndarray | float, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(training seconds, scoring seconds) of a burst of this step that nothing cuts short and that scores all rows."""
        return self.costs.seconds(arm, rows, float(self.cost[step]))

    def is_failed(self, step: int) -> bool:
        """A burst of this step makes nothing."""
        return bool(self.fate[step] < self.failed)

    def is_harmful(self, step: int) -> bool:
        """A burst of this step makes its domain worse and passes the gate."""
        return bool(self.failed <= self.fate[step] < self.failed + self.harmful)

    def gain(self, domain: int, base: np.ndarray, closed: float) -> float:
        """Tokens a round that closing a share of what is left adds on the domain; base: (D,) lengths before."""
        return max(float(self.ceiling[domain] - base[domain]), 0.0) * closed

    def trained(self, domain: int, base: np.ndarray, closed: float, *, is_harmful: bool = False) -> np.ndarray:
        """(D,) acceptance lengths after `closed` of what was left of its domain's gap was closed; harm is done to it alone."""
        new = 1.0 + (base - 1.0) * (1.0 - self.forgetting[domain] * closed)
        new += self.transfer[domain] * closed * np.maximum(self.ceiling - new, 0.0)
        harmed = 1.0 + (base[domain] - 1.0) * (1.0 - self.harm)
        new[domain] = harmed if is_harmful else base[domain] + self.gain(domain, base, closed)
        return new

    def train(self, order: TrainOrder) -> TrainTruth:
        """Carry out a burst."""
        k, d = order.step, order.domain
        base = self._lengths[order.base]
        fixed_s, scoring_s = (float(s) for s in self.job_seconds(order.arm, 0.0, k))
        row_s, scoring_row_s = ((float(s) - f) / 1e3 for s, f in zip(self.job_seconds(order.arm, 1e3, k), (fixed_s, scoring_s), strict=True))  # fmt: skip
        learner = self._learners.pop(order.bucket, None)
        if learner is None or (learner.base, learner.parameters, learner.domain) != (
            order.base,
            order.arm.parameters,
            d,
        ):
            learner = SimulatedLearner(order.base, order.arm.parameters, d)
        before, share = learner.rows, self.share(d, base[d : d + 1])
        chunk, read, status = SCORED_TOGETHER * order.rows_per_request, 0.0, "learning"
        train_s, shadow_s = min(fixed_s, order.time_limit_s), 0.0
        warm, has_scored = (fixed_s, 0.0), False  # seconds and rows up to the first chunk of its kind
        starts = before + np.arange(0.0, max(order.rows, 1), chunk)
        gains = self.gain(d, base, 1.0) * self.closed(d, order.arm, starts, share)[:, 0]
        rng, deviation = np.random.default_rng([self.noise_seed, k]), self.gate_noise * RECENT_REQUESTS**0.5 / base[d]
        if self.is_failed(k):
            train_s = min(fixed_s + row_s * order.rows, order.time_limit_s)
            return TrainTruth(status="failed", train_s=train_s, reason="the update diverged")
        for number, gain in enumerate(gains):
            rows, left_s = min(chunk, order.rows - read), order.time_limit_s - train_s - shadow_s
            if rows <= 0 or left_s <= 0:
                break
            is_due = status != "accepted" or number % SURE_EVERY == 0
            is_scored = is_due and before + read >= UNSCORED_REQUESTS * order.rows_per_request
            begin_s = scoring_s if is_scored and shadow_s == 0 else 0.0
            fitting = (left_s - begin_s) / max(row_s + (scoring_row_s if is_scored else 0.0), 1e-12)
            if fitting <= 0:
                shadow_s += left_s
                break
            is_cut, rows = fitting < rows, min(rows, fitting)  # a trainer looks at its limit behind every step
            if is_scored:
                shadow_s += begin_s + scoring_row_s * rows
                num = max(round(rows / order.rows_per_request), int(not is_cut))
                scores = np.log1p(gain / base[d]) + deviation * rng.standard_normal(num)
                for score in scores.tolist():
                    learner.test.add(score, order.min_gain)
                learner.recent = [*learner.recent, *scores.tolist()][-RECENT_REQUESTS:]
            read += rows
            train_s += row_s * rows
            status = self._finding(learner, order.min_gain)
            if status == "rejected" or is_cut:
                break
            left, total = order.rows - read, (before + read) / order.rows_per_request
            if not number or (is_scored and not has_scored):
                warm, has_scored = (train_s + shadow_s, read), is_scored
            elif status == "learning" and order.plan is not None and left > 0 and not will_pay(
                order.plan, order.min_gain, learner.recent, num_read=total, num_left=left / order.rows_per_request,
                left_s=(train_s + shadow_s - warm[0]) * left / (read - warm[1]),
            ):  # fmt: skip
                break
        learner.rows = before + read
        closed, is_harmful = float(self.closed(d, order.arm, np.array([learner.rows]), share)[0, 0]), self.is_harmful(k)
        new, status = self.trained(d, base, closed, is_harmful=is_harmful), "accepted" if is_harmful else status
        version = None
        if status == "accepted":
            version = f"v{len(self._lengths)}-{order.decision_id}"
            self._lengths[version] = new
        elif status == "learning":
            self._learners[order.bucket] = learner
        seen = base[d] * np.expm1(learner.recent)
        mean = float(seen.mean()) if len(seen) else None
        lower = -np.inf if mean is None or len(seen) < 2 else mean - Z90 * float(seen.std(ddof=1)) / len(seen) ** 0.5
        return TrainTruth(
            status=status, version=version, train_s=train_s, shadow_s=shadow_s, seen_gain=mean, seen_lower=float(lower),
            num_rows=round(read), num_requests=max(round(read / order.rows_per_request), 1), num_rows_before=round(before),
            num_scored=len(seen), log_evidence=learner.test.log_evidence,
            reason="nothing scored yet" if mean is None else f"gain {mean:+.3f}, lower bound {lower:+.3f}",
        )  # fmt: skip

    def _finding(self, learner: SimulatedLearner, min_gain: float) -> str:
        if learner.test.is_less():
            return "rejected"
        is_now = bool(learner.recent) and float(np.mean(np.exp(learner.recent))) > 1.0 + min_gain
        return "accepted" if is_now and learner.test.is_more() else "learning"
