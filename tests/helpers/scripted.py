"""Stand-ins for the infra tests: a controller that follows a script, stores in memory, launchers of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.bandit.controller.controller import HostContext, JobOutcome
from paceline.bandit.ledger.totals import LedgerTotals
from paceline.contracts import (
    SPAN_S,
    ArmSpec,
    Decision,
    DrafterManifest,
    FeedbackBatch,
    LedgerEntry,
    RoundStats,
    TrainJob,
    TrainResult,
)
from paceline.errors import ManifestError
from paceline.infra.controller.jobs import WorkerLease
from tests.helpers.feedback import round_rows

ARM = ArmSpec(name="full", parameters="full", num_rows=100)


def row(
    i: int | Iterable[int],
    *,
    bucket: str = "math",
    group: str = "adaptive",
    version: str = "v1",
    ts: float | None = None,
) -> RoundStats:
    """A row a number: 2 of 4 drafted tokens accepted, 3 emitted, 10 ms."""
    ts, numbers = time.time() if ts is None else ts, [i] if isinstance(i, int) else i
    return round_rows(
        [(f"r{n}", bucket, group, version, True, n, 4, 2, 3, 1, 1.0, 6.0, 10.0, False, ts) for n in numbers]
    )


def decision(decision_id: int, action: str, **fields) -> Decision:
    made = Decision(
        decision_id=decision_id, ts=time.time(), bucket="math", action=action, arm=None, version=None, policy="script",
        context={}, expected_gain=0.1, expected_saving_s=2.0, expected_cost_s=1.0, propensity=1.0, reason="script",
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


class _State(msgspec.Struct):
    rows: int = 0
    next_id: int = 1
    jobs: dict[int, str] = {}
    policy: str = "payoff"
    pinned: bool = False
    totals: LedgerTotals = msgspec.field(default_factory=LedgerTotals)


class ScriptedController:
    """The Controller's methods; orders up to three jobs, one for each `train_every_rows`, publishes accepted versions."""

    def __init__(self, stored: bytes = b"", *, train_every_rows: int = 0) -> None:
        self.s = msgspec.msgpack.decode(stored, type=_State) if stored else _State()
        self.every = train_every_rows
        self.trained_at = 0
        self.decisions: list[Decision] = []
        self.ledger: list[LedgerEntry] = []
        self.queue: list[Decision] = []
        self.orders: dict[int, Decision] = {}
        self.outcomes: list[TrainResult] = []
        self.canaries: list[tuple[int, str]] = []
        self.contexts: list[HostContext] = []
        self.forgotten: list[str] = []
        self.parted: list[tuple[str, str]] = []

    def book(self, entry: LedgerEntry) -> None:
        self.ledger.append(entry)
        self.s.totals.add(entry)

    def ledger_totals(self) -> LedgerTotals:
        return self.s.totals

    def observe(self, batch: FeedbackBatch) -> None:
        self.s.rows += batch.num_rows
        self.book(
            LedgerEntry(
                entry_id=f"saving:{batch.replica_id}:{batch.boot_epoch}:{batch.seq}", ts=SPAN_S * batch.cells[-1].span,
                kind="saving", bucket="math", version=None, seconds=float(batch.num_rows),
            )
        )  # fmt: skip

    def forget_bucket(self, name: str) -> None:
        self.forgotten.append(name)

    def begin_bucket(self, name: str, now: float, num_rows: int) -> None:
        self.forgotten.append(name)

    def part_bucket(self, name: str, whole: str, now: float, num_rows: int) -> None:
        self.parted.append((name, whole))

    def tick(self, now: float, context) -> list[Decision]:
        self.contexts.append(context)
        out, self.queue = self.queue, []
        if self.every and not context.job_running and min(self.s.rows // self.every, 3) > len(self.s.jobs):
            out.append(decision(self.s.next_id, "train", arm=ARM.name))
        for d in out:
            self.s.next_id = max(self.s.next_id, d.decision_id + 1)
            if d.action == "train":
                self.s.jobs[d.decision_id], self.orders[d.decision_id] = "running", d
        self.decisions += out
        return out

    def arm_of(self, d: Decision) -> ArmSpec:
        return ARM

    def job_finished(self, result: TrainResult, *, decision_id: int, now: float) -> JobOutcome:
        self.outcomes.append(result)
        assert self.s.jobs[decision_id] == "running", "a job's result was folded twice"
        self.s.jobs[decision_id] = result.status
        d = self.orders.get(decision_id) or decision(
            decision_id, "train", arm=ARM.name
        )  # of a controller before this one
        d = msgspec.structs.replace(d, outcome=result.status, realised_cost_s=result.train_s)
        self.decisions.append(d)
        self.book(
            LedgerEntry(entry_id=f"{decision_id}:training", ts=now, kind="training", bucket="math", version=result.version, seconds=result.train_s)
        )  # fmt: skip
        return JobOutcome(
            decision=d, publish=result.version if result.status == "accepted" else None, reason=result.reason,
            others=list(d.context.get("others", ())),
        )  # fmt: skip

    def staged(self, decision_id: int, seconds: float, now: float, tag: str = "swap") -> None:
        self.book(
            LedgerEntry(entry_id=f"{decision_id}:staging:{tag}", ts=now, kind="staging", bucket="math", version=None, seconds=seconds)
        )  # fmt: skip

    def order_ended(self, decision_id: int, outcome: str, bucket: str = "") -> None:
        self.canaries.append((decision_id, outcome))

    def manual(self, action: str, version: str, now: float, reason: str, left: Iterable[str] = ()) -> Decision:
        d = decision(self.s.next_id, action, version=version, reason=reason, context={"left": list(left)})
        self.s.next_id += 1
        self.decisions.append(d)
        return d

    def unpin(self) -> None: ...

    def set_policy(self, name: str) -> None:
        self.s.policy = name

    def closed_epoch(self) -> None:
        return None

    def drain(self) -> tuple[list[Decision], list[LedgerEntry]]:
        out = self.decisions, self.ledger
        self.decisions, self.ledger = [], []
        return out

    def snapshot(self) -> None:
        """It believes nothing that could be shown."""

    def state(self, *, is_whole: bool = True) -> bytes:
        return msgspec.msgpack.encode(self.s)

    def open_epoch(self) -> bytes:
        return b""


@dataclass
class Shard:
    shard_id: str
    bucket: str = "math"
    num_rows: int = 200
    target_version: str = "t"
    created: float = 0.0


@dataclass
class MemoryStore:
    shards: list[Shard] = field(default_factory=lambda: [Shard("s1"), Shard("s2"), Shard("o1", bucket="code")])

    def list_shards(self, bucket: str | None = None) -> list[Shard]:
        return [s for s in self.shards if bucket in (None, s.bucket)]

    def enforce_limits(self, max_bytes: int, max_age_s: float, now: float) -> int:
        old = [s for s in self.shards if now - s.created > max_age_s]
        self.shards = [s for s in self.shards if s not in old]
        return len(old)


@dataclass
class MemoryRegistry:
    known: set[str] = field(default_factory=lambda: {"v1", "v2", "v3"})
    without_weights: set[str] = field(default_factory=set)

    def has_weights(self, version: str) -> bool:
        return version in self.known - self.without_weights

    def with_weights(self) -> set[str]:
        return self.known - self.without_weights

    def delete_weights(self, version: str) -> None:
        self.without_weights.add(version)

    def get_manifest(self, version: str, *, target_version: str | None = None) -> DrafterManifest:
        assert target_version in (None, "t"), "every version here is for target t"
        if version not in self.known:
            raise ManifestError(f"drafter {version} is not in the registry; choose one that `paceline versions` lists")
        return DrafterManifest(
            version=version, sha256="0" * 64, num_bytes=1, drafter_type="specblock", config={}, shapes_hash="", target_version="t",
            parent=None, arm="initial", bucket=None, num_train_rows=0, metrics={}, created=0.0,
        )  # fmt: skip

    def list(self) -> list[DrafterManifest]:
        return [self.get_manifest(v) for v in sorted(self.known)]


_WORKER = """
import json, sys, time
from paceline.contracts import TrainResult
from paceline.infra.controller.jobs import WorkerLease
from tests.helpers.feedback import round_rows
args = json.loads(sys.argv[1])
lease = WorkerLease(args["url"], args["model"], args["job_id"], args["token"], ttl_s=args["ttl_s"], limit_s=args["limit_s"])
started = time.monotonic()
if args["device_share"]:
    lease.clock = lambda: args["device_share"] * (time.monotonic() - started)
with lease:
    status = args["status"]
    while time.monotonic() - started < args["seconds"]:
        if lease.should_stop() and not args["is_deaf"]:
            status = "stopped"
            break
        time.sleep(0.01)
    with open(args["journal"], "a") as f:
        f.write(f"{args['job_id']} {status}\\n")
    version = args["version"] if status == "accepted" else None
    lease.finish(TrainResult(job_id=args["job_id"], status=status, version=version, reason="script", train_s=time.monotonic() - started, shadow_s=0.0))
"""


class ProcessHandle:
    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def result(self) -> TrainResult | None:
        return None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class ProcessLauncher:
    """Runs each job in a real process that holds the lease for `seconds` and then reports `status`."""

    url: str
    journal: str
    seconds: float = 0.2
    status: str = "accepted"
    version: str = "v2"
    is_deaf: bool = False
    device_share: float = 0.0
    """Share of its time that a worker reports to have had its device; 0: it reports nothing."""
    handles: list[ProcessHandle] = field(default_factory=list)

    def launch(self, job: TrainJob, lease: WorkerLease) -> ProcessHandle:
        values = {
            "url": self.url, "model": lease._model, "job_id": job.job_id, "token": lease._token, "ttl_s": lease._ttl_s,
            "limit_s": lease._limit_s, "seconds": self.seconds, "status": self.status, "version": self.version,
            "journal": self.journal, "is_deaf": self.is_deaf, "device_share": self.device_share,
        }  # fmt: skip
        args = [sys.executable, "-c", _WORKER, msgspec.json.encode(values).decode()]
        handle = ProcessHandle(subprocess.Popen(args, env={**os.environ}))
        self.handles.append(handle)
        return handle
