"""The trace writer never blocks, counts what it drops and survives a store that refuses."""

import threading
import time
import zlib

import pytest
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import WAITING_SHARE, TraceWriter, num_bytes
from paceline.config import TraceConfig
from paceline.contracts import Group
from paceline.serving.api.generation import default_group
from paceline.serving.sampling.request import RequestTrace


def make_trace(request_id, bucket="math", num_outputs=5):
    total = 2 + num_outputs
    return RequestTrace(
        request_id=request_id,
        bucket=bucket,
        temperature=0.0,
        prompt_len=2,
        token_ids=list(range(total)),
        features=torch.zeros(total - 1, 4),
        topk_ids=torch.zeros(num_outputs, 2, dtype=torch.int32),
        topk_logprobs=torch.zeros(num_outputs, 2),
        target_version="t",
    )


class GatedStore(TraceStore):
    """A store whose writes wait for `gate` and fail while `error` is set."""

    def __init__(self, root):
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = None

    def write_shard(self, traces, bucket):
        self.entered.set()
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        return super().write_shard(traces, bucket)


def until(check, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "condition did not come true in time"
        threading.Event().wait(0.005)


def test_traces_land_in_one_shard_per_bucket(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=60))
    for i in range(4):
        writer.record_trace(make_trace(f"r{i}", bucket="math" if i % 2 else "code"))
    writer.close()
    assert [(s.bucket, s.num_rows) for s in sorted(store.list_shards(), key=lambda s: s.bucket)] == [
        ("code", 10), ("math", 10),
    ]  # fmt: skip
    assert writer.counters()["traces_written"] == 4 and writer.counters()["traces_dropped"] == 0


def test_a_full_shard_is_written_without_waiting_for_its_age(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=3600, shard_rows=10))
    for i in range(2):
        writer.record_trace(make_trace(f"r{i}"))
    until(lambda: store.list_shards() != [])
    writer.close()


def test_an_old_shard_is_written_even_when_not_full(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=0.02))
    writer.record_trace(make_trace("r"))
    until(lambda: store.list_shards() != [])
    writer.close()


def test_a_stalled_store_drops_and_counts_instead_of_blocking(tmp_path):
    store = GatedStore(tmp_path)
    store.gate.clear()
    writer = TraceWriter(store, TraceConfig(flush_interval_s=0.01, max_pending=2))
    writer.record_trace(make_trace("first"))
    assert store.entered.wait(30)  # the writer's thread now hangs in the store
    for i in range(49):
        writer.record_trace(make_trace(f"r{i}"))
    assert writer.counters()["traces_dropped"] == 47  # two wait in the queue
    store.gate.set()
    writer.close()
    counts = writer.counters()
    assert counts["traces_written"] + counts["traces_dropped"] == 50


@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError(), RuntimeError("of a library")])
def test_a_store_that_refuses_is_counted_and_the_writer_goes_on(tmp_path, error):
    store = GatedStore(tmp_path)
    store.error = error
    writer = TraceWriter(store, TraceConfig(flush_interval_s=60))
    writer.record_trace(make_trace("lost"))
    assert writer.flush()
    store.error = None
    writer.record_trace(make_trace("kept"))
    assert writer.flush()
    writer.close()
    counts = writer.counters()
    assert (counts["shards_failed"], counts["traces_dropped"], counts["traces_written"]) == (1, 1, 1)


def test_a_store_that_fails_for_a_while_loses_no_trace_that_the_queue_would_hold(tmp_path):
    store = GatedStore(tmp_path)
    store.error = OSError("away")
    writer = TraceWriter(store, TraceConfig(flush_interval_s=0.05, max_pending=5, shard_rows=1))
    for i in range(3):
        writer.record_trace(make_trace(f"a{i}"))
        until(lambda: store.entered.is_set())
        store.entered.clear()
    until(lambda: store.entered.is_set())
    assert writer.counters()["traces_dropped"] == 0
    store.error = None
    until(lambda: writer.counters()["traces_written"] == 3)
    store.error = OSError("away")
    for i in range(20):
        writer.record_trace(make_trace(f"b{i}"))
        until(lambda: writer.counters()["traces_waiting"] == 0)
    until(lambda: writer.counters()["traces_dropped"] >= 15)
    store.error = None
    writer.close()
    counts = writer.counters()
    assert counts["traces_written"] + counts["traces_dropped"] == 23 and counts["traces_dropped"] <= 20
    kept = {t.request_id for s in store.list_shards() for t in store.read_shard(s.shard_id)}
    assert {"a0", "a1", "a2"} <= kept and len(kept) == counts["traces_written"]


