"""Guards: what a burst found surely better serves its class at once, and goes again where the hold-back is served faster."""

import functools

import pytest

from paceline.adapt.versions.lifecycle import DrafterStatus as S
from paceline.config import PolicyConfig, RolloutConfig
from paceline.infra.controller.rollout import Outcome, RolloutState, close_quiet, fold, judge
from paceline.infra.state.desired import read_desired, write_report
from tests.helpers import hosts
from tests.helpers.fake_replicas import FakeReplicas, loading
from tests.helpers.feedback import trial_batch as batch
from tests.helpers.feedback import trial_row as row
from tests.helpers.hosts import recent_log, settle
from tests.helpers.scripted import decision

ROLLOUT = RolloutConfig(canary_percent=50, quiet_s=0.02, freeze_s=500.0, max_requests=100)
make_host = functools.partial(hosts.make_host, rollout=ROLLOUT)


@pytest.fixture
def rollout():
    return ROLLOUT


@pytest.fixture
def serve_until_judged(shared_redis, keys, wait_until):
    def serve(host, **speed):
        fleet = FakeReplicas(shared_redis.url, keys, speed=lambda v: speed.get(v, 300.0), holdback=0.3)

        def is_over():
            fleet.report()
            fleet.serve(8)
            settle(host)
            return not host.session.state.rollout.guards

        wait_until(is_over, timeout_s=60.0, what="the end of the guard")
        settle(host)

    return serve


def publish(host, version="v2", *, decision_id=1, bucket="math"):
    host.session.lives.publish(
        version, "surely better", host.session.books.clock.now(), decision_id, bucket, arm="full"
    )
    settle(host)


def status(host, version):
    return host.session.state.lifecycle.status(version)


def test_what_a_job_made_serves_its_class_at_once_under_a_guard(host, client, keys, wait_until):
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    wait_until(lambda: settle(host, 1) or host.session.state.rollout.guards, timeout_s=60.0)
    settle(host)
    desired = read_desired(client, keys)
    assert (desired.version, desired.class_versions, desired.canary_version) == ("v1", {"math": "v2"}, "")
    assert status(host, "v2") == S.LIVE and host.session.state.rollout.canary is None
    (guard,) = host.snapshot().rollout.guards
    assert (guard.version, guard.scope, guard.incumbent, guard.decision_id) == ("v2", "math", "v1", 1)


def test_a_guard_ends_when_the_version_is_fast_enough(host, client, keys, serve_until_judged):
    publish(host)
    serve_until_judged(host, v2=420.0)
    assert read_desired(client, keys).class_versions == {"math": "v2"} and status(host, "v2") == S.LIVE
    assert host.session.controller.canaries == [(1, "promoted")]
    assert any(
        "guard of v2 on math promoted: not slower than v1" in e.get("text", "") for e in recent_log(client, keys)
    )


def test_a_slow_version_is_taken_back_barred_and_its_class_frozen(host, client, keys, serve_until_judged):
    publish(host, "v3", decision_id=1)
    serve_until_judged(host, v3=400.0)
    publish(host, "v2", decision_id=2)
    serve_until_judged(host, v2=150.0, v3=400.0)
    desired = read_desired(client, keys)
    assert desired.class_versions == {"math": "v3"}, "the class has the version before"
    assert "guard of v2 on math rolled back: it is slower than v1" in desired.reason
    assert [status(host, v) for v in ("v1", "v2", "v3")] == [S.LIVE, S.ROLLED_BACK, S.LIVE]
    assert host.session.controller.canaries == [(1, "promoted"), (2, "rolled_back")]
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert contexts[-1].frozen == ["math"] and contexts[-1].versions == ["v1", "v3"]
    publish(host, "v2", decision_id=3)
    assert read_desired(client, keys).class_versions == {"math": "v3"}, "it is barred, whoever asks"


