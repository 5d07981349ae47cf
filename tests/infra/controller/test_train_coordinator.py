"""Claims of infra/controller/jobs.py with real worker processes."""

import pickle
import time

import msgspec
import pytest
import redis

from paceline.adapt.data.trace_store import ShardInfo
from paceline.config import PolicyConfig
from paceline.contracts import DesiredState, TrainJob, encode
from paceline.infra.controller.jobs import (
    BEAT_SHARE,
    Lease,
    TrainCoordinator,
    WorkerLease,
    failed,
    order_job,
    read_lease,
)
from paceline.infra.controller.store import HostConfig
from paceline.infra.state.room import Room
from paceline.machine import ManualClock, SystemClock
from tests.helpers.scripted import ARM, ProcessLauncher, decision

TTL_S = 1.0


def job(job_id: str = "j1", limit_s: float = 30.0) -> TrainJob:
    return TrainJob(
        job_id=job_id, bucket="math", arm=ARM, base_version="v1", first_version="v1", shard_ids=["s"], rehearsal_shard_ids=[],
        seed=0, time_limit_s=limit_s,
    )  # fmt: skip


@pytest.fixture
def launcher(shared_redis, tmp_path):
    made = ProcessLauncher(shared_redis.url, str(tmp_path / "journal"))
    yield made
    for h in made.handles:
        if h.is_alive():
            h.kill()


def coordinator(client, url, keys, launcher, owner="c1", **options) -> TrainCoordinator:
    config = HostConfig(redis_url=url, model=keys.model, lease_ttl_s=TTL_S, **options)
    return TrainCoordinator(config, Room(client, keys), launcher, clock=SystemClock(), owner=owner)


def wait_result(c, j, wait_until):
    found = []

    def look() -> bool:
        result = c.poll(j)
        if result is not None:
            found.append(result)
        return result is not None

    wait_until(look, timeout_s=60.0, what="a result")
    return found[0]


def test_job_runs_under_a_lease_and_reports(shared_redis, client, keys, launcher, wait_until):
    c = coordinator(client, shared_redis.url, keys, launcher)
    assert c.poll(job()) is None
    assert read_lease(client, keys).job_id == "j1"
    result = wait_result(c, job(), wait_until)
    assert (result.status, result.version) == ("accepted", "v2")
    assert read_lease(client, keys) is None
    assert len(launcher.handles) == 1


def test_a_damaged_lease_keeps_no_job_from_running(shared_redis, client, keys, launcher, wait_until):
    client.set(keys.train, b"\x00junk")
    c = coordinator(client, shared_redis.url, keys, launcher)
    c.poll(job())
    assert read_lease(client, keys).job_id == "j1"
    assert wait_result(c, job(), wait_until).status == "accepted"


def test_a_damaged_result_is_a_failed_job(shared_redis, client, keys, launcher, wait_until):
    c = coordinator(client, shared_redis.url, keys, launcher)
    c.poll(job())
    wait_until(lambda: read_lease(client, keys) is None, what="the end of the job")
    client.set(keys.train_result("j1"), b"\x00junk")
    result = c.poll(job())
    assert (result.job_id, result.status) == ("j1", "failed") and "damaged" in result.reason


def test_second_job_waits_for_the_lease(shared_redis, client, keys, launcher):
    c1, c2 = (coordinator(client, shared_redis.url, keys, launcher, owner=o) for o in ("c1", "c2"))
    launcher.seconds = 30.0
    c1.poll(job("j1"))
    for _ in range(3):
        assert c2.poll(job("j2")) is None
        assert c2.poll(job("j1")) is None
    assert len(launcher.handles) == 1


def test_a_job_that_nobody_knows_is_asked_to_stop_and_waited_for_no_longer_than_for_the_own(
    shared_redis, client, keys, launcher
):
    c, clock = coordinator(client, shared_redis.url, keys, launcher), ManualClock(1000.0)
    c._clock = clock
    other = Lease(job_id="other", token="t", host="a-node")
    for _ in range(3):
        client.set(keys.train, encode(other))  # a heartbeat that goes on, in a process that is stuck
        assert c.poll(job("j1", limit_s=30.0)) is None
        clock.advance(12.0)
    assert client.get(keys.train_stop) == b"other"
    clock.advance(60.0)
    result = c.poll(job("j1", limit_s=30.0))
    assert (result.status, result.train_s) == ("failed", 0.0)
    assert "job other" in result.reason and "a-node" in result.reason
    client.delete(keys.train)
    assert c.poll(job("j2")) is None and len(launcher.handles) == 1, "the next one begins when it is gone"


