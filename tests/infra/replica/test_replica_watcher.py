"""Claims of infra/replica/watcher.py."""

import time
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.contracts import DesiredState, TrafficClasses, encode
from paceline.errors import DrafterMismatchError, EngineAwayError, EngineStoppedError
from paceline.infra.controller.jobs import Lease
from paceline.infra.replica.span_target import SpanTarget
from paceline.infra.replica.watcher import ReplicaWatcher
from paceline.infra.state.desired import commit_desired, ensure_first_version, read_reports
from paceline.infra.state.redis_clients import Breaker, patient_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.infra.state.redis_server import EmbeddedRedis
from tests.helpers.collector import Collector
from tests.helpers.hanging import Hanging


@dataclass
class Slots:
    """Two drafter slots; `idle` says whether one is free."""

    live_version: str = "v1"
    staged: str = ""
    idle: bool = True
    bad: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    canary: tuple[str, int] = ("", 0)
    scope: str = ""
    errors: dict[str, int] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    room: int = 2
    loaded: list[str] = field(default_factory=list)
    is_away: bool = False
    """As an engine that others run may be, and one's own that has ended."""
    away: type[Exception] = EngineAwayError

    def set_canary(self, version: str, percent: int, bucket: str) -> None:
        assert not version or self.staged == version
        self.canary, self.scope = (version, percent), bucket

    def route(self, class_versions: dict[str, str]) -> None:
        self.routes = class_versions

    def missing(self) -> list[str]:
        return sorted({*self.routes.values()} - {*self.loaded})

    def check_is_there(self) -> None:
        if self.is_away:
            raise self.away("the engine must answer")

    def load(self, version: str) -> bool:
        self.check_is_there()
        self.calls.append(version)
        if version in self.bad:
            raise DrafterMismatchError(f"drafter {version} weights must be finite")
        if has_room := len(self.loaded) < self.room:
            self.loaded.append(version)
        return has_room

    def served(self) -> dict[str, str]:
        return {b: v for b, v in self.routes.items() if v in self.loaded and v not in self.broken}

    def stage(self, version: str) -> bool:
        self.calls.append(version)
        if version in self.bad:
            raise DrafterMismatchError(f"drafter {version} weights must be finite")
        if self.idle:
            self.staged = version
        return self.idle

    def failures(self) -> dict[str, str]:
        return self.broken

    def publish(self, version: str) -> float:
        assert self.staged == version
        self.check_is_there()
        self.live_version = version
        return 0.25

    def num_errors(self) -> dict[str, int]:
        return self.errors

    def versions(self) -> dict[str, str]:
        return {"A": self.live_version}


@dataclass
class Told:
    """What the replica is told."""

    desired: list[int] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def desired_changed(self, desired: DesiredState) -> None:
        self.desired.append(desired.gen)

    def training_changed(self, is_training: bool) -> None:
        self.training.append(is_training)

    def classes_changed(self, classes: TrafficClasses) -> None:
        self.classes.append(classes.rev)


def watcher(url, keys, slots: Slots, **options) -> ReplicaWatcher:
    return ReplicaWatcher(url, keys, slots, replica_id="a", **options)


def want(client, keys, version: str) -> None:
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, version=version))


@pytest.fixture
def seeded(client, keys):
    return ensure_first_version(client, keys, "v1", 10, 1.0)


