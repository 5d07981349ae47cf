"""Clocks that are wrong or step change nothing: times that are compared are Redis', carried on by a steady clock."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import machine
from paceline.adapt.data.trace_store import TraceStore
from paceline.config import TraceConfig
from paceline.contracts import SPAN_S, FeedbackBatch, decode
from paceline.infra.app import build
from paceline.infra.controller.feedback import CONSUMER, READ_COUNT
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.service.deployment import DEPLOYED_AT
from paceline.infra.state.redis_clients import FEEDBACK_GROUP
from paceline.infra.state.redis_clock import RedisClock
from paceline.infra.web.metrics import controller_metrics
from paceline.machine import ManualClock, SystemClock
from tests.helpers.drafters import make_trace
from tests.helpers.hosts import make_host, send, settle, stored
from tests.helpers.scripted import row

ROOT = Path(__file__).resolve().parents[3]
AHEAD_S = 61 * 60.0
MAX_AGE_S = 3600.0
SKEWED = """
import sys, time
real, skew = time.time, float(sys.argv[1])
time.time = lambda: real() + skew  # what this node's clock says, before anything of ours is imported
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import TraceWriter
from paceline.config import TraceConfig
from paceline.infra.state.redis_clients import producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import SystemClock
from tests.helpers.drafters import make_trace

clock = RedisClock()
if sys.argv[4] == "own":
    clock = SystemClock()
elif sys.argv[4] == "redis":
    clock.look(producer_client(sys.argv[3]))
writer = TraceWriter(TraceStore(sys.argv[2], clock=clock), TraceConfig(max_age_s=float(sys.argv[5])), clock=clock)
for i in range(5):
    writer.record_trace(make_trace(f"skewed{i}"))
    assert writer.flush()
writer.close()
print(clock.now() - real())
"""


@pytest.fixture(autouse=True)
def anchored(monkeypatch):
    """This process's clock reads as if the process began now: the wall clock of a virtual machine steps while others run."""
    monkeypatch.setattr(machine, "_WALL_S", time.time() - machine.steady())


