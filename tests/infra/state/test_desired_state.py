"""Claims of infra/state/desired.py."""

import resource
import threading

import msgspec
import pytest

from paceline.contracts import DesiredState, ReplicaReport
from paceline.errors import PacelineError
from paceline.infra.state.desired import commit_desired, ensure_first_version, read_desired, read_reports, write_report
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import patient_client
from tests.helpers.hosts import recent_log


def test_first_record_is_made_once(client, keys):
    first = ensure_first_version(client, keys, "v1", 10, 1.0)
    again = ensure_first_version(client, keys, "v1", 10, 2.0)
    assert first == again == read_desired(client, keys)
    assert (first.gen, first.version, first.first_version) == (1, "v1", "v1")


def test_generations_only_grow(client, keys):
    ensure_first_version(client, keys, "v1", 10, 1.0)
    with pytest.raises(PacelineError, match=r"desired\.gen must be above 1"):
        commit_desired(client, keys, lambda d: d)


def test_concurrent_commits_lose_no_generation(shared_redis, client, keys):
    ensure_first_version(client, keys, "v1", 10, 1.0)

    def bump(current: DesiredState | None) -> DesiredState:
        assert current is not None
        return msgspec.structs.replace(current, gen=current.gen + 1)

    def work() -> None:
        mine = patient_client(shared_redis.url)
        for _ in range(10):
            commit_desired(mine, keys, bump)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert read_desired(client, keys).gen == 31
    assert sum(e["kind"] == "desired" for e in recent_log(client, keys)) == 31


def test_damaged_record_says_what_to_do(client, keys):
    client.set(keys.desired, b"\x00junk")
    with pytest.raises(PacelineError, match="pin a version"):
        read_desired(client, keys)


def test_whoever_writes_a_record_replaces_a_damaged_one(client, keys):
    client.set(keys.desired, b"\x00junk")
    assert ensure_first_version(client, keys, "v1", 10, 1.0) == read_desired(client, keys)


def test_reports_of_dead_replicas_expire(client, keys, wait_until):
    def report(name: str) -> ReplicaReport:
        return ReplicaReport(
            replica_id=name, gen=1, version="v1", slots={"A": "v1"}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=1.0
        )  # fmt: skip

    write_report(client, keys, report("a"), ttl_s=1)
    write_report(client, keys, report("b"), ttl_s=60)
    assert [r.replica_id for r in read_reports(client, keys)] == ["a", "b"]
    wait_until(lambda: [r.replica_id for r in read_reports(client, keys)] == ["b"])
    assert client.zrange(keys.replicas, 0, -1) == [b"b"]
    write_report(client, keys, report("c"), ttl_s=60)
    client.set(keys.replica("b"), b"\x00junk")
    assert [r.replica_id for r in read_reports(client, keys)] == ["c"], "a damaged one hides no other"


def test_log_file_repeats_the_stream_exactly_once(client, keys, tmp_path):
    path = tmp_path / "decisions.jsonl"
    ensure_first_version(client, keys, "v1", 10, 1.0)
    assert LogFile(path).sync(client, keys) == 1
    with path.open("a") as f:
        f.write('{"log_id": "torn')
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=2, version="v2"))
    again = LogFile(path)
    assert again.sync(client, keys) == 1
    assert again.sync(client, keys) == 0
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [(x["kind"], x["gen"]) for x in lines] == [("desired", 1), ("desired", 2)]


def test_of_a_large_log_file_only_the_end_is_read(client, keys, tmp_path, monkeypatch):
    path = tmp_path / "decisions.jsonl"
    lines = [msgspec.json.encode({"log_id": f"{i}-0", "kind": "note", "text": "x" * (i % 300)}) for i in range(1, 5001)]
    path.write_bytes(b"\n".join(lines) + b'\nno JSON\n{"log_id": "torn')
    monkeypatch.setattr("paceline.infra.state.log._BLOCK_BYTES", 1000)
    log, ends = LogFile(path), []
    monkeypatch.setattr(log, "_block", lambda end, read=log._block: ends.append(end) or read(end))
    assert log.last_id() == "5000-0" and path.read_bytes().endswith(b"\nno JSON\n")
    assert len(ends) < 5, "not the whole file"
    assert [line["log_id"] for line in log.newest_first()] == [f"{i}-0" for i in range(5000, 0, -1)]


def test_log_file_that_a_full_disk_tore_is_made_good(client, keys, tmp_path):
    log = LogFile(tmp_path / "decisions.jsonl")
    ensure_first_version(client, keys, "v1", 10, 1.0)
    log.sync(client, keys)
    for gen in range(2, 6):
        commit_desired(client, keys, lambda d, gen=gen: msgspec.structs.replace(d, gen=gen, version="v2"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size * 5 // 2, limits[1]))
    try:
        with pytest.raises(OSError):
            log.sync(client, keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not log.path.read_bytes().endswith(b"\n")
    log.sync(client, keys)
    lines = [msgspec.json.decode(line) for line in log.path.read_bytes().splitlines()]
    assert [x["gen"] for x in lines] == [1, 2, 3, 4, 5]
