"""The ledger is conserved over the real commit path: a kill between any two writes, lost replies, restarts, lost data."""

import dataclasses
import os
import time
import uuid
import zlib

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from paceline.bandit.ledger.totals import fold_entries
from paceline.config import PolicyConfig
from paceline.contracts import Decision, LedgerEntry, ReplicaReport, TrainJob, TrainResult, decode, encode
from paceline.errors import FencedError
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.jobs import WorkerLease
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version, read_desired, write_report
from paceline.infra.state.export import log_records
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.machine import ManualClock
from tests.helpers.faults import MODES, Fault, Killed
from tests.helpers.feedback import round_rows
from tests.helpers.hosts import ledger, make_host, stored
from tests.helpers.scripted import MemoryRegistry, MemoryStore, Shard

FAULTS = ("none", *MODES, "restart", "zombie", "duplicate")
ORDERS = ("", "", "", "pin", "unpin")
PASSES = 6
REAL_REPLACE = os.replace
STEP_S = 5.0


class _Ended:
    def is_alive(self) -> bool:
        return False

    def result(self) -> TrainResult | None:
        return None

    def kill(self) -> None: ...


@dataclasses.dataclass
class InstantTrainer:
    """Takes the real lease, writes a result that depends on the job only, gives the lease back."""

    registry: MemoryRegistry
    journal: list[TrainResult] = dataclasses.field(default_factory=list)

    def launch(self, job: TrainJob, lease: WorkerLease) -> _Ended:
        luck = zlib.crc32(f"{job.job_id}{len(self.journal)}".encode())
        accepted, version = luck % 3 > 0, f"w{len(self.journal)}"
        if accepted:
            self.registry.known.add(version)
        result = TrainResult(
            job_id=job.job_id, status="accepted" if accepted else "failed", version=version if accepted else None,
            reason="script", train_s=1.0 + luck % 7 / 8, shadow_s=0.25 * accepted,
        )  # fmt: skip
        self.journal.append(result)
        lease.heartbeat()
        assert lease.finish(result)
        return _Ended()


