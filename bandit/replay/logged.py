"""Logged service: a replay of a decision log under another policy.

Traffic, hold-back, round times and the first drafter's acceptance are those of the log, and its ledger says what a swap
costs and how jobs slow rounds down. A job that the log holds (same bucket, parameters and base, rows within a quarter)
goes as it went, and where it was accepted gives exactly the version that was trained then, scored by replay; any other
job's gain comes from the gain model fitted on the log (bandit/replay/gain_fit.py), with its error as the spread of seeds.
Rounds that a text drafter had are left out of the traffic: no policy changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import sized
from paceline.bandit.beliefs.gain_model import POWER, TAU_ROWS
from paceline.bandit.beliefs.job_cost import SLOWDOWN_PRIOR, STAGING_PRIOR_S, prior_shadow_s, prior_training_s
from paceline.bandit.controller.decision_log import FeedbackCell, FeedbackLine, LoggedJob, ServiceLog
from paceline.bandit.ledger.totals import fold_entries
from paceline.bandit.policies.pricing import headroom_of
from paceline.bandit.replay.curves import PriorCosts, off_diagonal
from paceline.bandit.replay.gain_fit import GainFit, arm_share, fit_gains
from paceline.bandit.replay.outcomes import (
    FIRST,
    Learned,
    SimulatedLearner,
    SimulatedOutcomes,
    TrainOrder,
    TrainTruth,
    real_truth,
)
from paceline.bandit.replay.scenario import MAX_DURATION_S, MAX_STEPS, Scenario, Traffic
from paceline.bandit.replay.simulate import run_policy
from paceline.bandit.replay.world import RunResult
from paceline.contracts import ArmSpec, Group
from paceline.errors import ConfigError

MATCH_ROWS = 0.25
"""Relative difference in rows up to which a logged job stands for an ordered one."""
SERVED_ROUNDS = 100
"""Drafted rounds whose acceptance length is known better than by replay scores."""


FORGETTING = 0.1
"""Share of the acceptance length above 1 that endless training costs other buckets where the log does not say it."""


@dataclass(frozen=True)
class FittedCurves:
    """The gain model fitted on a log."""

    fit: GainFit
    labels: tuple[str, ...]

    def closed(self, domain: int, arm: ArmSpec, rows: np.ndarray | float) -> np.ndarray:
        curve = 1.0 - np.exp(-((np.maximum(rows, 0.0) / TAU_ROWS) ** POWER))
        return np.asarray(arm_share(self.fit.model, self.labels[domain], arm) * curve)


def rows_worth(gains: np.ndarray) -> np.ndarray:
    """Factors on rows that bring factors on gains, cut at 0 and 2, where the model's curve begins."""
    return np.asarray(np.clip(gains, 0.0, 2.0) ** (1.0 / POWER))