def skewed_node(skew_s: float, folder: Path, url: str, clock: str = "redis") -> float:
    """A node whose clock is off writes five shards and enforces the limits after each; its clock's error afterwards."""
    command = [sys.executable, "-c", SKEWED, str(skew_s), str(folder), url, clock, str(MAX_AGE_S)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return float(done.stdout)


def test_a_deployment_is_dated_by_redis_wherever_it_is_built(shared_redis, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_WALL_S", machine._WALL_S + AHEAD_S)
    args = {"data_dir": str(tmp_path), "drafter": "lookup", "redis_url": shared_redis.url, "num_replicas": 2}
    values = build(args)._bound_deployment.init_args[1]
    assert abs(values[DEPLOYED_AT] - time.time()) < 60.0


def test_the_systems_clock_goes_on_when_the_wall_clock_steps(monkeypatch):
    clock = SystemClock()
    before = clock.now()
    assert abs(before - time.time()) < 5.0
    for step in (7200.0, -7200.0):
        monkeypatch.setattr(time, "time", lambda step=step: step)
        assert 0.0 <= clock.now() - before < 5.0
        assert 0.0 <= SystemClock().now() - before < 5.0


def test_every_process_has_the_time_of_redis(client, monkeypatch):
    monkeypatch.setattr(machine, "_WALL_S", machine._WALL_S + AHEAD_S)
    clock = RedisClock()
    assert not clock.is_set and clock.now() - time.time() > AHEAD_S - 5.0
    clock.look(client)
    assert clock.is_set and abs(clock.now() - time.time()) < 5.0
    seconds, _ = client.time()
    assert abs(clock.now() - seconds) < 2.0


def test_a_redis_that_is_away_leaves_the_systems_time_until_it_answers(own_redis):
    from paceline.infra.state.redis_clients import producer_client

    clock, client = RedisClock(), producer_client(own_redis.url)
    own_redis.stop()
    clock.try_to_look(client)
    assert not clock.is_set and abs(clock.now() - time.time()) < 5.0
    own_redis.start()
    clock.try_to_look(client)
    assert clock.is_set


@pytest.mark.parametrize("skew_s", [AHEAD_S, -AHEAD_S])
def test_a_node_61_minutes_off_deletes_no_trace_and_its_own_are_as_young_as_all(shared_redis, tmp_path, skew_s):
    store = TraceStore(tmp_path)
    for i in range(5):
        store.write_shard([make_trace(f"r{i}")], "math")
    assert abs(skewed_node(skew_s, tmp_path, shared_redis.url)) < 5.0
    shards = store.list_shards()
    assert len(shards) == 10
    assert max(s.created for s in shards) - min(s.created for s in shards) < 120.0
    assert store.enforce_limits(TraceConfig().max_bytes, MAX_AGE_S, time.time()) == 0
    assert store.enforce_limits(TraceConfig().max_bytes, MAX_AGE_S, time.time() + MAX_AGE_S + 120.0) == 10


def test_nor_does_one_that_has_not_heard_from_redis_yet(shared_redis, tmp_path):
    TraceStore(tmp_path).write_shard([make_trace("r")], "math")
    assert skewed_node(AHEAD_S, tmp_path, shared_redis.url, clock="away") > AHEAD_S - 5.0
    assert len(TraceStore(tmp_path).list_shards()) == 6


def test_the_same_node_by_its_own_clock_would_delete_everybodys(shared_redis, tmp_path):
    """What the claim above is worth: the fault is really there."""
    TraceStore(tmp_path).write_shard([make_trace("r")], "math")
    skewed_node(AHEAD_S, tmp_path, shared_redis.url, clock="own")
    assert len(TraceStore(tmp_path).list_shards()) == 5


def test_rounds_of_a_node_that_is_ahead_are_told_by_redis_time(shared_redis, client, keys, monkeypatch):
    monkeypatch.setattr(machine, "_WALL_S", machine._WALL_S + AHEAD_S)
    pub = FeedbackPublisher(shared_redis.url, keys, replica_id="a", target_version="t", clock=RedisClock())
    pub.record_rounds(row(1, ts=SystemClock().now()))  # as this node's engine does
    assert pub.flush()
    ((_, fields),) = client.xrange(keys.feedback)
    (cell,) = decode(fields[b"v"], FeedbackBatch).cells
    assert abs(cell.span * SPAN_S - time.time()) < 4 * SPAN_S
    pub.close()


def test_a_batch_that_is_sent_again_after_a_step_is_folded_once(
    shared_redis, client, keys, tmp_path, seeded, monkeypatch
):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    send(client, keys, 1, replica="quiet")
    settle(host)
    monkeypatch.setattr(time, "time", lambda: time.monotonic() + 4e9)
    host.session.feedback._sweep_due = 0.0  # look for producers that are gone with the next batch
    send(client, keys, 1, replica="other")
    send(client, keys, 1, replica="quiet")
    settle(host)
    state = stored(client, keys)
    assert (state.num_rows, state.num_duplicates) == (6, 1)


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_controller_with_another_clock_than_the_one_before_folds_once(
    shared_redis, client, keys, tmp_path, seeded, ahead_s
):
    first = make_host(shared_redis.url, keys, tmp_path, clock=ManualClock(1e9))
    first.connect()
    send(client, keys, 1, replica="quiet")
    settle(first)
    clock = ManualClock(1e9 + ahead_s)
    second = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    second.connect()
    send(client, keys, 1, replica="other")
    send(client, keys, 1, replica="quiet")
    settle(second)
    assert (stored(client, keys).num_rows, stored(client, keys).num_duplicates) == (6, 1)
    clock.advance(3700.0)
    send(client, keys, 2, replica="other")
    settle(second)
    if ahead_s > 0:  # an hour of this controller's own time is enough to forget a producer
        assert set(stored(client, keys).watermarks) == {"other:1"}


def test_a_controller_goes_by_redis_time_and_says_how_old_its_values_are(
    shared_redis, client, keys, tmp_path, seeded, monkeypatch
):
    monkeypatch.setattr(machine, "_WALL_S", machine._WALL_S + AHEAD_S)
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    settle(host)
    snapshot = host.snapshot()
    assert snapshot.ts is not None and abs(snapshot.ts - time.time()) < 5.0
    assert snapshot.age_s is not None and 0.0 <= snapshot.age_s < 5.0
    assert "paceline_controller_snapshot_age_seconds" in controller_metrics(snapshot, "m").decode()


@pytest.mark.parametrize("missed_s", [30.0, 110.0, -30.0])
def test_a_process_that_stood_still_has_the_right_time_a_minute_later(monkeypatch, missed_s):
    """A virtual machine that is paused misses what passes meanwhile; no time that was told is followed by an earlier one."""
    redis_s, steady_s = [1e9], [500.0]
    monkeypatch.setattr("paceline.infra.state.redis_clock.steady", lambda: steady_s[0])
    client = SimpleNamespace(time=lambda: (int(redis_s[0]), 0))
    clock, told = RedisClock(), []

    def passes(seconds, missed_s=0.0):
        redis_s[0] += seconds + missed_s
        steady_s[0] += seconds
        clock.look(client)
        told.append(clock.now())

    passes(0.0)
    passes(30.0, missed_s)
    assert told[-1] == pytest.approx(redis_s[0] - missed_s), "it was read half a minute ago"
    passes(40.0)
    assert told[-1] == pytest.approx(max(redis_s[0], told[-2]))
    passes(100.0)
    assert told[-1] == pytest.approx(redis_s[0]) and told == sorted(told)


def test_a_step_of_redis_own_clock_is_not_followed(client, monkeypatch, caplog):
    clock = RedisClock()
    clock.look(client)
    real = machine.steady
    monkeypatch.setattr("paceline.infra.state.redis_clock.steady", lambda: real() + 61.0)
    monkeypatch.setattr(client, "time", lambda: (int(time.time()) + 7200, 0))
    before = clock.now()
    clock.look(client)
    assert 0 <= clock.now() - before < 5.0
    assert "restart the service's processes" in caplog.text


def test_what_waited_for_a_controller_is_no_load_of_the_seconds_in_which_it_is_read(shared_redis, client, keys, tmp_path, seeded):  # fmt: skip
    """The policy is asked when all is read: its epoch is then the whole absence, with all that came in it."""
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    asked = []
    monkey = host.session.controller.tick
    host.session.controller.tick = lambda now, context: asked.append(now) or monkey(now, context)
    for seq in range(1, 2 * READ_COUNT + 11):
        send(client, keys, seq, rows=1)
    settle(host, 2)
    assert asked == [] and stored(client, keys).num_rows == 2 * READ_COUNT
    settle(host, 1)
    assert len(asked) == 1 and stored(client, keys).num_rows == 2 * READ_COUNT + 10


def test_a_controller_that_cannot_read_up_decides_all_the_same(shared_redis, client, keys, tmp_path, seeded):
    clock, asked = ManualClock(1e9), []
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    host.session.controller.tick = lambda now, context: asked.append(now) or []
    for seq in range(1, 3 * READ_COUNT + 1):
        send(client, keys, seq, rows=1)
        if seq % READ_COUNT == 0:
            settle(host, 1)
            clock.advance(45.0)
    assert len(asked) == 1


def test_what_an_earlier_controller_read_and_did_not_commit_is_not_all_that_waits(
    shared_redis, client, keys, tmp_path, seeded
):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    send(client, keys, 1)
    client.xreadgroup(FEEDBACK_GROUP, CONSUMER, {keys.feedback: ">"})  # and then it was killed
    for seq in range(2, READ_COUNT + 12):
        send(client, keys, seq, rows=1)
    again, asked = make_host(shared_redis.url, keys, tmp_path), []
    again.connect()
    tick = again.session.controller.tick
    again.session.controller.tick = lambda now, context: (
        asked.append(stored(client, keys).num_rows) or tick(now, context)
    )
    while not asked:
        settle(again, 1)
    assert stored(client, keys).num_rows == 3 + READ_COUNT + 10 and asked[0] >= 3 + READ_COUNT, (
        "all of it is read first"
    )


def test_what_breaks_in_a_pass_keeps_nothing_from_being_committed(shared_redis, client, keys, tmp_path, seeded):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()

    def broken(*_, **__):
        raise ZeroDivisionError("a defect")

    host.session.lives.judge_trials = broken
    host.session.jobs.poll = broken
    for seq in (1, 2):
        send(client, keys, seq)
        with pytest.raises(ZeroDivisionError):  # the loop waits longer each time, as for any defect
            settle(host, 1)
    assert stored(client, keys).num_rows == 6 and client.xpending(keys.feedback, FEEDBACK_GROUP)["pending"] == 0
