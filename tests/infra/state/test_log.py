"""Claims of infra/state/log.py: who logs never waits for the disk, and what is lost is counted."""

import asyncio
import json
import logging
import os
import time

import httpx
import pytest

from paceline.infra.state import log as log_module
from paceline.infra.state.export import log_records
from paceline.infra.state.log import (
    LogFile,
    QueuedFile,
    configure_logging,
    delete_gone_logs,
    keep_audit,
    num_dropped_lines,
)
from tests.helpers.api_server import serve_engine, wait_until
from tests.helpers.fakes import tiny_target


@pytest.fixture(autouse=True)
def no_files():
    yield
    configure_logging(to_stderr=False)


def record(text: str) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "paceline.test", "levelname": "INFO", "msg": text})


def messages(path) -> list[str]:
    return [json.loads(line)["message"] for line in path.read_text().splitlines()]


def test_lines_are_written_in_order_and_files_move_aside_when_they_are_full(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_FILE_BYTES", 2000)
    handler = QueuedFile(tmp_path / "sub" / "x.log")
    for i in range(100):
        handler.handle(record(f"line {i}"))
    handler.close()
    found = sorted((tmp_path / "sub").iterdir(), key=lambda p: p.name)
    assert [p.name for p in found] == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(p.stat().st_size <= 2000 for p in found)
    kept = [text for path in (*found[:0:-1], found[0]) for text in messages(path)]
    assert kept == [f"line {i}" for i in range(100 - len(kept), 100)] and len(kept) > 40
    assert handler.num_dropped == 0


def test_a_file_that_hangs_blocks_nobody_and_its_queue_is_bounded(tmp_path):
    os.mkfifo(tmp_path / "hangs.log")  # opening it waits for a reader: what a stalled mount does to a write
    handler = QueuedFile(tmp_path / "hangs.log", max_lines=50)
    began = time.monotonic()
    for i in range(200):
        handler.handle(record(f"line {i}"))
    assert time.monotonic() - began < 1.0
    assert 149 <= handler.num_dropped <= 150  # one line is in the thread's hands
    with (tmp_path / "hangs.log").open() as reader:
        got = [json.loads(reader.readline())["message"] for _ in range(50)]
        assert got == [f"line {i}" for i in range(50)]
        handler.close()


def test_logs_of_processes_that_are_gone_are_bounded_and_those_of_live_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_GONE_LOGS", 4)
    live = QueuedFile(tmp_path / "replica-live.log")
    live.handle(record("line"))
    live.flush()
    names = [f"{kind}-r{i}.log" for i in range(5) for kind in ("replica", "access", "ingress")]
    kept = ["controller.log", "audit-r0.log"]
    for number, name in enumerate([*kept, "replica-live.log", *names, "replica-r0.log.1"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000.0 + number, 1000.0 + number))
    delete_gone_logs(tmp_path, now=1000.0 + log_module.GONE_AFTER_S)
    assert len(list(tmp_path.iterdir())) == 19, "none is old enough"
    delete_gone_logs(tmp_path, now=1100.0 + log_module.GONE_AFTER_S)
    newest = [*names[-3:], "replica-r0.log", "replica-r0.log.1"]  # the latter is the newest of all
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "replica-live.log", *newest])
    live.close()
    (tmp_path / "replica-live.log.1").mkdir()  # what cannot be deleted is left
    os.utime(tmp_path / "replica-live.log.1", (1000.0, 1000.0))
    delete_gone_logs(tmp_path, now=1100.0 + log_module.GONE_AFTER_S)
    assert not (tmp_path / "replica-live.log").exists()


def test_a_full_disk_is_counted_and_lines_come_again_when_there_is_room(tmp_path):
    path = tmp_path / "x.log"
    path.symlink_to("/dev/full")
    handler = QueuedFile(path)
    for i in range(5):
        handler.handle(record(f"line {i}"))
    handler.flush()
    assert handler.num_dropped == 5
    handler._file.close()
    path.unlink()
    handler.handle(record("after"))
    handler.close()
    assert messages(path) == ["after"]
    assert handler.num_dropped == 5


def test_answers_and_health_go_on_while_the_data_folder_hangs(tmp_path):
    """A real engine behind its HTTP routes; both log files of the replica hang from before the first request on."""
    os.mkfifo(tmp_path / "access.log")
    os.mkfifo(tmp_path / "replica.log")
    with serve_engine(tiny_target(vocab=300, layers=2), has_access_log=True) as (base, _):
        configure_logging(file=tmp_path / "replica.log", access_file=tmp_path / "access.log", to_stderr=False)
        access = next(h for h in logging.getLogger("paceline.access").handlers if isinstance(h, QueuedFile))
        for _ in range(log_module.MAX_QUEUED_LINES):  # one is taken out by the thread that hangs
            access.handle(record("earlier"))

        async def together() -> list[float]:
            async with httpx.AsyncClient(base_url=base, timeout=20.0) as client:
                body = {"prompt": "hello", "max_tokens": 32, "ignore_eos": True}
                answers = [client.post("/v1/completions", json=body) for _ in range(8)]
                waits = []

                async def watch() -> None:
                    for _ in range(10):
                        began = time.monotonic()
                        assert (await client.get("/healthz")).status_code == 200
                        waits.append(time.monotonic() - began)

                done, _ = await asyncio.gather(asyncio.gather(*answers), watch())
                assert [r.status_code for r in done] == [200] * 8
                return waits

        assert max(asyncio.run(together())) < 5.0
        wait_until(lambda: num_dropped_lines() >= 7)
        for name in ("access.log", "replica.log"):  # let the threads go
            os.close(os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK))


def test_damaged_lines_of_the_decision_log_are_left_out_whatever_they_are(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"log_id": "5-0", "kind": "note"}\n{"log_id": "6-\n17\n[]\n"note"\nnull\n' + "[" * 100_000 + "\n")
    assert list(LogFile(path).newest_first()) == [{"log_id": "5-0", "kind": "note"}]
    assert LogFile(path).last_id() == "5-0" and log_records(path, "decision") == []


def test_commands_are_kept_whatever_else_the_process_says(tmp_path):
    configure_logging("WARNING", to_stderr=False)
    keep_audit(tmp_path / "audit-attached.log")
    audit = logging.getLogger("paceline.audit")
    audit.info("pin done")
    audit.warning("refused")
    logging.getLogger("paceline").info("nothing of it")
    configure_logging("WARNING", to_stderr=False)  # closes the file
    assert messages(tmp_path / "audit-attached.log") == ["pin done"]