def test_share_samples_by_request_id(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(share=0.3, flush_interval_s=60, max_pending=1000))
    ids = [f"r{i}" for i in range(300)]
    wanted = {i for i in ids if writer.wants(i, "math")}
    assert wanted == {i for i in ids if zlib.crc32(i.encode()) // 100 % 10_000 < 3000} and 50 < len(wanted) < 130
    for request_id in wanted:
        writer.record_trace(make_trace(request_id))
    writer.close()
    kept = {t.request_id for s in store.list_shards() for t in store.read_shard(s.shard_id)}
    assert kept == wanted, "what was wanted at admission is not sampled a second time"


def test_a_small_share_is_a_sample_of_both_groups(tmp_path):
    writer = TraceWriter(TraceStore(tmp_path), TraceConfig(share=0.005))
    ids = [i for i in (f"r{n}" for n in range(40_000)) if writer.wants(i, "math")]
    held_back = sum(default_group(i, 30) is Group.STATIC for i in ids)
    writer.close()
    assert 130 < len(ids) < 270 and 0.18 < held_back / len(ids) < 0.42


def test_nothing_is_wanted_at_share_zero_or_after_close(tmp_path):
    off = TraceWriter(TraceStore(tmp_path), TraceConfig(share=0.0))
    assert not off.wants("r", "math")
    off.close()
    on = TraceWriter(TraceStore(tmp_path), TraceConfig())
    assert on.wants("r", "math")
    on.close()
    assert not on.wants("r", "math")
    on.record_trace(make_trace("late"))
    assert on.counters()["traces_dropped"] == 1


def test_store_stays_within_its_byte_limit(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=60, max_bytes=4096))
    for i in range(20):
        writer.record_trace(make_trace(f"r{i}"))
        assert writer.flush()
    writer.close()
    assert 0 < sum(s.num_bytes for s in store.list_shards()) <= 4096


def test_old_shards_go_at_the_start_and_while_nothing_is_written(tmp_path):
    from paceline.machine import ManualClock

    clock = ManualClock(1000.0)
    store = TraceStore(tmp_path, clock=clock)
    store.write_shard([make_trace("r")], "math")
    clock.advance(50.0)
    store.write_shard([make_trace("s")], "math")
    clock.advance(20.0)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=0.02, max_age_s=60.0), clock=clock)
    until(lambda: len(store.list_shards()) == 1)
    writer.close()


def test_what_waits_is_bounded_by_bytes_and_a_long_trace_alone_may_wait(tmp_path):
    store = GatedStore(tmp_path)
    one = num_bytes(make_trace("r"))
    writer = TraceWriter(store, TraceConfig(flush_interval_s=0.01, max_bytes=int(10 * one / WAITING_SHARE)))
    try:
        store.gate.clear()
        for i in range(16):
            writer.record_trace(make_trace(f"r{i}"))
        assert writer.counters()["traces_dropped"] == 6
        store.gate.set()
        until(lambda: writer.counters()["traces_written"] == 10)
        store.gate.clear()
        writer.record_trace(make_trace("long", num_outputs=200))
        assert writer.counters()["traces_dropped"] == 6, "a long one, when nothing waits"
        writer.record_trace(make_trace("next"))
        assert writer.counters()["traces_dropped"] == 7 and not writer.wants("later", "math")
    finally:
        store.gate.set()
        writer.close()
    assert writer._num_waiting_bytes == 0


def test_limits_that_others_keep_are_left_alone(tmp_path):
    store = TraceStore(tmp_path)
    writer = TraceWriter(store, TraceConfig(flush_interval_s=60, max_bytes=4096), keeps_limits=False)
    for i in range(20):
        writer.record_trace(make_trace(f"r{i}"))
        assert writer.flush()
    writer.close()
    assert len(store.list_shards()) == 20
