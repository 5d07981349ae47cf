"""Two models share a data directory and a model name: drafters of the other target are never used or shown."""

import re

import msgspec
import pytest
import torch

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.config import RolloutConfig
from paceline.contracts import ReplicaReport
from paceline.errors import DrafterMismatchError, RequestError
from paceline.infra.state.desired import commit_desired, ensure_first_version, read_desired, write_report
from paceline.machine import ManualClock
from tests.helpers.hosts import make_host, send, settle
from tests.helpers.scripted import MemoryStore, ProcessLauncher, Shard, decision


class Versions:
    """A real registry with two versions of target "t" (the service's own) and two of another."""

    def __init__(self, root) -> None:
        clock = ManualClock(1.0)
        self.registry = DrafterRegistry(root, clock=clock)

        def put(seed: int, target: str, parent: str | None = None) -> str:
            clock.advance(1.0)
            weights = {"w": torch.full((2, 2), float(seed))}
            fields = {"drafter_type": "specblock", "config": {}, "target_version": target}
            return self.registry.put(weights, **fields, parent=parent).version

        self.theirs = put(0, "other")
        self.theirs_later = put(1, "other", self.theirs)
        self.first = put(2, "t")
        self.trained = put(3, "t", self.first)


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "registry")


@pytest.fixture
def host(shared_redis, client, keys, tmp_path, versions):
    """The service served the other target before: its versions were live and are in the stored history."""
    ensure_first_version(client, keys, versions.theirs, 10, 1.0)
    before = make_host(shared_redis.url, keys, tmp_path, registry=versions.registry, target_version="other")
    before.connect()
    before.session.orders.pin(versions.theirs_later)
    settle(before)
    assert before.session.state.history == [versions.theirs, versions.theirs_later]
    made = make_host(
        shared_redis.url, keys, tmp_path, registry=versions.registry, first_version=versions.first,
        launcher=ProcessLauncher(shared_redis.url, str(tmp_path / "journal"), version=versions.theirs),
    )  # fmt: skip
    made.connect()
    settle(made)
    yield made
    if made.session.state.pending is not None:
        made.session.jobs.kill()


def test_only_own_versions_are_listed_and_live_history_holds_no_other(host, versions):
    view = host.snapshot()
    assert [v.version for v in view.versions] == [versions.first, versions.trained]
    assert view.history == [versions.first] and view.version == versions.first


def test_policy_is_offered_only_own_versions(host, versions):
    settle(host)
    assert sorted(host.session.controller.contexts[-1].versions) == sorted([versions.first, versions.trained])


def test_weights_of_the_target_before_go_first_where_the_pool_is_full(shared_redis, client, keys, tmp_path, versions):
    ensure_first_version(client, keys, versions.first, 10, 1.0)
    size = versions.registry.get_manifest(versions.first).num_bytes
    write_report(client, keys, ReplicaReport(
        replica_id="draining", gen=1, version=versions.theirs_later, slots={}, failed_gen=None, failed_reason="",
        swap_pause_ms=[], ts=1.0, target_version="other",
    ))  # fmt: skip
    own = make_host(
        shared_redis.url, keys, tmp_path, registry=versions.registry, target_version="t",
        rollout=RolloutConfig(pool_bytes=3 * size),
    )  # fmt: skip
    own.connect()
    settle(own, 4)
    assert versions.registry.with_weights() == {versions.first, versions.trained, versions.theirs_later}


def test_another_targets_scores_and_deltas_protect_nothing(shared_redis, client, keys, tmp_path, versions):
    registry, first = versions.registry, versions.first

    def put(seed, target, length, size=2, **more):
        weights = {"w": torch.full((size, size), float(seed))}
        fields = {"drafter_type": "specblock", "config": {}, "target_version": target, **more}
        return registry.put(weights, **fields, bucket="math", arm="x", metrics={"acceptance_length": length}).version

    put(10, "other", 3.0)
    base = put(11, "other", 2.0, size=200)
    put(12, "other", 2.9, delta_of=base)
    best, worse = put(13, "t", 2.5), put(14, "t", 2.0)
    ensure_first_version(client, keys, first, 10, 1.0)
    limit = sum(registry.get_manifest(v).num_bytes for v in (first, best))
    own = make_host(
        shared_redis.url, keys, tmp_path, registry=registry, target_version="t", rollout=RolloutConfig(pool_bytes=limit)
    )  # fmt: skip
    own.connect()
    settle(own, 4)
    assert registry.with_weights() == {first, best} and worse in own.session.state.evicted
    put(15, "other", 3.5)
    settle(own, 4)
    assert registry.with_weights() == {first, best}


