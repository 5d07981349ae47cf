"""Claims of infra/state/backup.py: two commands carry a service over the loss of its data folder and its Redis."""

import io
import os
import shutil
import tarfile
import time
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.online.learner_store import LearnerKey, LearnerStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.cli.main import app
from paceline.contracts import ReplicaReport
from paceline.errors import FencedError
from paceline.infra.state import backup
from paceline.infra.state.desired import ensure_first_version, read_desired, write_report
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.paths import service_home
from tests.helpers.drafters import make_trace
from tests.helpers.hosts import ledger, make_host, send, settle, stored

RUN = CliRunner()


def restored(server: EmbeddedRedis, keys: Keys, data_dir: Path):
    """A controller of the service in `data_dir`, which has made some passes."""
    host = make_host(server.url, keys, data_dir, data_dir=service_home(data_dir, keys.model))
    host.connect()
    settle(host)
    return host


LEARNER = LearnerKey("math", "specblock", "v1", "t", "full")


@pytest.fixture
def service(tmp_path, keys):
    """A stopped service with an embedded Redis: six rows, a pin, a ledger, a drafter version and a trace."""
    data_dir = tmp_path / "data"
    home = service_home(data_dir, keys.model)
    version = DrafterRegistry(home / "registry").put(
        {"w": torch.ones(2, 2)}, drafter_type="specblock", config={}, target_version="t"
    )
    TraceStore(home / "traces").write_shard([make_trace("a")], "math")
    LearnerStore(home / "learners").save(LEARNER, {"w": torch.full((3,), 2.0)}, {"steps": 7})
    with EmbeddedRedis(data_dir) as server:
        client = patient_client(server.url)
        ensure_first_version(client, keys, "v1", 10, 1.0)
        host = restored(server, keys, data_dir)
        for seq in (1, 2):
            send(client, keys, seq)
        settle(host)
        host.session.orders.pin("v2")
        host.stop()
        known = stored(client, keys)
    return data_dir, version.version, known


def run(*words: object, code: int = 0) -> str:
    done = RUN.invoke(app, [str(w) for w in words], env={"PACELINE_REDIS_URL": ""})
    text = " ".join((done.output + (str(done.exception) if done.exception else "")).split())
    assert (done.exit_code != 0) == bool(code), text
    return text


def save(service, keys, tmp_path, *words: object) -> Path:
    out = tmp_path / "saved.tar"
    run("backup", "--data-dir", service[0], "--model-name", keys.model, "--out", out, *words)
    return out


@pytest.mark.parametrize("with_traces", [False, True])
def test_a_service_goes_on_from_its_backup_on_another_computer(service, keys, tmp_path, with_traces):
    data_dir, version, known = service
    out = save(service, keys, tmp_path, *(["--traces"] if with_traces else []))
    assert out.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(data_dir)
    there = tmp_path / "elsewhere"
    run("restore", out, "--data-dir", there)
    home = service_home(there, keys.model)
    with EmbeddedRedis(there) as server:
        client = patient_client(server.url)
        ensure_first_version(client, keys, "v1", 10, 2.0)  # the set-up runs before the controller does
        host = restored(server, keys, there)
        state = host.session.state
        assert (state.num_rows, state.num_booked, state.commit > known.commit) == (
            known.num_rows,
            known.num_booked,
            True,
        )
        assert len(ledger(client, keys, home)) == known.num_booked > 0
        assert read_desired(client, keys).version == "v2"
        send(client, keys, 2)  # what was folded before the backup
        send(client, keys, 3)
        settle(host)
        assert (stored(client, keys).num_rows, stored(client, keys).num_duplicates) == (known.num_rows + 3, 1)
        host.stop()
    assert torch.equal(DrafterRegistry(home / "registry").load_state(version)["w"], torch.ones(2, 2))
    assert len(TraceStore(home / "traces").list_shards()) == with_traces
    learner = LearnerStore(home / "learners").load(LEARNER)
    assert learner is not None and torch.equal(learner[0]["w"], torch.full((3,), 2.0)) and learner[1]["steps"] == 7


def test_what_is_restored_is_for_its_owner_alone(service, keys, tmp_path):
    out, there = save(service, keys, tmp_path, "--traces"), tmp_path / "there"
    before = os.umask(0o022)
    try:
        there.mkdir()
        run("restore", out, "--data-dir", there)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o077 for path in (there, *there.rglob("*"))} == {0}


