"""Claims of infra/replica/feedback.py against a real server."""

import os
import signal
import time

import msgspec
import pytest
import redis

from paceline.config import FeedbackConfig
from paceline.contracts import FeedbackBatch, decode, rows_of
from paceline.infra.replica.feedback import BATCH_ROWS, FeedbackPublisher
from paceline.infra.state.redis_clients import patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from tests.helpers.feedback import round_rows, trial_row
from tests.helpers.scripted import row


def batches(client, keys) -> list[FeedbackBatch]:
    return [decode(fields[b"v"], FeedbackBatch) for _, fields in client.xrange(keys.feedback)]


def publisher(url, keys, **config) -> FeedbackPublisher:
    return FeedbackPublisher(
        url, keys, replica_id="a", target_version="t", config=FeedbackConfig(**config), boot_epoch=1
    )


def test_rows_arrive_in_order_and_in_batches(shared_redis, client, keys):
    pub = publisher(shared_redis.url, keys)
    for i in range(2 * BATCH_ROWS + 1):
        pub.record_rounds(row(i))
    assert pub.flush()
    got = batches(client, keys)
    assert [b.seq for b in got] == [1, 2, 3]
    num_rows = 2 * BATCH_ROWS + 1
    assert [i for b in got for c in b.cells for i in c.requests] == [f"r{i}" for i in range(num_rows)]
    assert got[0].cells[0].requests["r0"].kept == 3 and got[0].cells[0].requests["r0"].seconds == 0.01
    assert pub.counters() == {
        "produced": num_rows, "delivered": num_rows, "dropped": 0, "pending": 0, "redis_up": True, "outages": 0,
        "prompts": 0, "prompts_sent": 0,
    }  # fmt: skip


def test_rows_travel_beside_their_sums_only_where_they_are_kept(shared_redis, client, keys):
    for keep_rows in (False, True):
        pub = publisher(shared_redis.url, keys, keep_rows=keep_rows)
        pub.record_rounds(row(3))
        pub.record_rounds(row(4))
        assert pub.flush()
    without, with_rows = batches(client, keys)
    assert without.cells == with_rows.cells and without.num_rows == 2
    assert rows_of(without) is None
    rows = rows_of(with_rows)
    assert rows is not None and rows.round_index == [3, 4] and rows.verify_ms == [6.0, 6.0]


def test_the_price_of_drafting_is_told_where_a_version_was_there_and_rounds_went_without_it(shared_redis, client, keys):
    pub = publisher(shared_redis.url, keys)
    pub.draft_ratio = lambda num_requests: 1.0 + num_requests / 8
    for version, size, num_drafts in [("v0", 1, 4), ("v0", 1, 0), ("v0", 4, 0), ("v0", 3, 4), ("", 2, 0)]:
        pub.record_rounds(
            round_rows([(*trial_row("q", version, drafts=num_drafts)[:9], size, *trial_row("q", "")[10:])])
        )
    assert pub.flush()
    (batch,) = batches(client, keys)
    told = {(c.version, size): sums.draft_ratio for c in batch.cells for size, sums in c.sizes.items()}
    assert told == {("v0", 1): 1.125, ("v0", 4): 1.5, ("v0", 3): 0.0, ("", 2): 0.0}


def test_thread_publishes_within_the_interval(shared_redis, client, keys, wait_until):
    pub = publisher(shared_redis.url, keys, flush_interval_s=0.02).start()
    pub.record_rounds(row(0))
    wait_until(lambda: client.xlen(keys.feedback) == 1)
    pub.close()


def test_rows_that_cannot_be_written_are_dropped_and_those_behind_them_are_told(shared_redis, client, keys, wait_until):
    pub = publisher(shared_redis.url, keys, flush_interval_s=0.02).start()
    pub.record_rounds(msgspec.structs.replace(row(0), bucket=["\ud800"]))
    wait_until(lambda: pub.counters()["dropped"] == 1)
    pub.record_rounds(row(1))
    wait_until(lambda: client.xlen(keys.feedback) == 1)
    pub.close()
    assert [b.seq for b in batches(client, keys)] == [1]
    assert pub.counters()["delivered"] == 1 and pub.counters()["pending"] == 0


