"""Versions of classes in the controller: orders, trials of one class, restarts, refusals, the pool, what is left alone."""

import functools

import msgspec
import pytest

from paceline.adapt.versions.lifecycle import DrafterStatus as S
from paceline.config import RolloutConfig
from paceline.contracts import DesiredState, decode, encode
from paceline.errors import DrafterMismatchError, FencedError, ManifestError
from paceline.infra.controller import lives
from paceline.infra.state.desired import read_desired, write_report
from tests.helpers import hosts
from tests.helpers.fake_replicas import FakeReplicas, loading
from tests.helpers.hosts import recent_log, run_canary, settle, stored
from tests.helpers.scripted import MemoryRegistry, decision

ROLLOUT = RolloutConfig(guard=False, canary_percent=50, quiet_s=0.02, freeze_s=500.0, max_requests=100)
make_host = functools.partial(hosts.make_host, rollout=ROLLOUT)


@pytest.fixture
def rollout():
    return ROLLOUT


def fleet_of(shared_redis, keys, **speed) -> FakeReplicas:
    return FakeReplicas(shared_redis.url, keys, speed=lambda v: speed.get(v, 300.0))


def status(host, version: str) -> S | None:
    return host.session.state.lifecycle.status(version)


def test_an_operator_gives_a_class_a_version_and_takes_it_back(host, client, keys):
    orders = host.session.orders
    orders.assign("math", "v2")
    settle(host)
    orders.assign("~class-3", "v3")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.version, desired.class_versions) == (3, "v1", {"math": "v2", "~class-3": "v3"})
    assert [desired.version_of(b) for b in ("math", "~class-3", "code")] == ["v2", "v3", "v1"]
    assert [status(host, v) for v in ("v1", "v2", "v3")] == [S.LIVE] * 3
    snapshot = host.snapshot()
    assert snapshot.class_versions == desired.class_versions and snapshot.history == ["v1"]
    assert snapshot.notes[-1].text == "v3 assigned to class ~class-3 by the operator"
    orders.assign("math", "v3")
    settle(host)
    assert status(host, "v2") == S.RETIRED and read_desired(client, keys).class_versions["math"] == "v3"
    orders.unassign("math")
    settle(host)
    assert read_desired(client, keys).class_versions == {"~class-3": "v3"} and status(host, "v3") == S.LIVE
    orders.unassign("~class-3")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.class_versions, status(host, "v3")) == (6, {}, S.RETIRED)
    assert "given back to the live version" in desired.reason


def test_other_orders_leave_the_classes_alone(host, client, keys):
    host.session.orders.assign("math", "v2")
    settle(host)
    host.session.orders.pin("v3")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.class_versions) == ("v3", {"math": "v2"})
    assert [status(host, v) for v in ("v1", "v2", "v3")] == [S.RETIRED, S.LIVE, S.LIVE]
    host.session.orders.rollback()
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.class_versions, status(host, "v2")) == ("v1", {"math": "v2"}, S.LIVE)
    host.session.orders.pin("v2")
    settle(host)
    assert status(host, "v1") == S.RETIRED and read_desired(client, keys).class_versions == {"math": "v2"}
    host.session.orders.rollback("v1")
    settle(host)
    assert status(host, "v2") == S.LIVE, "it is rolled back for all and serves its class on"


def test_what_cannot_be_assigned_is_refused_with_a_reason_and_changes_nothing(host, client, keys, monkeypatch):
    orders = host.session.orders
    with pytest.raises(ManifestError, match="not in the registry"):
        orders.assign("math", "v9")
    for name in ("", "~", "a b", "x" * 65, "~~class-1", "math\n"):
        with pytest.raises(ValueError, match="class must be the name of a bucket"):
            orders.assign(name, "v2")
    with pytest.raises(DrafterMismatchError, match="class must have a version of its own"):
        orders.unassign("math")
    orders.canary("v2")
    settle(host)
    with pytest.raises(DrafterMismatchError, match="v2 is on trial"):
        orders.assign("math", "v2")
    orders.assign("math", "v3")
    settle(host)
    assert host.session.state.rollout.canary.version == "v2", "a trial on other requests goes on"
    with pytest.raises(DrafterMismatchError, match="v3 already"):
        orders.assign("math", "v3")
    with pytest.raises(DrafterMismatchError, match="live or on trial"):
        orders.canary("v3")
    monkeypatch.setattr(lives, "MAX_ASSIGNED", 1)
    with pytest.raises(DrafterMismatchError, match="at most 1 classes"):
        orders.assign("code", "v1")
    orders.assign("math", "v1")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.gen, desired.class_versions, desired.canary_version) == (4, {"math": "v1"}, "v2")


