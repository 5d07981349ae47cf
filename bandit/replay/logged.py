"""Logged service: a replay of a decision log under another policy.

Traffic, round times and the first drafter's acceptance are those of the log. A job that the log holds (same bucket,
parameters and base, rows within a quarter) gives exactly the version that was trained then, scored by replay; any other
job's gain comes from the gain model fitted on the log (bandit/replay/gain_fit.py), with its error as the spread of seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.gain_model import learned_share
from paceline.bandit.beliefs.job_cost import SHADOW_PRIOR_S, prior_training_s
from paceline.bandit.controller.decision_log import FeedbackCell, LoggedJob, ServiceLog
from paceline.bandit.replay.gain_fit import GainFit, arm_share, fit_gains, gap
from paceline.bandit.replay.outcomes import FIRST, SimulatedOutcomes, TrainOrder, TrainTruth, training_seconds
from paceline.bandit.replay.scenario import Scenario, Traffic
from paceline.bandit.replay.simulate import run_policy
from paceline.bandit.replay.world import RunResult
from paceline.contracts import ArmSpec, Group
from paceline.errors import ConfigError

MATCH_ROWS = 0.25
"""Relative difference in rows up to which a logged job stands for an ordered one."""


@dataclass
class LoggedOutcomes(SimulatedOutcomes):
    """Results of jobs on a logged service."""

    fit: GainFit = field(default=None)  # type: ignore[assignment]
    labels: tuple[str, ...] = ()
    jobs: list[LoggedJob] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Version of the replay -> version of the log that it stands for."""
    shadow: dict[str, dict[str, float]] = field(default_factory=dict)
    cost_factor: float = 1.0
    """Measured over prior training time."""
    shadow_s: float = SHADOW_PRIOR_S
    used: set[int] = field(default_factory=set)

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float, step: int) -> np.ndarray:
        share = arm_share(self.fit.model, self.labels[domain], arm)
        curve = np.vectorize(learned_share, otypes=[float])(np.asarray(rows, dtype=float))
        return np.minimum(share * curve * self.luck[step], 1.0)

    def job_seconds(self, arm: ArmSpec, rows: np.ndarray | float, step: int) -> tuple[np.ndarray, float]:
        fixed, growing = training_seconds(arm, rows)
        factor = self.cost_factor * float(self.cost[step])
        return factor * (fixed + growing), self.shadow_s * float(self.cost[step])

    def train(self, order: TrainOrder) -> TrainTruth:
        i = self._logged(order)
        if i is None:
            return super().train(order)
        job = self.jobs[i]
        self.used.add(i)
        gain, se = float(job.gain or 0.0), job.gain_se
        truth = TrainTruth(
            status=job.status,
            train_s=min(job.train_s, order.time_limit_s),
            shadow_s=job.shadow_s,
            seen_gain=gain,
            seen_lower=gain - 1.645 * se,
            reason=f"as logged: {job.version or job.status}",
        )
        if job.status != "accepted" or job.version is None or job.train_s > order.time_limit_s:
            return truth if job.status != "accepted" else super().train(order)
        version = f"v{len(self._lengths)}-{order.decision_id}"
        new = self._lengths[order.base].copy()
        closed = float(self.closed(order.domain, order.arm, order.rows, order.step))
        new = 1.0 + (new - 1.0) * (1.0 - self.scenario.forgetting * closed)
        new[order.domain] = max(self._lengths[order.base][order.domain] + gain, 1.0)
        for d, label in enumerate(self.labels):
            scored = self.shadow.get(label, {})
            base = scored.get(self.names.get(order.base, ""))
            if job.version in scored and base:  # exact: both versions were replayed on the same texts
                new[d] = self._lengths[order.base][d] * scored[job.version] / base
        self._lengths[version] = new
        self.names[version] = job.version
        return msgspec.structs.replace(truth, version=version)

    def redraw(self, rng: np.random.Generator) -> None:
        """Forget the results of logged jobs, and draw anew what the gain model leaves open."""
        self.jobs, steps = [], len(self.luck)
        common = rng.normal(1.0, self.fit.spread)  # the model may be wrong for all jobs alike
        self.luck = np.clip(common * rng.normal(1.0, self.fit.spread, steps), 0.0, 2.0)
        self.cost = np.exp(rng.normal(0.0, 0.1, steps))
        self.gate_z = rng.standard_normal(steps)

    def _logged(self, order: TrainOrder) -> int | None:
        for i, job in enumerate(self.jobs):
            if i in self.used or job.gain is None or self.names.get(order.base) != job.base_version:
                continue
            is_same = job.bucket == order.bucket and job.arm.parameters == order.arm.parameters
            if is_same and abs(job.arm.num_rows - order.arm.num_rows) <= MATCH_ROWS * job.arm.num_rows:
                return i
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedService:
    """A log prepared for replays."""

    log: ServiceLog
    scenario: Scenario
    traffic: Traffic
    first: np.ndarray  # (D,)
    fit: GainFit

    def learned(self) -> dict[str, dict[str, int]]:
        """First drafter -> bucket -> rows that it was trained on, from the earliest belief logged while it served."""
        rows: dict[str, int] = {}
        for d in self.log.decisions:
            belief = d.context.get("belief")
            if d.action in ("train", "recall", "rollback"):
                rows |= (
                    {belief["bucket"]: int(belief["learned_rows"])} if belief and belief["bucket"] not in rows else {}
                )
                break  # another version may serve from here on
            if belief:
                rows.setdefault(str(belief["bucket"]), int(belief["learned_rows"]))
        return {FIRST: rows}

    def step_of(self, ts: float) -> int:
        """Step of the replay in which something was logged."""
        k = int((ts - self.log.epochs[0].start) / self.traffic.step_s - 0.5)
        return min(max(k, 0), self.traffic.num_steps - 1)

    def notes(self) -> list[str]:
        """What a reader must know about the result."""
        scores = sum(len(v) for v in self.log.shadow.values())
        return [
            f"log: {len(self.log.epochs)} epochs of about {self.traffic.step_s:.0f} s, {len(self.log.jobs)} jobs, {scores} replay scores",
            self.fit.sentence(),
            "jobs that the log holds are replayed as they went; others follow the gain model, whose error is the spread of the seeds",
        ]


