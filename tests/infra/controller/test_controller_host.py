"""Claims of infra/controller/host.py against a real server, with a scripted policy: feedback, fencing, restarts, repair."""

import threading

import msgspec
import numpy as np
import pytest
import redis
from redis.client import Pipeline

from paceline.config import PolicyConfig
from paceline.contracts import LedgerEntry, ReplicaReport, encode
from paceline.errors import ConfigError, FencedError, ManifestError, PacelineError
from paceline.infra.controller import host as host_module
from paceline.infra.controller import store
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.snapshot import LedgerSums
from paceline.infra.controller.store import HostConfig
from paceline.infra.controller.traffic import MAX_BUCKETS
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version, read_desired, write_report
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import FEEDBACK_GROUP, consumer_client, patient_client
from paceline.machine import ManualClock
from tests.helpers.fake_replicas import loading
from tests.helpers.faults import Fault
from tests.helpers.hosts import ledger, make_host, recent_log, send, settle, stored
from tests.helpers.scripted import (
    MemoryRegistry,
    MemoryStore,
    ProcessLauncher,
    ScriptedController,
    decision,
    row,
)


def pending_entries(client, keys) -> int:
    return int(client.xpending(keys.feedback, FEEDBACK_GROUP)["pending"])


def test_feedback_is_folded_once_and_acknowledged(host, client, keys):
    for seq in (1, 2, 2, 1, 3):
        send(client, keys, seq)
    settle(host)
    assert (host.session.state.num_rows, host.session.state.num_duplicates) == (9, 2)
    assert pending_entries(client, keys) == 0
    assert stored(client, keys).num_rows == 9
    assert len(ledger(client, keys)) == 3


def test_the_policy_sees_a_bounded_number_of_buckets(host, client, keys):
    seen = []
    observe = host.session.controller.observe
    host.session.controller.observe = lambda batch: (seen.extend(cell.bucket for cell in batch.cells), observe(batch))
    for seq in (1, 2, 3):
        rows = [row(i, bucket=f"b{seq}-{i}") for i in range(100)]
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
        client.xadd(keys.feedback, {"v": encode(batch)})
    settle(host)
    assert host.session.state.num_rows == len(seen) == 300
    assert len(set(seen)) == MAX_BUCKETS and "other" in seen
    assert set(host.session.state.traffic.totals) == set(seen)


def test_gaps_and_producer_drops_are_counted(host, client, keys):
    send(client, keys, 1)
    send(client, keys, 4, dropped=7)
    send(client, keys, 1, boot=2)
    settle(host)
    assert (host.session.state.num_missing_batches, host.session.state.num_dropped, host.session.state.num_rows) == (
        2,
        7,
        9,
    )


class Looks(dict):
    """A dict that counts how often all of it is looked at."""

    num = 0

    def items(self):
        self.num += 1
        return super().items()

    def __iter__(self):
        self.num += 1
        return super().__iter__()


def test_producers_that_are_gone_are_forgotten_and_no_batch_looks_at_all_of_them(
    shared_redis, client, keys, tmp_path, seeded
):
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    send(client, keys, 1, replica="gone")
    settle(host)
    state = host.session.state
    looks = state.watermarks = Looks(state.watermarks)
    for i in range(20):
        send(client, keys, 1, replica=f"r{i}")
    settle(host)
    assert len(looks) == 21 and looks.num == 0
    clock.advance(3000.0)
    send(client, keys, 2, replica="r0")
    settle(host)
    assert len(state.watermarks) == 21 and looks.num == 1
    clock.advance(700.0)
    send(client, keys, 3, replica="r0")
    settle(host)
    assert state.watermarks == {"r0:1": (3, 4700.0)}
    assert state.num_duplicates == state.num_missing_batches == 0


