"""Claims of infra/state/export.py: exports of a real controller's data directory load and equal what the service holds."""

import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.adapt.data.trace_export import load_traces
from paceline.adapt.data.trace_store import TraceStore
from paceline.bandit.ledger.totals import LedgerCell, fold_entries
from paceline.bandit.off_policy.estimate import read_decisions
from paceline.cli.main import app
from paceline.contracts import LedgerEntry
from paceline.errors import ConfigError, PacelineError
from paceline.infra.controller.store import held_entries
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.export import (
    MANIFEST,
    WHAT,
    ExportOptions,
    load_decisions,
    load_ledger,
    log_records,
    run_export,
)
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import ManualClock
from tests.helpers.drafters import make_trace
from tests.helpers.hosts import make_host, send, settle
from tests.helpers.scripted import decision

KEYS = Keys("paceline")


def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture
def served(tmp_path):
    """A data directory as a service leaves it, and what its controller held at the end."""
    with EmbeddedRedis(tmp_path / "data") as server:
        client = patient_client(server.url)
        ensure_first_version(client, KEYS, "v1", 10, 1.0)
        host = make_host(server.url, KEYS, tmp_path, keep_rows=True)
        host.connect()
        for seq in (1, 2, 2):
            send(client, KEYS, seq, keep_rows=True)
        host.session.controller.queue.append(decision(1, "hold", context={"length_se": math.inf, "epoch": 3}))
        settle(host)
        host.session.orders.pin("v2")
        host.session.controller.decisions.append(decision(1, "hold", context={"epoch": 3}, realised_saving_s=4.0))
        host.session.controller.book(
            LedgerEntry(entry_id="x", ts=9.0, kind="training", bucket="math", version="v2", seconds=2.5, arm="head")
        )
        settle(host)
        host.stop()
        client.close()
    TraceStore(tmp_path / "data" / "traces").write_shard([make_trace("a"), make_trace("bb")], "math")
    return tmp_path / "data", host


def test_what_is_exported_equals_what_the_service_held(served, tmp_path):
    data_dir, host = served
    manifest = run_export(ExportOptions(data_dir=data_dir, out=tmp_path / "out"), quiet(), clock=ManualClock(77.0))
    assert manifest["missing"] == [] and manifest["created"] == 77.0
    assert load_decisions(tmp_path / "out") == list(host.session.books.store.decisions.values())
    assert load_ledger(tmp_path / "out") == list(host.session.books.store.ledger)
    assert [t.request_id for t in load_traces(tmp_path / "out")] == ["a", "bb"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "feedback.jsonl").read_text().splitlines()]
    assert [(r["replica_id"], r["seq"], r["round_index"]) for r in rows] == [
        ("a", s, i) for s in (1, 2) for i in range(3)
    ]
    assert rows[0]["num_accepted_tokens"] == 2 and rows[0]["share_ms"] == 10.0
    assert json.loads((tmp_path / "out" / MANIFEST).read_text()) == manifest


def test_an_export_of_an_empty_ledger_has_no_entries(served, tmp_path):
    data_dir = served[0]
    log = data_dir / "decisions.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "entry_id" not in line))
    run_export(ExportOptions(data_dir=data_dir, out=tmp_path / "out", what=("decisions", "ledger")), quiet())
    assert load_ledger(tmp_path / "out") == [] and load_decisions(tmp_path / "out")
    run_export(ExportOptions(data_dir=data_dir, out=tmp_path / "other", what=("decisions",)), quiet())
    with pytest.raises(PacelineError, match=r"holds no exported ledger\.jsonl"):
        load_ledger(tmp_path / "other")


def test_what_is_exported_is_for_its_owner_alone(served, tmp_path):
    before = os.umask(0o022)
    try:
        run_export(ExportOptions(data_dir=served[0], out=tmp_path / "out"), quiet())
    finally:
        os.umask(before)
    out = tmp_path / "out"
    assert {path.stat().st_mode & 0o077 for path in (out, *out.rglob("*"))} == {0}


