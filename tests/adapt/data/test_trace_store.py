"""Trace shards: round trip, atomic writes, listing, limits, damage."""

import dataclasses
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.adapt.data.trace_store import MAX_TRACE_ROWS, TraceStore, count_rows, learned_span
from paceline.errors import TraceError
from paceline.machine import ManualClock
from paceline.names import is_class, own_bucket
from tests.helpers.drafters import make_trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shard_gives_back_what_was_written(tmp_path, dtype):
    store = TraceStore(tmp_path)
    traces = [make_trace("a", dtype=dtype), make_trace("bb", prompt_len=1, num_outputs=1, dtype=dtype)]
    for trace in traces:
        trace.tap_layers = None if dtype == torch.float32 else (1, 5, 8)
    back = store.read_shard(store.write_shard(traces, "math"))
    assert [t.request_id for t in back] == ["a", "bb"]
    for t, b in zip(traces, back, strict=True):
        assert (t.token_ids, t.prompt_len, t.bucket, t.target_version, t.finish_reason, t.extra, t.tap_layers) == (
            b.token_ids, b.prompt_len, b.bucket, b.target_version, b.finish_reason, b.extra, b.tap_layers,
        )  # fmt: skip
        assert torch.equal(t.features, b.features) and b.features.dtype == dtype
        assert torch.equal(t.topk_ids, b.topk_ids) and torch.equal(t.topk_logprobs, b.topk_logprobs)


def test_nobody_but_its_owner_reads_a_shard_whoever_writes_it(tmp_path):
    before = os.umask(0o022)
    try:
        store = TraceStore(tmp_path / "service" / "traces")
        shard = store.write_shard([make_trace()], "math")
    finally:
        os.umask(before)
    folder = tmp_path / "service" / "traces"
    assert (folder.stat().st_mode & 0o777, (folder / f"{shard}.safetensors").stat().st_mode & 0o777) == (0o700, 0o600)


def test_listing_is_oldest_first_and_filters_by_bucket(tmp_path):
    clock = ManualClock(1000.0)
    store = TraceStore(tmp_path, clock=clock)
    ids = []
    for bucket in ("math", "odd/na_me", "math"):
        ids.append(store.write_shard([make_trace()], bucket))
        clock.advance(1.5)
    shards = store.list_shards()
    assert [s.shard_id for s in shards] == ids
    assert [s.bucket for s in shards] == ["math", "odd/na_me", "math"]
    assert [s.shard_id for s in store.list_shards("math")] == [ids[0], ids[2]]
    assert shards[1].num_rows == 5 and shards[1].created == 1001.5 and shards[1].target_version == "abc_1"