def test_a_stop_leaves_the_session_to_a_loop_that_is_inside_a_call(
    shared_redis, keys, tmp_path, seeded, wait_until, monkeypatch
):
    host = make_host(shared_redis.url, keys, tmp_path).start()
    wait_until(lambda: host.snapshot().epoch == 1)
    inside, go, closed = threading.Event(), threading.Event(), []
    monkeypatch.setattr(host.session.feedback, "read", lambda block_ms: inside.set() or int(go.wait(60.0)))
    monkeypatch.setattr(host.session, "close", lambda patience_s: closed.append(go.is_set()))
    assert inside.wait(20.0)
    host.stop(timeout_s=0.1)
    assert closed == []
    go.set()
    host.stop()
    assert closed == [True]


def test_a_producer_that_is_idle_for_hours_but_reports_has_lost_nothing(shared_redis, client, keys, tmp_path, seeded):
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    for boot, seq in ((1, 1), (2, 1), (2, 2)):
        send(client, keys, seq, boot=boot, replica="idle")
    for number in range(3):
        write_report(client, keys, loading("idle", 1, "v1"))
        send(client, keys, 1 + number, replica="busy")
        settle(host)
        clock.advance(4000.0)
    send(client, keys, 3, boot=2, replica="idle")
    settle(host)
    state = host.session.state
    assert (state.num_missing_batches, state.num_duplicates) == (0, 0)
    assert set(state.watermarks) == {"idle:2"}, "neither its earlier boot nor one without a report"


def test_entries_read_but_not_committed_are_read_again_by_the_next_controller(
    shared_redis, host, client, keys, tmp_path
):
    send(client, keys, 1)
    settle(host)
    send(client, keys, 2)
    host.session.feedback.read(1)  # folded in memory, then the process dies
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.state.num_rows == 3
    settle(second)
    assert (second.session.state.num_rows, second.session.controller.s.rows, second.session.state.num_duplicates) == (
        6,
        6,
        0,
    )
    assert pending_entries(client, keys) == 0


def test_older_controller_is_fenced(shared_redis, host, client, keys, tmp_path):
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    send(client, keys, 1)
    host.session.feedback.read(1)
    with pytest.raises(FencedError, match="another controller took over"):
        host.session.books.flush()
    settle(second)
    assert second.session.state.num_rows == 3
    assert len(ledger(client, keys)) == 1


def test_a_fenced_controller_goes_on_when_its_rival_is_gone_and_no_sooner(
    shared_redis, client, keys, tmp_path, seeded, wait_until, monkeypatch
):
    clock, looks = ManualClock(1000.0), []
    monkeypatch.setattr(host_module, "_RIVAL_LOOK_S", 0.01)
    monkeypatch.setattr(
        host_module, "read_progress", lambda *of: (looks.append(store.read_progress(*of)), looks[-1])[1]
    )
    host, rival = (make_host(shared_redis.url, keys, tmp_path, clock=clock) for _ in range(2))
    host.start()
    try:
        wait_until(lambda: stored(client, keys).epoch == 1)
        rival.connect()
        send(client, keys, 1)
        wait_until(lambda: host.is_fenced, what="the fence")
        with pytest.raises(PacelineError, match="waits for its end; nothing was changed"):
            host.call(lambda: None).result(10)
        for _ in range(6):  # the rival has nothing to do, and lives
            clock.advance(store.BEAT_S)
            settle(rival, 1)
            num = len(looks)
            wait_until(lambda num=num: len(looks) > num + 2)
            assert host.is_fenced
        clock.advance(3 * store.BEAT_S)
        wait_until(lambda: not host.is_fenced, what="the return")
        assert host.call(lambda: host.session.state.epoch).result(10) == 3
        wait_until(lambda: stored(client, keys).num_rows == 3)
        with pytest.raises(FencedError):
            rival.session.books.flush(always=True)
    finally:
        host.stop()