def test_a_backup_is_taken_while_the_service_runs(service, keys, tmp_path):
    data_dir, _, known = service
    with EmbeddedRedis(data_dir) as server:
        client = patient_client(server.url)
        host = restored(server, keys, data_dir)
        out = save(service, keys, tmp_path)
        send(client, keys, 3)  # later than the backup
        settle(host)
        host.stop()
    run("restore", out, "--data-dir", data_dir, "--replace")
    with EmbeddedRedis(data_dir) as server:
        host = restored(server, keys, data_dir)
        assert host.session.state.num_rows == known.num_rows
        assert len(ledger(patient_client(server.url), keys, service_home(data_dir, keys.model))) == known.num_booked
        host.stop()
    (aside,) = [p for p in (data_dir / "services").iterdir() if ".before." in p.name]
    assert (aside / "decisions.jsonl").is_file()


def test_a_controller_that_outlives_its_replicas_does_not_undo_a_restore(service, shared_redis, client, keys, tmp_path):
    out, there = save(service, keys, tmp_path), tmp_path / "there"
    words = ("restore", out, "--data-dir", there, "--redis-url", shared_redis.url)
    run(*words)
    old = restored(shared_redis, keys, there)
    old.session.orders.pin("v3")
    settle(old)
    run(*words, "--replace")
    with pytest.raises(FencedError):
        settle(old)
    assert not client.exists(keys.state, keys.desired, keys.decisions)
    new = restored(shared_redis, keys, there)
    assert new.session.state.desired.version == "v2"
    with pytest.raises(FencedError):
        settle(old)
    new.stop()


def test_what_there_is_is_not_overwritten_without_a_word(service, keys, tmp_path):
    data_dir, _, known = service
    out = save(service, keys, tmp_path)
    before = sorted((p, p.stat().st_mtime_ns) for p in service_home(data_dir, keys.model).rglob("*"))
    assert "give --replace" in run("restore", out, "--data-dir", data_dir, code=1)
    assert sorted((p, p.stat().st_mtime_ns) for p in service_home(data_dir, keys.model).rglob("*")) == before
    shutil.rmtree(service_home(data_dir, keys.model))
    assert "give --replace" in run("restore", out, "--data-dir", data_dir, code=1), "Redis still has the state"
    with EmbeddedRedis(data_dir) as server:
        assert stored(patient_client(server.url), keys).commit == known.commit
        assert "must not be in use" in run("restore", out, "--data-dir", data_dir, "--replace", code=1)


def test_a_running_service_with_a_redis_of_its_own_is_not_restored_over(service, shared_redis, client, keys, tmp_path):
    out = save(service, keys, tmp_path)
    report = ReplicaReport(
        replica_id="r", gen=1, version="v1", slots={}, failed_gen=None, failed_reason="", swap_pause_ms=[], ts=1.0
    )
    write_report(client, keys, report)
    there = tmp_path / "there"
    words = ("restore", out, "--data-dir", there, "--redis-url", shared_redis.url, "--replace")
    text = run(*words, code=1)
    assert "must be stopped first" in text and ":***@" not in text and shared_redis.url not in text
    assert not service_home(there, keys.model).exists()
    client.delete(keys.replica("r"))
    client.set(keys.state + ":kept", b"x")
    client.set(keys.base + "2", b"another service's")
    run(*words)
    assert service_home(there, keys.model).is_dir() and client.keys(f"{keys.base}:*") == [keys.epoch.encode()]
    assert client.get(keys.base + "2") == b"another service's"
    client.delete(keys.base + "2")


def test_a_redis_that_is_not_named_is_not_passed_over_in_silence(service, shared_redis, keys, tmp_path):
    out, data_dir = save(service, keys, tmp_path), service[0]
    shutil.rmtree(data_dir / "redis")  # as it is where the Redis is another computer's
    home = service_home(data_dir, keys.model)
    before = sorted(home.rglob("*"))
    refusal = run("restore", out, "--data-dir", data_dir, "--replace", code=1)
    assert "redis-url must name the Redis" in refusal and "move that folder away if there is none" in refusal
    assert sorted(home.rglob("*")) == before
    named = run("restore", out, "--data-dir", data_dir, "--replace", "--redis-url", shared_redis.url)
    assert "no --redis-url was given" not in named
    assert "no --redis-url was given" in run("restore", out, "--data-dir", tmp_path / "there"), "nobody can know there"