@dataclass(kw_only=True)
class LoggedOutcomes(SimulatedOutcomes):
    """Results of jobs on a logged service."""

    spread: float
    """Relative spread of a job's gain around the prediction."""
    labels: tuple[str, ...]
    jobs: list[LoggedJob] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Version of the replay -> version of the log that it stands for."""
    shadow: dict[str, dict[str, float]] = field(default_factory=dict)
    served: dict[tuple[str, str], float] = field(default_factory=dict)
    """(bucket, version of the log) -> acceptance length of the rounds that it served."""
    used: set[int] = field(default_factory=set)

    def train(self, order: TrainOrder) -> TrainTruth:
        i = self._logged(order)
        if i is None:
            return super().train(order)
        job, result = self.jobs[i], self.jobs[i].result
        made, score = result.version if result.status == "accepted" else None, result.candidate
        if made and result.train_s > order.time_limit_s:
            return super().train(order)
        self.used.add(i)
        self._learners.pop(order.bucket, None)
        version = f"v{len(self._lengths)}-{order.decision_id}"
        truth = msgspec.structs.replace(
            real_truth(result, {job.base_version: order.base} | ({made: version} if made else {})),
            train_s=min(result.train_s, order.time_limit_s),
            reason=f"as logged: {made or result.status}",
        )
        if result.status == "learning":  # a burst that the log lacks goes on from there, with a test that begins anew
            learner = SimulatedLearner(order.base, order.arm.parameters, order.domain, rows=float(job.num_learned))
            self._learners[order.bucket] = learner
        if made is None or score is None:
            return truth
        base = self._lengths[order.base]
        share = self.share(order.domain, base[order.domain : order.domain + 1])
        closed = self.closed(order.domain, order.arm, np.array([job.num_learned]), share)
        new = self.trained(order.domain, base, float(closed[0, 0]))
        new[order.domain] = max(base[order.domain] + score.gain_mean, 1.0)
        for d, label in enumerate(self.labels):
            scored = self.shadow.get(label, {})
            before = scored.get(self.names.get(order.base, ""))
            if (label, made) in self.served:  # scores are those of the learner some requests before
                new[d] = self.served[label, made]
            elif made in scored and before:  # exact: both versions were replayed on the same texts
                new[d] = base[d] * scored[made] / before
        self._lengths[version] = new
        self.names[version] = made
        return truth

    def redraw(self, rng: np.random.Generator) -> None:
        """Forget the results of logged jobs, and draw anew what the gain model leaves open."""
        self.jobs, steps = [], len(self.cost)
        common = rng.normal(1.0, self.spread)  # the model may be wrong for all jobs alike
        self.luck = rows_worth(common * rng.normal(1.0, self.spread, len(self.first)))
        self.cost = np.exp(rng.normal(0.0, 0.1, steps))
        self.noise_seed = int(rng.integers(2**31))
        self.fate = rng.random(steps)

    def _logged(self, order: TrainOrder) -> int | None:
        for i, job in enumerate(self.jobs):
            is_scored = job.result.status not in ("accepted", "rejected") or job.result.candidate is not None
            if i in self.used or not is_scored or self.names.get(order.base) != job.base_version:
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
    served: dict[tuple[str, str], float]
    """(bucket, version) -> acceptance length of at least SERVED_ROUNDS drafted rounds."""
    fit: GainFit
    slowdown: float
    """Relative slow-down of rounds while a job runs."""
    staging_s: float
    """Device-seconds of making another version live, per replica."""
    holdback_percent: int
    """Share of the hold-back group's tokens."""
    trainer_price: float
    """What a second of the trainer was booked at."""

    def learned(self) -> Learned:
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
        before = f"; {self.log.num_before} epochs with another first drafter before them are left out" if self.log.num_before else ""  # fmt: skip
        return [
            f"log: {len(self.log.epochs)} epochs of about {self.traffic.step_s:.0f} s, {len(self.log.jobs)} jobs, {scores} replay scores{before}",
            self.fit.sentence(),
            "jobs that the log holds are replayed as they went; others follow the gain model, whose error is the spread of the seeds",
        ]