def test_keys_that_change_again_and_again_fence_nobody(host, client, keys, monkeypatch):
    send(client, keys, 1)
    execute = Pipeline.execute

    def change_first(pipe, *args, **options):
        client.xadd(keys.log, {"kind": "note", "v": "{}"})
        return execute(pipe, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", change_first)
        with pytest.raises(redis.WatchError, match="keep changing"):
            settle(host)
    settle(host)
    assert stored(client, keys).num_rows == 3 and len(ledger(client, keys)) == 1


def test_commit_whose_reply_was_lost_is_not_repeated(shared_redis, client, keys, tmp_path, seeded):
    fault = Fault()
    host = make_host(shared_redis.url, keys, tmp_path, make_client=fault.client)
    host.connect()
    send(client, keys, 1)
    fault.arm("away", at=0)
    with pytest.raises(redis.ConnectionError):
        host.step(block_ms=0)
    num_lines = client.xlen(keys.log)
    send(client, keys, 2)
    settle(host)
    assert stored(client, keys).num_rows == 6
    assert (
        list(ledger(client, keys))
        == ["saving:a:1:1", "saving:a:1:2"]
        == [e.entry_id for e in host.session.books.store.ledger]
    )
    assert sum("entry_id" in e for e in recent_log(client, keys)) == 2 and client.xlen(keys.log) == num_lines + 1


def test_a_command_whose_commit_is_in_doubt_does_not_swallow_what_comes_after_it(
    shared_redis, client, keys, tmp_path, seeded
):
    fault = Fault()
    host = make_host(shared_redis.url, keys, tmp_path, make_client=fault.client)
    host.connect()
    settle(host)
    fault.arm("away", at=0)
    host.call(lambda: None)  # its commit writes nothing but the state
    with pytest.raises(redis.ConnectionError):
        host.step(block_ms=0)
    send(client, keys, 1)
    settle(host)
    assert stored(client, keys).num_rows == 3 and len(ledger(client, keys)) == 1


def test_policy_is_told_what_manifests_say_of_every_version(shared_redis, keys, tmp_path, seeded):
    made = MemoryRegistry().get_manifest("v1")
    first = msgspec.structs.replace(made, config={"learned_rows": {"code": 900}})
    second = msgspec.structs.replace(
        made, version="v2", parent="v1", bucket="math", metrics={"num_fresh_rows": 300, "acceptance_length": 2.5}
    )
    registry = MemoryRegistry()
    registry.list = lambda: [first, second]
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry)
    host.connect()
    settle(host)
    told = host.session.controller.contexts[-1]
    assert told.learned_rows == {"v1": {"code": 900}, "v2": {"code": 900, "math": 300}}
    assert told.shadow == {"math": {"v2": 2.5}}


def test_trimmed_but_pending_entries_are_counted_and_acknowledged(shared_redis, host, client, keys, tmp_path):
    for seq in (1, 2):
        send(client, keys, seq)
    host.session.feedback.read(1)
    assert pending_entries(client, keys) == 2
    client.xtrim(keys.feedback, maxlen=0, approximate=False)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    assert second.session.state.num_lost_entries == 2
    assert pending_entries(client, keys) == 0


def test_unreadable_entry_does_not_stop_the_stream(host, client, keys):
    client.xadd(keys.feedback, {"v": b"junk"})
    client.xadd(keys.feedback, {"w": b"1"})
    send(client, keys, 1)
    settle(host)
    assert (host.session.state.num_lost_entries, host.session.state.num_rows) == (2, 3)


def test_a_batch_that_breaks_the_pass_keeps_none_of_those_behind_it_from_being_folded(host, client, keys, monkeypatch):
    lives, observe = host.session.feedback._lives, host.session.feedback._lives.observe
    monkeypatch.setattr(lives, "observe", lambda batch: observe(batch) if batch.seq != 2 else 1 / 0)
    client.xadd(keys.feedback, {"v": b"junk"})
    for seq in (1, 2, 3, 4):
        send(client, keys, seq)
    with pytest.raises(ZeroDivisionError):
        settle(host)
    settle(host)
    state = host.session.state
    assert (state.num_rows, state.num_lost_entries, state.num_duplicates) == (12, 1, 0)
    assert stored(client, keys).num_rows == 12
    assert pending_entries(client, keys) == 0 and host.session.state.num_missing_batches == 0