def test_stream_is_bounded(shared_redis, client, keys):
    pub = publisher(shared_redis.url, keys, max_stream_entries=100)
    for i in range(1500):
        pub.record_rounds(row(i))
        pub.flush()
    assert client.xlen(keys.feedback) < 400  # '~' trims whole nodes of 100 entries


def test_outage_keeps_the_newest_rows_and_counts_the_rest(tmp_path, keys):
    server = EmbeddedRedis(tmp_path)
    server.start()
    pub = publisher(server.url, keys, max_rows=50)
    pub.record_rounds(row(0))
    assert pub.flush()
    server.stop()
    for i in range(1, 101):
        pub.record_rounds(row(i))
    assert not pub.flush()
    assert not pub.is_redis_up
    for i in range(101, 201):
        pub.record_rounds(row(i))
    server.start()
    assert pub.flush()
    assert pub.is_redis_up
    got = batches(patient_client(server.url), keys)
    assert pub.num_produced == pub.num_delivered + pub.num_dropped == 201
    assert sum(b.num_rows for b in got) == pub.num_delivered
    assert sum(b.num_dropped for b in got) == pub.num_dropped > 0
    assert "r200" in got[-1].cells[-1].requests
    pub.close()
    server.stop()


def test_recording_stays_fast_while_redis_hangs(own_redis, keys):
    pub = publisher(own_redis.url, keys, flush_interval_s=0.02).start()
    os.kill(own_redis.pid, signal.SIGSTOP)
    try:
        recording, begin = 0.0, time.perf_counter()
        for i in range(2000):
            started = time.perf_counter()
            pub.record_rounds(row(i))
            recording += time.perf_counter() - started
            time.sleep(0.001)
        whole = time.perf_counter() - begin
        assert recording < 0.5 * whole  # a flush hangs all the while: whoever waited for it would do nothing else
    finally:
        os.kill(own_redis.pid, signal.SIGCONT)
    pub.close(timeout_s=10.0)
    assert pub.num_delivered == 2000


def test_batch_is_sent_again_under_its_seq_when_the_reply_was_lost(own_redis, keys):
    pub = publisher(own_redis.url, keys)
    pub.record_rounds(row(0))
    os.kill(own_redis.pid, signal.SIGSTOP)  # the command waits in the socket: executed, but not acknowledged
    assert not pub.flush()
    os.kill(own_redis.pid, signal.SIGCONT)
    assert pub.flush()
    got = batches(patient_client(own_redis.url), keys)
    assert {b.seq for b in got} == {1}
    assert pub.num_delivered == 1


def test_refusal_for_lack_of_memory_is_a_counted_drop(tmp_path, keys):
    with EmbeddedRedis(tmp_path, max_memory_mb=2) as server:
        client = patient_client(server.url)
        with pytest.raises(redis.exceptions.ResponseError):
            for i in range(1000):
                client.set(f"fill{i}", b"x" * 100_000)
        with pytest.raises(redis.exceptions.ResponseError):
            for _ in range(1000):
                client.append("fill0", b"x" * 1000)
        pub = publisher(server.url, keys)
        pub.record_rounds(row(0))
        assert pub.flush()
        assert (pub.num_delivered, pub.num_dropped) == (0, 1)
        client.delete(*[f"fill{i}" for i in range(100)])
        pub.record_rounds(row(1))
        assert pub.flush()
        assert batches(client, keys)[-1].num_dropped == 1


def test_close_counts_what_could_not_be_delivered(keys):
    pub = publisher("redis://127.0.0.1:1/0", keys)
    pub.record_rounds(row(0))
    pub.close(timeout_s=0.5)
    assert (pub.num_pending, pub.num_dropped) == (0, 1)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_counters_add_up_under_a_small_ring(shared_redis, keys, num_rows):
    pub = publisher(shared_redis.url, keys, max_rows=16)
    for i in range(num_rows):
        pub.record_rounds(row(i))
    assert pub.num_produced == pub.num_dropped + pub.num_pending
