"""Claims of infra/controller/lives.py against a real server: canaries, life cycles, the pool, retention."""

import functools

import msgspec
import pytest

from paceline.adapt.versions.lifecycle import DrafterStatus as S
from paceline.config import RolloutConfig, TraceConfig
from paceline.contracts import ReplicaReport, encode, is_canary
from paceline.errors import DrafterMismatchError, ManifestError
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import commit_desired, read_desired, write_report
from tests.helpers import hosts
from tests.helpers.fake_replicas import FakeReplicas, loading
from tests.helpers.hosts import recent_log, run_canary, settle, stored
from tests.helpers.scripted import MemoryRegistry, MemoryStore, Shard, decision, row

ROLLOUT = RolloutConfig(guard=False, canary_percent=50, quiet_s=0.02, freeze_s=500.0, max_requests=100)
make_host = functools.partial(hosts.make_host, rollout=ROLLOUT)


@pytest.fixture
def rollout():
    return ROLLOUT


@pytest.fixture
def replicas(shared_redis, keys, seeded):
    return lambda **speed: FakeReplicas(shared_redis.url, keys, speed=lambda v: speed.get(v, 300.0))


def ways(host, version: str) -> list[S]:
    return [t.after for t in host.session.state.lifecycle.versions[version].transitions]


def test_the_first_drafter_is_live_and_nothing_is_on_trial(host):
    settle(host)
    assert ways(host, "v1") == [S.LIVE]
    assert host.snapshot().canary is None


def test_a_job_ordered_during_a_trial_is_refused_for_the_trial(host):
    host.session.orders.canary("v2")
    settle(host)
    with pytest.raises(ValueError, match="v2 is on trial; wait for its verdict"):
        host.session.orders.train("math")
    assert host.session.state.pending is None


def test_accepted_training_goes_through_a_canary_to_live(host, client, keys, replicas, wait_until):
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    settle(host, 1)
    (key,) = host.session.state.lifecycle.with_status(S.TRAINING)
    assert key == f"job:{host.session.state.pending.job.job_id}"
    wait_until(lambda: settle(host, 1) or host.session.state.rollout.canary is not None, timeout_s=60.0)
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.canary_version, desired.canary_percent, desired.gen) == ("v1", "v2", 50, 2)
    assert desired.canary_bucket == "math"
    snapshot = host.snapshot()
    assert snapshot.canary.version == "v2" and snapshot.history == ["v1"]
    assert snapshot.lifecycle["v2"].state == "canary" and snapshot.lifecycle["v2"].bucket == "math"
    run_canary(host, replicas(v2=420.0), wait_until)
    desired = read_desired(client, keys)
    assert (desired.class_versions, desired.canary_version, desired.canary_percent, desired.gen) == (
        {"math": "v2"},
        "",
        0,
        3,
    )
    assert "canary promoted: not slower than v1" in desired.reason
    assert ways(host, "v2") == [S.TRAINING, S.TRAINED, S.SHADOWED, S.CANARY, S.LIVE]
    assert ways(host, "v1") == [S.LIVE], "it serves the other classes on"
    assert host.session.controller.canaries == [(1, "promoted")]
    logged = [e for e in recent_log(client, keys) if e["kind"] == "lifecycle"]
    assert len(logged) == 6 and all("reason" in e for e in logged)
    assert client.hlen(keys.decisions) == 1


def test_a_slow_canary_is_rolled_back_barred_and_frozen(host, client, keys, replicas, wait_until):
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.state.rollout.canary is not None, timeout_s=60.0)
    settle(host)
    run_canary(host, replicas(v2=150.0), wait_until)
    desired = read_desired(client, keys)
    assert (desired.version, desired.canary_version, desired.gen) == ("v1", "", 3)
    assert "canary v2 rolled back: it is slower than v1" in desired.reason
    assert ways(host, "v2")[-1] == S.ROLLED_BACK and host.session.state.lifecycle.status("v1") == S.LIVE
    assert host.session.controller.canaries == [(1, "rolled_back")]
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].frozen == ["math"] and contexts[-1].versions == ["v1", "v3"]
    assert not contexts[-1].job_running
    host.session.controller.tick = lambda now, context: [decision(9, "recall", version="v2")]  # whoever asks
    settle(host, 1)
    assert read_desired(client, keys).gen == 3 and host.session.state.rollout.canary is None