def test_every_class_that_a_slow_version_was_given_to_gets_its_own_version_before(
    host, client, keys, serve_until_judged
):
    publish(host, "v3", decision_id=1)
    serve_until_judged(host, v3=400.0)
    publish(host, "v3", decision_id=2, bucket="code")
    for bucket in ("math", "code", "law"):
        publish(host, "v2", decision_id=3, bucket=bucket)
    assert sorted(host.session.state.rollout.guards) == ["code", "law", "math"]
    serve_until_judged(host, v2=150.0, v3=400.0)
    assert read_desired(client, keys).class_versions == {"math": "v3", "code": "v3"}


def test_no_policy_decides_upon_what_served_before_a_change_of_the_same_pass(host, client, keys):
    seen = []
    host.session.controller.tick = lambda now, context: seen.append(dict(context.class_versions)) or []
    now = host.session.books.clock.now()
    host.session.lives.publish("v2", "surely better", now, 1, "math", arm="full")
    host.session.orders.tick(now)
    assert seen == []
    settle(host)
    assert seen and all(versions == {"math": "v2"} for versions in seen)


def test_a_class_without_a_version_before_goes_back_to_the_live_one(host, client, keys, serve_until_judged):
    publish(host)
    serve_until_judged(host, v2=150.0)
    assert read_desired(client, keys).class_versions == {} and status(host, "v2") == S.ROLLED_BACK


def test_a_guard_keeps_no_policy_from_deciding_and_every_class_has_its_own(host):
    publish(host, "v2", bucket="math")
    publish(host, "v3", bucket="code", decision_id=2)
    assert sorted(host.session.state.rollout.guards) == ["code", "math"]
    contexts = []
    host.session.controller.tick = lambda now, context: contexts.append(context) or []
    settle(host)
    assert not contexts[-1].job_running and contexts[-1].class_versions == {"math": "v2", "code": "v3"}


@pytest.mark.parametrize("says", [{"refused": {"v2": "weights must be finite"}}, {"failures": {"v2": "NaN"}}])
def test_a_version_that_a_replica_cannot_serve_is_rolled_back_at_once(host, client, keys, says):
    publish(host)
    write_report(client, keys, loading("a", 2, "v1", **says))
    settle(host)
    settle(host)
    assert read_desired(client, keys).class_versions == {} and status(host, "v2") == S.ROLLED_BACK


def test_another_version_of_the_class_ends_its_guard_and_a_restart_does_not(shared_redis, host, client, keys, tmp_path):  # fmt: skip
    publish(host)
    host.session.books.flush(always=True)
    second = make_host(shared_redis.url, keys, tmp_path)
    second.connect()
    settle(second)
    assert second.session.state.rollout.guards == host.session.state.rollout.guards != {}
    second.session.orders.assign("math", "v3")
    settle(second)
    assert not second.session.state.rollout.guards and second.session.controller.canaries == []
    assert read_desired(client, keys).class_versions == {"math": "v3"}


def test_a_version_that_proved_nothing_yet_is_none_to_go_back_to(host, client, keys, serve_until_judged):
    publish(host, "v3", decision_id=1)
    publish(host, "v2", decision_id=2)
    assert host.session.state.rollout.guards["math"].version == "v2"
    serve_until_judged(host, v2=150.0, v3=100.0)
    assert read_desired(client, keys).class_versions == {}


def test_a_version_under_guard_is_guarded_elsewhere_too_and_goes_everywhere(host, client, keys, serve_until_judged):
    publish(host, "v2", bucket="math")
    publish(host, "v2", bucket="code", decision_id=2)
    assert sorted(host.session.state.rollout.guards) == ["code", "math"]
    serve_until_judged(host, v2=150.0)
    assert read_desired(client, keys).class_versions == {} and status(host, "v2") == S.ROLLED_BACK
    publish(host, "v2", decision_id=3)
    assert read_desired(client, keys).class_versions == {}


def test_what_an_operator_assigned_while_a_job_ran_stays(host, client, keys):
    host.session.orders.assign("math", "v3")
    settle(host)
    publish(host)
    assert read_desired(client, keys).class_versions == {"math": "v3"} and not host.session.state.rollout.guards
    assert host.session.controller.canaries == [(1, "refused")]


