"""World: a simulated service in which the real Controller decides and the truth is known; and its decision log."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.recall import SCORE_SD
from paceline.bandit.controller.controller import Controller, HostContext
from paceline.bandit.controller.decision_log import KIND
from paceline.bandit.ledger.ledger import contradictions
from paceline.bandit.replay.outcomes import FIRST, REFUSED, Outcomes, TrainOrder, TrainTruth
from paceline.bandit.replay.scenario import Traffic
from paceline.config import PolicyConfig
from paceline.contracts import (
    CellSums,
    Decision,
    FeedbackSums,
    Group,
    RequestSums,
    RoundMean,
    ShadowScore,
    SizeSums,
    TrainResult,
    burst_plan,
)
from paceline.machine import ManualClock

START = 1000.0
STORE_ROWS = 60_000
"""Rows of a bucket that the trace store keeps."""
MAX_UNITS = {Group.ADAPTIVE: 16, Group.STATIC: 4}
"""Requests of a step and domain that are reported one by one; more are pooled."""
LENGTH_SD, TIME_SD = 0.12, 0.05
"""Relative spread of a request's acceptance length and of its time per round."""
KINDS = ("training", "shadow", "interference", "staging")
REHEARSED = 8
"""Requests of each other bucket that a job's replay scores."""


class RunResult(msgspec.Struct, kw_only=True):
    """One policy on one cell with one seed; device-seconds."""

    never_s: float
    """What serving costs when nothing is ever trained."""
    serving_s: float
    """What serving cost under this policy, interference left out."""
    spent: dict[str, float]
    """True spend by kind: training, shadow, interference, staging."""
    ledger: dict[str, Any]
    """What the controller booked, by kind; its savings are estimates from the hold-back group."""
    net_s: float
    """never_s - serving_s - spent."""
    curve: list[float]
    """Cumulative net at `times`."""
    times: list[float]
    num_jobs: int = 0
    num_accepted: int = 0
    num_swaps: int = 0
    events: list[dict[str, Any]] = []
    """Decisions that acted, with time, bucket, arm or version, reason."""
    contradictions: list[str] = []

    @property
    def net_share(self) -> float:
        return self.net_s / self.never_s if self.never_s > 0 else 0.0


