"""Claims of infra/state/room.py and of what bounds the streams, against real servers at their maxmemory."""

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import ResponseError

from paceline.config import FeedbackConfig
from paceline.contracts import TrainJob
from paceline.errors import PacelineError
from paceline.infra.controller.jobs import TrainCoordinator
from paceline.infra.controller.store import HostConfig
from paceline.infra.replica import feedback as feedback_module
from paceline.infra.replica.feedback import BATCH_ROWS, FeedbackPublisher
from paceline.infra.state.desired import ensure_first_version, queue_log
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.infra.state.room import RESERVE_BYTES, Room
from paceline.machine import SystemClock
from tests.helpers.hosts import make_host, send, settle, stored
from tests.helpers.scripted import ARM, row

UNBOUNDED = 1 << 40
MEMORY_MB = 24


@pytest.fixture
def small(tmp_path) -> Iterator[EmbeddedRedis]:
    """A server with little memory."""
    with EmbeddedRedis(tmp_path / "small", max_memory_mb=MEMORY_MB) as server:
        yield server


def publisher(url: str, keys, name: str = "a", *, max_stream_bytes: int = UNBOUNDED, **config) -> FeedbackPublisher:
    made = FeedbackConfig(keep_rows=True, max_stream_bytes=max_stream_bytes, **config)
    return FeedbackPublisher(url, keys, replica_id=name, target_version="t", config=made, boot_epoch=1)


def publish(pub: FeedbackPublisher, rows: int = BATCH_ROWS) -> None:
    """Send one batch of so many rows."""
    pub.record_rounds(row(range(rows)))
    assert pub.flush()


def fill(pub: FeedbackPublisher) -> None:
    """Publish until Redis refuses, to the last kilobytes."""
    for rows in (BATCH_ROWS, 100, 2, 2):
        dropped = pub.num_dropped
        while pub.num_dropped == dropped:
            publish(pub, rows)


def test_the_stream_is_bounded_in_bytes_while_nobody_reads_it(shared_redis, client, keys):
    limit = 4 * 2**20
    large, little = (publisher(shared_redis.url, keys, name, max_stream_bytes=limit) for name in "ab")
    before = int(client.info("memory")["used_memory"])
    for _ in range(30):
        publish(large)
        publish(little, rows=20)
    grown = int(client.info("memory")["used_memory"]) - before
    assert limit / 2 < client.memory_usage(keys.feedback, samples=0) < 1.1 * limit
    assert grown < 1.25 * limit
    assert large.num_dropped == little.num_dropped == 0
    value = len(client.xrevrange(keys.feedback, count=2)[1][1][b"v"])
    client.xtrim(keys.feedback, maxlen=0, approximate=False)
    empty = client.memory_usage(keys.feedback)
    client.xadd(keys.feedback, {"v": b"x" * value})
    overhead = client.memory_usage(keys.feedback) - empty - value
    assert overhead < max(
        feedback_module._ENTRY_OVERHEAD_BYTES, value // 4
    )  # large values round up to the allocator's sizes


@pytest.mark.parametrize("keep_rows", [False, True])
def test_what_a_commit_acknowledged_is_deleted_unless_rows_are_kept(
    shared_redis, client, keys, tmp_path, seeded, keep_rows
):
    host = make_host(shared_redis.url, keys, tmp_path, keep_rows=keep_rows)
    host.connect()
    for seq in range(1, 6):
        send(client, keys, seq)
    settle(host)
    assert stored(client, keys).num_rows == 15
    assert client.xlen(keys.feedback) == (5 if keep_rows else 0)
    send(client, keys, 6)
    host.session.feedback.look_at_lag()
    assert host.session.feedback.lag == 1


def test_what_older_releases_left_acknowledged_goes_when_a_controller_starts(
    shared_redis, client, keys, tmp_path, seeded
):
    before = make_host(shared_redis.url, keys, tmp_path, keep_rows=True)
    before.connect()
    for seq in (1, 2, 3):
        send(client, keys, seq)
    settle(before)
    send(client, keys, 4)
    before.session.feedback.read(1)  # handed out, not acknowledged
    send(client, keys, 5)
    assert client.xlen(keys.feedback) == 5
    after = make_host(shared_redis.url, keys, tmp_path)
    after.connect()
    assert client.xlen(keys.feedback) == 2
    settle(after)
    state = stored(client, keys)
    assert (state.num_rows, state.num_duplicates, state.num_missing_batches, state.num_lost_entries) == (15, 0, 0, 0)


