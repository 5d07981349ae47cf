"""What the controller orders, with real training processes: jobs and their ends, recalls, pins, rollbacks, staging costs."""

import asyncio
import gc
import threading
import time

import msgspec
import pytest

from paceline.contracts import ReplicaReport
from paceline.errors import ManifestError, PacelineError, RequestError
from paceline.infra.controller.orders import CommandQueue, outcome
from paceline.infra.controller.snapshot import Swaps
from paceline.infra.state.desired import commit_desired, read_desired, write_report
from tests.helpers.hosts import make_host, recent_log, send, settle
from tests.helpers.scripted import MemoryRegistry, decision


def test_a_command_that_takes_too_long_is_withdrawn_or_said_to_be_under_way():
    commands, has_begun, may_end = CommandQueue(), threading.Event(), threading.Event()
    done = []

    def slow() -> str:
        has_begun.set()
        may_end.wait(20)
        done.append("slow")
        return "carried out"

    slow_one, waiting = commands.put(slow), commands.put(lambda: done.append("waiting"))
    loop = threading.Thread(target=commands.run, args=(lambda: None,))
    loop.start()
    assert has_begun.wait(20)
    with pytest.raises(PacelineError, match=r"begun, and not at its end.*may be carried out yet"):
        asyncio.run(outcome(slow_one, 0.01))
    with pytest.raises(PacelineError, match=r"not done.*nothing was changed"):
        asyncio.run(outcome(waiting, 0.01))
    may_end.set()
    loop.join(20)
    assert done == ["slow"] and asyncio.run(outcome(slow_one, 20.0)) == "carried out"


def test_a_command_that_is_refused_raises_what_it_raised_and_leaves_no_error_in_the_event_loops_log(caplog):
    commands = CommandQueue()

    def refuse() -> None:
        raise ValueError("no such version")

    async def ask() -> None:
        with pytest.raises(ValueError, match="no such version"):
            await outcome(commands.put(refuse), 20.0)
        gc.collect()

    loop = threading.Thread(target=lambda: (time.sleep(0.1), commands.run(lambda: None)))
    loop.start()
    asyncio.run(ask())
    loop.join(20)
    gc.collect()
    assert not [r for r in caplog.records if r.name == "asyncio" and r.levelname == "ERROR"]


def test_accepted_training_makes_a_new_generation(host, client, keys, wait_until):
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    settle(host, 1)
    assert host.session.state.pending.job.shard_ids == ["s2"]
    assert host.session.state.pending.job.rehearsal_shard_ids == ["o1"]

    def done() -> bool:
        settle(host, 1)
        return host.session.state.pending is None and host.session.state.desired.gen == 2

    wait_until(done, timeout_s=60.0)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.class_versions) == (2, "v1", {"math": "v2"}), (
        "its class has it, no other"
    )
    assert host.snapshot().decisions[0].outcome == "accepted"
    assert len(host.launcher.handles) == 1
    kinds = [e["kind"] for e in recent_log(client, keys)]
    assert kinds.count("job") == 1 and kinds.count("decision") == 2
    assert (host.config.data_dir / "decisions.jsonl").read_bytes().count(b"\n") == len(kinds)


def test_restart_while_training_waits_for_the_same_job(shared_redis, host, client, keys, tmp_path, wait_until):
    host.launcher.seconds = 2.0
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    settle(host, 2)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.state.pending is not None

    def done() -> bool:
        settle(second, 1)
        return second.session.state.desired.gen == 2

    wait_until(done, timeout_s=60.0)
    assert second.launcher.handles == []
    assert (tmp_path / "journal").read_text().count("\n") == 1


def test_decision_without_shards_ends_as_failed(host):
    host.shards.shards.clear()
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    settle(host)
    assert host.session.controller.s.jobs == {1: "failed"}
    assert "no trace shards" in host.session.controller.outcomes[0].reason


def test_recall_gives_the_class_a_version_and_takes_it_back(host, client, keys):
    host.session.controller.queue.append(decision(1, "recall", version="v3", reason="scores better"))
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.class_versions, desired.reason) == (2, {"math": "v3"}, "scores better")
    host.session.controller.queue.append(decision(2, "recall", version="v1", reason="the first is better"))
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.class_versions) == (3, "v1", {})


def test_operators_take_along_what_the_policy_gave_to_classes_and_leave_what_they_assigned(host, client, keys):
    def given() -> tuple[str, dict[str, str]]:
        settle(host)
        desired = read_desired(client, keys)
        return desired.version, desired.class_versions

    orders = host.session.orders
    orders.assign("code", "v2")
    settle(host)
    host.session.controller.queue.append(decision(1, "recall", version="v3"))
    assert given() == ("v1", {"code": "v2", "math": "v3"})
    assert orders.rollback() == "v1"
    assert given() == ("v1", {"code": "v2"}) and host.session.controller.decisions == []
    host.session.controller.queue.append(decision(5, "recall", version="v3"))
    assert given() == ("v1", {"code": "v2", "math": "v3"})
    orders.pin("v2")
    assert given() == ("v2", {"code": "v2"}), "a pin is for every class but those assigned"
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].assigned == ["code"] and contexts[-1].class_versions == {"code": "v2"}
    orders.unassign("code")
    assert given() == ("v2", {}) and contexts[-1].assigned == []