def test_a_replica_that_has_not_loaded_the_version_is_no_evidence(shared_redis, host, keys, wait_until):
    """Its hold-back would be compared with nobody, and how fast that replica is would count."""
    publish(host)
    fleet = FakeReplicas(shared_redis.url, keys, speed=lambda v: 300.0, holdback=0.5)
    fleet.serve(8)
    wait_until(lambda: settle(host, 1) or host.session.state.num_rows == fleet.num_rows, what="the rows")
    guard = host.session.state.rollout.guards["math"]
    assert not guard.open and guard.test.num_requests == (0, 0)
    fleet.report()
    settle(host)
    fleet.serve(8)
    wait_until(lambda: settle(host, 1) or host.session.state.num_rows == fleet.num_rows, what="the rows")
    assert len(guard.open) + sum(guard.test.num_requests) == 16


def test_a_version_that_served_before_needs_no_guard_and_without_a_hold_back_there_is_a_canary(shared_redis, host, client, keys, tmp_path):  # fmt: skip
    publish(host)
    host.session.orders.unassign("math")
    settle(host)
    publish(host)
    assert not host.session.state.rollout.guards and read_desired(client, keys).class_versions == {"math": "v2"}
    host.stop()
    other = make_host(shared_redis.url, keys, tmp_path, policy=PolicyConfig(holdback_percent=0))
    other.connect()
    settle(other)
    publish(other, "v3", bucket="code")
    assert other.session.state.rollout.canary.version == "v3" and not other.session.state.rollout.guards
    host.stop()


def test_a_version_under_a_guard_of_before_begins_no_canary_elsewhere_and_the_policy_hears_of_it(
    shared_redis, host, client, keys, tmp_path
):
    publish(host)
    host.stop()
    other = make_host(shared_redis.url, keys, tmp_path, policy=PolicyConfig(holdback_percent=0))
    other.connect()
    settle(other)
    publish(other, decision_id=2, bucket="code")
    assert other.session.controller.canaries == [(2, "refused")] and other.session.state.rollout.canary is None
    assert read_desired(client, keys).class_versions == {"math": "v2"} and status(other, "v2") == S.LIVE


def test_where_everybody_is_held_back_there_is_no_guard(shared_redis, client, keys, tmp_path, seeded):
    host = make_host(shared_redis.url, keys, tmp_path, policy=PolicyConfig(holdback_percent=100))
    host.connect()
    settle(host)
    publish(host)
    assert not host.session.state.rollout.guards and host.session.state.rollout.canary.version == "v2"


def test_the_hold_back_is_the_other_side_and_nobody_else():
    state = RolloutState()
    state.guard(
        "v2", "", ROLLOUT, incumbent="v1", holdback_percent=10, now=0.0, decision_id=1, bucket="math", arm="full"
    )
    guard = state.guards["math"]
    sent = {
        "own": ("v2", "adaptive"), "held": ("v1", "static"), "early": ("v1", "adaptive"), "plain": ("", "plain"),
        "asked": ("v1", "asked"),
    }  # fmt: skip
    for name, (version, group) in sent.items():
        fold(guard, batch(row(name, version, 1, group=group)).cells, 1.0)
    assert set(guard.open) == {"own", "held"} and guard.num_excluded == 1
    close_quiet(guard, ROLLOUT, 2.0)
    assert guard.test.num_requests == (1, 1) and judge(guard, ROLLOUT, 2.0) is None


def test_a_guard_waits_for_its_class_and_keeps_what_nothing_speaks_against():
    config = RolloutConfig(quiet_s=0.1, max_requests=20, max_s=5.0)
    state = RolloutState()
    state.guard("v2", "", config, incumbent="v1", holdback_percent=1, now=0.0, decision_id=1, bucket="math", arm="full")
    guard = state.guards["math"]
    assert judge(guard, config, now=1e6) is None, "the class was away"
    for k in range(20):
        assert judge(guard, config, now=1e6) is None
        fold(guard, batch(row(f"q{k}", "v2", 1, ts=1e6, drafts=0, draft_ms=0.0)).cells, 1e6)
        close_quiet(guard, config, 1e6 + 1)
    assert judge(guard, config, now=1e6).outcome == Outcome.PROMOTED, "nobody was held back, and it never drafted"