def planned_result(
    traffic: Traffic,
    never_s: np.ndarray,
    flow: np.ndarray,
    spent: dict[str, float],
    events: list[dict[str, Any]],
    *,
    num_accepted: int,
    num_swaps: int = 0,
) -> RunResult:
    """The result of a given plan; `never_s` and `flow` (saved less spent): (T,) device-seconds by step."""
    steps, total = traffic.num_steps, np.concatenate([[0.0], np.cumsum(flow)])
    at = sorted({*range(0, steps + 1, max(steps // 60, 1)), steps})
    never, net = float(never_s.sum()), float(total[-1])
    return RunResult(
        never_s=never,
        serving_s=never - net - sum(spent.values()),
        spent=spent,
        ledger={},
        net_s=net,
        curve=[round(float(total[k]), 4) for k in at],
        times=[k * traffic.step_s for k in at],
        num_jobs=len(events),
        num_accepted=num_accepted,
        num_swaps=num_swaps,
        events=events,
    )


class World:
    """Drives one Controller through `traffic`; jobs come out as `outcomes` says. Deterministic per seed."""

    def __init__(
        self,
        traffic: Traffic,
        outcomes: Outcomes,
        config: PolicyConfig,
        *,
        seed: int,
        slowdown: float = 0.05,
    ) -> None:
        self.traffic, self.outcomes, self.config, self.slowdown = traffic, outcomes, config, slowdown
        self.has_long_steps = traffic.step_s >= 0.99 * config.epoch_s
        self.clock = ManualClock(START)
        self.controller = Controller(config, outcomes.arms, clock=self.clock, rng=np.random.default_rng(config.seed))
        self._noise = np.random.default_rng([seed, 7919])
        self.default, self.versions = FIRST, [FIRST]
        self.own: dict[str, str] = {}
        """Bucket -> version of its own; the others have the default."""
        self.written = traffic.rows_at_start()
        self.read = np.zeros_like(self.written)
        """Rows that learners have read."""
        self.job: tuple[Decision, TrainTruth, float, int] | None = None  # with its end and domain
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.never_s = self.serving_s = 0.0
        self.events: list[dict[str, Any]] = []
        self.num_jobs = self.num_accepted = self.num_swaps = 0
        self._busy = np.zeros(traffic.num_steps)
        self._first_s = traffic.token_s(outcomes.lengths(FIRST))

    def run(self) -> RunResult:
        """Serve to the end of the traffic, then end a job in flight and book what it cost so far."""
        steps, curve, times = self.traffic.num_steps, [0.0], [0.0]
        every = max(steps // 60, 1)
        for k in range(steps):
            self.step(k)
            if (k + 1) % every == 0 or k == steps - 1:
                curve.append(self.net_s)
                times.append((k + 1) * self.traffic.step_s)
        if self.stop_job():
            curve[-1] = self.net_s
        return self.result(curve, times)

    def result(self, curve: list[float], times: list[float]) -> RunResult:
        """What came of the steps so far; drains the controller."""
        # All of the run: the controller itself keeps the latest actions alone.
        decisions, entries = self.controller.drain()
        return RunResult(
            never_s=self.never_s,
            serving_s=self.serving_s,
            spent=dict(self.spent),
            ledger=msgspec.to_builtins(self.controller.snapshot().ledger),
            net_s=self.net_s,
            curve=[round(v, 4) for v in curve],
            times=times,
            num_jobs=self.num_jobs,
            num_accepted=self.num_accepted,
            num_swaps=self.num_swaps,
            events=self.events,
            contradictions=contradictions(self.controller.ledger_totals(), entries, decisions),
        )

    def stop_job(self) -> bool:
        """End a job in flight and book what it cost so far; False without one."""
        if self.job is None:
            return False
        decision, truth, end, domain = self.job
        left = max(end - self.clock.now(), 0.0)
        train_s = max(truth.train_s + truth.shadow_s - left, 0.0)
        self._finish(decision, msgspec.structs.replace(truth, status="stopped", version=None, train_s=train_s, shadow_s=0.0, reason="the replay ended"), domain)  # fmt: skip
        return True

    @property
    def net_s(self) -> float:
        return self.never_s - self.serving_s - sum(self.spent.values())

    def step(self, k: int) -> None:
        """Serve step k, end a job that is due, decide."""
        self.controller.observe(self._serve(k))
        self._pass_time()
        now = self.clock.now()
        for decision in self.controller.tick(now, self._context()):
            self._obey(decision, k, now)

    def _pass_time(self) -> None:
        """To the end of the step, and a job that is due by then ends; with steps as long as epochs, when it is due.

        The controller hears of the swap when it happens then, as from a host that ticks every second.
        """
        begin = self.clock.now()
        end = begin + self.traffic.step_s
        if self.job is not None and self.job[2] <= end:
            decision, truth, due, domain = self.job
            if self.has_long_steps:
                due = min(max(due, self.clock.now()), end - 0.01 * self.traffic.step_s)
                self.clock.advance(due - self.clock.now())
                self._finish(decision, truth, domain)
                if due - begin < self.config.epoch_s:  # the epoch ends with the step, which holds all of its feedback
                    self.controller.tick(due, self._context())
            else:
                self.clock.advance(end - self.clock.now())
                self._finish(decision, truth, domain)
        self.clock.advance(end - self.clock.now())

    def _obey(self, decision: Decision, k: int, now: float) -> None:
        if decision.action == "hold":
            return
        self._note(decision.action, decision.bucket, decision.arm or decision.version or "", decision.reason)
        if decision.action == "train":
            self._start(decision, k, now)
        elif decision.version is not None:
            self._swap(decision.bucket, decision.version, decision.decision_id)

    def version_of(self, bucket: str) -> str:
        """The version that a bucket has."""
        return self.own.get(bucket, self.default)

    def _start(self, decision: Decision, k: int, now: float) -> None:
        arm, labels = self.controller.arm_of(decision), self.traffic.labels
        mine = [d for d, label in enumerate(labels) if label == decision.bucket]
        recent = self.traffic.tokens[max(k - 5, 0) : k + 1, mine].sum(axis=0)
        domain = mine[int(np.argmax(recent))]
        order = TrainOrder(
            step=k,
            domain=domain,
            bucket=decision.bucket,
            arm=arm,
            base=str(decision.context["base_version"]),
            rows=int(min(arm.num_rows, self.written[domain] - self.read[domain], STORE_ROWS)),
            rows_per_request=self.traffic.tokens_per_request,
            time_limit_s=float(decision.context["time_limit_s"]),
            decision_id=decision.decision_id,
            min_gain=float(decision.context.get("min_gain", 0.0)),
            plan=burst_plan(decision),
        )
        truth = self.outcomes.train(order)
        self.read[domain] += order.rows if truth.num_rows is None else truth.num_rows
        duration = truth.train_s + truth.shadow_s
        self.job = (decision, truth, now + duration, domain)
        self.num_jobs += 1
        at, left = k + 1, duration
        while left > 0 and at < self.traffic.num_steps:
            self._busy[at] = min(left / self.traffic.step_s, 1.0)
            left -= self.traffic.step_s
            at += 1

    def _finish(self, decision: Decision, truth: TrainTruth, domain: int) -> None:
        self.job = None
        self.spent["training"] += self.config.trainer_price * truth.train_s
        self.spent["shadow"] += self.config.trainer_price * truth.shadow_s
        arm, base = self.controller.arm_of(decision), str(decision.context["base_version"])
        before, first = float(self.outcomes.lengths(base)[domain]), float(self.outcomes.lengths(FIRST)[domain])

        def score(version: str, length: float) -> ShadowScore:
            return ShadowScore(
                version=version, acceptance_length=length, num_requests=truth.num_scored, num_tokens=100 * truth.num_scored,
                gain_mean=gain or 0.0, gain_lower=truth.seen_lower,
            )  # fmt: skip

        gain = truth.seen_gain
        result = TrainResult(
            job_id=f"job-{decision.decision_id}",
            status=truth.status,
            version=truth.version,
            reason=truth.reason,
            train_s=truth.train_s,
            shadow_s=truth.shadow_s,
            candidate=None if gain is None else score(truth.version or REFUSED, before + gain),
            incumbent=None if gain is None else score(base, before),
            first=None if gain is None else score(FIRST, first),
            num_rows=truth.num_rows,
            num_requests=truth.num_requests,
            log_evidence=truth.log_evidence,
            num_rows_before=truth.num_rows_before,
            elsewhere=self._elsewhere(decision.bucket, base, truth),
            start_s=truth.start_s,
        )
        if truth.version is not None:
            self.versions.append(truth.version)
            self.num_accepted += 1
        outcome = self.controller.job_finished(result, decision_id=decision.decision_id, now=self.clock.now())
        self._note(truth.status, decision.bucket, truth.version or arm.name, truth.reason)
        if outcome.publish is not None:
            self._swap(decision.bucket, outcome.publish, decision.decision_id)

    def _elsewhere(self, bucket: str, base: str, truth: TrainTruth) -> dict[str, list[ShadowScore]]:
        """What the replay of rehearsed requests says of a new version and its base on the buckets served before."""
        found: dict[str, list[ShadowScore]] = {}
        if truth.elsewhere is not None or truth.version is None:
            return truth.elsewhere or found
        for d, label in enumerate(self.traffic.labels):
            if label == bucket or self.written[d] <= 0:
                continue
            luck = 1.0 + SCORE_SD / REHEARSED**0.5 * float(self._noise.standard_normal())  # the same requests for both
            found[label] = [
                ShadowScore(
                    version=v, acceptance_length=max(1.0 + (float(self.outcomes.lengths(v)[d]) - 1.0) * luck, 1.0),
                    num_requests=REHEARSED, num_tokens=800, gain_mean=0.0, gain_lower=0.0,
                )
                for v in (truth.version, base)
            ]  # fmt: skip
        return found

    def _swap(self, bucket: str, version: str, decision_id: int) -> None:
        """Give a version to a bucket, or to all: '', as an operator may."""
        if not bucket:
            self.default, self.own = version, {}
        elif version == self.default:
            self.own.pop(bucket, None)
        else:
            self.own[bucket] = version
        self.num_swaps += 1
        seconds = self.outcomes.staging_s * self.traffic.num_replicas
        self.spent["staging"] += seconds
        self.controller.staged(decision_id, seconds, self.clock.now())

    def _context(self) -> HostContext:
        written: dict[str, int] = {}
        for label, rows in zip(self.traffic.labels, self.written.tolist(), strict=True):
            if rows > 0:
                written[label] = written.get(label, 0) + int(rows)
        return HostContext(
            live_version=self.default,
            first_version=FIRST,
            rows={b: min(n, STORE_ROWS) for b, n in written.items()},
            rows_written=written,
            versions=list(self.versions),
            job_running=self.job is not None,
            num_replicas=self.traffic.num_replicas,
            learned_rows=self.outcomes.learned,
            class_versions=dict(self.own),
        )

    def _serve(self, k: int) -> FeedbackSums:
        """Account for the step's true cost; return what the replicas would report."""
        traffic, tokens = self.traffic, self.traffic.tokens[k]
        self.written += tokens * traffic.rows_share
        holdback = self.config.holdback_percent / 100.0
        slow = self.slowdown * float(self._busy[k])
        first = self.outcomes.lengths(FIRST)
        versions = [self.version_of(label) for label in traffic.labels]
        live = np.array([self.outcomes.lengths(v)[d] for d, v in enumerate(versions)])
        live_s = traffic.token_s(live)
        # so that it is exactly never_s without a swap
        cost = float(tokens @ (self._first_s + (1 - holdback) * (live_s - self._first_s)))
        self.never_s += float(tokens @ self._first_s)
        self.serving_s += cost
        self.spent["interference"] += slow * cost
        cells: list[CellSums] = []
        for d in np.flatnonzero(tokens).tolist():
            for group, version, share, lengths in (
                (Group.ADAPTIVE, versions[d], 1 - holdback, live),
                (Group.STATIC, FIRST, holdback, first),
            ):
                cells += self._cell(k, d, group, version, float(tokens[d]) * share, float(lengths[d]), slow)
        drafted, plain = sum(c.drafted_rounds for c in cells), sum(c.num_rounds - c.drafted_rounds for c in cells)
        rounds = [*self._rounds(k, drafted, is_drafted=True), *self._rounds(k, plain, is_drafted=False)]
        return FeedbackSums(cells=cells, rounds=rounds)

    def _cell(
        self, k: int, d: int, group: Group, version: str, tokens: float, length: float, slow: float
    ) -> list[CellSums]:
        traffic = self.traffic
        requests = tokens / traffic.tokens_per_request
        units = min(int(requests + self._noise.random()), MAX_UNITS[group])
        if units == 0:
            return []
        pooled = max(requests / units, 1.0)  # requests behind one reported unit
        z = self._noise.standard_normal((2, units)) / np.sqrt(pooled)
        lengths = np.maximum(length * (1.0 + LENGTH_SD * z[0]), 1.02)
        q = float(traffic.drafted_share(length))
        round_s = (q * traffic.drafted_s + (1 - q) * traffic.plain_s) * (1.0 + slow)
        emitted = traffic.tokens_per_request * pooled
        rounds = emitted / (q * lengths + 1 - q)
        seconds = rounds * round_s * np.maximum(1.0 + TIME_SD * z[1], 0.1)
        table = np.stack([seconds, np.full(units, emitted), q * rounds, q * rounds * lengths], axis=1).tolist()
        num_rounds = round(float(rounds.sum()))
        drafted = round(q * num_rounds)
        total_s = float(seconds.sum())
        drafted_s = total_s * q * traffic.drafted_s / (q * traffic.drafted_s + (1 - q) * traffic.plain_s)
        return [
            CellSums(
                bucket=traffic.labels[d],
                group=str(group),
                version=version,
                sizes={
                    traffic.batch_size: SizeSums(
                        num_rounds=num_rounds,
                        drafted_rounds=drafted,
                        drafted_s=drafted_s,
                        plain_s=total_s - drafted_s,
                        num_tokens=emitted * units,
                        plain_tokens=num_rounds - drafted,
                    )
                },
                requests={f"{k}.{d}.{group.value}.{u}": RequestSums(*row) for u, row in enumerate(table)},
            )
        ]

    def _rounds(self, k: int, count: int, *, is_drafted: bool) -> list[RoundMean]:
        if count == 0:
            return []
        base = self.traffic.drafted_s if is_drafted else self.traffic.plain_s
        busy = float(self._busy[k])
        out = []
        for is_training, share, factor in ((False, 1 - busy, 1.0), (True, busy, 1.0 + self.slowdown)):
            n = int(count * share)
            if n > 0:
                mean = base * factor * (1.0 + TIME_SD * float(self._noise.standard_normal()) / n**0.5)
                out.append(RoundMean(batch_size=self.traffic.batch_size, is_drafted=is_drafted, is_training=is_training, num_rounds=n, mean_s=mean))  # fmt: skip
        return out

    def _note(self, action: str, bucket: str, what: str, reason: str) -> None:
        found = {"t": self.clock.now() - START, "action": action, "bucket": bucket, "what": what, "reason": reason}
        self.events.append(found)


def record(world: World) -> bytes:
    """Run a world to its end; the lines that a service would have appended to decisions.jsonl (docs/policies.md)."""
    lines: list[dict[str, Any]] = []
    jobs: dict[int, tuple[float, TrainResult]] = {}
    controller, finish = world.controller, world.controller.job_finished

    def job_finished(result: TrainResult, **known: Any) -> Any:
        jobs[known["decision_id"]] = (known["now"], result)
        return finish(result, **known)

    controller.job_finished = job_finished  # type: ignore[method-assign]
    for k in range(world.traffic.num_steps):
        world.step(k)
        lines += _drained(world, jobs)
        closed = controller.closed_epoch()
        if closed is not None:
            lines.append({"kind": KIND, **msgspec.to_builtins(closed)})
    world.stop_job()
    lines += _drained(world, jobs)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _drained(world: World, jobs: dict[int, tuple[float, TrainResult]]) -> list[dict[str, Any]]:
    decisions, entries = world.controller.drain()
    lines = [{"kind": "decision", **msgspec.to_builtins(d)} for d in decisions]
    lines += [{"kind": "ledger", **msgspec.to_builtins(e)} for e in entries]
    for d in decisions:
        if d.decision_id in jobs:
            at, result = jobs.pop(d.decision_id)
            lines.append(
                {"log_id": f"{int(at * 1000)}-0", "kind": "job", **msgspec.to_builtins(result), "bucket": d.bucket, "arm": d.arm}
            )  # fmt: skip
    return lines