def test_first_pass_takes_the_generation_without_a_swap(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    assert w.reconcile()
    assert (w.gen, w.version, slots.calls) == (1, "v1", [])
    assert read_reports(client, keys)[0].gen == 1


def test_a_clock_that_goes_by_redis_is_read_as_long_as_the_watcher_lives(shared_redis, client, keys, seeded):
    clock = RedisClock()
    w = watcher(shared_redis.url, keys, Slots(), clock=clock)
    assert w.reconcile() and clock.is_set


def test_new_generation_is_staged_published_and_reported(shared_redis, client, keys, seeded):
    slots = Slots()
    told = Told()
    w = watcher(shared_redis.url, keys, slots, followers=told)
    want(client, keys, "v2")
    w.reconcile()
    report = read_reports(client, keys)[0]
    assert (slots.live_version, report.gen, report.version, report.swap_pause_ms) == ("v2", 2, "v2", [0.25])
    assert told.desired == [2]


def test_swaps_of_the_live_version_and_of_classes_are_traces(shared_redis, client, keys, seeded):
    with Collector() as collector:
        spans = SpanTarget(endpoint=collector.url, model="tiny").open("a")
        w = watcher(shared_redis.url, keys, Slots(), deeds=spans.deeds)
        want(client, keys, "v2")
        w.reconcile()
        commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, class_versions={"math": "v3"}))
        w.reconcile()
        w.reconcile()
        spans.close()
    swaps = {
        s.attributes["paceline.drafter_version"]: s.attributes for s in collector.spans if s.name == "paceline.swap"
    }
    assert swaps["v2"]["paceline.pause_ms"] == 0.25
    assert swaps["v3"]["paceline.buckets"] == ["math"]


def test_refused_version_leaves_the_live_one_and_is_not_tried_again(shared_redis, client, keys, seeded):
    slots = Slots(bad={"v2"})
    w = watcher(shared_redis.url, keys, slots)
    want(client, keys, "v2")
    for _ in range(3):
        w.reconcile()
    report = read_reports(client, keys)[0]
    assert (slots.live_version, slots.calls, report.failed_gen) == ("v1", ["v2"], 2)
    assert "must be finite" in report.failed_reason
    want(client, keys, "v3")
    w.reconcile()
    assert (slots.live_version, w.failed_gen) == ("v3", None)


def test_a_registry_that_hangs_blames_no_version_and_blocks_no_other_order(shared_redis, client, keys, seeded, tmp_path, wait_until):  # fmt: skip
    folder, calls = Hanging(tmp_path / "weights"), StorageCalls("the registry", 0.1)

    @dataclass
    class Reading(Slots):
        """Slots whose versions v2 and v3 are read from the registry."""

        def stage(self, version: str) -> bool:
            if version in ("v2", "v3"):
                calls.run((tmp_path / "weights").read_bytes)
            return super().stage(version)

        def load(self, version: str) -> bool:
            calls.run((tmp_path / "weights").read_bytes)
            return super().load(version)

    slots = Reading()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    commit_desired(
        client, keys,
        lambda d: msgspec.structs.replace(d, gen=d.gen + 1, version="v2", class_versions={"math": "v3"}),
    )  # fmt: skip
    for _ in range(3):
        assert w.reconcile()
        report = read_reports(client, keys)[0]
        assert (report.version, report.gen, report.failed_gen, report.refused) == ("v1", 1, None, {})
    want(client, keys, "v4")
    w.reconcile()
    assert (slots.live_version, read_reports(client, keys)[0].gen) == ("v4", 3), "a roll-back to what is loaded goes on"
    want(client, keys, "v2")
    w.reconcile()
    folder.release()
    (tmp_path / "weights").write_bytes(b"")
    wait_until(lambda: w.reconcile() and slots.live_version == "v2" and slots.loaded == ["v3"])
    assert read_reports(client, keys)[0].gen == 4


def test_third_version_waits_for_an_idle_slot_and_the_newest_wins(shared_redis, client, keys, seeded):
    slots = Slots(idle=False)
    w = watcher(shared_redis.url, keys, slots)
    want(client, keys, "v2")
    w.reconcile()
    assert (w.gen, slots.live_version) == (0, "v1")
    want(client, keys, "v3")
    w.reconcile()
    slots.idle = True
    w.reconcile()
    assert (slots.live_version, w.gen, w.num_swaps) == ("v3", 3, 1)
    assert slots.calls == ["v2", "v3", "v3"]