def test_policy_that_raises_does_not_stop_the_feedback(shared_redis, client, keys, tmp_path, seeded):
    class Failing(ScriptedController):
        def tick(self, now, context):
            raise ZeroDivisionError

    host = make_host(shared_redis.url, keys, tmp_path, make=Failing)
    host.connect()
    send(client, keys, 1)
    settle(host)
    assert host.session.state.num_rows == 3
    assert "failed to decide" in host.snapshot().errors.last


def test_policy_set_at_run_time_survives_a_restart(shared_redis, host, keys, tmp_path):
    host.session.orders.set_policy("never")
    settle(host)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.controller.s.policy == "never"
    third = make_host(shared_redis.url, keys, tmp_path, policy=PolicyConfig(policy="always"))
    third.connect()
    assert third.session.controller.s.policy == "always"


def test_flush_is_repaired_from_memory(own_redis, keys, tmp_path, wait_until):
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(own_redis.url, keys, tmp_path)
    host.connect()
    send(client, keys, 1)
    host.session.orders.pin("v2")
    settle(host)
    epoch = host.session.books.store.epoch
    client.flushall()
    send(client, keys, 1)
    send(client, keys, 2)
    settle(host, 5)
    assert (host.session.state.num_rows, host.session.state.num_duplicates) == (6, 1)
    assert read_desired(client, keys).version == "v2"
    assert len(ledger(client, keys, tmp_path / "data")) == 2
    assert len(client.hgetall(keys.decisions)) == 1
    assert host.session.books.store.epoch > epoch