class Service:
    """One service in Redis; its controller may die and come back, everything else goes on."""

    def __init__(self, url: str, folder, seed: int) -> None:
        self.url, self.keys, self.seed = url, Keys(uuid.uuid4().hex[:8]), seed
        self.client = patient_client(url)
        self.folder = folder / self.keys.model
        self.clock, self.fault = ManualClock(1000.0), Fault()
        self.registry, self.store = MemoryRegistry(), MemoryStore([Shard("s0", num_rows=400)])
        self.trainer = InstantTrainer(self.registry)
        self.num_rows = self.seq = 0
        ensure_first_version(self.client, self.keys, "v1", 30, 1.0)
        self.host = self.start()

    def start(self) -> ControllerHost:
        """A controller takes over; one that dies or is cut off while it does so is followed by another."""
        host = make_host(
            self.url, self.keys, self.folder, make=None, policy=PolicyConfig(policy="always", epoch_s=STEP_S, min_rows=100),
            store=self.store, registry=self.registry, launcher=self.trainer, clock=self.clock,
            make_client=self.fault.client, snapshot_every_s=0.0,
        )  # fmt: skip
        try:
            host.connect()
        except (Killed, redis.ConnectionError):
            return self.start()
        return host

    def traffic(self, copies: int) -> None:
        """Rounds of both groups; adapted versions take 8 ms a round instead of 10, a training job adds 1."""
        self.seq += 1
        rng = np.random.default_rng((self.seed, self.seq))
        live, now = read_desired(self.client, self.keys), self.clock.now()
        rows = []
        for i in range(120):
            group = "static" if i % 3 == 0 else "adaptive"
            version = "v1" if group == "static" else live.version_of("math")
            busy = self.seq % 2 == 0
            ms = (10.0 if version == "v1" else 8.0) + busy + 0.3 * rng.standard_normal()
            request = f"q{self.seq}-{i % 12}"
            rows.append((request, "math", group, version, True, i, 4, 2, 3, 1, 1.0, 6.0, ms, busy, now))
        batch = make_batch(
            [round_rows(rows)], replica_id="a", boot_epoch=1, seq=self.seq, target_version="t", num_dropped=0
        )
        for _ in range(copies):
            self.client.xadd(self.keys.feedback, {"v": encode(batch)})
        self.num_rows += len(rows)
        self.store.shards.append(Shard(f"s{self.seq}", num_rows=150))

    def report(self) -> None:
        """The replica runs what is desired; how long staging took depends on the generation only."""
        desired = read_desired(self.client, self.keys)
        made = ReplicaReport(
            replica_id="a", gen=desired.gen, version=desired.version, slots={}, failed_gen=None, failed_reason="",
            swap_pause_ms=[2.0] if desired.gen > 1 else [], staging_s=0.125 * (1 + desired.gen % 3), ts=self.clock.now(),
        )  # fmt: skip
        write_report(self.client, self.keys, made, ttl_s=600)

    def step(self, fault: str, at: int, order: str) -> None:
        self.traffic(2 if fault == "duplicate" else 1)
        self.clock.advance(STEP_S)
        if order == "pin":
            self.host.call(lambda: self.host.session.orders.pin("v3"))
        elif order == "unpin":
            self.host.call(lambda: self.host.session.orders.unpin())
        if order:  # an order that dies with the process was refused: its caller knows
            self.one_pass()
        if fault in MODES:
            self.fault.arm(fault, at)
        for _ in range(PASSES):
            self.one_pass()
        if fault in ("restart", "zombie"):
            old, self.host = self.host, self.start()
            if fault == "zombie":
                old.session.books.log("note", {"text": "from the dead"})
                with pytest.raises(FencedError):
                    old.session.books.flush()
        self.report()
        for _ in range(2):
            self.one_pass()
        self.fault.arm("", 0)

    def one_pass(self) -> None:
        try:
            self.host.step(block_ms=0)
        except Killed:
            self.host = self.start()
        except redis.ConnectionError:  # the host's loop waits and calls again
            self.host.step(block_ms=0)

    def lose_redis(self) -> None:
        """Redis comes back empty."""
        for key in self._names():
            self.client.delete(key)

    def _names(self) -> list[bytes]:
        return list(self.client.scan_iter(f"{self.keys.base}:*".replace("{", "?").replace("}", "?")))

    def dumped(self) -> dict[bytes, bytes]:
        """What Redis holds, as `lose_since` takes it."""
        return {name: self.client.dump(name) for name in self._names()}

    def lose_since(self, dumped: dict[bytes, bytes]) -> None:
        """Redis comes back without its latest transactions: killed before it wrote them to its file, or a fail-over."""
        self.lose_redis()
        for name, value in dumped.items():
            self.client.restore(name, 0, value)


def held(service: Service) -> tuple[dict[str, LedgerEntry], dict[int, Decision]]:
    """Ledger and decisions as Redis and the log file have them."""
    decisions = {int(k): decode(v, Decision) for k, v in service.client.hgetall(service.keys.decisions).items()}
    return ledger(service.client, service.keys, service.folder / "data"), decisions


def check_books(service: Service) -> None:
    """Entries are neither lost nor doubled wherever they are read, and all sums are those of the entries."""
    service.host.session.books.store.copy_log()
    entries, _ = held(service)
    session = service.host.session
    assert list(session.books.store.ledger) == list(entries.values())
    assert session.controller.ledger_totals().rows() == fold_entries(entries.values()).rows()
    assert session.controller.check(entries.values()) == []
    logged = log_records(service.folder / "data" / "decisions.jsonl", "ledger")
    assert {r["entry_id"]: r["seconds"] for r in logged} == {k: e.seconds for k, e in entries.items()}


def check(service: Service, reference: Service) -> None:
    check_books(service)
    for mine, right in zip(held(service), held(reference), strict=True):
        assert [(mine.get(k), right.get(k)) for k in {*mine, *right} if mine.get(k) != right.get(k)] == []
    assert ledger(service.client, service.keys) == held(service)[0], "stream and file differ"
    state = stored(service.client, service.keys)
    assert state.num_rows == service.num_rows
    by_kind = fold_entries(held(service)[0].values()).by_kind()
    done = service.trainer.journal[: len(service.trainer.journal) - (state.pending is not None)]
    assert by_kind.get("training", 0.0) == pytest.approx(sum(r.train_s for r in done))
    assert by_kind.get("shadow", 0.0) == pytest.approx(sum(r.shadow_s for r in done))
    lines = (service.folder / "data" / "decisions.jsonl").read_text().splitlines()
    assert sum('"entry_id"' in line for line in lines) == len(held(service)[0]), "an entry was logged twice"


