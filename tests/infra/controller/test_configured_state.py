"""What the service is configured with at its start wins over what an earlier start left in Redis."""

import pytest

from paceline.config import PolicyConfig
from paceline.infra.state.desired import ensure_first_version, read_desired
from paceline.infra.state.redis_clients import patient_client
from tests.helpers.hosts import make_host, recent_log, settle


@pytest.fixture
def pinned(shared_redis, client, keys, tmp_path):
    """An earlier start: first drafter v1, 10 percent held back, v2 made live and pinned by the operator."""
    ensure_first_version(patient_client(shared_redis.url), keys, "v1", 10, 1.0)
    host = make_host(shared_redis.url, keys, tmp_path, make=None)
    host.connect()
    host.session.orders.pin("v2")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.holdback_percent) == (2, "v2", 10)
    return host


def test_set_up_writes_the_configured_holdback_and_keeps_the_live_version(shared_redis, client, keys, pinned):
    ensure_first_version(patient_client(shared_redis.url), keys, "v1", 30, 2.0)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.first_version, desired.holdback_percent) == (3, "v2", "v1", 30)
    assert "from 10 to 30 percent" in desired.reason


def test_set_up_that_changes_nothing_writes_nothing(shared_redis, client, keys, pinned):
    before, num_entries = client.get(keys.desired), len(recent_log(client, keys))
    ensure_first_version(patient_client(shared_redis.url), keys, "v1", 10, 2.0)
    assert client.get(keys.desired) == before and len(recent_log(client, keys)) == num_entries


def test_controller_puts_its_holdback_into_force_at_start_and_keeps_it_at_swaps(
    shared_redis, client, keys, tmp_path, pinned
):
    host = make_host(shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(holdback_percent=30))
    host.connect()
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.first_version, desired.holdback_percent) == (3, "v2", "v1", 30)
    assert host.snapshot().holdback_percent == 30
    host.session.orders.rollback()
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.holdback_percent) == (4, "v1", 30)


def test_controller_that_agrees_with_the_record_leaves_it(shared_redis, client, keys, tmp_path, pinned):
    make_host(shared_redis.url, keys, tmp_path, make=None, first_version="v1").connect()
    assert read_desired(client, keys).gen == 2


def test_controller_writes_the_first_record_where_no_set_up_ran(shared_redis, client, keys, tmp_path):
    make_host(shared_redis.url, keys, tmp_path, first_version="v1").connect()
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.first_version, desired.holdback_percent) == (1, "v1", "v1", 10)


@pytest.mark.parametrize("has_set_up", [True, False])
def test_another_first_drafter_goes_live_and_ends_the_old_pin(shared_redis, client, keys, tmp_path, pinned, has_set_up):
    assert pinned.session.controller.snapshot().pinned == pinned.snapshot().pinned == "v2"
    if has_set_up:
        ensure_first_version(patient_client(shared_redis.url), keys, "v3", 10, 2.0)
    host = make_host(shared_redis.url, keys, tmp_path, make=None, first_version="v3")
    host.connect()
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.first_version) == (3, "v3", "v3")
    assert host.session.controller.snapshot().pinned is None


def test_versions_of_classes_outlive_another_holdback_and_end_with_another_first_drafter(shared_redis, client, keys, tmp_path, pinned):  # fmt: skip
    pinned.session.orders.assign("math", "v3")
    settle(pinned)
    ensure_first_version(patient_client(shared_redis.url), keys, "v1", 30, 2.0)
    desired = read_desired(client, keys)
    assert (desired.holdback_percent, desired.class_versions) == (30, {"math": "v3"})
    host = make_host(shared_redis.url, keys, tmp_path, make=None, first_version="v2", policy=PolicyConfig())
    host.connect()
    assert read_desired(client, keys).class_versions == {}
    assert "pins and versions of classes removed" in [n.text for n in host.snapshot().notes][-1]


def test_pin_outlives_a_restart_with_the_same_drafter(shared_redis, keys, tmp_path, pinned):
    host = make_host(shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(holdback_percent=30))
    host.connect()
    assert host.session.controller.snapshot().pinned == "v2"


def test_restored_snapshot_wins_over_a_record_made_after_redis_lost_its_data(own_redis, keys, tmp_path):
    client = patient_client(own_redis.url)
    ensure_first_version(client, keys, "v1", 10, 1.0)
    host = make_host(own_redis.url, keys, tmp_path)
    host.connect()
    host.session.orders.pin("v2")
    settle(host)
    host.stop()
    client.flushall()
    ensure_first_version(patient_client(own_redis.url), keys, "v1", 10, 2.0)
    second = make_host(own_redis.url, keys, tmp_path, first_version="v1")
    second.connect()
    desired = read_desired(client, keys)
    assert desired == second.session.state.desired and (desired.gen, desired.version) == (2, "v2")