def prepare(log: ServiceLog, name: str) -> LoggedService:
    """Traffic and fitted models of a log.

    Raises: ConfigError when it is too long, served nothing, or does not say how the first drafter fares.
    """
    step_s = float(np.median([e.end - e.start for e in log.epochs]))
    begin = log.epochs[0].start
    span_s, limit_s = log.epochs[-1].end - begin, min(MAX_DURATION_S, MAX_STEPS * step_s)
    if span_s > limit_s:
        raise ConfigError(
            f"log must span at most {limit_s / 86_400:.3g} days, got {span_s / 86_400:.6g}; keep its newest lines only, or "
            "delete those of a wrong clock"
        )
    device_s = sum(c.device_s for e in log.epochs for c in e.cells)
    labels = tuple(sorted({c.bucket for e in log.epochs for c in e.cells if c.own_tokens > 0}))
    if not labels or device_s <= 0:
        raise ConfigError(f"log must hold tokens and the device-seconds that they took, got {device_s:g} s in {len(labels)} buckets")  # fmt: skip
    first_version = log.epochs[0].first_version
    cells = [c for e in log.epochs for c in e.cells if c.group != Group.PLAIN]
    drafted = {(c.bucket, c.version) for c in cells if c.drafted_rounds > 0}
    if not drafted:
        raise ConfigError(
            "log must hold rounds with a draft, got none: what a better drafter brings hangs on their price"
        )
    lengths: dict[tuple[str, str], float] = {}
    served: dict[tuple[str, str], float] = {}
    for key in sorted(drafted):
        mine = [c for c in cells if (c.bucket, c.version) == key]
        rounds = sum(c.drafted_rounds for c in mine)
        lengths[key] = sum(c.kept for c in mine) / rounds
        if rounds >= SERVED_ROUNDS:
            served[key] = lengths[key]
    missing = [b for b in labels if (b, first_version) not in lengths and first_version not in log.shadow.get(b, {})]
    if missing:
        raise ConfigError(f"log must hold rounds or a replay score of the first drafter {first_version} in bucket {missing[0]}; keep a hold-back group")  # fmt: skip
    first = np.array([lengths.get((b, first_version)) or log.shadow[b][first_version] for b in labels])
    steps = max(int(np.ceil(span_s / step_s)), 1)
    tokens = np.zeros((steps, len(labels)))
    for epoch in log.epochs:
        k = min(max(int((epoch.end - begin) / step_s - 0.5), 0), steps - 1)
        k0 = min(max(int((epoch.start - begin) / step_s + 0.5), 0), k)  # one may have lasted for many, as in a pause
        for c in epoch.cells:
            if c.own_tokens > 0:
                tokens[k0 : k + 1, labels.index(c.bucket)] += c.own_tokens / (k + 1 - k0)
    spent = fold_entries(log.entries).by_kind()
    calm_s = device_s - min(max(spent.get("interference", 0.0), 0.0), 0.9 * device_s)
    drafted_s, plain_s = (seconds * calm_s / device_s for seconds in _round_seconds(cells))
    price = _trainer_price(log)
    during_s = _served_beside_jobs(log)
    swaps = [e.seconds for e in log.entries if e.kind == "staging"]
    static, whole = (sum(c.num_tokens for c in cells if c.group in groups) for groups in ((Group.STATIC,), (Group.STATIC, Group.ADAPTIVE)))  # fmt: skip
    rows_share, rows_before = _rows(log.epochs, labels)
    num_replicas = log.epochs[-1].num_replicas
    requests = sum(c.num_requests for c in cells)
    traffic = Traffic(
        step_s=step_s, labels=labels, tokens=tokens, drafted_s=drafted_s, plain_s=plain_s,
        batch_size=max(round(float(np.mean([e.batch_size for e in log.epochs]))), 1),
        tokens_per_request=max(sum(c.own_tokens for c in cells) / max(requests, 1.0), 1.0),
        num_replicas=num_replicas, rows_share=rows_share, rows_before=rows_before,
    )  # fmt: skip
    scenario = Scenario(name=f"{name}-{log.digest}", family="your log", duration_s=steps * step_s, step_s=step_s, regime_s=max(steps * step_s, step_s))  # fmt: skip
    scored = {(b, v): x for b, scores in log.shadow.items() for v, x in scores.items()}
    best = max([0.0, *(x for (_, v), x in (scored | lengths).items() if v != first_version)])
    return LoggedService(
        log=log, scenario=scenario, traffic=traffic, first=first, served=served, fit=fit_gains(log.jobs, best),
        slowdown=min((device_s - calm_s) / during_s, 3.0) if during_s > 0 else SLOWDOWN_PRIOR,
        staging_s=float(np.mean(swaps)) / max(num_replicas, 1) if swaps else STAGING_PRIOR_S,
        holdback_percent=round(100 * static / whole) if static else 10, trainer_price=price,
    )  # fmt: skip


def _rows(epochs: Sequence[FeedbackLine], labels: tuple[str, ...]) -> tuple[float, tuple[float, ...]]:
    """(share of the tokens that became rows, rows of each bucket before the log began); all and none where it says nothing."""
    begun, ended = epochs[0].rows_written, epochs[-1].rows_written
    emitted = sum(c.own_tokens for e in epochs[1:] for c in e.cells)
    if not ended or emitted <= 0:
        return 1.0, ()
    share = min(max(sum(ended.values()) - sum(begun.values()), 0) / emitted, 1.0)
    own = {b: sum(c.own_tokens for c in epochs[0].cells if c.bucket == b) for b in labels}
    return share, tuple(max(begun.get(b, 0) - share * own[b], 0.0) for b in labels)


def _trainer_price(log: ServiceLog) -> float:
    """What a second of the trainer was booked at, by the jobs that the log knows whole; 1 where none says it."""
    booked = _booked_jobs(log)
    taken_s = sum(taken for _, taken, _ in booked)
    return round(sum(seconds for _, _, seconds in booked) / taken_s, 6) if taken_s > 0 else 1.0


def _booked_jobs(log: ServiceLog) -> list[tuple[float, float, float]]:
    """(end, the trainer's seconds, what was booked for them) of every job whose order, result and entries are in the log."""
    found = {j.result.job_id: [0.0, j.result.train_s + j.result.shadow_s, 0.0] for j in log.jobs}
    for entry in log.entries:
        job = found.get(entry.entry_id.rpartition(":")[2])
        if job is not None and entry.kind in ("training", "shadow"):  # both when the job ends
            job[0], job[2] = entry.ts, job[2] + entry.seconds
    return [(end, taken, seconds) for end, taken, seconds in found.values() if end > 0]