@pytest.fixture
def file_faults():
    """Synced and renamed files count as writes, too; nothing is really synced: the computer keeps its power."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda fault: (
            patch.setattr(os, "fsync", fault.fsync(lambda fd: None)),
            patch.setattr(os, "replace", fault.replace(REAL_REPLACE)),
        )


EVERY_FAULT = [(FAULTS[i % len(FAULTS)], i // len(FAULTS), {5: "pin", 9: "unpin"}.get(i, "")) for i in range(24)]
LOSSES = ("none", "alive", "dead", "ahead", "latest", "unfiled", "successor", "forgotten", *MODES)


@pytest.mark.slow
@settings(
    max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(FAULTS), st.integers(0, 14), st.sampled_from(ORDERS)), min_size=3, max_size=8
    ),
    seed=st.integers(0, 3),
)
@example(steps=EVERY_FAULT, seed=0)
def test_no_fault_of_the_controller_changes_the_ledger(shared_redis, tmp_path, file_faults, steps, seed):
    service, reference = (Service(shared_redis.url, tmp_path, seed) for _ in range(2))
    file_faults(service.fault)
    for fault, at, order in steps:
        service.step(fault, at, order)
        reference.step("none", 0, order)
    check(service, reference)
    if steps is EVERY_FAULT:
        assert set(fold_entries(held(service)[0].values()).by_kind()) == {
            "training", "shadow", "staging", "interference", "saving",
        }  # fmt: skip
        assert len(service.trainer.journal) >= 3
        assert service.fault.fired == set(MODES)


def _cannot(*args: object) -> int:
    raise OSError("the disk is full")


@pytest.mark.slow
@settings(
    max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(steps=st.lists(st.tuples(st.sampled_from(LOSSES), st.integers(0, 14)), min_size=3, max_size=8))
@example(steps=[("none", 0), ("alive", 0), ("none", 0), ("dead", 0), ("after", 4), ("dead", 0), ("none", 0)])
@example(steps=[("none", 0), ("latest", 0), ("unfiled", 0), ("none", 0), ("unfiled", 0), ("unfiled", 0), ("dead", 0)])
@example(steps=[("none", 0), ("ahead", 0), ("none", 0), ("latest", 0), ("dead", 0), ("unfiled", 0), ("none", 0)])
@example(steps=[("ahead", 0), ("successor", 0), ("lost_reply", 3), ("unfiled", 0), ("forgotten", 0), ("none", 0)])
def test_what_redis_loses_comes_back_from_the_files_and_no_sum_is_wrong(shared_redis, tmp_path, file_faults, steps):
    service = Service(shared_redis.url, tmp_path, 0)
    file_faults(service.fault)
    for hour, (loss, at) in enumerate(steps, 1):
        before, dumped = service.host.session.state.num_booked, service.dumped()
        if loss == "successor":  # Redis will name the owner before it
            service.host = service.start()
        with pytest.MonkeyPatch.context() as patch:
            if loss == "unfiled":
                patch.setattr(LogFile, "sync", _cannot)
            service.step(loss if loss in MODES else "none", at, "")
        if loss == "ahead":  # the clock of the server that is lost is hours before that of the one that comes
            now = int(time.time()) + 3600 * hour
            service.client.xadd(service.keys.log, {"kind": "note", "v": "{}"}, id=f"{now * 1000}-7")
            service.host.session.books.store.copy_log()
        if loss in ("alive", "dead", "ahead"):
            service.lose_redis()
        if loss in ("latest", "unfiled", "successor", "forgotten"):
            service.lose_since(dumped)
            service.traffic(1)
            service.clock.advance(STEP_S)
        if loss in ("dead", "forgotten"):
            service.host = service.start()
        service.one_pass()
        check_books(service)
        assert service.host.session.state.num_booked >= before
