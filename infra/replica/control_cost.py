"""Control cost: how many replicas one controller carries, by the real host and policy over an embedded Redis.

Synthetic replicas publish what real ones would, and the controller drains it at full speed while its clock runs as that
traffic would take: what it costs to fold, commit, look around and close epochs is part of the figure as often as it comes.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A
from typing import Any

import redis
from rich.console import Console

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import Bar, new_table, number_text, progress, say_file
from paceline.config import PolicyConfig
from paceline.contracts import Group, ReplicaReport, RoundStats, TrainJob, encode
from paceline.errors import PacelineError
from paceline.infra.controller.feedback import READ_COUNT
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.jobs import JobHandle, WorkerLease
from paceline.infra.controller.store import HostConfig
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import write_report
from paceline.infra.state.redis_clients import Keys, consumer_client, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import ManualClock
from paceline.records import JsonFile, Setting, record

_START = 1_000_000.0
_REPORT_TTL_S = 3600
_CHUNK = 1000
"""Batches that wait in the stream at a time."""
_REDIS_MB = 1024
_VERSION, _FIRST = "live", "first"
_COLUMNS = ("replicas", "buckets", "running", "ms/batch", "rows/CPU-s", "kB/batch", "state kB/s", "epoch ms", "cores")


@record()
class ControlCostOptions:
    """Every replica has `running` requests at `rounds-per-s` and publishes each `flush-s`; idle replicas report only.

    The real controller with the pay-off rule folds it from an embedded Redis. CPU time is the controller's thread alone.
    """

    replicas: A[tuple[int, ...], Setting("Comma list; with the first number of buckets.", ge=1, non_empty=True)] = (
        1, 10, 100, 1000, 4000,
    )  # fmt: skip
    buckets: A[tuple[int, ...], Setting("Comma list; beyond the first: at bucket-replicas.", ge=1, non_empty=True)] = (
        4, 1, 64, 10_000,
    )  # fmt: skip
    bucket_replicas: A[int, Setting("Replicas of the curve over buckets.", ge=1)] = 100
    idle: A[tuple[int, ...], Setting("Comma list: replicas that serve nothing.", ge=1)] = (4000,)
    running: A[int, Setting("Requests in flight on a replica.", ge=1)] = 64
    rounds_per_s: A[float, Setting("Decode rounds of a replica a second.", gt=0)] = 30.0
    request_rounds: A[int, Setting("Rounds of a request.", ge=1)] = 40
    flush_s: A[float, Setting("Seconds of a batch (feedback.flush_interval_s).", gt=0)] = 0.25
    seconds: A[float, Setting("Seconds of service at a point.", gt=0)] = 12.0
    batches: A[int, Setting("Batches of a point at most, for fewer seconds then.", ge=1)] = 5000
    json: JsonFile = None


class _NoTraining:
    """Launcher of a service that has no training text."""

    def launch(self, job: TrainJob, lease: WorkerLease) -> JobHandle:
        raise PacelineError(f"job {job.job_id} cannot be launched: there is nothing to train on")


@dataclass(slots=True)
class _Replica:
    """Rounds of one synthetic replica: a tenth of its requests is held back, buckets take turns."""

    name: str
    options: ControlCostOptions
    num_buckets: int
    seq: int = 0
    num_rounds: int = 0
    _num_requests: int = 0
    _ids: list[str] = field(default_factory=list)
    _ages: list[int] = field(default_factory=list)
    _buckets: list[str] = field(default_factory=list)
    _groups: list[str] = field(default_factory=list)
    _versions: list[str] = field(default_factory=list)

    def _admit(self, at: int, age: int) -> None:
        number = self._num_requests
        self._num_requests += 1
        group = Group.STATIC if number % 10 == 0 else Group.ADAPTIVE
        columns: tuple[tuple[list, Any], ...] = (
            (self._ids, f"cmpl-{self.name}-{number:016x}-0"),
            (self._ages, age),
            (self._buckets, f"bucket{(number + zlib.crc32(self.name.encode())) % self.num_buckets}"),
            (self._groups, group.value),
            (self._versions, _FIRST if group == Group.STATIC else _VERSION),
        )
        for column, value in columns:
            column[at : at + 1] = [value]

    def _round(self, ts: float) -> RoundStats:
        options, n = self.options, self.options.running
        for i in range(n):
            if not self._ids or i >= len(self._ids):
                self._admit(i, i % options.request_rounds)
            elif self._ages[i] >= options.request_rounds:
                self._admit(i, 0)
            self._ages[i] += 1
        self.num_rounds += 1
        accepted = [(self.num_rounds + i) % 4 for i in range(n)]
        share_ms = 1e3 / options.rounds_per_s / n
        return RoundStats(
            request_id=list(self._ids), bucket=list(self._buckets), group=list(self._groups),
            drafter_version=list(self._versions), is_greedy=[True] * n, round_index=list(self._ages),
            num_draft_tokens=[8] * n, num_accepted_tokens=accepted, num_emitted_tokens=[a + 1 for a in accepted],
            batch_size=[n] * n, draft_ms=[0.2 * share_ms] * n, verify_ms=[0.7 * share_ms] * n,
            share_ms=[share_ms] * n, is_training=[False] * n, ts=[ts] * n,
        )  # fmt: skip

    def flush(self, ts: float, num_rounds: int) -> tuple[bytes, int]:
        """The next batch, encoded, and its rows."""
        self.seq += 1
        parts = [self._round(ts) for _ in range(num_rounds)]
        batch = make_batch(
            parts, replica_id=self.name, boot_epoch=1, seq=self.seq, target_version="", num_dropped=0
        )  # fmt: skip
        return encode(batch), sum(part.num_rows for part in parts)


@dataclass(slots=True)
class _Point:
    """One number of replicas and buckets under measurement."""

    options: ControlCostOptions
    num_replicas: int
    num_buckets: int
    is_idle: bool
    host: ControllerHost
    clock: ManualClock
    client: redis.Redis
    keys: Keys
    cpu_s: float = 0.0
    num_rows: int = 0
    num_batches: int = 0
    num_bytes: int = 0

    def _pass(self) -> int:
        began = time.thread_time()
        num_entries = self.host.step(block_ms=0)
        self.cpu_s += time.thread_time() - began
        return num_entries

    def _feed(self, replicas: list[_Replica], num_rounds: int) -> None:
        pipe = self.client.pipeline(transaction=False)
        for replica in replicas:
            data, num_rows = replica.flush(self.clock.now(), num_rounds)
            pipe.xadd(self.keys.feedback, {"v": data})
            self.num_rows += num_rows
            self.num_bytes += len(data)
        self.num_batches += len(replicas)
        pipe.execute()

    def _drain(self, seconds_per_entry: float) -> None:
        while num_entries := self._pass():
            self.clock.advance(num_entries * seconds_per_entry)
            if num_entries < READ_COUNT:
                break
        self.client.xtrim(self.keys.feedback, maxlen=0, approximate=False)

    def _time_of(self, seconds: float) -> float:
        """CPU seconds of a pass that comes so much later than the last one."""
        self.clock.advance(seconds)
        before = self.cpu_s
        self._pass()
        return self.cpu_s - before

    def run(self, bar: Bar) -> dict[str, Any]:
        """Serve the seconds and return the row."""
        options, config = self.options, self.host.config
        self._report()
        self._time_of(config.context_every_s)  # sees the reports
        replicas = [_Replica(f"replica-{i:05d}", options, self.num_buckets) for i in range(self.num_replicas)]
        if not self.is_idle:
            for i in range(0, len(replicas), _CHUNK):  # every replica is known before anything counts
                self._feed(replicas[i : i + _CHUNK], 1)
                self._drain(0.0)
        self.cpu_s, self.num_rows, self.num_batches, self.num_bytes = 0.0, 0, 0, 0
        store = self.host.session.books.store
        began, written = self.clock.now(), store.num_state_bytes
        self._serve(replicas, bar)
        seconds, busy_s = self.clock.now() - began, self.cpu_s
        self._time_of(config.commit_every_s)
        written = store.num_state_bytes - written
        look_s = min(self._time_of(config.context_every_s) for _ in range(2))
        epoch_s = max(self._time_of(config.policy.epoch_s) - look_s, 0.0)
        cores = busy_s / seconds
        if seconds < config.policy.epoch_s:  # no epoch ended in it, and few looks or none: their share of the time
            cores += look_s / config.context_every_s + epoch_s / config.policy.epoch_s
        lost = self.host.session.state
        assert lost.num_missing_batches == lost.num_lost_entries == lost.num_duplicates == 0, "a batch was lost"
        return {
            "replicas": self.num_replicas, "buckets": self.num_buckets, "running": 0 if self.is_idle else options.running,
            "num_batches": self.num_batches, "num_rows": self.num_rows, "seconds": round(seconds, 3),
            "cpu_s": round(busy_s, 4), "cores": round(cores, 4), "look_ms": round(1e3 * look_s, 2),
            "epoch_ms": round(1e3 * epoch_s, 2), "state_bytes_per_s": round(written / seconds),
            "ms_per_batch": round(1e3 * busy_s / self.num_batches, 4) if self.num_batches else None,
            "rows_per_cpu_s": round(self.num_rows / busy_s) if self.num_rows else None,
            "bytes_per_batch": round(self.num_bytes / self.num_batches) if self.num_batches else None,
        }  # fmt: skip

    def _report(self) -> None:
        for i in range(self.num_replicas):
            report = ReplicaReport(
                replica_id=f"replica-{i:05d}", gen=1, version=_FIRST, slots={"a": _FIRST}, failed_gen=None, failed_reason="",
                swap_pause_ms=[], counters={"produced": 0, "delivered": 0, "dropped": 0}, ts=self.clock.now(),
            )  # fmt: skip
            write_report(self.client, self.keys, report, _REPORT_TTL_S)

    def _serve(self, replicas: list[_Replica], bar: Bar) -> None:
        options = self.options
        if self.is_idle:
            end = self.clock.now() + options.seconds
            while self.clock.now() < end:
                self._pass()
                self.clock.advance(0.25)  # how long a pass waits for entries
            bar.step()
            return
        seconds_per_batch = options.flush_s / self.num_replicas
        total = max(1, min(int(options.seconds / seconds_per_batch), options.batches))
        rounds, owed, done = options.rounds_per_s * options.flush_s, 0.0, 0
        while done < total:
            owed += rounds
            num_rounds = max(1, int(owed))
            owed -= num_rounds
            for at in range(0, min(len(replicas), total - done), _CHUNK):
                chunk = replicas[at : at + min(_CHUNK, total - done)]
                self._feed(chunk, num_rounds)
                self._drain(seconds_per_batch)
                done += len(chunk)
                bar.step(len(chunk) / total)


def run_control_cost(options: ControlCostOptions, console: Console) -> dict[str, Any]:
    """Measure every point in turn; prints the curve, returns the document.

    Raises: ConfigError (no Redis binary), PacelineError.
    """
    file = ResultFile(options.json, command="bench control", options=options)
    points = [(n, options.buckets[0], False) for n in options.replicas]
    points += [(options.bucket_replicas, b, False) for b in options.buckets[1:]]
    points += [(n, 1, True) for n in options.idle]
    rows: list[dict[str, Any]] = []
    with progress(console, "control plane", len(points)) as bar:
        for num_replicas, num_buckets, is_idle in points:
            bar.say(f"{num_replicas} replicas, {num_buckets} buckets{', idle' if is_idle else ''}")
            rows.append(_measure(options, num_replicas, num_buckets, is_idle, bar))
            file.update(rows=rows)
    console.print(_table(options, rows))
    say_file(console, "JSON", options.json)
    return file.close(rows=rows)


def _measure(
    options: ControlCostOptions, num_replicas: int, num_buckets: int, is_idle: bool, bar: Bar
) -> dict[str, Any]:
    clock = ManualClock(_START)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        EmbeddedRedis(folder, max_memory_mb=_REDIS_MB) as server,
    ):
        root = Path(folder)
        config = HostConfig(
            redis_url=server.url, model="bench", data_dir=root / "data", policy=PolicyConfig(), first_version=_FIRST
        )
        host = ControllerHost(
            config, store=TraceStore(root / "traces"), registry=DrafterRegistry(root / "registry"),
            launcher=_NoTraining(), clock=clock, make_client=consumer_client,
        )  # fmt: skip
        host.connect()
        client = patient_client(server.url)
        try:
            point = _Point(options, num_replicas, num_buckets, is_idle, host, clock, client, Keys("bench"))
            return point.run(bar)
        finally:
            host.stop()
            client.close()


def _table(options: ControlCostOptions, rows: list[dict[str, Any]]) -> Any:
    def kilo(value: int | None) -> float | None:
        return None if value is None else value / 1e3

    cells = [
        (
            str(r["replicas"]), str(r["buckets"]), str(r["running"]), number_text(r["ms_per_batch"], 3),
            number_text(r["rows_per_cpu_s"]), number_text(kilo(r["bytes_per_batch"]), 1),
            number_text(kilo(r["state_bytes_per_s"])), number_text(r["epoch_ms"], 1), number_text(r["cores"], 3),
        )
        for r in rows
    ]  # fmt: skip
    caption = f"{options.rounds_per_s:g} rounds/s, a batch each {options.flush_s:g} s; CPU of the controller's thread"
    return new_table("Controller by replicas and buckets", _COLUMNS, left=0, rows=cells, caption=caption)