def test_an_ordered_canary_is_among_the_notes_and_in_the_log(host, client, keys):
    host.session.orders.canary("v2")
    settle(host)
    assert host.snapshot().notes[-1].text == "canary of v2 ordered by the operator"
    assert [e["text"] for e in recent_log(client, keys) if e["kind"] == "note"][-1].startswith("canary of v2")


class Unseen(list):
    """Reports that nobody may go through."""

    def __iter__(self):
        raise AssertionError("a batch looked at every replica")


def test_a_batch_of_a_trial_looks_at_no_replica_but_its_own(host, replicas):
    fleet = replicas()
    host.session.orders.canary("v2")
    settle(host)
    fleet.report()
    settle(host)
    host.session.surroundings.reports = Unseen(host.session.surroundings.reports)
    fleet.serve(8)
    assert host.session.feedback.read(1) > 0
    canary = host.session.state.rollout.canary
    assert canary is not None and len(canary.open) == fleet.num_rows / 3


def test_requests_of_the_version_on_trial_are_counted_apart(host, client, keys, replicas, wait_until):
    fleet = replicas()
    host.session.orders.canary("v2")
    settle(host)
    for _ in range(4):
        fleet.report()
        fleet.serve(8)
    wait_until(
        lambda: settle(host, 1) or host.session.state.num_rows == fleet.num_rows, what="the rows of both versions"
    )
    assert host.session.state.rollout.canary is not None
    assert set(fleet.num_rounds) == {"v1", "v2"}
    (traffic,) = host.snapshot().buckets.values()
    counted = {name: sums.rounds for name, sums in traffic.groups().items()}
    assert counted == {"adaptive": fleet.num_rounds["v1"], "canary": fleet.num_rounds["v2"]}
    own = next(i for i in range(1000) if is_canary(f"r{i}", "v2", ROLLOUT.canary_percent))
    rows = [row(own, bucket="code", version="")]
    batch = make_batch(rows, replica_id="c", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    client.xadd(keys.feedback, {"v": encode(batch)})
    settle(host)
    assert set(host.session.state.traffic.totals["code"]) == {"canary"}, (
        "v2 was switched off under it; it stays the trial's"
    )
    host.session.orders.pin("v1")
    settle(host)
    assert host.session.state.rollout.tried_version({"v1"}) == "v2", "what v2 still serves is none of v1's"
    assert host.session.state.rollout.tried_version({"v1", "v2"}) == ""


def test_no_training_and_no_recall_is_decided_during_a_canary(host, replicas):
    host.session.orders.canary("v2")
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].job_running and contexts[-1].live_version == "v1"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gen": 1, "canary": "", "failed_gen": 2, "failed_reason": "must be finite"}, "refused it: must be finite"),
        ({"gen": 2, "canary": "v2", "failures": {"v2": "NaN scores"}}, "switched it off: NaN scores"),
    ],
)
def test_a_replica_that_fails_on_it_ends_the_canary_and_touches_nothing_live(host, client, keys, fields, reason):
    host.session.orders.canary("v2")
    settle(host)
    write_report(client, keys, loading("a", fields.pop("gen"), "v1", fields.pop("canary"), swap_gen=0, **fields))
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.canary_version) == (3, "v1", "")
    assert reason in desired.reason and host.session.state.lifecycle.status("v2") == S.ROLLED_BACK
    assert host.session.state.history == ["v1"]


