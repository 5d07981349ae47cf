"""A controller with a past for the dashboard's tests: the real host, Redis and policy; time, traffic and training are made.

Twenty minutes of traffic of three buckets and three groups pass in about two seconds; `math` starts in the middle, and
training jobs end at once with what their launcher says. No Ray, no model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis

from paceline.config import PolicyConfig
from paceline.contracts import (
    DesiredState,
    DrafterManifest,
    ReplicaReport,
    ShadowScore,
    TrainJob,
    TrainResult,
    encode,
    is_canary,
)
from paceline.errors import ManifestError, PacelineError, RequestError
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.snapshot import (
    LatencyState,
    Quantiles,
    ReplicaState,
    Snapshot,
    SpeculationState,
    TrafficBin,
)
from paceline.infra.controller.store import HostConfig
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version, write_report
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.machine import ManualClock
from tests.helpers.feedback import round_rows
from tests.helpers.scripted import MemoryStore, Shard

FIRST = "a0c1d2e3f4b5"
STEP_S = 5.0
HOSTILE = '<img src=x onerror=alert(1)><a href="javascript:alert(2)">="x"</a>'
"""A bucket name that the API refuses; feedback in Redis could still hold one."""


@dataclass
class Registry:
    """Drafter versions with parents."""

    manifests: list[DrafterManifest] = field(default_factory=list)

    def add(self, version: str, *, parent: str | None, arm: str, bucket: str | None, created: float) -> None:
        self.manifests.append(
            DrafterManifest(
                version=version, sha256="0" * 64, num_bytes=4_000_000, drafter_type="specblock", config={}, shapes_hash="",
                target_version="t", parent=parent, arm=arm, bucket=bucket, num_train_rows=4096, metrics={"loss": 1.25}, created=created,
            )
        )  # fmt: skip

    def get_manifest(self, version: str, *, target_version: str | None = None) -> DrafterManifest:
        for m in self.manifests:
            if m.version == version:
                return m
        raise ManifestError(f"drafter {version} is not in the registry; choose one that `paceline versions` lists")

    def has_weights(self, version: str) -> bool:
        return any(m.version == version for m in self.manifests)

    def delete_weights(self, version: str) -> None:
        raise AssertionError("the pool of these tests holds everything")

    def list(self) -> list[DrafterManifest]:
        return self.manifests


@dataclass
class Launcher:
    """Jobs end at once: every job is accepted and makes the next version."""

    registry: Registry
    clock: ManualClock
    jobs: list[TrainJob] = field(default_factory=list)

    def launch(self, job: TrainJob, lease: Any) -> Any:
        self.jobs.append(job)
        version = f"b{len(self.jobs)}c1d2e3f4a5"
        self.registry.add(
            version, parent=job.base_version, arm=job.arm.name, bucket=job.bucket, created=self.clock.now()
        )
        score = ShadowScore(
            version=version, acceptance_length=2.6, num_requests=32, num_tokens=900, gain_mean=0.8, gain_lower=0.6
        )
        old = msgspec.structs.replace(
            score, version=job.base_version, acceptance_length=1.8, gain_mean=0.0, gain_lower=0.0
        )
        return _Done(
            TrainResult(
                job_id=job.job_id, status="accepted", version=version, reason="gain 0.80 tokens per round, at least 0.60",
                train_s=2.4, shadow_s=0.5, candidate=score, incumbent=old, first=old,
            )
        )  # fmt: skip


@dataclass
class _Done:
    value: TrainResult

    def is_alive(self) -> bool:
        return False

    def result(self) -> TrainResult:
        return self.value

    def kill(self) -> None: ...


@dataclass
class Scene:
    """The host and its surroundings; also what dashboard_router asks."""

    host: ControllerHost
    client: redis.Redis
    keys: Keys
    clock: ManualClock
    launcher: Launcher
    store: MemoryStore
    seq: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    is_away: bool = False
    speculation: list[SpeculationState] = field(default_factory=list)
    num_failed: int = 0
    """Of the past minute."""

    def run(self, seconds: float, buckets: Sequence[str]) -> None:
        """Let time and traffic pass."""
        for _ in range(int(seconds / STEP_S)):
            self.clock.advance(STEP_S)
            now = self.clock.now()
            desired = self.host.session.state.desired
            assert desired is not None
            self.report(desired)
            for bucket in buckets:
                self.send(bucket, desired, now)
                self.store.shards.append(
                    Shard(f"{bucket}-{self.seq}", bucket=bucket, num_rows=120, created=now, target_version="t")
                )
            self.host.step(block_ms=0)

    def send(self, bucket: str, desired: DesiredState, now: float) -> None:
        """Six requests of one bucket in five seconds: hold-back, plain and four adaptive ones."""
        rows = []
        is_math = bucket == "math" or bucket.startswith("<")
        for i in range(6):
            group = ("static", "plain")[i] if i < 2 else "adaptive"
            request_id = f"{bucket[:9]}-{self.seq}-{i}"
            is_tried = (
                desired.canary_version != ""
                and desired.canary_bucket in ("", bucket)
                and is_canary(request_id, desired.canary_version, desired.canary_percent)
            )
            version = desired.canary_version if is_tried else desired.version_of(bucket)
            is_better = is_math and group == "adaptive" and version != FIRST
            length = {"plain": 0.0}.get(group, 1.9 if is_better else 0.8 if is_math else 1.6)
            name = "" if group == "plain" else FIRST if group == "static" else version
            for k in range(8):
                accepted = 0 if group == "plain" else min(7, max(0, round(self.rng.gauss(length, 0.8))))
                drafted = 0 if group == "plain" else 8
                share_ms = (50.0 if group == "plain" else 60.0) * self.rng.uniform(0.95, 1.05)
                ts = now - STEP_S * self.rng.random() * 0.9
                rows.append((request_id, bucket, group, name, True, k + 1, drafted, accepted, accepted + 1, 2, 2.0, 7.0, share_ms, False, ts))  # fmt: skip
        self.seq += 1
        batch = make_batch(
            [round_rows(rows)],
            replica_id="r1",
            boot_epoch=1,
            seq=self.seq,
            target_version="t",
            num_dropped=int(self.seq == 3),
        )
        self.client.xadd(self.keys.feedback, {"v": encode(batch)})

    def report(self, desired: DesiredState) -> None:
        held = {FIRST, desired.canary_version, *desired.class_versions.values()} - {""}
        write_report(
            self.client, self.keys,
            ReplicaReport(
                replica_id="r1", gen=desired.gen, version=desired.version, canary_version=desired.canary_version,
                slots=dict(zip("ABCD", sorted(held), strict=False)), class_versions=desired.class_versions, failed_gen=None, failed_reason="",
                swap_pause_ms=[0.21], staging_s=0.03, counters={"produced": 100, "delivered": 99, "dropped": 1}, ts=self.clock.now(),
            ),
        )  # fmt: skip

    # ---- what the routes ask ------------------------------------------------------------------------------------
    def state(self) -> Snapshot:
        engine = {"num_running": 2, "num_waiting": 0, "num_pages": 64, "num_free_pages": 40, "num_tokens": 9, "num_finished": 1, "num_aborted": 0}  # fmt: skip
        replica = ReplicaState(replica_id="r1", engine=engine, speculation=self.speculation)
        if self.is_away:
            return Snapshot(gen=1, version=FIRST, first_version=FIRST, model="tiny", target="tiny", replica=replica)
        latency = LatencyState(
            num_answers=100, num_failed=self.num_failed, first_token=Quantiles(p50_s=0.0123, p99_s=0.25),
            per_token=Quantiles(p50_s=0.0045, p99_s=0.03), whole=Quantiles(p50_s=1.5, p99_s=None),
        )  # fmt: skip
        return msgspec.structs.replace(
            self.host.snapshot(), replica=replica, latency=latency, target="tiny", has_controller=True
        )

    def traffic(self, since: float) -> list[TrafficBin] | None:
        return None if self.is_away else self.host.traffic(since)

    def command(self, name: str, *args: Any) -> Snapshot:
        future = self.host.call(lambda: getattr(self.host.session.orders, name)(*args))
        self.host.step(block_ms=0)
        try:
            future.result(timeout=10)
        except FutureTimeout as e:
            raise PacelineError("the controller does not answer") from e
        except ValueError as e:
            raise RequestError(str(e)) from e
        return self.state()


def make_scene(redis_url: str, keys: Keys, **policy: Any) -> Scene:
    """A host that is connected and has seen nothing yet; its clock starts twenty minutes ago."""
    clock = ManualClock(time.time() - 1200.0)
    client = patient_client(redis_url)
    ensure_first_version(client, keys, FIRST, 20, clock.now())
    registry, store = Registry(), MemoryStore(shards=[])
    registry.add(FIRST, parent=None, arm="initial", bucket=None, created=clock.now())
    launcher = Launcher(registry, clock)
    settings = {"policy": "payoff", "epoch_s": 10.0, "min_rows": 500, "holdback_percent": 20, "horizon_s": 300.0, "trainer_price": 0.1}  # fmt: skip
    host = ControllerHost(
        HostConfig(redis_url=redis_url, model=keys.model, policy=PolicyConfig(**{**settings, **policy}), context_every_s=0.0, commit_every_s=0.0, target_version="t"),
        store=store, registry=registry, launcher=launcher, clock=clock,
    )  # fmt: skip
    host.connect()
    return Scene(host=host, client=client, keys=keys, clock=clock, launcher=launcher, store=store)
