"""Hindsight plan: what a plan that knows the future saves when it is really carried out.

The plan of the bound (bandit/replay/oracle.py) is carried out as a service would: one burst at a time, every row read once
and scored, staging; it needs no evidence. Each domain's version is chosen by dynamic programming over the traffic that follows. Local
search then drops, moves, resizes and rebases jobs while that pays. What it finds can be reached, so the best possible plan
lies between it and the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.outcomes import FIRST, SimulatedOutcomes
from paceline.bandit.replay.scenario import Traffic
from paceline.bandit.replay.world import RunResult, planned_result
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec

MAX_ROUNDS = 40
"""Improvements after which the search stops."""
CHUNK_BYTES = 1 << 30
"""Of the plans that are carried out together, at least one."""


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job of a plan."""

    step: int
    """Decided at the end of this step, or when the job before it has ended."""
    domain: int
    arm: int
    rows: float
    from_first: bool = False
    """Trained from the first drafter; else from the version that serves its domain best."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan carried out."""

    net_s: float
    flow: np.ndarray  # (T,) device-seconds saved less spent, by step
    spent: dict[str, float]
    events: list[dict]
    num_accepted: int
    num_swaps: int


class Trained(NamedTuple):
    """What a plan has trained: versions by the step from which each can serve, what they took, by step."""

    lengths: np.ndarray  # (V, D)
    ready: np.ndarray  # (V,)
    train_s: np.ndarray  # (T,)
    shadow_s: np.ndarray  # (T,)
    busy: np.ndarray  # (T,) share of the step
    events: list[dict]


