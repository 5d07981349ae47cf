"""The ledger is conserved over the real commit path: kill at any point of a pass, lost replies, restarts, repeated delivery."""

import dataclasses
import uuid
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from paceline.bandit.ledger.totals import fold_entries
from paceline.clock import ManualClock
from paceline.config import PolicyConfig, RolloutConfig
from paceline.contracts import Decision, LedgerEntry, ReplicaReport, TrainJob, TrainResult, decode, encode
from paceline.errors import FencedError
from paceline.infra.controller.host import ControllerHost, HostConfig
from paceline.infra.controller.jobs import WorkerLease
from paceline.infra.controller.store import HostState
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_desired, read_desired, write_report
from paceline.infra.state.export import log_records
from paceline.infra.state.redis_clients import Keys, patient_client
from tests.helpers.scripted import MemoryRegistry, MemoryStore, Shard

FAULTS = ("none", "before_commit", "after_commit", "lost_reply", "restart", "zombie", "duplicate")
ORDERS = ("", "", "", "pin", "unpin")
PASSES = 6
STEP_S = 5.0


class Killed(BaseException):
    """The process ends here: nothing may handle it."""


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
        self.clock = ManualClock(1000.0)
        self.registry, self.store = MemoryRegistry(), MemoryStore([Shard("s0", num_rows=400)])
        self.trainer = InstantTrainer(self.registry)
        self.num_rows = self.seq = 0
        ensure_desired(self.client, self.keys, version="v1", holdback_percent=30, now=1.0)
        self.host = self.start()

    def start(self) -> ControllerHost:
        host = ControllerHost(
            HostConfig(
                redis_url=self.url, model=self.keys.model, data_dir=self.folder, context_every_s=0.0, target_version="t",
                policy=PolicyConfig(policy="always", epoch_s=STEP_S, min_rows=100), rollout=RolloutConfig(canary_percent=0),
            ),
            store=self.store, registry=self.registry, launcher=self.trainer, clock=self.clock,
        )  # fmt: skip
        host.connect()
        return host

    def traffic(self, copies: int) -> None:
        """Rounds of both groups; adapted versions take 8 ms a round instead of 10, a training job adds 1."""
        self.seq += 1
        rng = np.random.default_rng((self.seed, self.seq))
        live, now = read_desired(self.client, self.keys), self.clock.now()
        rows = []
        for i in range(120):
            group = "static" if i % 3 == 0 else "adaptive"
            version = "v1" if group == "static" else live.version
            busy = self.seq % 2 == 0
            ms = (10.0 if version == "v1" else 8.0) + busy + 0.3 * rng.standard_normal()
            request = f"q{self.seq}-{i % 12}"
            rows.append((request, "math", group, version, True, i, 4, 2, 3, 1, 1.0, 6.0, ms, busy, now))
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=self.seq, target_version="t", num_dropped=0)
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
            self.host.call(lambda: self.host.pin("v3"))
        elif order == "unpin":
            self.host.call(lambda: self.host.unpin())
        if order:  # an order that dies with the process was refused: its caller knows
            self.one_pass("none")
        for number in range(PASSES):
            self.one_pass(fault if number == at else "none")
        self.report()
        for _ in range(2):
            self.one_pass("none")

    def one_pass(self, fault: str) -> None:
        host, real = self.host, self.host._store.commit
        if fault == "before_commit":
            host._store.commit = _die(None)
        elif fault == "after_commit":
            host._store.commit = _die(real)
        elif fault == "lost_reply":
            execute = host._store._execute

            def lost(pipe, state, commit):
                execute(pipe, msgspec.structs.replace(state), commit)
                raise ConnectionError("reply lost")

            host._store._execute = lost
        host._commit_due = 0.0
        try:
            host.step(block_ms=1)
        except Killed:
            self.host = self.start()
            return
        except ConnectionError:  # the host's loop waits and calls again
            host._store._execute = execute
            host.step(block_ms=1)
        if fault == "lost_reply":
            host._store._execute = execute
        if fault in ("before_commit", "after_commit"):
            host._store.commit = real  # there was nothing to commit in this pass
        if fault in ("restart", "zombie"):
            self.host = self.start()
        if fault == "zombie":
            host._commit.log.append(("note", {"text": "from the dead"}))
            with pytest.raises(FencedError):
                host._flush()


def _die(first):
    def commit(state, commit):
        if first is not None:
            first(state, commit)
        raise Killed

    return commit


def held(service: Service) -> tuple[dict[str, LedgerEntry], dict[int, Decision]]:
    """Ledger and decisions as Redis has them."""
    ledger = {k.decode(): decode(v, LedgerEntry) for k, v in service.client.hgetall(service.keys.ledger).items()}
    decisions = {int(k): decode(v, Decision) for k, v in service.client.hgetall(service.keys.decisions).items()}
    return ledger, decisions


def check(service: Service, reference: Service) -> None:
    ledger, decisions = held(service)
    for mine, right in zip((ledger, decisions), held(reference), strict=True):
        assert [(mine.get(k), right.get(k)) for k in {*mine, *right} if mine.get(k) != right.get(k)] == []
    state = decode(service.client.get(service.keys.state), HostState)
    assert state.num_rows == service.num_rows
    totals = fold_entries(ledger.values())
    assert state.ledger_totals.rows() == totals.rows() == service.host.controller._state.ledger.sums.rows()
    assert service.host.controller._state.ledger.entries == ledger
    assert service.host.controller.check() == []
    by_kind = totals.by_kind()
    done = service.trainer.journal[: len(service.trainer.journal) - (state.pending is not None)]
    assert by_kind.get("training", 0.0) == pytest.approx(sum(r.train_s for r in done))
    assert by_kind.get("shadow", 0.0) == pytest.approx(sum(r.shadow_s for r in done))
    file = service.folder / "decisions.jsonl"
    service.host._log_file.sync(service.client, service.keys)
    logged = log_records(file, "ledger", "entry_id")
    assert {r["entry_id"]: r["seconds"] for r in logged} == {k: e.seconds for k, e in ledger.items()}
    lines = file.read_text().splitlines()
    assert sum('"entry_id"' in line for line in lines) == len(ledger), "an entry was logged twice"


EVERY_FAULT = [(FAULTS[i % len(FAULTS)], i // len(FAULTS), {5: "pin", 9: "unpin"}.get(i, "")) for i in range(21)]


@pytest.mark.slow
@settings(
    max_examples=3, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(FAULTS), st.integers(0, PASSES - 1), st.sampled_from(ORDERS)), min_size=3, max_size=8
    ),
    seed=st.integers(0, 3),
)
@example(steps=EVERY_FAULT, seed=0)
def test_no_fault_of_the_controller_changes_the_ledger(shared_redis, tmp_path, steps, seed):
    service, reference = (Service(shared_redis.url, tmp_path, seed) for _ in range(2))
    for fault, at, order in steps:
        service.step(fault, at, order)
        reference.step("none", 0, order)
    check(service, reference)
    if steps is EVERY_FAULT:
        assert set(fold_entries(held(service)[0].values()).by_kind()) == {
            "training", "shadow", "staging", "interference", "saving",
        }  # fmt: skip
        assert len(service.trainer.journal) >= 3
