"""A data folder that hangs, as an NFS server that is gone makes it: the controller goes on, says so, and makes up for it.

Files of the folder are pipes that nobody reads or writes: opening one waits in the kernel.
"""

import threading

import pytest
import torch

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.infra.state.desired import ensure_first_version, read_desired, write_report
from tests.helpers.fake_replicas import loading
from tests.helpers.hanging import Hanging
from tests.helpers.hosts import make_host, recent_log, send, settle, stored


@pytest.fixture
def registry(tmp_path) -> DrafterRegistry:
    return DrafterRegistry(tmp_path / "registry")


def put(registry: DrafterRegistry, value: float) -> str:
    state = {"w": torch.full((2,), value)}
    return registry.put(state, drafter_type="specblock", config={}, target_version="t").version


def test_decisions_feedback_and_roll_backs_go_on_while_the_folder_hangs(
    shared_redis, client, keys, tmp_path, registry, wait_until
):
    first, second, third = (put(registry, i) for i in range(3))
    ensure_first_version(client, keys, first, 10, 1.0)
    host = make_host(
        shared_redis.url, keys, tmp_path, registry=registry, store=TraceStore(tmp_path / "traces"), storage_patience_s=0.2,
        snapshot_every_s=0.0,
    ).start()  # fmt: skip
    log = tmp_path / "data" / "decisions.jsonl"
    wait_until(lambda: host.snapshot().versions and log.exists())
    host.call(lambda: host.session.orders.pin(second)).result(10)
    wait_until(lambda: read_desired(client, keys).version == second)
    folder = Hanging(log, tmp_path / "registry" / "manifests" / "ffffffffffff.json")
    try:
        wait_until(lambda: host.snapshot().folder_hung_s > 0)
        for seq in range(1, 6):
            send(client, keys, seq)
            wait_until(lambda n=seq: stored(client, keys).num_rows >= n)
        host.call(lambda: host.session.orders.pause()).result(5)
        assert stored(client, keys).is_paused
        gen = read_desired(client, keys).gen
        refusal = loading("a", gen - 1, first, failed_gen=gen, failed_reason="must be finite")
        write_report(client, keys, refusal)
        wait_until(lambda: read_desired(client, keys).version == first)
        host.call(lambda: host.session.orders.rollback(third)).result(5)
        assert read_desired(client, keys).version == third, "replicas may have it loaded"
        view = host.snapshot()
        assert "does not answer" in view.folder_error and str(tmp_path / "data") in view.folder_error
        assert view.redis_up and view.folder_hangs == 1 and view.errors.count == 0
        assert sum(t.name == "storage-calls" and t.is_alive() for t in threading.enumerate()) >= 1
    finally:
        folder.release()
    wait_until(lambda: host.snapshot().folder_hung_s == 0)
    send(client, keys, 6)

    def is_made_up() -> bool:
        return log.exists() and recent_log(client, keys)[-1]["log_id"] in log.read_text()

    host.call(lambda: host.session.orders.pause(False)).result(5)
    wait_until(is_made_up)
    assert host.snapshot().folder_error == ""
    lines = log.read_text().splitlines()
    assert len(lines) == len(set(lines)) == client.xlen(keys.log), "every line once"
    host.stop()


def test_a_controller_that_starts_while_the_folder_hangs_goes_by_redis(shared_redis, client, keys, tmp_path):
    before = make_host(shared_redis.url, keys, tmp_path)
    before.connect()
    send(client, keys, 1)
    settle(before)
    folder = Hanging(tmp_path / "data" / "decisions.jsonl")
    host = make_host(shared_redis.url, keys, tmp_path, storage_patience_s=0.1)
    host.connect()
    send(client, keys, 2)
    settle(host)
    rows, booked = stored(client, keys).num_rows, len(host.session.books.store.ledger)
    folder.release()
    assert rows >= 2 and booked == stored(client, keys).num_booked > 0


def test_without_a_state_in_redis_it_waits_for_the_folder_says_so_and_begins_by_itself(shared_redis, client, keys, tmp_path, wait_until):  # fmt: skip
    folder = Hanging(tmp_path / "data" / "controller-t.msgpack")
    host = make_host(shared_redis.url, keys, tmp_path, storage_patience_s=0.1).start()
    wait_until(lambda: host.snapshot().read_only)
    assert "cannot be told yet" in host.snapshot().read_only and client.get(keys.epoch) is None
    folder.release()
    wait_until(lambda: stored(client, keys).commit > 0)
    host.stop()