def test_pin_and_rollback_refuse_another_target_with_the_reason(host, client, keys, versions):
    reason = f"drafter {versions.theirs} was trained for target other, this target is t; use a drafter of this target"
    for refuse in (host.session.orders.pin, host.session.orders.rollback):
        with pytest.raises(DrafterMismatchError, match=re.escape(reason)):
            refuse(versions.theirs)
    settle(host)
    assert read_desired(client, keys).version == versions.first


def test_rollback_leads_to_no_other_target(host, client, keys, versions):
    with pytest.raises(RequestError, match="only version that was ever live"):
        host.session.orders.rollback()
    host.session.orders.pin(versions.trained)
    settle(host)
    assert host.session.orders.rollback() == versions.first


def test_recall_and_accepted_job_of_another_target_are_not_published(host, client, keys, versions, wait_until):
    host.session.controller.queue.append(decision(1, "recall", version=versions.theirs))
    settle(host)
    assert read_desired(client, keys).version == versions.first
    host.session.controller.queue.append(decision(2, "train", arm="full"))
    wait_until(lambda: settle(host) is None and bool(host.session.controller.outcomes), timeout_s=60.0)
    settle(host)
    assert host.session.controller.outcomes[0].version == versions.theirs, (
        "the job was to return the other target's version"
    )
    assert read_desired(client, keys).version == versions.first


def test_a_refused_version_gives_way_to_an_own_one(host, client, keys, versions):
    host.session.state.history = [versions.theirs, versions.first]  # as a host of the other target left it
    host.session.orders.pin(versions.trained)
    settle(host)
    host.session.state.history.insert(-1, versions.theirs)
    gen = read_desired(client, keys).gen
    report = ReplicaReport(
        replica_id="a", gen=gen - 1, version=versions.first, slots={}, failed_gen=gen, failed_reason="NaN in w",
        swap_pause_ms=[], ts=1.0,
    )  # fmt: skip
    write_report(client, keys, report)
    settle(host)
    assert read_desired(client, keys).version == versions.first


def test_replicas_of_the_target_before_neither_refuse_nor_teach(host, client, keys, versions):
    host.session.orders.pin(versions.trained)
    settle(host)
    gen = read_desired(client, keys).gen
    report = ReplicaReport(
        replica_id="draining", gen=gen - 1, version=versions.theirs, slots={}, failed_gen=gen, swap_pause_ms=[], ts=1.0,
        failed_reason=f"{versions.trained} was trained for target t, this target is other", target_version="other",
    )  # fmt: skip
    write_report(client, keys, report)
    send(client, keys, 1, rows=3, replica="draining", target="other")
    send(client, keys, 1, rows=2, replica="new")
    settle(host)
    assert read_desired(client, keys).version == versions.trained
    assert host.session.state.num_rows == 2 and client.xlen(keys.feedback) == 0
    shown = host.snapshot()
    assert [r.replica_id for r in shown.replicas] == ["draining"], "it still serves its clients"
    told = [v for _, v in client.xrange(keys.log) if b"serves target other" in v[b"v"]]
    assert len(told) == 1
    write_report(client, keys, msgspec.structs.replace(report, replica_id="own", target_version="t"))
    settle(host)
    assert read_desired(client, keys).version == versions.first


def test_nothing_is_decided_while_a_version_of_another_target_is_live(host, client, keys, versions):
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, version=versions.theirs))
    host.session.orders.pause()
    settle(host)
    host.session.orders.pause(False)
    host.session.controller.queue.append(decision(1, "train", arm="full"))
    settle(host)
    assert host.session.state.desired.version == versions.theirs
    assert host.session.state.pending is None and host.session.controller.queue


def test_a_trace_folder_that_is_away_for_a_moment_counts_nothing_twice(shared_redis, client, keys, tmp_path, seeded):
    """As while it is mounted again: it lists nothing, and what is in it afterwards is not new."""
    store = MemoryStore()
    host = make_host(shared_redis.url, keys, tmp_path, store=store)
    host.connect()
    settle(host)
    written, all_shards = dict(host.session.state.rows_written), store.shards
    assert written == {"math": 400, "code": 200}
    store.shards = []
    settle(host)
    assert host.session.surroundings.rows == {} and host.session.state.rows_written == written
    store.shards = all_shards
    settle(host)
    assert host.session.state.rows_written == written
    store.shards = [*all_shards, Shard("s3")]
    settle(host)
    assert host.session.state.rows_written == written | {"math": 600}
