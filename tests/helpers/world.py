"""A simulated service for controller tests: traffic, captured rows, training jobs with known true gains."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable

import numpy as np

from paceline.bandit.beliefs.observation import summed
from paceline.bandit.controller.controller import Controller, HostContext
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Decision, FeedbackSums, Group, RoundStats, ShadowScore, TrainResult
from paceline.machine import ManualClock

FIRST = "v0"


@dataclasses.dataclass
class World:
    """Serves `mix(t)` (bucket -> share) with one device. Not pure decision logic: a stand-in for the host."""

    config: PolicyConfig
    mix: Callable[[float], dict[str, float]]
    lengths: dict[str, float]
    """Acceptance length of the first version per bucket."""
    ceilings: dict[str, float]
    """Acceptance length after endless training per bucket."""
    round_s: float = 0.025
    batch_size: int = 4
    slowdown: float = 0.04
    forget: float = 0.05
    """Share of the acceptance length that a new version has less on other buckets."""
    train_s: Callable[[ArmSpec], float] = lambda arm: 1.2 + 1.5 * arm.num_rows / 670.0
    arm_power: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"calibration": 0.1, "head": 0.62, "full": 1.0}
    )
    static_share: float = 0.1
    tau_rows: float = 3000.0
    """Rows after which a job has closed 1 - 1/e of the gap; not the gain model's."""
    step_s: float = 1.0
    seed: int = 0
    off_below: float = 0.0
    """Acceptance length below which the tree policy drafts in one round of ten only; such a round costs 0.6 of a drafted one."""
    learned: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.clock = ManualClock(1000.0)
        self.controller = Controller(self.config, clock=self.clock, rng=np.random.default_rng(self.config.seed))
        self.true = {FIRST: dict(self.lengths)}
        self.rows: dict[str, int] = {}
        self.live, self.own, self.versions = FIRST, dict[str, str](), [FIRST]
        self.job: tuple[Decision, float, float] | None = None
        self.decisions: list[Decision] = []
        self.swaps: list[tuple[float, str, str]] = []
        """Time, bucket, version."""
        self.tokens: dict[str, int] = {}

    @property
    def t(self) -> float:
        return self.clock.now() - 1000.0

    def version_of(self, bucket: str) -> str:
        return self.own.get(bucket, self.live)

    def traffic(self) -> FeedbackSums:
        """The rounds of one step."""
        busy = self.job is not None
        round_s = self.round_s * (1.0 + (self.slowdown if busy else 0.0))
        num_rounds = max(int(self.step_s / round_s), 1)
        mix = {b: s for b, s in self.mix(self.t).items() if s > 0}
        names, shares = sorted(mix), np.array([mix[b] for b in sorted(mix)])
        columns: dict[str, list] = {
            k: []
            for k in ("request_id", "bucket", "group", "drafter_version", "num_accepted_tokens", "num_draft_tokens")
        }
        for slot in range(self.batch_size):
            request = f"{slot}-{int(self.t) // 2}"
            draw = np.random.default_rng(zlib.crc32(f"{self.seed}{request}".encode()))
            bucket = str(draw.choice(names, p=shares / shares.sum()))
            is_static = draw.random() < self.static_share
            version = FIRST if is_static else self.version_of(bucket)
            length = max(self.true[version][bucket] * (1.0 + 0.12 * draw.standard_normal()), 1.02)
            accepted = self.rng.binomial(6, min((length - 1.0) / 6.0, 1.0), size=num_rounds)
            is_drafted = np.ones(num_rounds, dtype=bool)
            if self.true[version][bucket] < self.off_below:
                is_drafted = self.rng.random(num_rounds) < 0.1
                accepted = np.where(is_drafted, accepted, 0)
            columns["request_id"] += [request] * num_rounds
            columns["bucket"] += [bucket] * num_rounds
            columns["group"] += [str(Group.STATIC if is_static else Group.ADAPTIVE)] * num_rounds
            columns["drafter_version"] += [version] * num_rounds
            columns["num_accepted_tokens"] += accepted.tolist()
            columns["num_draft_tokens"] += np.where(is_drafted, 8, 0).tolist()
            emitted = int(accepted.sum()) + num_rounds
            self.rows[bucket] = self.rows.get(bucket, 0) + emitted
            self.tokens[bucket] = self.tokens.get(bucket, 0) + emitted
        n = len(columns["request_id"])
        share_ms = 1000.0 * round_s / self.batch_size * self.rng.normal(1.0, 0.05, size=n)
        share_ms = np.where(np.asarray(columns["num_draft_tokens"]) > 0, share_ms, 0.6 * share_ms)
        rows = RoundStats(
            is_greedy=[False] * n,
            round_index=[0] * n,
            num_emitted_tokens=[a + 1 for a in columns["num_accepted_tokens"]],
            batch_size=[self.batch_size] * n,
            draft_ms=[0.5] * n,
            verify_ms=[1.0] * n,
            share_ms=share_ms.tolist(),
            is_training=[busy] * n,
            ts=[self.clock.now()] * n,
            **columns,
        )
        return summed(rows)

    def context(self) -> HostContext:
        return HostContext(
            live_version=self.live,
            first_version=FIRST,
            rows={b: min(n, 60_000) for b, n in self.rows.items()},
            rows_written=dict(self.rows),
            versions=list(self.versions),
            job_running=self.job is not None,
            learned_rows=self.learned,
            class_versions=dict(self.own),
        )

    def train(self, decision: Decision) -> TrainResult:
        """The job's true outcome plus measurement noise; the gate accepts when the lower bound is above zero."""
        arm, bucket = self.controller.arm_of(decision), decision.bucket
        base = str(decision.context["base_version"])
        room = max(self.ceilings[bucket] - self.true[base][bucket], 0.0)
        gain = room * (1.0 - math.exp(-((arm.num_rows / self.tau_rows) ** 0.5))) * self.arm_power[arm.parameters]
        seen = gain + 0.03 * self.rng.standard_normal()
        lower = seen - 1.645 * 0.03
        accepted = lower > 0
        version = f"v{len(self.versions)}-{decision.decision_id}" if accepted else None
        if version is not None:
            self.true[version] = {
                b: length + gain if b == bucket else length * (1.0 - self.forget)
                for b, length in self.true[base].items()
            }
            self.versions.append(version)

        served = [b for b in self.rows if b != bucket]

        def score(name: str, length: float) -> ShadowScore:
            return ShadowScore(
                version=name,
                acceptance_length=length,
                num_requests=20,
                num_tokens=2000,
                gain_mean=seen,
                gain_lower=lower,
            )

        return TrainResult(
            job_id=f"job-{decision.decision_id}",
            status="accepted" if accepted else "rejected",
            version=version,
            reason=f"gain {seen:.3f}, lower bound {lower:.3f}",
            train_s=min(self.train_s(arm), float(decision.context["time_limit_s"])),
            shadow_s=1.5,
            candidate=score(version or "refused", self.true[base][bucket] + seen),
            incumbent=score(base, self.true[base][bucket]),
            first=score(FIRST, self.true[FIRST][bucket]),
            elsewhere={b: [score(v, self.true[v][b]) for v in (version, base)] for b in served} if version else {},
        )

    def step(self) -> list[Decision]:
        """Serve for step_s seconds, finish a job that is due, tick."""
        batch = self.traffic()
        self.clock.advance(self.step_s)
        self.controller.observe(batch)
        now = self.clock.now()
        if self.job is not None and self.job[1] <= now:
            decision, _, _ = self.job
            self.job = None
            outcome = self.controller.job_finished(self.train(decision), decision_id=decision.decision_id, now=now)
            if outcome.publish is not None:
                self._swap(decision.bucket, outcome.publish, decision.decision_id)
        decisions = self.controller.tick(now, self.context())
        for decision in decisions:
            if decision.action == "train":
                seconds = self.train_s(self.controller.arm_of(decision)) + 1.5
                self.job = (decision, now + min(seconds, float(decision.context["time_limit_s"]) + 1.5), now)
            elif decision.version is not None and decision.action in ("recall", "rollback"):
                self._swap(decision.bucket, decision.version, decision.decision_id)
        self.decisions += decisions
        return decisions

    def _swap(self, bucket: str, version: str, decision_id: int) -> None:
        self.own[bucket] = version
        self.swaps.append((self.t, bucket, version))
        self.controller.staged(decision_id, 0.1, self.clock.now())

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / self.step_s)):
            self.step()

    def of(self, *actions: str) -> list[Decision]:
        return [d for d in self.decisions if d.action in actions]