def test_a_full_redis_costs_nothing_where_a_reserve_was_set_aside(small, keys, tmp_path, wait_until):
    client = patient_client(small.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    first = make_host(small.url, keys, tmp_path)
    first.connect()
    settle(first)
    assert client.strlen(keys.reserve) == RESERVE_BYTES
    pub = publisher(small.url, keys)
    fill(pub)  # the controller is away
    with pytest.raises(ResponseError, match="used memory"):
        client.set("anything", b"x")
    second = make_host(small.url, keys, tmp_path).start()
    try:
        wait_until(lambda: stored(client, keys).num_rows == pub.num_delivered, timeout_s=60.0, what="everything folded")
        wait_until(lambda: client.strlen(keys.reserve) == RESERVE_BYTES, what="a new reserve")
        dropped = pub.num_dropped
        publish(pub)
        assert pub.num_dropped == dropped
        second.call(lambda: second.session.orders.set_policy("never")).result(20)
        assert stored(client, keys).policy == "never"
        snapshot = second.snapshot()
        assert snapshot.redis_up and not snapshot.is_redis_full
    finally:
        second.stop()


def test_a_full_redis_without_a_reserve_gives_up_the_oldest_and_counts_it(small, keys, tmp_path, wait_until):
    client = patient_client(small.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    pub = publisher(small.url, keys)
    fill(pub)
    num_batches = client.xlen(keys.feedback)
    host = make_host(small.url, keys, tmp_path).start()  # the first one that ever comes
    try:
        wait_until(lambda: stored(client, keys).num_rows > 0 and client.xlen(keys.feedback) == 0, timeout_s=60.0)
        state = stored(client, keys)
        (newest, _) = state.watermarks["a:1"]
        num_folded = newest - state.num_missing_batches
        assert 0 < num_batches - num_folded <= 0.6 * num_batches, "the older half, and every one of it is counted"
        assert state.num_rows < pub.num_delivered
        before, dropped = state.num_rows, pub.num_dropped
        publish(pub)
        wait_until(lambda: stored(client, keys).num_rows == before + BATCH_ROWS, what="the next batch")
        assert pub.num_dropped == dropped
    finally:
        host.stop()


def test_a_full_redis_recovers_while_traffic_goes_on(small, keys, tmp_path, wait_until):
    client = patient_client(small.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    pubs = [publisher(small.url, keys, name) for name in "ab"]
    for pub in pubs:
        fill(pub)
    ended = threading.Event()

    def load(pub: FeedbackPublisher) -> None:
        while not ended.wait(0.05):
            publish(pub, rows=100)

    threads = [threading.Thread(target=load, args=(pub,)) for pub in pubs]
    for thread in threads:
        thread.start()
    host = make_host(small.url, keys, tmp_path).start()
    try:
        wait_until(lambda: client.strlen(keys.reserve) == RESERVE_BYTES, timeout_s=60.0, what="room")
        dropped = [pub.num_dropped for pub in pubs]
        rows = stored(client, keys).num_rows
        wait_until(lambda: stored(client, keys).num_rows > rows + 2000, timeout_s=60.0, what="progress")
        assert [pub.num_dropped for pub in pubs] == dropped
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        host.stop()
    delivered = sum(pub.num_delivered for pub in pubs)
    assert stored(client, keys).num_rows <= delivered


class Launches:
    """A launcher that starts nothing."""

    def __init__(self) -> None:
        self.jobs: list[str] = []

    def launch(self, job, lease) -> None:
        self.jobs.append(job.job_id)


def test_a_job_is_launched_and_stopped_while_redis_is_full(small, keys, tmp_path):
    client, launches = patient_client(small.url), Launches()
    config = HostConfig(redis_url=small.url, model=keys.model)
    coordinator = TrainCoordinator(config, Room(client, keys), launches, clock=SystemClock(), owner="c")
    job = TrainJob(
        job_id="j1", bucket="math", arm=ARM, base_version="v1", first_version="v1", shard_ids=["s"], rehearsal_shard_ids=[],
        seed=0, time_limit_s=30.0,
    )  # fmt: skip
    pub = publisher(small.url, keys)
    for call in (lambda: coordinator.poll(job), lambda: coordinator.request_stop("j1")):
        fill(pub)
        with pytest.raises(ResponseError, match="used memory"):
            client.set("anything", b"x")
        call()
    assert launches.jobs == ["j1"] and client.get(keys.train_stop) == b"j1"


def order(host, policy: str) -> str:
    """Why a command failed, '' = it did not."""
    try:
        host.call(lambda: host.session.orders.set_policy(policy)).result(20)
    except PacelineError as e:
        return str(e)
    return ""


@pytest.mark.slow
def test_a_redis_that_others_filled_is_called_full_and_not_away(small, keys, tmp_path, wait_until):
    client = patient_client(small.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(small.url, keys, tmp_path).start()
    ended = threading.Event()

    def fill_up() -> None:
        number = 0
        while not ended.wait(0.001):
            number += 1
            try:
                client.set(f"other:{number}", b"x" * (200_000 if number < 1000 else 500))
            except ResponseError:
                time.sleep(0.005)

    wait_until(lambda: host.snapshot().epoch == 1)
    thread = threading.Thread(target=fill_up)
    thread.start()
    try:
        wait_until(
            lambda: "not stored yet" in order(host, "never") and host.snapshot().is_redis_full,
            timeout_s=60.0,
            what="full",
        )
        assert host.snapshot().redis_up
        ended.set()
        thread.join()
        for name in client.scan_iter("other:*"):
            client.delete(name)
        wait_until(lambda: not host.snapshot().is_redis_full, timeout_s=30.0, what="recovery")
        wait_until(lambda: stored(client, keys).policy == "never", what="what was not stored then")
        assert order(host, "always") == ""
        assert stored(client, keys).policy == "always"
    finally:
        ended.set()
        thread.join()
        host.stop()


def test_lines_of_the_log_that_its_file_never_got_are_counted_and_said(
    shared_redis, client, keys, tmp_path, seeded, monkeypatch
):
    monkeypatch.setattr("paceline.infra.state.room.LOG_ENTRIES", 20)
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    settle(host)
    (tmp_path / "data" / "decisions.jsonl").rename(tmp_path / "aside")
    (tmp_path / "data" / "decisions.jsonl").mkdir()  # nothing can be appended
    for number in range(60):
        host.session.books.note(f"line {number}")
        settle(host, 1)
    assert client.xlen(keys.log) <= 21
    (tmp_path / "data" / "decisions.jsonl").rmdir()
    (tmp_path / "aside").rename(tmp_path / "data" / "decisions.jsonl")
    host.session.books.note("line 60")
    settle(host)
    texts = [line.get("text", "") for line in LogFile(tmp_path / "data" / "decisions.jsonl").newest_first()]
    numbers = {int(text.removeprefix("line ")) for text in texts if text.startswith("line ")}
    (told,) = [text for text in texts if "lacks up to" in text]
    assert max(numbers) == 60 and len(numbers) < 25
    assert f"up to {61 - len(numbers)} older lines" in told


def test_the_log_stream_is_cut_to_its_bytes(shared_redis, client, keys, monkeypatch):
    monkeypatch.setattr("paceline.infra.state.room.LOG_BYTES", 2**20)
    for _ in range(400):
        with client.pipeline() as pipe:
            queue_log(pipe, keys, "feedback", {"text": "x" * 10_000})
            pipe.execute()
    assert client.memory_usage(keys.log) > 3 * 2**20
    Room(client, keys).keep()
    assert client.memory_usage(keys.log) < 1.2 * 2**20
    assert client.xlen(keys.log) > 50


def test_the_log_is_cut_where_redis_does_not_tell_its_memory(shared_redis, client, keys, monkeypatch):
    monkeypatch.setattr("paceline.infra.state.room.LOG_ENTRIES", 50)
    url = f"redis://{shared_redis.url.rpartition('@')[2].removeprefix('redis://')}"
    client.acl_setuser("narrow", enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-info", "-memory"])
    try:
        for number in range(200):
            with client.pipeline() as pipe:
                queue_log(pipe, keys, "note", {"text": str(number)})
                pipe.execute()
        with redis.Redis.from_url(url, username="narrow", password="p") as narrow:
            Room(narrow, keys).keep()
        assert client.xlen(keys.log) <= 51
    finally:
        client.acl_deluser("narrow")
