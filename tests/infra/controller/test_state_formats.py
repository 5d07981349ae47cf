"""Stored state has a number: what is older is read, what is newer or damaged is left alone and the controller is read-only."""

import json
from pathlib import Path

import msgspec
import pytest

from paceline.errors import PacelineError, StateError
from paceline.infra.state.formats import FORMAT, upgraded
from paceline.infra.state.layout import snapshot_name
from paceline.infra.state.redis_clients import patient_client
from paceline.infra.web.metrics import controller_metrics
from tests.helpers.hosts import make_host, send, serve_and_stop, settle, stored
from tests.helpers.scripted import MemoryRegistry

NEWER = msgspec.msgpack.encode(FORMAT + 7)
UNNUMBERED = Path(__file__).with_name("state_unnumbered.json")
"""Hash and snapshot file of a controller before states had a number; tests/helpers/state_sample.py made it then."""


def everything(client, keys) -> dict:
    """All keys of the service as they are stored, and the stream's length."""
    return {name: client.dump(name) for name in client.keys(f"{keys.base}*")}


@pytest.fixture
def stopped(shared_redis, client, keys, tmp_path, seeded):
    """A service whose controller has stopped after two batches."""
    return serve_and_stop(make_host(shared_redis.url, keys, tmp_path), client, keys)


def test_a_state_carries_its_number(stopped, client, keys, tmp_path):
    assert msgspec.msgpack.decode(client.hget(keys.state, "format")) == FORMAT == stored(client, keys).format
    raw = msgspec.msgpack.decode((tmp_path / "data" / snapshot_name("t")).read_bytes())
    assert raw["state"]["format"] == FORMAT


@pytest.mark.parametrize("where", ["redis", "file"])
def test_a_newer_state_is_refused_before_anything_is_written(stopped, shared_redis, client, keys, tmp_path, where):
    path = tmp_path / "data" / snapshot_name("t")
    if where == "redis":
        client.hset(keys.state, "format", NEWER)
    else:
        raw = msgspec.msgpack.decode(path.read_bytes())
        raw["state"] |= {"format": FORMAT + 7, "num_rows": {"a": "map now"}}
        path.write_bytes(msgspec.msgpack.encode(raw))
        client.delete(keys.state, keys.epoch)
    before, file, log = (
        everything(client, keys),
        path.read_bytes(),
        (tmp_path / "data" / "decisions.jsonl").read_bytes(),
    )
    host = make_host(shared_redis.url, keys, tmp_path)
    with pytest.raises(
        StateError, match=f"must have format {FORMAT} or an older one, got {FORMAT + 7}: a newer release"
    ):
        host.connect()
    assert everything(client, keys) == before
    assert path.read_bytes() == file and (tmp_path / "data" / "decisions.jsonl").read_bytes() == log


def test_a_refused_state_makes_the_controller_read_only_until_it_can_be_used(
    stopped, shared_redis, client, keys, tmp_path, wait_until, caplog
):
    client.hset(keys.state, "format", NEWER)
    desired = client.get(keys.desired)
    send(client, keys, 3)
    host = make_host(shared_redis.url, keys, tmp_path).start()
    try:
        wait_until(lambda: host.snapshot().read_only)
        snapshot = host.snapshot()
        assert "a newer release wrote it" in snapshot.read_only and snapshot.redis_up and snapshot.ts is None
        text = controller_metrics(snapshot, "m").decode()
        assert (
            'paceline_controller_read_only{model="m"} 1.0' in text
            and 'paceline_controller_redis_up{model="m"} 1.0' in text
        )
        assert sum("READ-ONLY" in r.message for r in caplog.records) == 1
        with pytest.raises(PacelineError, match="read-only"):
            host.call(lambda: host.session.orders.pause(True)).result(20)
        assert client.get(keys.desired) == desired and client.xlen(keys.feedback) == 1
        client.hset(keys.state, "format", msgspec.msgpack.encode(FORMAT))  # the newer release took it back
        wait_until(lambda: not host.snapshot().read_only and host.snapshot().ts is not None, timeout_s=30.0)
        wait_until(lambda: stored(client, keys).num_rows == 9)
    finally:
        host.stop()


def test_damage_without_a_snapshot_is_refused_and_left_as_it_is(stopped, shared_redis, client, keys, tmp_path):
    (tmp_path / "data" / snapshot_name("t")).unlink()
    client.hset(keys.state, "traffic", b"junk")
    before = everything(client, keys)
    with pytest.raises(StateError, match=r"cannot be read and there is no snapshot file.*restore a backup"):
        make_host(shared_redis.url, keys, tmp_path).connect()
    assert everything(client, keys) == before