@given(st.integers(1, 3 * MAX_TRACE_ROWS), st.integers(1, 3 * MAX_TRACE_ROWS))
def test_rows_are_those_that_a_step_takes(prompt_len, num_outputs):
    trace = make_trace()
    trace = dataclasses.replace(trace, token_ids=[1] * (prompt_len + num_outputs), prompt_len=prompt_len)
    span, rows = learned_span(trace), count_rows([trace])
    assert span.stop - span.start - 1 <= MAX_TRACE_ROWS and span.start < prompt_len < span.stop
    assert rows == span.stop - prompt_len >= min(num_outputs, MAX_TRACE_ROWS // 2)
    assert (rows == num_outputs) == (span.stop == prompt_len + num_outputs)


def test_every_bucket_of_every_tenant_has_shards(tmp_path):
    longest = own_bucket("b" + "_" * 63, f"~{'t' + '_' * 63}")
    assert is_class(longest)
    store = TraceStore(tmp_path)
    trace = make_trace()
    trace.target_version = "0123456789abcdef-int8"
    shard = store.write_shard([trace], longest)
    (listed,) = store.list_shards(longest)
    assert (listed.shard_id, listed.target_version) == (shard, trace.target_version)
    older = "0000000001000000_5_t_0123abcd_odd%5Fname.safetensors"  # of a release that wrote no "_" as it is
    (tmp_path / older).touch()
    assert [s.bucket for s in store.list_shards("odd_name")] == ["odd_name"]


def test_a_store_without_a_folder_is_empty(tmp_path):
    assert TraceStore(tmp_path / "none").list_shards() == []


def test_unfinished_and_foreign_files_are_not_listed(tmp_path):
    store = TraceStore(tmp_path)
    shard = store.write_shard([make_trace()], "math")
    (tmp_path / f"{shard}.safetensors.123.tmp").write_bytes(b"half")
    (tmp_path / "readme.txt").write_text("x")
    assert [s.shard_id for s in store.list_shards()] == [shard]


def test_limits_delete_the_oldest_by_bytes_and_age(tmp_path):
    clock = ManualClock(0.0)
    store = TraceStore(tmp_path, clock=clock)
    ids = []
    for _ in range(4):
        ids.append(store.write_shard([make_trace()], "math"))
        clock.advance(10)
    size = store.list_shards()[0].num_bytes
    assert store.enforce_limits(2 * size, 1e9, clock.now()) == 2
    assert [s.shard_id for s in store.list_shards()] == ids[2:]
    assert store.enforce_limits(10 * size, 15, clock.now()) == 1
    assert [s.shard_id for s in store.list_shards()] == ids[3:]


def test_damaged_shard_says_so(tmp_path):
    store = TraceStore(tmp_path)
    shard = store.write_shard([make_trace()], "math")
    path = tmp_path / f"{shard}.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match="damaged"):
        store.read_shard(shard)


def test_deleted_shard_says_so_and_may_be_deleted_twice(tmp_path):
    store = TraceStore(tmp_path)
    shard = store.write_shard([make_trace()], "math")
    store.delete_shard(shard)
    store.delete_shard(shard)
    with pytest.raises(TraceError, match="gone"):
        store.read_shard(shard)


def test_shard_id_cannot_leave_the_store(tmp_path):
    with pytest.raises(TraceError, match="list_shards"):
        TraceStore(tmp_path).read_shard("../secret")


def test_inconsistent_traces_are_refused(tmp_path):
    store = TraceStore(tmp_path)
    short = make_trace()
    short.features = short.features[:-1]
    other = make_trace()
    other.target_version = "other"
    for traces, match in (([], "at least one"), ([short], "features"), ([make_trace(), other], "target version")):
        with pytest.raises(TraceError, match=match):
            store.write_shard(traces, "math")
    assert store.list_shards() == []


def test_store_works_on_another_fsspec_file_system():
    store = TraceStore("memory://paceline-traces")
    shard = store.write_shard([make_trace()], "math")
    assert store.read_shard(shard)[0].request_id == "r"
    store.delete_shard(shard)
    assert store.list_shards() == []


def test_half_written_shards_go_at_the_age_limit(tmp_path):
    import os

    store = TraceStore(tmp_path)
    for name, age_s in (("old", 100.0), ("young", 10.0)):
        path = tmp_path / f"{name}.safetensors.1.tmp"
        path.write_bytes(b"captured features")
        os.utime(path, (1000.0 - age_s, 1000.0 - age_s))
    assert store.enforce_limits(10**9, 60.0, now=1000.0) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["young.safetensors.1.tmp"]


def test_deleting_a_tenant_deletes_every_shard_that_holds_its_traces(tmp_path):
    store = TraceStore(tmp_path)
    mine, other, nobody = make_trace(), make_trace(), make_trace()
    mine.extra, other.extra = {"tenant": "acme"}, {"tenant": "other"}
    store.write_shard([nobody, mine], "math")
    store.write_shard([mine], "code")
    kept = store.write_shard([other, nobody], "math")
    damaged = store.write_shard([other], "math")
    path = tmp_path / f"{damaged}.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert store.delete_tenant("acme") == 3
    assert [s.shard_id for s in store.list_shards()] == [kept]
    assert store.delete_tenant("acme") == 0