def test_traces_of_an_object_store_are_exported_from_there(served, tmp_path):
    url = "memory://exports"
    TraceStore(f"{url}/services/paceline/traces").write_shard([make_trace("c")], "math")
    options = ExportOptions(data_dir=served[0], out=tmp_path / "out", what=("traces",), store_url=url)
    run_export(options, quiet())
    assert [t.request_id for t in load_traces(tmp_path / "out")] == ["c"]


def test_totals_in_the_manifest_are_those_of_the_service(served, tmp_path):
    data_dir, host = served
    manifest = run_export(ExportOptions(data_dir=data_dir, out=tmp_path / "out", what=("ledger",)), quiet())
    rows = host.session.controller.ledger_totals().rows()
    assert rows == fold_entries(load_ledger(tmp_path / "out")).rows()
    assert manifest["ledger"]["cells"] == msgspec.to_builtins(rows)
    assert manifest["ledger"]["net_s"] == host.snapshot().ledger.net_s == 6.0 - 2.5
    assert msgspec.to_builtins(host.snapshot().ledger_cells) == manifest["ledger"]["cells"]
    assert list(host.snapshot().saved_interval_s) == manifest["ledger"]["saved_interval_s"]


def test_request_ids_are_pseudonyms_that_keep_rounds_together(served, tmp_path):
    for name in ("one", "two"):
        run_export(ExportOptions(data_dir=served[0], out=tmp_path / name, what=("feedback",)), quiet())
    ids = [[json.loads(x)["request_id"] for x in (tmp_path / n / "feedback.jsonl").open()] for n in ("one", "two")]
    assert ids[0][0] == ids[0][3] and len(set(ids[0])) == 3  # r0, r1, r2 in both batches
    assert not set(ids[0]) & set(ids[1]) and not {"r0", "r1", "r2"} & set(ids[0])


def test_a_decision_appears_once_in_its_newest_form(served, tmp_path):
    lines = (served[0] / "decisions.jsonl").read_text()
    notes = [row for line in lines.splitlines() if (row := json.loads(line))["kind"] == "note"]
    assert notes[0]["commit"] == 0  # a fresh start, told apart from a restored one
    assert lines.count('"kind": "decision"') == 3
    found = log_records(served[0] / "decisions.jsonl", "decision")
    assert [(d["decision_id"], d["realised_saving_s"], d["run"]) for d in found] == [(1, 4.0, 1), (2, None, 1)]


def test_ids_that_begin_anew_after_a_loss_of_the_state_do_not_overwrite_each_other(tmp_path):
    note = {"log_id": "1-0", "kind": "note", "text": "controller started"}
    entry = {"entry_id": "d1:training", "ts": 1.0, "kind": "training", "bucket": "a", "version": None}
    rows = [
        note | {"commit": 0, "num_booked": 0}, entry | {"seconds": 1.0, "number": 1}, note | {"commit": 8, "num_booked": 1},
        entry | {"entry_id": "d2:training", "seconds": 2.0, "number": 2}, note | {"commit": 0, "num_booked": 0},
        entry | {"seconds": 4.0, "number": 1},
    ]  # fmt: skip
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"entry_id": "d9:trai')
    found = log_records(path, "ledger")
    assert [(r["run"], r["entry_id"], r["seconds"], r["kind"]) for r in found] == [
        (1, "d1:training", 1.0, "training"), (1, "d2:training", 2.0, "training"), (2, "d1:training", 4.0, "training"),
    ]  # fmt: skip


def test_entries_of_a_state_that_was_lost_count_for_nothing(tmp_path):
    note = {"log_id": "1-0", "kind": "note", "text": "controller started"}
    entry = {"ts": 1.0, "kind": "training", "bucket": "a", "version": None, "seconds": 1.0}
    rows = [
        *(entry | {"entry_id": f"d{i}:training", "number": i} for i in (1, 2, 3)),
        note | {"commit": 5, "num_booked": 2}, entry | {"entry_id": "d9:training", "number": 3},
        *(entry | {"entry_id": f"d{i}:training", "number": i} for i in (4, 5)), note | {"commit": 4, "num_booked": 3},
    ]  # fmt: skip
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [r["entry_id"] for r in log_records(path, "ledger")] == ["d1:training", "d2:training", "d9:training"]
    held = held_entries(LogFile(path).newest_first(), num_booked=3)
    assert [e.entry_id for e in held] == ["d9:training", "d2:training", "d1:training"]