class Executor:
    """Carries plans out on one cell and seed."""

    def __init__(
        self,
        traffic: Traffic,
        outcomes: SimulatedOutcomes,
        config: PolicyConfig,
        *,
        slowdown: float,
        arms: tuple[ArmSpec, ...],
    ) -> None:
        self.traffic, self.outcomes, self.slowdown, self.arms = traffic, outcomes, slowdown, arms
        self.price = config.trainer_price
        self.share = 1.0 - config.holdback_percent / 100.0
        self.first = outcomes.lengths(FIRST)
        self.first_s = traffic.tokens @ traffic.token_s(self.first)  # (T,)
        self.written = traffic.rows()
        self.staging_s = outcomes.staging_s * traffic.num_replicas
        self._seconds: dict[tuple[int, float, int], tuple[float, float]] = {}
        self._made: dict[tuple[int, int, float, bytes, bool], np.ndarray | None] = {}
        """What jobs take and make: the plans of a search have most jobs in common."""

    def run(self, plans: list[list[PlannedJob]]) -> list[Outcome]:
        """Train by each plan, serve as well as the versions there are allow."""
        return self._serve([self._train(plan) for plan in plans])

    def best(self, plans: list[list[PlannedJob]]) -> tuple[Outcome, int]:
        """What the best of the plans comes to and its number, the first of several; CHUNK_BYTES are held at once."""
        versions = 1 + max(map(len, plans))
        plan_bytes = 12 * self.traffic.tokens.size * versions  # prices of float64, moves of int32
        num, best = max(CHUNK_BYTES // plan_bytes, 1), None
        for at in range(0, len(plans), num):
            for number, found in enumerate(self.run(plans[at : at + num]), at):
                if best is None or found.net_s > best[0].net_s:
                    best = found, number
        assert best is not None, "plans must not be empty"
        return best

    def _train(self, plan: list[PlannedJob]) -> Trained:
        steps, step_s = self.traffic.num_steps, self.traffic.step_s
        lengths, ready, events = [self.first], [0], []
        train_s, shadow_s = np.zeros(steps), np.zeros(steps)
        busy, read = np.zeros(steps), np.zeros(len(self.first))
        free = 0
        for job in sorted(plan, key=lambda j: j.step):
            k = max(job.step, free - 1)
            rows = min(job.rows, float(self.written[min(k, steps - 1), job.domain] - read[job.domain]))
            if k >= steps - 1 or rows < 1 or self.outcomes.is_failed(k):
                continue
            seconds, scoring = self._job_seconds(job.arm, rows, k)
            end = k + 1 + max(int(np.ceil((seconds + scoring) / step_s)), 1)  # a service looks for it once a step
            if end >= steps:
                continue
            train_s[k + 1], shadow_s[k + 1] = self.price * seconds, self.price * scoring
            left = seconds + scoring
            for at in range(k + 1, end):
                busy[at] = min(left / step_s, 1.0)
                left -= step_s
            free = end
            read[job.domain] += rows
            base = self._base(lengths, ready, job, k)
            events.append({"t": (k + 1) * step_s, "action": "train", "bucket": self.traffic.labels[job.domain], "what": self.arms[job.arm].name, "reason": f"{rows:.0f} rows, known to pay"})  # fmt: skip
            made = self._version(job.domain, job.arm, rows, base, self.outcomes.is_harmful(k))
            if made is not None:
                lengths.append(made)
                ready.append(end)
        return Trained(np.stack(lengths), np.array(ready), train_s, shadow_s, busy, events)

    def _job_seconds(self, arm: int, rows: float, step: int) -> tuple[float, float]:
        key = (arm, rows, step)
        if key not in self._seconds:
            training, scoring = self.outcomes.job_seconds(self.arms[arm], rows, step)
            self._seconds[key] = float(training), float(scoring)
        return self._seconds[key]

    def _version(self, domain: int, arm: int, rows: float, base: np.ndarray, is_harmful: bool) -> np.ndarray | None:
        """(D,) lengths of the version that a job makes; None when it is no better than its base, as the gate finds."""
        key = (domain, arm, rows, base.tobytes(), is_harmful)
        if key not in self._made:
            share = self.outcomes.share(domain, base[domain : domain + 1])
            closed = float(self.outcomes.closed(domain, self.arms[arm], np.array([rows]), share)[0, 0])
            is_let = is_harmful or self.outcomes.gain(domain, base, closed) > 0
            self._made[key] = self.outcomes.trained(domain, base, closed, is_harmful=is_harmful) if is_let else None
        return self._made[key]

    def _base(self, lengths: list[np.ndarray], ready: list[int], job: PlannedJob, k: int) -> np.ndarray:
        best = self.first
        if not job.from_first:
            for version, at in zip(lengths, ready, strict=True):
                if at <= k + 1 and version[job.domain] > best[job.domain]:
                    best = version
        return best

    def _serve(self, trained: list[Trained]) -> list[Outcome]:
        """The cheapest sequence of versions for every domain of every plan."""
        steps, tokens = self.traffic.num_steps, self.traffic.tokens
        most = max(len(t.ready) for t in trained)
        own_s = np.full((steps, len(trained), tokens.shape[1], most), np.inf)
        slows = [1.0 + self.slowdown * t.busy for t in trained]  # (T,) each
        for n, (t, slow) in enumerate(zip(trained, slows, strict=True)):
            is_ready = np.arange(steps)[:, None] >= t.ready[None, :]  # (T, V)
            token_s = self.traffic.token_s(t.lengths)  # (V, D)
            cost = self.share * (tokens * slow[:, None])[:, :, None] * token_s.T[None]  # (T, D, V)
            own_s[:, n, :, : len(t.ready)] = np.where(is_ready[:, None, :], cost, np.inf)
        paths = self._paths(own_s.reshape(steps, -1, most)).reshape(steps, len(trained), -1)  # (T, N, D)
        served = np.take_along_axis(own_s, paths[..., None], axis=3).sum(axis=(2, 3))  # (T, N)
        num_swaps = np.concatenate([paths[:1] != 0, paths[1:] != paths[:-1]]).sum(axis=2)
        outcomes = []
        for n, (t, slow) in enumerate(zip(trained, slows, strict=True)):
            served_s = (1.0 - self.share) * self.first_s * slow + served[:, n]
            flow = self.first_s - served_s - t.train_s - t.shadow_s - self.staging_s * num_swaps[:, n]
            num = int(num_swaps[:, n].sum())
            spent = {
                "training": float(t.train_s.sum()),
                "shadow": float(t.shadow_s.sum()),
                "interference": float((served_s - served_s / slow).sum()),
                "staging": float(self.staging_s * num),
            }
            outcomes.append(Outcome(float(flow.sum()), flow, spent, t.events, len(t.ready) - 1, num))
        return outcomes

    def _paths(self, cost: np.ndarray) -> np.ndarray:
        """(T, D) the version of every step at the least cost, (T, D, V) seconds, swaps included; it begins with version 0."""
        steps, domains, num = cost.shape
        value = np.full((domains, num), np.inf)
        value[:, 0] = 0.0
        came = np.zeros((steps, domains, num), dtype=np.int32)
        every, stay = np.arange(domains), np.arange(num)
        for k in range(steps):
            best = value.argmin(axis=1)
            swapped = value[every, best] + self.staging_s
            is_swap = swapped[:, None] < value
            came[k] = np.where(is_swap, best[:, None], stay)
            value = np.where(is_swap, swapped[:, None], value) + cost[k]
        path = np.zeros((steps, domains), dtype=np.int32)
        at = value.argmin(axis=1)
        for k in range(steps - 1, -1, -1):
            path[k] = at
            at = came[k, every, at]
        return path


def neighbours(plan: list[PlannedJob], arms: tuple[ArmSpec, ...]) -> list[list[PlannedJob]]:
    """Every plan that differs in one job: left out, earlier or later, smaller or larger, other arm, other base."""
    out = []
    for i, job in enumerate(plan):
        rest = plan[:i] + plan[i + 1 :]
        changed = [replace(job, from_first=not job.from_first)]
        changed += [replace(job, step=max(job.step + move, 0)) for move in (-3, -1, 1, 3, 8)]
        changed += [
            replace(job, rows=float(min(max(job.rows * f, 64.0), arms[job.arm].num_rows)))
            for f in (0.5, 0.75, 1.5, 2.5)
        ]
        changed += [
            replace(job, arm=a, rows=float(min(job.rows, arms[a].num_rows))) for a in range(len(arms)) if a != job.arm
        ]
        out.append(rest)
        out += [[*rest, new] for new in changed if new != job]
    return out


def _search(executor: Executor, plan: list[PlannedJob]) -> Outcome:
    """The best of a plan and what it becomes while one of its neighbours is better."""
    best = executor.run([plan])[0]
    for _ in range(MAX_ROUNDS):
        plans = neighbours(plan, executor.arms)
        if not plans:
            break
        found, number = executor.best(plans)
        if found.net_s <= best.net_s + 1e-9:
            break
        best, plan = found, plans[number]
    return best


def best_plan(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    config: PolicyConfig,
    *,
    slowdown: float,
    arms: tuple[ArmSpec, ...] | None = None,
) -> RunResult:
    """The best plan found, as a RunResult; never worse than doing nothing."""
    arms = arms or outcomes.arms
    executor = Executor(traffic, outcomes, config, slowdown=slowdown, arms=arms)
    names, ends = [a.name for a in arms], []
    for has_transfer in (False, True) if outcomes.transfer.any() else (False,):
        bound = hindsight(traffic, outcomes, config, slowdown=slowdown, arms=arms, has_transfer=has_transfer)
        plan = [
            PlannedJob(
                step=round(e["t"] / traffic.step_s) - 1,
                domain=int(e["domain"]),
                arm=names.index(e["what"]),
                rows=float(e["rows"]),
            )
            for e in bound.events
        ]
        ends.append(_search(executor, plan))
    best = max([*ends, *executor.run([[]])], key=lambda o: o.net_s)
    return planned_result(
        traffic,
        executor.first_s,
        best.flow,
        best.spent,
        best.events,
        num_accepted=best.num_accepted,
        num_swaps=best.num_swaps,
    )