def test_restarted_controller_takes_over_a_running_job(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds = 3.0  # longer than the lease: the worker itself must renew it
    coordinator(client, shared_redis.url, keys, launcher).poll(job())
    result = wait_result(coordinator(client, shared_redis.url, keys, launcher, owner="c2"), job(), wait_until)
    assert result.status == "accepted"
    assert len(launcher.handles) == 1


def test_killed_worker_is_a_failed_job(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds = 60.0
    c = coordinator(client, shared_redis.url, keys, launcher)
    c.poll(job())
    launcher.handles[0].kill()
    result = wait_result(c, job(), wait_until)
    assert (result.status, result.reason) == ("failed", "the training process ended without a result")
    assert read_lease(client, keys) is None


def test_killed_worker_is_noticed_by_another_controller(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds = 60.0
    coordinator(client, shared_redis.url, keys, launcher, start_s=1.0).poll(job())
    launcher.handles[0].kill()
    result = wait_result(coordinator(client, shared_redis.url, keys, launcher, owner="c2"), job(), wait_until)
    assert (result.status, result.reason) == ("failed", "the training process is gone")
    assert len(launcher.handles) == 1


def test_worker_stops_when_asked(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds = 60.0
    c = coordinator(client, shared_redis.url, keys, launcher)
    c.poll(job())
    c.request_stop("j1")
    assert wait_result(c, job(), wait_until).status == "stopped"


def test_worker_stops_at_its_time_limit(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds = 60.0
    c = coordinator(client, shared_redis.url, keys, launcher)
    assert wait_result(c, job(limit_s=0.2), wait_until).status == "stopped"


def test_deaf_worker_is_killed_after_its_time_limit(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds, launcher.is_deaf = 60.0, True
    c = coordinator(client, shared_redis.url, keys, launcher, stop_grace_s=0.3, start_s=1.0)
    result = wait_result(c, job(limit_s=0.2), wait_until)
    assert result.status == "failed" and "time limit of 0.2 s" in result.reason
    assert not launcher.handles[0].is_alive()


def test_a_starved_worker_is_killed_soon_and_pays_for_what_it_had_of_its_device(
    shared_redis, client, keys, launcher, wait_until
):
    launcher.seconds, launcher.is_deaf, launcher.device_share = 60.0, True, 0.05
    c, began = coordinator(client, shared_redis.url, keys, launcher, stop_grace_s=1.5, start_s=50.0), time.monotonic()
    result = wait_result(c, job(limit_s=0.5), wait_until)
    wall_s = time.monotonic() - began
    assert result.status == "failed" and "time limit of 0.5 s" in result.reason
    assert wall_s < 30.0, "the time to start a process is not granted to one that has begun"
    assert 0.05 < result.train_s < 0.05 * wall_s + BEAT_SHARE * TTL_S + 0.01


def test_a_lost_worker_pays_up_to_its_last_beat(shared_redis, client, keys, launcher, wait_until):
    launcher.seconds, launcher.device_share = 60.0, 1.0
    c = coordinator(client, shared_redis.url, keys, launcher)
    c.poll(job())
    wait_until(lambda: (read_lease(client, keys).used_s or 0.0) > 0.5, what="half a second of the worker")
    c.poll(job())
    launcher.handles[0].kill()
    time.sleep(3.0)  # a controller that was busy elsewhere
    result = wait_result(c, job(), wait_until)
    assert result.status == "failed"
    assert 0.5 < result.train_s < 1.5


def test_launch_that_fails_is_a_failed_job(shared_redis, client, keys, wait_until):
    class Broken:
        def launch(self, job, lease):
            raise OSError("no processes left")

    c = coordinator(client, shared_redis.url, keys, Broken())
    result = wait_result(c, job(), wait_until)
    assert result.status == "failed" and "no processes left" in result.reason


def test_folded_job_can_be_ordered_again(shared_redis, client, keys, launcher, wait_until):
    c = coordinator(client, shared_redis.url, keys, launcher)
    for n in (1, 2):
        wait_result(c, job(), wait_until)
        client.delete(*c.leftovers("j1"))
        c.forget()
        assert len(launcher.handles) == n


def test_worker_gives_way_to_another_lease(shared_redis, client, keys):
    lease = WorkerLease(shared_redis.url, keys.model, "j1", "mine", ttl_s=5.0, limit_s=60.0)
    client.set(keys.train, encode(Lease(job_id="j2", token="other", host="h")))
    lease.heartbeat()
    assert lease.should_stop()
    assert read_lease(client, keys).token == "other"


def test_a_heartbeat_behind_the_end_does_not_bring_the_lease_back(shared_redis, client, keys, launcher, wait_until):
    made = WorkerLease(shared_redis.url, keys.model, "j1", "mine", ttl_s=30.0, limit_s=60.0)
    lease = pickle.loads(pickle.dumps(made))
    with lease:
        wait_until(lambda: read_lease(client, keys) is not None)
        assert lease.finish(failed("j1", "x"))
        lease.heartbeat()  # of the thread that renews, or of the trainer
        assert read_lease(client, keys) is None
    client.delete(keys.train_result("j1"))  # the controller folds it
    lease.heartbeat()
    assert read_lease(client, keys) is None
    c = coordinator(client, shared_redis.url, keys, launcher)
    assert wait_result(c, job("j2"), wait_until).status == "accepted", "the next job need not wait for it"


def test_a_heartbeat_that_the_server_carries_out_behind_the_end_fails(shared_redis, client, keys, monkeypatch):
    lease = WorkerLease(shared_redis.url, keys.model, "j1", "mine", ttl_s=30.0, limit_s=60.0)
    other = WorkerLease(shared_redis.url, keys.model, "j1", "mine", ttl_s=30.0, limit_s=60.0)
    renew = redis.client.Pipeline.multi

    def end_first(pipe):
        if not ended:  # between the beat's look and its transaction; the lease has run out
            ended.append(True)
            assert other.finish(failed("j1", "x"))
        return renew(pipe)

    ended: list[bool] = []
    monkeypatch.setattr(redis.client.Pipeline, "multi", end_first)
    lease.heartbeat()
    assert ended and read_lease(client, keys) is None


def test_lease_is_taken_again_after_a_flush(shared_redis, client, keys):
    lease = WorkerLease(shared_redis.url, keys.model, "j1", "mine", ttl_s=5.0, limit_s=60.0)
    lease.heartbeat()
    assert read_lease(client, keys).token == "mine"
    assert not lease.should_stop()
    assert msgspec.msgpack.decode(client.get(keys.train))["job_id"] == "j1"


@pytest.mark.parametrize(("usable", "num_shards"), [(None, 2), (100, 2), (10, 1), (14, 2), (0, 0)])
def test_a_job_reads_no_shard_that_was_whole_before_the_present_text_of_its_bucket(usable, num_shards):
    shards = [
        ShardInfo(shard_id=f"math-{i}", bucket="math", num_rows=10, num_bytes=1, created=float(i), target_version="t")
        for i in range(5)
    ]
    desired = DesiredState(gen=1, version="v1", first_version="v1", holdback_percent=10)
    order = decision(1, "train", bucket="math", context={} if usable is None else {"usable_rows": {"math": usable}})
    arm = msgspec.structs.replace(ARM, num_rows=10)
    made = order_job(order, arm, shards, desired=desired, policy=PolicyConfig())
    assert (made.shard_ids if made else []) == [f"math-{i}" for i in range(5 - num_shards, 5)]


def test_of_buckets_that_learn_together_each_gives_the_rows_of_its_own_present_text():
    shards = [
        ShardInfo(shard_id=f"{b}-{i}", bucket=b, num_rows=10, num_bytes=1, created=float(i), target_version="t")
        for b in ("old", "new")
        for i in range(5)
    ]
    desired = DesiredState(gen=1, version="v1", first_version="v1", holdback_percent=10)
    context = {"others": ["new"], "usable_rows": {"old": 50, "new": 10}}
    arm = msgspec.structs.replace(ARM, num_rows=40)
    made = order_job(
        decision(1, "train", bucket="old", context=context), arm, shards, desired=desired, policy=PolicyConfig()
    )
    assert made is not None and made.shard_ids == [*(f"old-{i}" for i in range(5)), "new-4"]


def test_a_job_reads_the_text_of_its_own_tenant_alone():
    shards = [
        ShardInfo(shard_id=f"{b}-{i}", bucket=b, num_rows=10, num_bytes=1, created=float(i), target_version="t")
        for i in range(3)
        for b in ("math", "law", "law@acme", "tax@acme", "law@bolt")
    ]
    desired = DesiredState(gen=1, version="v1", first_version="v1", holdback_percent=10)
    arm = msgspec.structs.replace(ARM, num_rows=10, rehearsal_share=0.5)
    for bucket, own, others in (
        ("law@acme", ["law@acme"], {"tax@acme"}),
        ("law", ["law", "math"], set()),
        ("law", ["law"], {"math"}),
    ):
        order = decision(1, "train", bucket=bucket, context={"others": [*own[1:], "law@bolt"]})
        made = order_job(order, arm, shards, desired=desired, policy=PolicyConfig())
        assert made is not None and {i.rsplit("-", 1)[0] for i in made.shard_ids} == set(own)
        assert {i.rsplit("-", 1)[0] for i in made.rehearsal_shard_ids} == others
    assert (
        order_job(decision(1, "train", bucket="law@new"), arm, shards, desired=desired, policy=PolicyConfig()) is None
    )