def test_lost_data_is_restored_from_the_snapshot_file(own_redis, keys, tmp_path):
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(own_redis.url, keys, tmp_path)
    host.connect()
    send(client, keys, 1)
    host.session.orders.pin("v2")
    settle(host)
    host.stop()
    client.flushall()
    second = make_host(own_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    assert (second.session.state.num_rows, second.session.state.desired.gen) == (3, 2)
    assert read_desired(client, keys).version == "v2"
    assert second.session.books.store.epoch > host.session.books.store.epoch
    assert len(ledger(client, keys, tmp_path / "data")) == 1


def report_of(gen: int, version: str) -> ReplicaReport:
    return ReplicaReport(
        replica_id="a", gen=gen, version=version, slots={"A": version}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=1.0
    )  # fmt: skip


def test_a_state_older_than_what_replicas_follow_is_written_behind_it(own_redis, keys, tmp_path):
    """They ignore generations before their own: until the restored ones had passed it, no order would reach them."""
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(own_redis.url, keys, tmp_path, snapshot_every_s=0.0)
    host.connect()
    host.session.orders.pin("v2")
    settle(host)
    (snapshot,) = (tmp_path / "data").glob("controller-*.msgpack")
    old = snapshot.read_bytes()
    for version in ("v1", "v2", "v1"):
        host.session.orders.pin(version)
        settle(host)
    assert (host.session.state.desired.gen, host.session.state.desired.version) == (5, "v1")
    snapshot.write_bytes(old)  # the controller died before it wrote this file again
    client.flushall()
    write_report(client, keys, report_of(5, "v1"), ttl_s=60)
    second = make_host(own_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version) == (6, "v2") and desired == second.session.state.desired
    assert "replicas know generation 5" in [n.text for n in second.snapshot().notes][-1]
    settle(second)
    assert read_desired(client, keys) == desired, "once"


def test_a_later_record_of_the_set_up_is_taken_over_though_replicas_knew_it_first(host, client, keys):
    later = msgspec.structs.replace(read_desired(client, keys), gen=7, version="v2")
    client.set(keys.desired, encode(later))
    write_report(client, keys, report_of(7, "v2"), ttl_s=60)
    send(client, keys, 1)
    settle(host)
    assert read_desired(client, keys) == host.session.state.desired == later


@pytest.mark.parametrize("junk", [b"\x00junk", b"", b"\xff" * 40])
@pytest.mark.parametrize("name", ["desired", "epoch"])
def test_a_damaged_record_is_written_anew_and_orders_are_taken(host, client, keys, tmp_path, name, junk):
    send(client, keys, 1)
    settle(host)
    before = read_desired(client, keys)
    client.set(getattr(keys, name), junk)
    send(client, keys, 2)
    settle(host)
    assert read_desired(client, keys) == before
    client.set(getattr(keys, name), junk)
    host.session.orders.pin("v2")
    settle(host)
    assert (read_desired(client, keys).gen, read_desired(client, keys).version) == (before.gen + 1, "v2")
    assert host.session.state.num_rows == 6 and len(ledger(client, keys, tmp_path / "data")) == 2


def test_a_controller_starts_though_the_epoch_is_damaged(shared_redis, host, client, keys, tmp_path):
    settle(host)
    client.set(keys.epoch, b"\x00junk")
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.books.store.epoch > host.session.books.store.epoch
    with pytest.raises(FencedError):
        send(client, keys, 1)
        settle(host)


def test_a_data_folder_that_cannot_be_written_is_no_outage(host, client, keys, tmp_path):
    settle(host)
    log = tmp_path / "data" / "decisions.jsonl"
    log.rename(tmp_path / "aside")
    log.mkdir()
    send(client, keys, 1)
    host.session.orders.set_policy("never")
    settle(host)
    assert stored(client, keys).policy == "never" and stored(client, keys).num_rows == 3
    assert "data folder" in host.snapshot().errors.last
    log.rmdir()
    (tmp_path / "aside").rename(log)
    host.session.orders.set_policy("payoff")
    settle(host)
    assert [x["log_id"] for x in LogFile(log).newest_first()] == [x["log_id"] for x in recent_log(client, keys)][::-1]


def test_redis_holds_the_decisions_that_the_controller_holds(shared_redis, client, keys, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_DECISIONS", 5)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    for i in range(1, 10):
        host.session.controller.queue.append(decision(i, "hold"))
        for known in range(max(i - 3, 1), i):  # logged anew, with what they brought
            host.session.controller.decisions.append(decision(known, "hold", realised_saving_s=1.0 * i))
        settle(host)
        held = host.session.books.store.decisions
        assert {int(name) for name in client.hgetall(keys.decisions)} == set(held) == set(range(max(i - 4, 1), i + 1))
    host.stop()


def test_a_controller_that_starts_afresh_shows_no_decisions_of_the_one_before(
    shared_redis, client, keys, tmp_path, seeded
):
    client.hset(keys.decisions, "7", b"junk")
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    settle(host)
    assert host.snapshot().decisions == [] and client.hgetall(keys.decisions) == {}


def test_commands_run_in_the_loop_and_return_errors(shared_redis, keys, tmp_path, seeded, wait_until):
    host = make_host(shared_redis.url, keys, tmp_path).start()
    wait_until(lambda: host.snapshot().gen == 1)
    host.call(lambda: host.session.orders.pin("v2")).result(10)
    assert host.snapshot().version in ("v1", "v2")
    wait_until(lambda: host.snapshot().version == "v2")
    with pytest.raises(ManifestError):
        host.call(lambda: host.session.orders.pin("nope")).result(10)
    host.stop()
    with pytest.raises(PacelineError, match="has stopped"):
        host.call(host.session.orders.pause).result(1)


def test_snapshots_are_made_when_somebody_asks_and_then_are_new(
    shared_redis, client, keys, tmp_path, seeded, wait_until, monkeypatch
):
    made: list[int] = []
    assemble = host_module.snapshot_view
    monkeypatch.setattr(host_module, "snapshot_view", lambda session: (made.append(1), assemble(session))[1])
    host = make_host(shared_redis.url, keys, tmp_path).start()
    wait_until(lambda: host.snapshot().gen == 1)
    host.snapshot(wait_s=5.0)
    settled = len(made)
    send(client, keys, 1)
    wait_until(lambda: stored(client, keys).num_rows == 3)
    send(client, keys, 2)
    wait_until(lambda: stored(client, keys).num_rows == 6)
    assert len(made) <= settled + 1, "passes went by, and nobody asked"
    assert host.snapshot(wait_s=5.0).feedback.delivered == 6
    before = len(made)
    for _ in range(50):
        host.snapshot()
    assert len(made) <= before + 2, "however many ask"
    host.stop()
    assert host.snapshot(wait_s=0.0).feedback.delivered == 6


def test_controller_starts_without_redis_and_connects_later(tmp_path, keys, wait_until):
    from paceline.infra.state.redis_server import EmbeddedRedis

    server = EmbeddedRedis(tmp_path)
    tries = []
    make_client = lambda url: (tries.append(url), consumer_client(url))[1]  # noqa: E731
    host = make_host(server.url, keys, tmp_path, make_client=make_client).start()
    wait_until(lambda: len(tries) > 1)
    assert host.snapshot().redis_up is False
    server.start()
    ensure_first_version(patient_client(server.url), keys, "v1", 10, 1.0)
    wait_until(lambda: host.snapshot().gen == 1, 60.0)
    host.stop()
    server.stop()


def test_snapshot_agrees_with_the_ledger(host, client, keys):
    send(client, keys, 1)
    host.session.controller.book(
        LedgerEntry(entry_id="x", ts=1.0, kind="training", bucket="math", version=None, seconds=2.0)
    )
    settle(host)
    snapshot = host.snapshot()
    sums = LedgerSums(spent_s=2.0, saved_s=3.0, net_s=1.0, by_kind={"saving": 3.0, "training": 2.0})
    assert snapshot.ledger == sums
    adaptive = snapshot.buckets["math"].groups()["adaptive"]
    assert (adaptive.rounds, adaptive.acceptance_length) == (3, 3.0)
    assert adaptive.tokens_per_s == pytest.approx(300.0)
    assert np.isclose(snapshot.buckets["math"].recent["adaptive"].acceptance_rate, 0.5)
    assert snapshot.feedback.delivered == 3 and snapshot.feedback.lag == 0
    assert snapshot.redis_up is True


def test_unknown_policy_is_refused(shared_redis, keys, tmp_path, seeded):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()

    def refuse(name: str) -> None:
        raise ConfigError("policy.policy must be one of never, always, interval, payoff")

    host.session.controller.set_policy = refuse  # type: ignore[method-assign]
    with pytest.raises(ConfigError):
        host.session.orders.set_policy("x")


def test_real_policy_orders_a_job_and_learns_its_outcome(shared_redis, client, keys, tmp_path, seeded, wait_until):
    clock = ManualClock(1000.0)
    launcher = ProcessLauncher(shared_redis.url, str(tmp_path / "journal"), status="rejected")
    host = ControllerHost(
        HostConfig(
            redis_url=shared_redis.url, model=keys.model, context_every_s=0.0, commit_every_s=0.0, target_version="t",
            policy=PolicyConfig(policy="always", epoch_s=5.0, min_rows=100),
        ),
        store=MemoryStore(), registry=MemoryRegistry(), launcher=launcher, clock=clock,
    )  # fmt: skip
    host.connect()
    seq = 0

    def decided() -> bool:
        nonlocal seq
        clock.advance(2.0 if host.session.state.pending is None else 0.1)  # the job's process lives in real time
        seq += 1
        rows = [row(i, group=g, ts=clock.now()) for i in range(20) for g in ("adaptive", "static")]
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
        client.xadd(keys.feedback, {"v": encode(batch)})
        settle(host, 1)
        return any(d.outcome == "rejected" for d in host.snapshot().decisions)

    wait_until(decided, timeout_s=60.0, what="a training decision with its outcome")
    host.session.orders.set_policy("never")
    settle(host)
    wait_until(lambda: host.session.state.pending is None or settle(host) is not None, timeout_s=30.0)
    assert host.session.controller.check(ledger(client, keys).values()) == []
    assert host.snapshot().ledger.by_kind["training"] > 0
    bandit = host.snapshot().bandit.ledger
    assert bandit.spent_s == pytest.approx(host.snapshot().ledger.spent_s)
    second = make_host(shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(policy="always", min_rows=100))
    second.connect()
    assert second.session.controller.snapshot().ledger.spent_s == pytest.approx(bandit.spent_s)
    assert second.session.state.policy == "never"