def test_every_restart_keeps_the_assignments_and_a_killed_order_has_happened_or_not(shared_redis, host, client, keys, tmp_path):  # fmt: skip
    host.session.orders.assign("math", "v2")  # killed before its commit
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    assert read_desired(client, keys).class_versions == {} and status(second, "v2") is None
    with pytest.raises(FencedError):
        settle(host)
    assert read_desired(client, keys).class_versions == {}
    second.session.orders.assign("math", "v2")
    second.session.books.flush()  # killed behind it
    third = make_host(shared_redis.url, keys, tmp_path)
    third.connect()
    settle(third)
    assert third.session.state.desired.class_versions == {"math": "v2"} and status(third, "v2") == S.LIVE
    assert read_desired(client, keys).gen == 2
    client.delete(keys.state, keys.desired, keys.epoch, keys.decisions)
    third.session.books.flush(always=True)
    assert read_desired(client, keys).class_versions == {"math": "v2"}, "Redis lost its data, the controller has them"


def test_a_state_and_a_record_from_before_classes_had_versions_are_read(shared_redis, host, client, keys, tmp_path):
    settle(host)
    old = msgspec.msgpack.decode(encode(read_desired(client, keys)))
    for name in ("class_versions", "canary_bucket"):
        del old[name]
    assert decode(msgspec.msgpack.encode(old), DesiredState) == read_desired(client, keys)
    client.set(keys.desired, msgspec.msgpack.encode(old))
    client.hset(keys.state, "desired", msgspec.msgpack.encode(old))
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    second.session.orders.assign("math", "v2")
    settle(second)
    assert read_desired(client, keys).class_versions == {"math": "v2"}


def test_a_canary_of_a_class_serves_the_class_when_it_is_promoted(shared_redis, host, client, keys, wait_until):
    fleet = fleet_of(shared_redis, keys, v2=420.0, v3=600.0)
    host.session.orders.canary("v2", "math")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.canary_version, desired.canary_bucket, desired.class_versions) == ("v2", "math", {})
    assert (host.snapshot().canary.incumbent, host.snapshot().canary.scope) == ("v1", "math")
    run_canary(host, fleet, wait_until)
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.canary_version, desired.canary_bucket) == ("v1", "", "")
    assert desired.class_versions == {"math": "v2"} and "canary promoted: not slower than v1" in desired.reason
    assert [status(host, v) for v in ("v1", "v2")] == [S.LIVE, S.LIVE]
    host.session.orders.canary("v3", "math")
    settle(host)
    assert host.snapshot().canary.incumbent == "v2", "it is tried against the version of its class"
    run_canary(host, fleet, wait_until)
    settle(host)
    assert read_desired(client, keys).class_versions == {"math": "v3"}
    assert [status(host, v) for v in ("v1", "v2", "v3")] == [S.LIVE, S.RETIRED, S.LIVE]


def test_a_slow_canary_of_a_class_goes_and_the_class_keeps_its_version(shared_redis, host, client, keys, wait_until):
    host.session.orders.assign("math", "v2")
    host.session.books.flush()
    host.session.orders.canary("v3", "math")
    settle(host)
    run_canary(host, fleet_of(shared_redis, keys, v3=150.0), wait_until)
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.class_versions, desired.canary_bucket) == ("v1", {"math": "v2"}, "")
    assert [status(host, v) for v in ("v1", "v2", "v3")] == [S.LIVE, S.LIVE, S.ROLLED_BACK]


def test_requests_of_other_classes_are_no_evidence_in_the_trial_of_one(shared_redis, host, keys, wait_until):
    fleet = fleet_of(shared_redis, keys)
    host.session.orders.canary("v2", "code")
    settle(host)
    fleet.report()
    for _ in range(3):
        fleet.serve(8)
    wait_until(lambda: settle(host, 1) or host.session.state.num_rows == fleet.num_rows, what="the rows")
    canary = host.session.state.rollout.canary
    assert not canary.open and not canary.num_excluded and canary.test.num_requests == (0, 0)


def test_a_restart_goes_on_with_the_canary_of_a_class(shared_redis, host, client, keys, tmp_path, wait_until):
    host.session.orders.canary("v2", "math")
    settle(host)
    host.session.books.flush(always=True)
    before = host.session.state.rollout.canary
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    assert second.session.state.rollout.canary == before and before.scope == "math"
    run_canary(second, fleet_of(shared_redis, keys, v2=600.0), wait_until)
    settle(second)
    assert read_desired(client, keys).class_versions == {"math": "v2"}