def test_a_live_version_that_fails_during_a_canary_is_the_one_that_goes(host, client, keys):
    host.session.orders.pin("v3")
    settle(host)
    host.session.orders.canary("v2")
    settle(host)
    write_report(client, keys, loading(
        "a", 3, "v3", "v2", swap_gen=2, failed_gen=3, failed_reason="failed while serving: NaN", failures={"v3": "NaN"},
    ))  # fmt: skip
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.canary_version) == (4, "v1", "")
    assert (ways(host, "v3")[-1], ways(host, "v2")[-1]) == (S.ROLLED_BACK, S.RETIRED)


def test_rows_of_replicas_without_the_canary_do_not_count(host, client, keys, replicas):
    fleet = replicas()
    host.session.orders.canary("v2")
    settle(host)
    fleet.serve(8)  # no report yet
    settle(host, 5)
    assert not host.session.state.rollout.canary.open and sum(host.session.state.rollout.canary.test.num_requests) == 0
    fleet.report()
    settle(host, 1)
    fleet.serve(8)
    settle(host, 2)
    canary = host.session.state.rollout.canary
    assert len(canary.open) + sum(canary.test.num_requests) == 16


def test_every_restart_goes_on_with_the_same_canary(shared_redis, host, client, keys, tmp_path, replicas, wait_until):
    fleet = replicas()
    host.session.orders.canary("v2")
    settle(host)
    fleet.report()
    current = host
    for _ in range(4):
        fleet.serve(2)
        settle(current)
        settle(current)
        current.session.books.flush(always=True)
        before = current.session.state.rollout.canary
        current = make_host(shared_redis.url, keys, tmp_path)
        current.connect()
        after = current.session.state.rollout.canary
        assert after is not None and after.version == "v2"
        assert after == before
    fleet._speed = lambda version: 600.0 if version == "v2" else 300.0
    run_canary(current, fleet, wait_until)
    assert read_desired(client, keys).version == "v2" and ways(current, "v2")[-2:] == [S.CANARY, S.LIVE]


def test_an_operators_pin_ends_the_canary(host, client, keys):
    host.session.orders.canary("v2")
    settle(host)
    host.session.orders.pin("v3")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.canary_version) == ("v3", "")
    assert (ways(host, "v2")[-1], ways(host, "v3")[-1], ways(host, "v1")[-1]) == (S.RETIRED, S.LIVE, S.RETIRED)
    host.session.orders.canary("v2")
    settle(host)
    host.session.orders.pin("v2")  # the operator does not wait for the verdict
    settle(host)
    assert read_desired(client, keys).version == "v2" and ways(host, "v2")[-1] == S.LIVE


def test_another_canary_replaces_the_one_in_flight(host, client, keys):
    host.session.orders.canary("v2")
    settle(host)
    host.session.orders.canary("v3")
    settle(host)
    assert read_desired(client, keys).canary_version == "v3"
    assert (ways(host, "v2")[-1], host.session.state.rollout.canary.version) == (S.RETIRED, "v3")


def test_a_record_written_elsewhere_ends_the_canary(host, client, keys):
    host.session.orders.canary("v2")
    settle(host)
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, version="v3", canary_version=""))
    host.session.books.log("note", {"text": "anything"})
    settle(host, 5)
    assert host.session.state.rollout.canary is None and host.session.state.desired.version == "v3"
    assert (ways(host, "v2")[-1], ways(host, "v3")[-1]) == (S.RETIRED, S.LIVE)


def test_a_version_that_was_live_before_is_recalled_at_once_and_a_new_one_is_tried_first(host, client, keys):
    host.session.orders.pin("v2")
    settle(host)
    host.session.controller.queue.append(decision(5, "recall", version="v1"))
    settle(host)
    assert (read_desired(client, keys).version_of("math"), read_desired(client, keys).canary_version) == ("v1", "")
    host.session.controller.queue.append(decision(6, "recall", version="v3"))
    settle(host)
    assert (read_desired(client, keys).version_of("math"), read_desired(client, keys).canary_version) == ("v1", "v3")


