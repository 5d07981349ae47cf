"""A full data disk is no outage of Redis: decisions go on, commands are done and said to be, files are made up for."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench.chaos.faults import fill
from paceline.errors import PacelineError
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.log import LogFile
from paceline.infra.state.redis_clients import patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.infra.web.metrics import controller_metrics
from tests.helpers.hosts import ledger, make_host, recent_log, send, stored

DISK = "3m"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder], stderr=subprocess.DEVNULL
    ).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def is_complete(log: Path, client, keys) -> bool:
    """Whether the file holds what the stream holds."""
    ids = {line["log_id"] for line in LogFile(log).newest_first() if "log_id" in line}
    return ids >= {line["log_id"] for line in recent_log(client, keys)}


def test_decisions_and_commands_go_on_while_the_disk_is_full(
    shared_redis, client, keys, tmp_path, seeded, disk, wait_until
):
    host = make_host(shared_redis.url, keys, tmp_path, data_dir=disk, snapshot_every_s=0.0).start()
    try:
        wait_until(lambda: host.snapshot().epoch == 1)
        filler = fill(disk)
        send(client, keys, 1)
        host.call(lambda: host.session.orders.set_policy("never")).result(20)  # no error: it was done
        assert stored(client, keys).policy == "never"
        wait_until(lambda: host.snapshot().folder_error)
        errors = host.snapshot(wait_s=2.0).errors
        for seq in range(2, 12):
            send(client, keys, seq)
            wait_until(lambda seq=seq: stored(client, keys).num_rows == 3 * seq)
        snapshot = host.snapshot(wait_s=2.0)
        assert "No space left" in snapshot.folder_error and "data folder" in snapshot.errors.last
        assert snapshot.errors.count <= errors.count + 1, "said once, not with every commit"
        assert snapshot.redis_up and not snapshot.is_redis_full and not snapshot.read_only
        text = controller_metrics(snapshot, "m").decode()
        assert (
            'paceline_controller_folder_failed{model="m"} 1.0' in text
            and 'paceline_controller_redis_up{model="m"} 1.0' in text
        )
        filler.unlink()
        send(client, keys, 12)
        wait_until(lambda: not host.snapshot(wait_s=1.0).folder_error, what="room on the disk")
        wait_until(lambda: is_complete(disk / "decisions.jsonl", client, keys))
        assert (disk / "controller-t.msgpack").stat().st_size > 0
    finally:
        host.stop()
    ledger(client, keys, disk)  # none lost, none doubled


def test_a_controller_starts_on_a_full_disk(shared_redis, client, keys, tmp_path, seeded, disk, wait_until):
    first = make_host(shared_redis.url, keys, tmp_path, data_dir=disk)
    first.connect()
    send(client, keys, 1)
    first.step(block_ms=0)
    fill(disk)
    second = make_host(shared_redis.url, keys, tmp_path, data_dir=disk).start()
    try:
        wait_until(lambda: host_rows(second) == 3)
        assert second.snapshot().redis_up
        send(client, keys, 2)
        wait_until(lambda: stored(client, keys).num_rows == 6)
    finally:
        second.stop()


def test_an_embedded_redis_whose_disk_is_full_is_called_full_and_goes_on_later(keys, tmp_path, disk, wait_until):
    with EmbeddedRedis(disk) as server:
        client = patient_client(server.url)
        ensure_first_version(client, keys, "v1", 10, 1.0)
        host = make_host(server.url, keys, tmp_path, data_dir=disk).start()
        try:
            wait_until(lambda: host.snapshot().epoch == 1)
            filler = fill(disk)
            wait_until(lambda: "MISCONF" in refusal(host), timeout_s=30.0, what="a refusal")
            snapshot = host.snapshot()
            assert snapshot.redis_up and snapshot.is_redis_full
            filler.unlink()
            wait_until(lambda: not refusal(host), timeout_s=30.0, what="room")
            wait_until(lambda: not host.snapshot(wait_s=1.0).is_redis_full)
            assert stored(client, keys).policy == "never"
        finally:
            host.stop()


def refusal(host) -> str:
    """Why a command failed, '' = it did not."""
    try:
        host.call(lambda: host.session.orders.set_policy("never")).result(20)
    except PacelineError as e:
        return str(e)
    return ""


def host_rows(host) -> int:
    return host.snapshot().feedback.delivered