def _served_beside_jobs(log: ServiceLog) -> float:
    """Device-seconds that serving would have taken without jobs while jobs ran."""
    start, end = (np.array([getattr(e, name) for e in log.epochs]) for name in ("start", "end"))  # (E,) each
    device_s = np.array([sum(c.device_s for c in e.cells) for e in log.epochs])
    slow_s = np.zeros(len(log.epochs))
    for entry in log.entries:
        if entry.kind == "interference":
            slow_s[min(int(np.searchsorted(end, entry.ts)), len(end) - 1)] += entry.seconds
    load = np.maximum(device_s - slow_s, 0.1 * device_s) / np.maximum(end - start, 1e-9)
    beside = (
        np.clip(np.minimum(end, ts) - np.maximum(start, ts - seconds), 0.0, None)
        for ts, seconds, _ in _booked_jobs(log)
    )
    return float(sum(overlap @ load for overlap in beside))


def _round_seconds(cells: list[FeedbackCell]) -> tuple[float, float]:
    """Device seconds of a round per request with a draft, of which there are some, and without; as dear when never seen."""
    drafted_s, drafted = sum(c.drafted_s for c in cells), sum(c.drafted_rounds for c in cells)
    plain_s, plain = sum(c.plain_s for c in cells), sum(c.plain_rounds for c in cells)
    with_draft = drafted_s / drafted
    return with_draft, plain_s / plain if plain >= 20 else with_draft


def logged_outcomes(service: LoggedService, seed: int) -> LoggedOutcomes:
    """Results of jobs on a prepared log; the seed draws what the gain model leaves open."""
    log, steps = service.log, service.traffic.num_steps
    rng = np.random.default_rng([seed, 11])
    first = log.epochs[0].first_version
    best = max([0.0, *(x for scores in log.shadow.values() for v, x in scores.items() if v != first)])
    ended = [j.result.status for j in log.jobs if j.result.status != "stopped"]
    read = [(j.result, sized(j.arm, max(j.num_read, 1))) for j in log.jobs if j.result.status != "stopped"]
    ratios = [r.train_s / prior_training_s(arm) for r, arm in read if r.train_s > 0]
    scorings = [r.shadow_s / prior_shadow_s(arm) for r, arm in read if r.shadow_s > 0]
    return LoggedOutcomes(
        first=service.first,
        ceiling=service.first + np.array([headroom_of(float(v), best) for v in service.first]),
        curves=FittedCurves(service.fit, service.traffic.labels),
        costs=PriorCosts(
            train_factor=float(np.mean(ratios)) if ratios else 1.0,
            scoring_factor=float(np.mean(scorings)) if scorings else 1.0,
        ),
        forgetting=off_diagonal(len(service.first), FORGETTING),
        transfer=off_diagonal(len(service.first), 0.0),
        learned=service.learned(),
        slowdown=service.slowdown,
        staging_s=service.staging_s,
        luck=rows_worth(rng.normal(1.0, service.fit.spread, len(service.first))),
        cost=np.exp(rng.normal(0.0, 0.1, steps)),
        noise_seed=int(rng.integers(2**31)),
        fate=rng.random(steps),
        failed=ended.count("failed") / len(ended) if ended else 0.0,
        spread=service.fit.spread,
        labels=service.traffic.labels,
        jobs=log.jobs,
        names={FIRST: log.epochs[0].first_version},
        shadow=log.shadow,
        served=service.served,
    )


def logged_settings(service: LoggedService, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run on a log: its hold-back, its trainer's price, and one decision for every epoch, unless `settings` says
    otherwise."""
    own = {"holdback_percent": service.holdback_percent, "trainer_price": service.trainer_price}
    return {"epoch_s": 0.999 * service.traffic.step_s, **own, **settings}


def replay_logged(service: LoggedService, policy: str, settings: Mapping[str, Any], seed: int) -> RunResult:
    """Run a policy (or the oracle) on a prepared log; the seed draws what the gain model leaves open."""
    outcomes, chosen = logged_outcomes(service, seed), logged_settings(service, settings)
    return run_policy(service.traffic, outcomes, policy, chosen, seed)