def test_a_refused_live_version_is_rolled_back_and_only_an_operator_brings_it_again(host, client, keys):
    host.session.orders.pin("v2")
    settle(host)
    write_report(client, keys, ReplicaReport(
        replica_id="a", gen=1, version="v1", slots={}, failed_gen=2, failed_reason="NaN", swap_pause_ms=[], ts=1.0,
    ))  # fmt: skip
    settle(host)
    assert ways(host, "v2")[-1] == S.ROLLED_BACK and read_desired(client, keys).version == "v1"
    host.session.orders.canary("v2")
    settle(host)
    assert ways(host, "v2")[-3:] == [S.ROLLED_BACK, S.RETIRED, S.CANARY]


def test_what_cannot_be_tried_is_refused_with_a_reason(shared_redis, host, keys, tmp_path):
    settle(host)
    with pytest.raises(DrafterMismatchError, match="live or on trial"):
        host.session.orders.canary("v1")
    with pytest.raises(ManifestError, match="not in the registry"):
        host.session.orders.canary("nope")
    host.registry.without_weights.add("v3")
    for order in (host.session.orders.canary, host.session.orders.pin, host.session.orders.rollback):
        with pytest.raises(ManifestError, match="deleted from the pool"):
            order("v3")
    off = make_host(shared_redis.url, keys, tmp_path, rollout=RolloutConfig(canary_percent=0))
    off.connect()
    with pytest.raises(DrafterMismatchError, match="canaries are off"):
        off.session.orders.canary("v2")


def test_a_paused_controller_rolls_back_but_does_not_promote(host, client, keys, replicas, wait_until):
    host.session.orders.canary("v2")
    settle(host)
    host.session.orders.pause()
    fleet = replicas(v2=600.0)
    for _ in range(10):
        fleet.report()
        fleet.serve(8)
        settle(host)
    assert host.session.state.rollout.canary is not None and read_desired(client, keys).version == "v1"
    host.session.orders.pause(False)
    run_canary(host, fleet, wait_until)
    assert read_desired(client, keys).version == "v2"
    host.session.orders.canary("v3")
    settle(host)
    host.session.orders.pause()
    run_canary(host, replicas(v2=300.0, v3=100.0), wait_until)
    assert read_desired(client, keys).version == "v2" and ways(host, "v3")[-1] == S.ROLLED_BACK


def test_an_accepted_version_that_is_not_published_waits_retired(host, wait_until):
    finish = host.session.controller.job_finished
    host.session.controller.job_finished = lambda *a, **k: unpublished(finish(*a, **k))
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.state.lifecycle.status("v2") is not None, timeout_s=60.0)
    assert ways(host, "v2") == [S.TRAINING, S.TRAINED, S.SHADOWED, S.RETIRED]


def unpublished(outcome):
    return msgspec.structs.replace(outcome, publish=None, reason="dearer on the present mix")


@pytest.mark.parametrize(("status", "end"), [("rejected", S.REJECTED), ("failed", S.FAILED)])
def test_jobs_without_a_version_end_in_the_table_and_change_nothing(host, client, keys, wait_until, status, end):
    host.launcher.status = status
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.controller.s.jobs.get(1) == status, timeout_s=60.0)
    (key,) = host.session.state.lifecycle.with_status(end)
    assert key.startswith("job:") and host.session.state.rollout.canary is None
    settle(host)
    assert read_desired(client, keys).gen == 1 and host.snapshot().job is None


def test_staging_of_a_canary_is_charged_to_its_decision_once(host, client, keys, wait_until, replicas):
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.state.rollout.canary is not None, timeout_s=60.0)
    settle(host)
    write_report(client, keys, loading("a", 2, "v1", "v2", swap_gen=0, staging_s=0.5, swap_pause_ms=[40.0]))
    settle(host)
    assert host.snapshot().ledger.by_kind["staging"] == pytest.approx(0.5)  # staged without a flip
    assert host.snapshot().swaps.count == 0
    run_canary(host, replicas(v2=600.0), wait_until)
    settle(host)
    assert host.snapshot().ledger.by_kind["staging"] == pytest.approx(0.5)