def test_operator_pins_rolls_back_and_is_refused_with_a_reason(host, client, keys):
    host.session.orders.pin("v3")
    settle(host)
    assert read_desired(client, keys).version == "v3"
    assert host.session.orders.rollback() == "v1"
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version) == (3, "v1")
    assert host.snapshot().history == ["v1", "v3", "v1"]
    with pytest.raises(ManifestError, match="not in the registry"):
        host.session.orders.pin("nope")
    with pytest.raises(ManifestError, match="not in the registry"):
        host.session.orders.rollback("nope")


def test_a_roll_back_does_not_wait_for_a_store_that_refuses(shared_redis, client, keys, tmp_path, seeded):
    class Registry(MemoryRegistry):
        is_refused = False

        def get_manifest(self, version, **options):
            if self.is_refused:
                raise OSError("the store failed: EndpointConnectionError")
            return super().get_manifest(version, **options)

    registry = Registry()
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry)
    host.connect()
    host.session.orders.pin("v3")
    settle(host)
    registry.is_refused = True
    assert host.session.orders.rollback() == "v1"
    settle(host)
    assert read_desired(client, keys).version == "v1"
    with pytest.raises(OSError, match="the store failed"):
        host.session.orders.pin("unknown")


def test_rollback_without_a_past_says_so(host):
    settle(host)
    with pytest.raises(RequestError, match="only version that was ever live"):
        host.session.orders.rollback()


def test_refused_version_is_rolled_back(host, client, keys):
    host.session.orders.pin("v2")
    settle(host)
    write_report(
        client,
        keys,
        ReplicaReport(
            replica_id="a", gen=1, version="v1", slots={}, failed_gen=2, failed_reason="NaN in w", swap_pause_ms=[], ts=1.0
        ),
    )  # fmt: skip
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version) == (3, "v1")
    assert "NaN in w" in desired.reason
    assert host.snapshot().history == ["v1"]  # a later rollback does not lead back to what was refused


def test_staging_is_booked_once_when_all_replicas_run_the_version(host, client, keys):
    def report(replica: str, gen: int) -> None:
        made = ReplicaReport(
            replica_id=replica, gen=gen, version="v", slots={}, failed_gen=None, failed_reason="",
            swap_pause_ms=[20.0] if gen > 1 else [], staging_s=0.5, counters={"produced": 10, "dropped": 1}, ts=5.0,
        )  # fmt: skip
        write_report(client, keys, made)
        settle(host)

    report("a", 1)
    report("b", 1)
    host.session.orders.pin("v2")
    settle(host)
    report("a", 2)
    assert "staging" not in host.snapshot().ledger.by_kind
    for _ in range(3):
        report("b", 2)
    snapshot = host.snapshot()
    assert snapshot.ledger.by_kind["staging"] == pytest.approx(1.04)
    assert snapshot.swaps == Swaps(count=2, pause_ms=[20.0, 20.0], times=[5.0, 5.0])
    assert snapshot.feedback.dropped == 2


def test_swaps_of_many_replicas_are_counted_once_each(host, client, keys):
    def report(gen: int, num: int) -> None:
        for i in range(num):
            made = ReplicaReport(
                replica_id=f"r{i}", gen=gen, version="v", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[20.0],
                ts=1000.0 * gen + i,
            )  # fmt: skip
            write_report(client, keys, made)
        settle(host)

    report(2, 600)
    times = list(host.session.state.swap_times)
    assert times == [2000.0 + i for i in range(600)][-len(times) :] and len(times) >= 500
    settle(host)
    assert host.session.state.swap_times == times, "more looks, and no swap more"
    report(3, 1)
    assert host.session.state.swap_times == [*times, 3000.0][-len(times) :]


def test_desired_record_of_the_command_line_is_adopted(host, client, keys):
    settle(host)
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=7, version="v3"))
    host.session.orders.pause()
    settle(host)
    assert host.session.state.desired.gen == 7
    host.session.orders.pin("v2")
    settle(host)
    assert read_desired(client, keys).gen == 8


def test_paused_controller_folds_but_does_not_decide(host, client, keys):
    host.session.orders.pause()
    host.session.controller.queue.append(decision(1, "recall", version="v3"))
    send(client, keys, 1)
    settle(host)
    assert (host.session.state.num_rows, read_desired(client, keys).gen) == (3, 1)
    host.session.orders.pause(False)
    settle(host)
    assert read_desired(client, keys).class_versions == {"math": "v3"}