def test_a_trial_that_began_by_a_clock_that_was_set_back_since_began_now(shared_redis, host, keys, tmp_path):
    host.session.orders.canary("v2", "math")
    settle(host)
    host.session.state.rollout.canary.since += 7200.0
    host.session.books.flush(always=True)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.state.rollout.canary.since <= second.session.books.clock.now()


def test_a_class_that_ends_takes_its_trial_and_what_was_frozen_with_it(host, client, keys):
    host.session.orders.canary("v2", "~class-1")
    host.session.state.rollout.frozen["~class-1"] = host.session.books.clock.now() + 600.0
    settle(host)
    assert read_desired(client, keys).canary_bucket == "~class-1"
    host.session.state.classes.ended.append(1)
    host.session._refresh()
    settle(host)
    assert read_desired(client, keys).canary_version == "" and host.session.state.rollout.canary is None
    assert host.session.state.rollout.frozen == {} and status(host, "v2") == S.RETIRED


def test_classes_of_a_state_that_is_lost_give_their_numbers_no_version(shared_redis, host, client, keys, tmp_path):
    host.session.lives.assign("~class-7", "v2", "learned", 1.0, 7)
    host.session.orders.assign("math", "v3")
    settle(host)
    assert set(read_desired(client, keys).class_versions) == {"~class-7", "math"}
    client.delete(keys.state)
    second = make_host(shared_redis.url, keys, tmp_path / "without its copy")
    second.connect()
    settle(second)
    assert read_desired(client, keys).class_versions == {"math": "v3"}
    assert "numbered by a state that is lost" in " ".join(text for _, text in second.session.state.notes)


@pytest.mark.parametrize("order", ["assign", "unassign", "pin", "canary itself"])
def test_an_order_for_the_class_ends_its_canary(host, client, keys, order):
    orders = host.session.orders
    orders.assign("math", "v1")
    settle(host)
    orders.canary("v2", "math")
    settle(host)
    if order == "pin":
        orders.pin("v3")
    elif order == "unassign":
        orders.unassign("math")
    else:
        orders.assign("math", "v3" if order == "assign" else "v2")
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.canary_version, desired.canary_bucket, host.session.state.rollout.canary) == ("", "", None)
    wanted = {"assign": {"math": "v3"}, "unassign": {}, "pin": {"math": "v1"}, "canary itself": {"math": "v2"}}
    assert desired.class_versions == wanted[order]
    assert status(host, "v2") == (S.LIVE if order == "canary itself" else S.RETIRED)


def test_what_is_trained_for_a_class_with_a_version_of_its_own_is_tried_on_that_class(host, client, keys, wait_until):
    host.session.lives.assign("math", "v3", "by the policy", 1.0, 9)
    settle(host)
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.state.rollout.canary is not None, timeout_s=60.0)
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.canary_version, desired.canary_bucket, desired.class_versions) == ("v2", "math", {"math": "v3"})


def test_a_replica_that_refuses_the_version_of_a_class_is_told_of_once_and_nothing_is_rolled_back(host, client, keys):
    host.session.orders.assign("math", "v2")
    settle(host)
    for _ in range(3):
        write_report(client, keys, loading("a", 2, "v1", refused={"v2": "weights must be finite"}))
        settle(host)
    texts = [n.text for n in host.snapshot().notes]
    told = [t for t in texts if "does not serve v2" in t]
    assert told == ["replica a does not serve v2, the live version takes its classes: weights must be finite"]
    assert read_desired(client, keys).gen == 2 and read_desired(client, keys).class_versions == {"math": "v2"}
    assert any("does not serve v2" in e.get("text", "") for e in recent_log(client, keys))


def test_weights_of_a_class_stay_in_the_pool_until_it_is_given_back(shared_redis, client, keys, tmp_path, seeded):
    registry = MemoryRegistry(known={"v1", "v2"})
    host = make_host(shared_redis.url, keys, tmp_path, registry=registry, rollout=RolloutConfig(pool_bytes=2))
    host.connect()
    host.session.orders.assign("math", "v2")
    settle(host)
    registry.known |= {"v3", "v4"}
    host.session.pool._max_bytes = 1
    settle(host, 4)
    assert registry.without_weights == {"v3", "v4"} == set(stored(client, keys).evicted)
    host.session.orders.unassign("math")
    settle(host, 4)
    assert registry.without_weights == {"v2", "v3", "v4"}