def test_a_run_has_one_number_in_every_file(shared_redis, client, keys, tmp_path):
    def serve(decision_id: int) -> None:
        ensure_first_version(client, keys, "v1", 10, 1.0)
        host = make_host(shared_redis.url, keys, tmp_path)
        host.connect()
        host.session.controller.queue.append(decision(decision_id, "hold"))
        settle(host)
        if is_booked:
            host.session.controller.book(
                LedgerEntry(entry_id=f"d{decision_id}:training:x", ts=9.0, kind="training", bucket="math", version=None, seconds=2.5)
            )  # fmt: skip
        settle(host)
        host.stop()

    is_booked = False
    serve(1)  # decides, books nothing
    (tmp_path / "data" / "controller-t.msgpack").unlink()
    for key in client.keys(f"paceline:{{{keys.model}}}:*"):
        client.delete(key)
    is_booked = True
    serve(1)  # its state was lost: ids begin anew
    serve(2)  # restored
    path = tmp_path / "data" / "decisions.jsonl"
    decisions = log_records(path, "decision")
    assert [(d["run"], d["decision_id"]) for d in decisions] == [(1, 1), (2, 1), (2, 2)]
    assert [(e["run"], e["entry_id"][:3]) for e in log_records(path, "ledger")] == [(2, "d1:"), (2, "d2:")]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    made = msgspec.to_builtins(decision(1, "hold", context={"length_se": math.inf, "epoch": 1}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "decisions.jsonl").write_text(json.dumps({"log_id": "1-0", "kind": "decision", **made}) + "\n")
    run_export(ExportOptions(data_dir=tmp_path / "data", out=tmp_path / "out", what=("decisions",)), quiet())
    assert load_decisions(tmp_path / "out")[0].context == {"length_se": None, "epoch": 1}


def test_the_evaluator_reads_the_exported_decisions(served, tmp_path):
    run_export(ExportOptions(data_dir=served[0], out=tmp_path / "out", what=("decisions",)), quiet())
    with (tmp_path / "out" / "decisions.jsonl").open("rb") as lines:
        found = read_decisions(lines)
    assert [(d.action, d.reward_s, d.propensity) for d in found] == [("hold", 4.0, 1.0)]  # the pin is an order


def test_the_log_is_exported_for_replays(served, tmp_path):
    run_export(ExportOptions(data_dir=served[0], out=tmp_path / "out", what=("decisions",)), quiet())
    rows = [json.loads(line) for line in (tmp_path / "out" / "replay.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (served[0] / "decisions.jsonl").read_text().splitlines()]
    assert [(r["log_id"], r["kind"]) for r in rows] == [(r["log_id"], r["kind"]) for r in kept]
    assert any(r["kind"] == "decision" for r in rows)


def test_nothing_to_export_is_said_part_by_part_and_leaves_no_folder(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(
        PacelineError, match=r"nothing to export: decisions: no decision.*ledger: nothing.*traces:.*feedback:"
    ):
        run_export(ExportOptions(data_dir=tmp_path / "data", out=tmp_path / "out"), quiet())
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_part_that_is_missing_is_said_and_the_others_are_written(served, tmp_path):
    with EmbeddedRedis(served[0]):  # as long as the service runs, its embedded Redis is its own
        manifest = run_export(ExportOptions(data_dir=served[0], out=tmp_path / "out"), quiet())
    assert [s.split(":")[0] for s in manifest["missing"]] == ["feedback"]
    assert "must not be in use" in manifest["missing"][0]
    assert not (tmp_path / "out" / "feedback.jsonl").exists() and (tmp_path / "out" / "ledger.jsonl").exists()


def test_a_stream_without_rows_names_the_setting_that_keeps_them(shared_redis, client, keys, tmp_path):
    (tmp_path / "data").mkdir()
    send(client, keys, 1)
    options = ExportOptions(
        data_dir=tmp_path / "data", out=tmp_path / "out", what=("feedback",), redis_url=shared_redis.url, model_name=keys.model
    )  # fmt: skip
    with pytest.raises(PacelineError, match=r"holds no rows; set feedback\.keep_rows"):
        run_export(options, quiet())


def test_feedback_of_a_running_service_with_its_own_redis_is_read(shared_redis, client, keys, tmp_path):
    (tmp_path / "data").mkdir()
    for seq in range(1, 4):
        send(client, keys, seq, keep_rows=True)
    client.xadd(keys.feedback, {"v": b"junk"})
    options = ExportOptions(
        data_dir=tmp_path / "data",
        out=tmp_path / "out",
        what=("feedback",),
        redis_url=shared_redis.url,
        model_name=keys.model,
    )
    assert run_export(options, quiet())["files"]["feedback.jsonl"]["rows"] == 9
    away = "redis://:secret@127.0.0.1:1/0"
    gone = ExportOptions(data_dir=tmp_path / "data", out=tmp_path / "gone", what=("feedback",), redis_url=away)
    with pytest.raises(PacelineError, match="cannot be read") as error:
        run_export(gone, quiet())
    assert "secret" not in str(error.value)


def test_the_same_folder_is_not_written_twice(served, tmp_path):
    options = ExportOptions(data_dir=served[0], out=tmp_path / "out", what=("ledger",))
    run_export(options, quiet())
    with pytest.raises(ConfigError, match="new or empty folder"):
        ExportOptions(data_dir=served[0], out=tmp_path / "out")
    with pytest.raises(ConfigError, match="what must be among decisions, ledger, traces, feedback"):
        ExportOptions(data_dir=served[0], out=tmp_path / "new", what=("weights",))
    with pytest.raises(ConfigError, match="data-dir must be a folder"):
        ExportOptions(data_dir=tmp_path / "nowhere", out=tmp_path / "new")


def test_the_command_writes_and_reports(served, tmp_path):
    arguments = ["export", "--data-dir", str(served[0]), "--out", str(tmp_path / "out"), "--what", "decisions, traces"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "decisions.jsonl: 2 rows" in result.output and "traces.jsonl: 2 rows" in result.output
    assert ".safetensors: tensors, " in result.output and "None" not in result.output
    assert set(WHAT) == {"decisions", "ledger", "traces", "feedback"}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "decisions.jsonl",
        MANIFEST,
        "replay.jsonl",
        "traces",
        "traces.jsonl",
    ]


def test_the_page_names_every_field_and_its_example_runs(served, tmp_path, monkeypatch, capsys):
    run_export(ExportOptions(data_dir=served[0], out=tmp_path / "OUT"), quiet())
    page = (Path(__file__).resolve().parents[3] / "docs" / "api" / "exports.md").read_text()
    for name in ("decisions", "ledger", "traces", "feedback"):
        with (tmp_path / "OUT" / f"{name}.jsonl").open() as lines:
            for line in lines:
                assert not [field for field in json.loads(line) if f"`{field}`" not in page]
    for field in [
        *LedgerCell.__struct_fields__,
        *json.loads((tmp_path / "OUT" / MANIFEST).read_text()),
    ]:
        assert f"`{field}`" in page
    monkeypatch.chdir(tmp_path)
    # one hold only: valued by a log of two, since an interval needs two
    lines = (tmp_path / "OUT" / "decisions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "OUT" / "decisions.jsonl").write_text("".join([*lines, lines[0]]))
    exec(page.split("```python\n")[1].split("```")[0], {})
    out = capsys.readouterr().out
    assert "Estimate(method='doubly_robust', total_s=8.0" in out and "bb" in out