def test_damage_on_both_sides_is_refused_and_left_as_it_is(stopped, shared_redis, client, keys, tmp_path):
    path = tmp_path / "data" / snapshot_name("t")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    client.hset(keys.state, "traffic", b"junk")
    before = everything(client, keys)
    with pytest.raises(StateError, match=r"snapshot file .* cannot be read"):
        make_host(shared_redis.url, keys, tmp_path).connect()
    assert everything(client, keys) == before and path.read_bytes() == data[: len(data) // 2]


def test_damaged_state_gives_way_to_the_snapshot_and_is_kept_aside(stopped, shared_redis, client, keys, tmp_path):
    client.hset(keys.state, "traffic", b"junk")
    damaged, decisions = client.hgetall(keys.state), client.hgetall(keys.decisions)
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    settle(host)
    assert host.session.state.num_rows == 6
    (aside,) = client.keys(f"{keys.state}:damaged:*")
    assert client.hgetall(aside) == damaged
    (aside,) = client.keys(f"{keys.decisions}:damaged:*")
    assert client.hgetall(aside) == decisions == client.hgetall(keys.decisions)


def test_an_unreadable_policy_does_not_begin_again_from_nothing(stopped, shared_redis, client, keys, tmp_path):
    client.hset(keys.state, "controller", msgspec.msgpack.encode(b"junk"))
    before = everything(client, keys)
    with pytest.raises(StateError, match="policy's part of the stored state cannot be read"):
        make_host(shared_redis.url, keys, tmp_path, make=None).connect()
    assert everything(client, keys) == before


@pytest.mark.parametrize("where", ["redis", "file"])
def test_a_state_from_before_numbers_goes_on(own_redis, keys, tmp_path, where):
    """The state of a real controller of the release before, with its policy, beliefs, ledger and watermarks."""
    sample = json.loads(UNNUMBERED.read_text())
    client = patient_client(own_redis.url)
    assert "format" not in sample["state"]
    if where == "redis":
        for name, data in sample["state"].items():
            client.hset(keys.state, name, bytes.fromhex(data))
        for name, data in sample["decisions"].items():
            client.hset(keys.decisions, name, bytes.fromhex(data))
    else:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / snapshot_name("t")).write_bytes(bytes.fromhex(sample["file"]))
    registry = MemoryRegistry()
    host = make_host(own_redis.url, keys, tmp_path, make=None, registry=registry)
    host.connect()
    expected = sample["expected"]
    snapshot = host.snapshot()
    assert host.session.state.num_rows == expected["num_rows"] > 0
    assert snapshot.ledger.spent_s == pytest.approx(expected["spent_s"])
    assert snapshot.ledger.saved_s == pytest.approx(expected["saved_s"])
    assert [d.decision_id for d in snapshot.decisions] == expected["decision_ids"]
    assert snapshot.history == expected["history"] and snapshot.policy == expected["policy"]
    send(client, keys, 1, replica="a")  # folded before the upgrade
    send(client, keys, expected["last_seq"] + 1, replica="a")
    settle(host)
    state = stored(client, keys)
    assert (state.num_rows, state.num_duplicates) == (expected["num_rows"] + 3, expected["num_duplicates"] + 1)
    assert (state.format, state.model) == (FORMAT, keys.model)


@pytest.mark.parametrize("number", [FORMAT + 1, -1, "1", None])
def test_numbers_that_this_release_does_not_know_are_no_state(number):
    with pytest.raises((StateError, msgspec.DecodeError)):
        upgraded({"format": msgspec.msgpack.encode(number)}, "it")


@pytest.mark.parametrize("has_more", ["redis", "file"])
def test_whichever_of_redis_and_the_snapshot_is_newer_is_gone_on_with(
    shared_redis, client, keys, tmp_path, seeded, has_more
):
    """Redis may come back from an older copy of its data, as from a backup of it alone."""
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    send(client, keys, 1)
    settle(host)
    older = client.dump(keys.state)
    file = tmp_path / "data" / snapshot_name("t")
    host.session.books.store.save_file(host.session.state)
    older_file = file.read_bytes()
    serve_and_stop(host, client, keys)
    newest = stored(client, keys)
    assert newest.num_rows > 3
    if has_more == "file":
        client.restore(keys.state, 0, older, replace=True)
        assert stored(client, keys).commit < newest.commit
    else:
        file.write_bytes(older_file)
    again = make_host(shared_redis.url, keys, tmp_path)
    again.connect()
    settle(again)
    now = stored(client, keys)
    assert (now.num_rows, now.num_booked >= newest.num_booked) == (newest.num_rows, True)
    assert now.commit > newest.commit and now.desired.version == newest.desired.version == "v2"
    assert bool(client.keys(f"{keys.state}:damaged:*")) == (has_more == "file"), "what Redis had is kept"