def test_no_state_is_no_backup(tmp_path):
    (tmp_path / "services" / "paceline").mkdir(parents=True)
    assert "must hold the state" in run("backup", "--data-dir", tmp_path, "--out", tmp_path / "x.tar", code=1)
    assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob("*.tmp"))


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def rewrite(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_a_backup_that_is_damaged_changes_nothing(service, keys, tmp_path):
    out, there = save(service, keys, tmp_path), tmp_path / "there"
    whole, files = out.read_bytes(), members(out)
    manifest = msgspec.json.decode(files["backup.json"])
    (state,) = [name for name in files if name.startswith("controller")]
    spoilt: dict[str, dict[str, bytes]] = {
        "is not what backup.json says": {**files, state: files[state][:-1] + b"?"},
        "outside its folder": {"../../evil": b"x", **files},
        "outside": {"/tmp/evil": b"x", **files},
        "must have format": {**files, "backup.json": msgspec.json.encode(manifest | {"format": 9})},
        "was cut off": {name: data for name, data in files.items() if name != "backup.json"},
        "damaged": {name: data for name, data in files.items() if name != state},
    }
    for told, wrong in spoilt.items():
        rewrite(out, wrong)
        assert told in run("restore", out, "--data-dir", there, code=1)
    for data in (whole[: len(whole.rstrip(b"\0")) // 2], b"", b"junk" * 1000):  # an archive ends with zeros
        out.write_bytes(data)
        assert "backup" in run("restore", out, "--data-dir", there, code=1)
    for nothing in (tmp_path / "nowhere", tmp_path):
        assert "backup must be a file" in run("restore", nothing, "--data-dir", there, code=1)
    assert not (tmp_path / "evil").exists() and not there.exists()
    there.write_text("")
    assert "data-dir must be a folder that can be written" in run("restore", out, "--data-dir", there, code=1)
    assert "out must name a file that can be written" in run("backup", "--out", there / "x.tar", code=2)


def test_a_learner_that_is_replaced_while_it_is_saved_is_saved_as_it_is_then(service, keys, tmp_path, monkeypatch):
    store = LearnerStore(service_home(service[0], keys.model) / "learners")
    add, is_replaced = backup._add, []

    def replace_first(tar, path, name):
        if name.startswith("learners/") and not is_replaced:
            is_replaced.append(name)
            store.save(LEARNER, {"w": torch.full((3,), 5.0)}, {"steps": 8})
        return add(tar, path, name)

    monkeypatch.setattr(backup, "_add", replace_first)
    out, there = save(service, keys, tmp_path), tmp_path / "there"
    run("restore", out, "--data-dir", there)
    tensors, record = LearnerStore(service_home(there, keys.model) / "learners").load(LEARNER)
    assert is_replaced and record["steps"] == 8 and torch.equal(tensors["w"], torch.full((3,), 5.0))


def test_a_wrong_file_leaves_a_folder_open_to_those_to_whom_it_was(tmp_path):
    shared, wrong = tmp_path / "shared", tmp_path / "wrong.tar"
    shared.mkdir()
    shared.chmod(0o755)
    wrong.write_bytes(b"no backup")
    assert "that `paceline backup` wrote" in run("restore", wrong, "--data-dir", shared, code=1)
    assert shared.stat().st_mode & 0o777 == 0o755 and list(shared.iterdir()) == []


def test_a_backup_of_an_old_state_says_how_old(service, keys, tmp_path):
    data_dir = service[0]
    (snapshot,) = service_home(data_dir, keys.model).glob("controller*.msgpack")
    order = ("--data-dir", data_dir, "--model-name", keys.model)
    assert "hours ago" not in run("backup", *order, "--out", tmp_path / "new.tar")
    os.utime(snapshot, (time.time(), time.time() - 7200.0))
    assert "was written 2.0 hours ago" in run("backup", *order, "--out", tmp_path / "old.tar")


def test_links_in_a_backup_are_refused(service, keys, tmp_path):
    out = save(service, keys, tmp_path)
    with tarfile.open(out, "w") as tar:
        info = tarfile.TarInfo("registry/x")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    assert "no plain file" in run("restore", out, "--data-dir", tmp_path / "there", code=1)