def test_the_policy_is_told_which_classes_are_not_its_own_also_after_a_restart(shared_redis, host, keys, tmp_path):
    host.session.orders.assign("math", "v2")
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].class_versions == {"math": "v2"} and contexts[-1].live_version == "v1"
    assert contexts[-1].assigned == ["math"]
    host.session.books.flush(always=True)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.state.assigned == ["math"]


def test_classes_of_a_state_that_does_not_say_who_gave_them_their_versions_are_the_operators(shared_redis, host, client, keys, tmp_path):  # fmt: skip
    host.session.orders.assign("math", "v2")
    settle(host)
    host.session.books.flush(always=True)
    client.hdel(keys.state, "assigned")
    client.hset(keys.state, "format", msgspec.msgpack.encode(1))
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    assert second.session.state.assigned == ["math"] and second.session.state.format == 2


@pytest.mark.parametrize("is_told_twice", [False, True])
def test_the_version_of_a_class_that_ends_is_not_passed_on_with_its_number(host, client, keys, is_told_twice):
    host.session.orders.assign("~class-1", "v2")
    host.session.books.flush()
    host.session.orders.assign("~class-2", "v3")
    host.session.books.flush()
    host.session.state.classes.ended = [7, 1, 1] if is_told_twice else [1]
    settle(host)
    assert read_desired(client, keys).class_versions == {"~class-2": "v3"} and host.session.state.classes.ended == []
    assert host.snapshot().notes[-1].text.startswith("class ~class-1 has ended") and status(host, "v2") == S.RETIRED
    assert set(host.session.controller.forgotten) >= {"~class-1"}, "nor is what the policy believes of it"


def test_a_version_that_no_class_has_room_for_is_no_order_that_was_carried_out(host, client, keys, monkeypatch):
    monkeypatch.setattr(lives, "MAX_ASSIGNED", 1)
    orders, policy, state = host.session.orders, host.session.controller, host.session.state
    orders.assign("code", "v3")
    hosts.send(client, keys, 1)
    settle(host)
    trained = decision(7, "recall", version="v2", bucket="math")
    state.lifecycle.admit("v2", S.TRAINING, reason="ordered", ts=1.0)
    for step in (S.TRAINED, S.SHADOWED):
        state.lifecycle.move("v2", step, reason="done", ts=1.0)
    policy.queue = [trained]
    settle(host)
    assert policy.canaries == [(7, "refused")] and status(host, "v2") == S.RETIRED
    assert read_desired(client, keys).class_versions == {"code": "v3"}
    assert any("v2 is not given to class math" in n["text"] for n in recent_log(client, keys) if n["kind"] == "note")
    assert policy.contexts[-1].assigned == ["code", "math"], "nothing is decided for a class that can be given nothing"
    orders.unassign("code")
    settle(host)
    assert policy.contexts[-1].assigned == [] and "v2" in policy.contexts[-1].versions
    policy.queue = [decision(8, "recall", version="v2", bucket="math")]
    settle(host)
    assert state.rollout.canary.version == "v2" and status(host, "v2") == S.CANARY, "ordered again once there is room"


def test_a_version_on_trial_for_others_is_refused_and_the_policy_hears_of_it(host, client, keys):
    policy = host.session.controller
    host.session.orders.canary("v2")
    settle(host)
    host.session.state.lifecycle.versions["v2"] = msgspec.structs.replace(
        host.session.state.lifecycle.versions["v2"], was_live=True
    )
    policy.queue = [decision(5, "recall", version="v2", bucket="math")]
    settle(host)
    assert policy.canaries == [(5, "refused")] and status(host, "v2") == S.CANARY, "its trial goes on"


def test_a_canary_whose_place_was_given_away_meanwhile_is_retired_not_believed(
    shared_redis, host, client, keys, wait_until, monkeypatch
):
    host.session.orders.canary("v2", "math")
    settle(host)
    monkeypatch.setattr(lives, "MAX_ASSIGNED", 1)
    host.session.orders.assign("code", "v3")
    settle(host)
    assert host.session.state.rollout.canary.version == "v2"
    run_canary(host, fleet_of(shared_redis, keys, v2=600.0), wait_until)
    assert status(host, "v2") == S.RETIRED and host.session.controller.canaries[-1] == (0, "retired")
    assert read_desired(client, keys).class_versions == {"code": "v3"} and host.snapshot().errors.count == 0