def test_the_pool_deletes_weights_that_nobody_needs_after_the_commit(shared_redis, client, keys, tmp_path, seeded):
    registry = MemoryRegistry(known={"v1", "v2"})
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry, rollout=RolloutConfig(pool_bytes=3))
    host.connect()
    write_report(client, keys, ReplicaReport(
        replica_id="a", gen=1, version="v1", slots={"A": "v1", "B": "v6"}, failed_gen=None, failed_reason="",
        swap_pause_ms=[], ts=1.0,
    ))  # fmt: skip
    host.session.orders.pin("v2")
    settle(host, 1)
    registry.known |= {"v3", "v4", "v5", "v6", "v7"}
    deleted_at = []
    delete = registry.delete_weights
    registry.delete_weights = lambda v: deleted_at.append((v, v in stored(client, keys).evicted)) or delete(v)
    settle(host, 4)
    # first and live version, the one that a replica still holds: three of one byte each
    assert set(host.session.state.evicted) == {"v3", "v4", "v5", "v7"} == registry.without_weights
    assert all(was_committed for _, was_committed in deleted_at)
    assert sorted(host.snapshot().evicted) == ["v3", "v4", "v5", "v7"]
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].versions == ["v1", "v2", "v6"]
    with pytest.raises(ManifestError, match="deleted from the pool"):
        host.session.orders.pin("v3")


def test_weights_that_were_given_up_cost_no_call_of_the_store_each(shared_redis, client, keys, tmp_path, seeded):
    registry = MemoryRegistry(known={f"v{i}" for i in range(1, 40)})
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry, rollout=RolloutConfig(pool_bytes=1))
    host.connect()
    settle(host)
    assert len(registry.without_weights) == 38
    asked = []
    registry.has_weights = registry.delete_weights = asked.append
    settle(host)
    assert asked == []


def test_weights_that_a_killed_controller_gave_up_are_deleted_by_the_next(shared_redis, client, keys, tmp_path, seeded):
    registry = MemoryRegistry(known={"v1", "v2", "v3"})
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry, rollout=RolloutConfig(pool_bytes=1))
    registry.delete_weights = lambda v: None  # the process dies before
    host.connect()
    settle(host)
    assert stored(client, keys).evicted == ["v2", "v3"] and registry.without_weights == set()
    del registry.delete_weights
    second = make_host(shared_redis.url, keys, tmp_path, registry=registry, rollout=RolloutConfig(pool_bytes=1))
    second.connect()
    settle(second)
    assert registry.without_weights == {"v2", "v3"}


def test_names_of_clients_that_traces_once_had_are_kept_for_as_long_as_there_are_rows(
    shared_redis, keys, tmp_path, seeded
):
    """Every life of a replica names buckets that never get a place."""
    store = MemoryStore(shards=[Shard("own", "math", 100)])
    host = make_host(shared_redis.url, keys, tmp_path, store=store)
    host.connect()
    settle(host)
    for life in range(5):
        store.shards = [Shard(f"{life}-{n}", f"name-{life}-{n}", 10) for n in range(20)]
        store.shards += [Shard(f"class-{life}", "~class-1", 10)]
        settle(host)
    written = host.session.state.rows_written
    assert sorted(written) == sorted([*(f"name-4-{n}" for n in range(20)), "~class-1"]) and written["~class-1"] == 50
    assert set(host.session.controller.forgotten) == {
        "math",
        *(f"name-{life}-{n}" for life in range(4) for n in range(20)),
    }


def test_old_traces_go_while_no_replica_runs(shared_redis, keys, tmp_path, seeded):
    import time

    now = time.time()
    store = MemoryStore(shards=[Shard("old", created=now - 100.0), Shard("new", created=now)])
    host = make_host(shared_redis.url, keys, tmp_path, store=store, trace=TraceConfig(max_age_s=60.0))
    host.connect()
    settle(host)
    assert [s.shard_id for s in store.shards] == ["new"]