def test_rollback_is_a_new_generation_with_an_older_version(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    for version in ("v2", "v1"):
        want(client, keys, version)
        w.reconcile()
    assert (slots.live_version, w.gen) == ("v1", 3)


def test_older_generation_is_ignored(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    want(client, keys, "v2")
    w.reconcile()
    client.set(keys.desired, encode(msgspec.structs.replace(seeded, version="v0")))
    w.reconcile()
    assert (slots.live_version, w.gen) == ("v2", 2)


def test_drafter_that_fails_while_serving_is_reported(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    slots.broken["v1"] = "non-finite log-probabilities"
    w.reconcile()
    report = read_reports(client, keys)[0]
    assert report.failed_gen == report.gen == 1
    assert "non-finite" in report.failed_reason


def test_poke_is_faster_than_the_poll(shared_redis, client, keys, seeded, wait_until):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots, poll_s=60.0).start()
    wait_until(lambda: client.pubsub_numsub(keys.poke)[0][1] == 1)
    want(client, keys, "v2")
    wait_until(lambda: slots.live_version == "v2", timeout_s=5.0)
    w.stop()
    assert read_reports(client, keys) == []


def test_training_lease_marks_the_rounds(shared_redis, client, keys, seeded):
    told = Told()
    w = watcher(shared_redis.url, keys, Slots(), followers=told)
    w.reconcile()
    client.set(keys.train, encode(Lease(job_id="j", token="t", host="h")), px=60_000)
    w.reconcile()
    client.delete(keys.train)
    w.reconcile()
    assert told.training == [True, False]


def test_a_damaged_lease_keeps_no_generation_away(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    client.set(keys.train, b"\x00junk")
    want(client, keys, "v2")
    w.reconcile()
    assert slots.live_version == "v2" and not w.is_training


def test_outage_keeps_the_drafter_and_the_next_generation_arrives_after_it(tmp_path, keys, wait_until):
    server = EmbeddedRedis(tmp_path)
    server.start()
    ensure_first_version(patient_client(server.url), keys, "v1", 10, 1.0)
    slots = Slots()
    w = watcher(server.url, keys, slots, poll_s=0.05).start()
    wait_until(lambda: w.gen == 1)
    server.stop()
    wait_until(lambda: not w.is_redis_up)
    assert slots.live_version == "v1"
    server.start()
    want(patient_client(server.url), keys, "v2")
    wait_until(lambda: slots.live_version == "v2")
    assert w.is_redis_up
    w.stop()
    server.stop()


def test_a_pass_without_redis_counts_once_so_that_the_sixth_waits_the_longest(keys, wait_until):
    w = watcher("redis://127.0.0.1:1/0", keys, Slots())
    waits: list[float] = []
    w._breaker = breaker = Breaker(base_s=0.01, cap_s=0.08, rng=Random(0))
    failed = breaker.failed
    breaker.failed = lambda: waits.append(failed()) or waits[-1]
    w.start(first_read_s=0.0)
    wait_until(lambda: len(waits) >= 6)
    w.stop()
    for wait_s, most_s in zip(waits, (0.01, 0.02, 0.04, 0.08, 0.08, 0.08), strict=False):
        assert most_s / 2 <= wait_s <= most_s, waits


def test_start_without_redis_serves_after_the_patience(keys):
    w = watcher("redis://127.0.0.1:1/0", keys, Slots())
    w.start(first_read_s=0.2)
    assert (w.version, w.is_redis_up) == ("v1", False)
    w.stop()


def try_out(client, keys, canary: str, percent: int = 10, **fields) -> None:
    commit_desired(
        client,
        keys,
        lambda d: msgspec.structs.replace(d, gen=d.gen + 1, canary_version=canary, canary_percent=percent, **fields),
    )


def test_a_canary_is_staged_beside_the_live_version_and_reported(shared_redis, client, keys, seeded):
    slots = Slots(errors={"v2": 3})
    w = watcher(shared_redis.url, keys, slots)
    try_out(client, keys, "v2")
    w.reconcile()
    report = read_reports(client, keys)[0]
    assert (slots.live_version, slots.canary, report.version, report.canary_version) == ("v1", ("v2", 10), "v1", "v2")
    assert (report.gen, report.swap_gen, report.swap_pause_ms, report.errors) == (2, 0, [], {"v2": 3})
    try_out(client, keys, "v2", 50)
    w.reconcile()
    assert (slots.canary, slots.calls) == (("v2", 50), ["v2"])  # another share needs no other weights


def test_promotion_publishes_the_canary_and_calling_off_takes_its_share(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    try_out(client, keys, "v2")
    w.reconcile()
    try_out(client, keys, "", 0, version="v2")
    w.reconcile()
    assert (slots.live_version, w.version, w.canary_version, w.swap_gen, w.num_swaps) == ("v2", "v2", "", 3, 1)
    try_out(client, keys, "v3")
    w.reconcile()
    try_out(client, keys, "", 0)
    w.reconcile()
    assert (slots.live_version, slots.canary, w.canary_version, w.gen) == ("v2", ("", 0), "", 5)


def test_a_canary_that_cannot_be_loaded_leaves_the_live_version_and_is_reported(shared_redis, client, keys, seeded):
    slots = Slots(bad={"v2"})
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    try_out(client, keys, "v2")
    w.reconcile()
    report = read_reports(client, keys)[0]
    assert (report.version, report.canary_version, report.failed_gen) == ("v1", "", 2)
    assert slots.live_version == "v1" and "must be finite" in report.failed_reason


def test_a_replica_that_starts_during_a_canary_loads_both(shared_redis, client, keys, seeded):
    try_out(client, keys, "v3", version="v2")
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    assert (slots.live_version, slots.canary, w.gen) == ("v2", ("v3", 10), 2)


def test_a_canary_waits_for_an_idle_slot_without_holding_up_the_live_version(shared_redis, client, keys, seeded):
    slots = Slots(idle=False)
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    try_out(client, keys, "v2")
    w.reconcile()
    assert (w.gen, w.canary_version, slots.live_version) == (1, "", "v1")
    slots.idle = True
    w.reconcile()
    assert (w.gen, slots.canary) == (2, ("v2", 10))


def test_a_new_order_calls_a_failed_canary_off_before_anything_is_staged(shared_redis, client, keys, seeded):
    shares = []

    class WatchedSlots(Slots):
        def stage(self, version: str) -> bool:
            shares.append((version, self.canary))
            self.broken.pop(version, None)  # fresh weights
            return super().stage(version)

    slots = WatchedSlots()
    w = watcher(shared_redis.url, keys, slots)
    try_out(client, keys, "v2")
    w.reconcile()
    slots.broken["v2"] = "NaN"
    try_out(client, keys, "v2", version="v3")
    w.reconcile()
    assert shares == [("v2", ("", 0)), ("v3", ("", 0)), ("v2", ("", 0))]
    assert (slots.live_version, slots.canary, w.canary_version, w.gen) == ("v3", ("v2", 10), "v2", 3)


def test_traffic_classes_are_followed_and_kept_when_they_are_lost_or_damaged(shared_redis, client, keys, seeded):
    told = Told()
    w = watcher(shared_redis.url, keys, Slots(), followers=told)
    assert w.reconcile() and told.classes == []
    first = TrafficClasses(rev=3, space="s", names=["~class-1"], centroids=[[0.0, 1.0]], radii=[0.5])
    client.set(keys.classes, encode(first))
    assert w.reconcile() and w.reconcile() and told.classes == [3]
    client.set(keys.classes, b"\xc1 not a record")
    assert w.reconcile() and w.classes == first
    client.delete(keys.classes)
    assert w.reconcile() and w.classes == first and told.classes == [3]
    client.set(keys.classes, encode(msgspec.structs.replace(first, rev=1)))  # the controller was restored from a file
    assert w.reconcile() and told.classes == [3, 1]


def assign(client, keys, **class_versions: str) -> None:
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, class_versions=class_versions))


def test_versions_of_classes_are_loaded_one_a_pass_and_reported(shared_redis, client, keys, seeded):
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    assign(client, keys, math="v2", code="v3", chat="v4")
    reports = []
    for _ in range(4):
        w.reconcile()
        reports.append(read_reports(client, keys)[0].class_versions)
    assert reports == [{"math": "v2"}, *[{"math": "v2", "code": "v3"}] * 3], (
        "the rest has no room, the live one serves it"
    )
    assert (slots.live_version, w.gen, w.failed_gen) == ("v1", 2, None)
    slots.room = 3
    w.reconcile()
    assert read_reports(client, keys)[0].class_versions == {"math": "v2", "code": "v3", "chat": "v4"}
    assign(client, keys, code="v3")
    w.reconcile()
    assert slots.routes == {"code": "v3"} and read_reports(client, keys)[0].class_versions == {"code": "v3"}


def test_a_replica_that_joins_has_the_versions_of_all_classes_before_it_is_ready(shared_redis, client, keys, seeded):
    assign(client, keys, math="v2", code="v3", chat="v4", prose="v5")
    slots = Slots(room=3, bad={"v2"})
    w = watcher(shared_redis.url, keys, slots).start()
    try:
        assert slots.loaded == ["v3", "v4", "v5"], "all but the one that is refused"
        report = read_reports(client, keys)[0]
        assert report.class_versions == {"code": "v3", "chat": "v4", "prose": "v5"} and [*report.refused] == ["v2"]
    finally:
        w.stop()
    assert read_reports(client, keys) == [], "one that has left is waited for by nobody"


def test_a_version_of_a_class_that_is_refused_or_fails_is_reported_and_touches_nothing_else(shared_redis, client, keys, seeded):  # fmt: skip
    slots = Slots(bad={"v2"})
    w = watcher(shared_redis.url, keys, slots)
    assign(client, keys, math="v2", code="v3")
    for _ in range(3):
        w.reconcile()
    report = read_reports(client, keys)[0]
    assert (report.class_versions, report.failed_gen, slots.calls) == ({"code": "v3"}, None, ["v2", "v3"])
    assert "must be finite" in report.refused["v2"]
    slots.broken["v3"] = "non-finite log-probabilities"
    slots.loaded.clear()
    for _ in range(3):
        w.reconcile()
    report = read_reports(client, keys)[0]
    assert "failed while serving: non-finite" in report.refused["v3"], "it is not loaded again and again"
    assert (report.class_versions, report.failed_gen, slots.calls) == ({}, None, ["v2", "v3"])
    slots.bad, slots.broken = set(), {}
    assign(client, keys, math="v2")
    w.reconcile()
    report = read_reports(client, keys)[0]
    assert (report.class_versions, report.refused) == ({"math": "v2"}, {}), "another order is another try"


def test_a_version_that_finds_no_memory_once_is_not_refused_and_one_that_was_is_tried_again(
    shared_redis, client, keys, seeded, monkeypatch
):
    slots, now, errors = Slots(), [1000.0], [RuntimeError("CUDA out of memory"), MemoryError("no memory")]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("paceline.infra.replica.watcher.time", clock)

    def check():
        if slots.tries and errors:
            raise errors.pop(0)

    slots.check_is_there, slots.tries = check, True
    w = watcher(shared_redis.url, keys, slots)
    assign(client, keys, math="v2")
    seen = []
    for _ in range(8):
        w.reconcile()
        seen.append((2 - len(errors), "v2" in read_reports(client, keys)[0].refused))
        now[0] += 3.0
    assert seen[:2] == [(1, False)] * 2 and seen[2] == (2, True), "the second failure counts"
    assert seen[3:6] == [(2, True)] * 3 and seen[6:] == [(2, False)] * 2, "and it is tried again, later each time"
    assert (slots.calls, slots.loaded) == (["v2"], ["v2"])
    assert read_reports(client, keys)[0].refused == {} and read_reports(client, keys)[0].class_versions == {
        "math": "v2"
    }


def test_what_failed_before_it_was_assigned_is_tried_again(shared_redis, client, keys, seeded):
    slots = Slots(broken={"v2": "non-finite log-probabilities"})
    w = watcher(shared_redis.url, keys, slots)
    assign(client, keys, math="v2")
    w.reconcile()
    assert slots.calls == ["v2"] and read_reports(client, keys)[0].refused == {}
    slots.loaded.clear()
    w.reconcile()
    assert slots.calls == ["v2"] and "failed while serving" in read_reports(client, keys)[0].refused["v2"]


def test_a_replica_that_starts_has_the_classes_versions_and_a_canary_of_one(shared_redis, client, keys, seeded):
    assign(client, keys, math="v2")
    try_out(client, keys, "v3", canary_bucket="math")
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    assert (slots.canary, slots.scope, slots.served(), w.gen) == (("v3", 10), "math", {"math": "v2"}, 3)
    try_out(client, keys, "", 0, canary_bucket="")
    w.reconcile()
    assert (slots.canary, slots.scope, slots.served()) == (("", 0), "", {"math": "v2"})


def test_a_record_of_a_service_without_versions_of_classes_is_read(shared_redis, client, keys, seeded):
    old = {n: getattr(seeded, n) for n in ("gen", "version", "first_version", "holdback_percent", "reason", "ts")}
    client.set(keys.desired, msgspec.msgpack.encode(old))
    slots = Slots()
    w = watcher(shared_redis.url, keys, slots)
    w.reconcile()
    assert (w.gen, slots.routes, w.desired.version_of("math")) == (1, {}, "v1")


@pytest.mark.parametrize("away", [EngineAwayError, EngineStoppedError])
def test_a_version_is_not_refused_because_the_engine_is_away(shared_redis, client, keys, seeded, away):
    slots = Slots(away=away)
    w = watcher(shared_redis.url, keys, slots, poll_s=0.1)
    assert w.reconcile()
    want(client, keys, "v2")
    slots.is_away = True
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert w.reconcile()
        assert (w.failed_gen, w.version, slots.live_version) == (None, "v1", "v1")
    (report,) = read_reports(client, keys)
    assert (report.failed_gen, report.failed_reason) == (None, "the engine must answer")
    assert 2 <= slots.calls.count("v2") <= 4, "asked again after 0.1, 0.2 and 0.4 s"
    slots.is_away = False
    while w.version == "v1":
        assert w.reconcile() and time.monotonic() < deadline + 10.0
    (report,) = read_reports(client, keys)
    assert (report.failed_gen, report.version, report.gen, report.failed_reason) == (None, "v2", 2, "")


def test_the_version_of_a_class_is_loaded_when_the_engine_is_back(shared_redis, client, keys, seeded):
    slots = Slots(is_away=True)
    w = watcher(shared_redis.url, keys, slots)
    commit_desired(client, keys, lambda d: msgspec.structs.replace(d, gen=d.gen + 1, class_versions={"code": "v3"}))
    assert w.reconcile() and (slots.loaded, w.report().refused) == ([], {})
    slots.is_away = False
    assert w.reconcile() and slots.loaded == ["v3"]


@dataclass
class Unread(Slots):
    """Slots whose registry refuses while `is_refused`."""

    is_refused: bool = True

    def check_is_read(self) -> None:
        if self.is_refused:
            raise OSError("the store failed: EndpointConnectionError")

    def stage(self, version: str) -> bool:
        staged = super().stage(version)
        self.check_is_read()
        return staged

    def load(self, version: str) -> bool:
        self.check_is_read()
        return super().load(version)


def test_a_registry_that_refuses_blames_no_version_and_is_asked_again_later(shared_redis, client, keys, seeded):
    slots = Unread()
    w = watcher(shared_redis.url, keys, slots, poll_s=0.1)
    commit_desired(
        client, keys,
        lambda d: msgspec.structs.replace(d, gen=d.gen + 1, version="v2", class_versions={"math": "v3"}),
    )  # fmt: skip
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert w.reconcile()
    (report,) = read_reports(client, keys)
    assert (report.version, report.gen, report.failed_gen, report.refused) == ("v1", 0, None, {})
    assert "EndpointConnectionError" in report.failed_reason
    assert 2 <= slots.calls.count("v2") <= 4, "asked again after 0.1, 0.2 and 0.4 s"
    slots.is_refused = False
    while (w.version, slots.loaded) != ("v2", ["v3"]):
        assert w.reconcile() and time.monotonic() < deadline + 10.0
    (report,) = read_reports(client, keys)
    assert (report.gen, report.failed_gen, report.failed_reason) == (2, None, "")
