"""Claims of adapt/data/trace_export.py: what is exported loads and equals what was stored."""

import hashlib

import msgspec
import pytest
import safetensors.torch
import torch

from paceline.adapt.data.trace_export import FOLDER, INDEX, TraceRow, export_traces, load_traces
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import TraceWriter
from paceline.config import TraceConfig
from paceline.errors import TraceError
from tests.helpers.drafters import make_trace
from tests.helpers.engines import Run, finish, make_engine


@pytest.fixture
def store(tmp_path):
    return TraceStore(tmp_path / "traces")


def _fill(store):
    first = [make_trace("a"), make_trace("bb", prompt_len=1, num_outputs=1), make_trace("ccc", num_outputs=9)]
    second = [make_trace("d", bucket="code", dtype=torch.bfloat16)]
    store.write_shard(first, "math")
    store.write_shard(second, "code")
    return first + second


def test_exported_traces_equal_the_stored_ones(store, tmp_path):
    traces, seen = _fill(store), []
    done = export_traces(store, tmp_path / "out", progress=lambda *at: seen.append(at))
    assert (done.num_requests, done.num_shards, done.num_gone, done.num_damaged) == (4, 2, 0, 0)
    assert seen == [(1, 2), (2, 2)]
    loaded = list(load_traces(tmp_path / "out"))
    for want, got in zip(traces, loaded, strict=True):
        for name in ("request_id", "bucket", "temperature", "prompt_len", "token_ids", "target_version", "finish_reason", "extra"):  # fmt: skip
            assert getattr(got, name) == getattr(want, name)
        for name in ("features", "topk_ids", "topk_logprobs"):
            assert torch.equal(getattr(got, name), getattr(want, name))
            assert getattr(got, name).dtype == getattr(want, name).dtype


def test_the_index_and_safetensors_alone_are_enough_to_read_a_request(store, tmp_path):
    traces = _fill(store)
    done = export_traces(store, tmp_path)
    rows = [msgspec.json.decode(line) for line in (tmp_path / INDEX).read_bytes().splitlines()]
    row = rows[2]
    tensors = safetensors.torch.load_file(tmp_path / row["file"])
    assert tensors["token_ids"][slice(*row["tokens"])].tolist() == traces[2].token_ids
    assert torch.equal(tensors["features"][slice(*row["features"])], traces[2].features)
    assert torch.equal(tensors["topk_logprobs"][slice(*row["outputs"])], traces[2].topk_logprobs)
    for file, digest in done.sha256.items():
        assert hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() == digest
    assert TraceStore(tmp_path / FOLDER).list_shards() == store.list_shards()  # a store again
    assert set(rows[0]) == set(TraceRow.__struct_fields__)


def test_an_empty_store_writes_nothing(store, tmp_path):
    done = export_traces(store, tmp_path / "out")
    assert (done.num_requests, done.num_shards) == (0, 0)
    assert not (tmp_path / "out").exists()


def test_damaged_and_deleted_shards_are_left_out_and_counted(store, tmp_path, monkeypatch):
    _fill(store)
    listed = store.list_shards()
    torn = tmp_path / "traces" / f"{listed[0].shard_id}.safetensors"
    torn.write_bytes(torn.read_bytes()[:-10])
    store.write_shard([make_trace("kept")], "math")
    listed = store.list_shards()
    store.delete_shard(listed[1].shard_id)
    monkeypatch.setattr(store, "list_shards", lambda: listed)  # the limits struck after the listing
    done = export_traces(store, tmp_path / "out")
    assert (done.num_gone, done.num_damaged, done.num_requests) == (1, 1, 1)
    assert [t.request_id for t in load_traces(tmp_path / "out")] == ["kept"]


def test_a_missing_file_is_named(store, tmp_path):
    _fill(store)
    done = export_traces(store, tmp_path / "out")
    (tmp_path / "out" / next(iter(done.sha256))).unlink()
    with pytest.raises(TraceError, match="missing or damaged"):
        list(load_traces(tmp_path / "out"))


def test_opted_out_requests_of_a_real_engine_are_not_in_the_export(store, tmp_path):
    writer = TraceWriter(store, TraceConfig(share=1.0))
    writer.record_rounds = lambda rows: None  # type: ignore[attr-defined]
    engine = make_engine(sinks=writer)
    runs = [Run(engine, "stays"), Run(engine, "opted-out", is_traced=False), Run(engine, "stays-too", temperature=0.7)]
    finish(engine)
    writer.close()
    export_traces(store, tmp_path / "out")
    loaded = {t.request_id: t for t in load_traces(tmp_path / "out")}
    assert set(loaded) == {"stays", "stays-too"}
    assert tuple(loaded["stays"].token_ids[loaded["stays"].prompt_len :]) == runs[0].tokens
    everything = b"".join(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert b"stays-too" in everything and b"opted-out" not in everything