def prepare(log: ServiceLog, name: str) -> LoggedService:
    """Traffic and fitted models of a log. Raises ConfigError when it does not say how the first drafter fares."""
    labels = tuple(sorted({c.bucket for e in log.epochs for c in e.cells if c.num_tokens > 0}))
    first_version = log.epochs[0].first_version
    cells = [c for e in log.epochs for c in e.cells if c.group != Group.PLAIN and c.drafted_rounds > 0]
    lengths: dict[tuple[str, str], float] = {}
    for key in {(c.bucket, c.version) for c in cells}:
        mine = [c for c in cells if (c.bucket, c.version) == key]
        lengths[key] = sum(c.kept for c in mine) / sum(c.drafted_rounds for c in mine)
    missing = [b for b in labels if (b, first_version) not in lengths and first_version not in log.shadow.get(b, {})]
    if missing:
        raise ConfigError(f"log must hold rounds or a replay score of the first drafter {first_version} in bucket {missing[0]}; keep a hold-back group")  # fmt: skip
    first = np.array([lengths.get((b, first_version)) or log.shadow[b][first_version] for b in labels])
    step_s = float(np.median([e.end - e.start for e in log.epochs]))
    begin = log.epochs[0].start
    steps = max(int(np.ceil((log.epochs[-1].end - begin) / step_s)), 1)
    tokens = np.zeros((steps, len(labels)))
    for epoch in log.epochs:
        k = min(max(int((epoch.end - begin) / step_s - 0.5), 0), steps - 1)
        for c in epoch.cells:
            if c.num_tokens > 0:
                tokens[k, labels.index(c.bucket)] += c.num_tokens
    drafted_s, plain_s = _round_seconds(cells)
    requests = sum(c.num_requests for c in cells)
    traffic = Traffic(
        step_s=step_s, labels=labels, tokens=tokens, drafted_s=drafted_s, plain_s=plain_s,
        batch_size=max(round(float(np.mean([e.batch_size for e in log.epochs]))), 1),
        tokens_per_request=max(sum(c.num_tokens for c in cells) / max(requests, 1.0), 1.0),
        num_replicas=log.epochs[-1].num_replicas,
    )  # fmt: skip
    scenario = Scenario(name=f"{name}-{log.digest}", family="your log", duration_s=steps * step_s, step_s=step_s, regime_s=max(steps * step_s, step_s))  # fmt: skip
    best = max([*lengths.values(), *(v for scores in log.shadow.values() for v in scores.values())])
    return LoggedService(log=log, scenario=scenario, traffic=traffic, first=first, fit=fit_gains(log.jobs, best))


def _round_seconds(cells: list[FeedbackCell]) -> tuple[float, float]:
    """Device seconds of a round per request with and without a draft; the latter as dear when never seen."""
    drafted_s, drafted = sum(c.drafted_s for c in cells), sum(c.drafted_rounds for c in cells)
    plain_s = sum(c.device_s - c.drafted_s for c in cells)
    plain = sum(c.num_rounds - c.drafted_rounds for c in cells)
    with_draft = drafted_s / drafted if drafted else 0.02
    return with_draft, plain_s / plain if plain >= 20 else with_draft


def logged_outcomes(service: LoggedService, seed: int) -> LoggedOutcomes:
    """Results of jobs on a prepared log; the seed draws what the gain model leaves open."""
    log, steps = service.log, service.traffic.num_steps
    rng = np.random.default_rng([seed, 11])
    best = max([float(service.first.max()), *(v for scores in log.shadow.values() for v in scores.values())])
    ratios = [j.train_s / prior_training_s(j.arm) for j in log.jobs if j.train_s > 0 and j.status != "stopped"]
    shadows = [j.shadow_s for j in log.jobs if j.shadow_s > 0]
    return LoggedOutcomes(
        scenario=service.scenario,
        first=service.first,
        ceiling=service.first + np.array([gap(float(v), best) for v in service.first]),
        tau=np.ones_like(service.first),
        power=np.ones_like(service.first),
        arm_share={a.parameters: 1.0 for a in default_arms()},
        luck=np.clip(rng.normal(1.0, service.fit.spread, steps), 0.0, 2.0),
        cost=np.exp(rng.normal(0.0, 0.1, steps)),
        fate=np.ones(steps),
        gate_z=rng.standard_normal(steps),
        fit=service.fit,
        labels=service.traffic.labels,
        jobs=log.jobs,
        names={FIRST: log.epochs[0].first_version},
        shadow=log.shadow,
        cost_factor=float(np.mean(ratios)) if ratios else 1.0,
        shadow_s=float(np.mean(shadows)) if shadows else SHADOW_PRIOR_S,
    )


def logged_settings(service: LoggedService, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run on a log: one decision for every logged epoch unless `settings` says otherwise."""
    return {"epoch_s": 0.999 * service.traffic.step_s, **settings}


def replay_logged(service: LoggedService, policy: str, settings: Mapping[str, Any], seed: int) -> RunResult:
    """Run a policy (or the oracle) on a prepared log; the seed draws what the gain model leaves open."""
    outcomes, chosen = logged_outcomes(service, seed), logged_settings(service, settings)
    return run_policy(service.traffic, outcomes, policy, chosen, seed, service.learned())
