"""Claims of the way of traffic classes: vectors in feedback, sums in the controller's state, centroids in Redis."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.config import PolicyConfig
from paceline.contracts import FeedbackBatch, PromptVectors, TrafficClasses, decode, encode
from paceline.errors import FencedError
from paceline.infra.controller.traffic import MAX_BUCKETS
from paceline.infra.replica.feedback import BATCH_PROMPTS, FeedbackPublisher, make_batch
from paceline.infra.state.desired import ensure_first_version, read_classes, read_desired
from paceline.infra.state.redis_clients import patient_client
from paceline.machine import ManualClock
from tests.helpers.hosts import make_host, recent_log, settle, stored
from tests.helpers.scripted import MemoryStore, Shard, decision, row

DIMS = 12


def vectors(kind: int, num: int, seed: int = 0) -> np.ndarray:
    """(num, DIMS) float32 of one kind of prompts; kinds are 0.7 apart."""
    found = np.random.default_rng(100 * kind + seed).standard_normal((num, DIMS)) * 0.03
    found[:, kind] += 0.5
    return found.astype("<f4")


def tell(client, keys, seq: int, prompts: np.ndarray, *, replica: str = "a", space: str = "s") -> None:
    """One batch of a replica with vectors of prompts."""
    batch = make_batch(
        [row(0)], replica_id=replica, boot_epoch=1, seq=seq, target_version="t", num_dropped=0,
        prompts=PromptVectors(space=space, num_dims=DIMS, vectors=prompts.tobytes()),
    )  # fmt: skip
    client.xadd(keys.feedback, {"v": encode(batch)})


def batches(client, keys) -> list[FeedbackBatch]:
    return [decode(fields[b"v"], FeedbackBatch) for _, fields in client.xrange(keys.feedback)]


def told(client, keys) -> TrafficClasses:
    return read_classes(client, keys) or TrafficClasses()


def test_vectors_of_all_replicas_make_classes_that_are_published_with_the_state(shared_redis, client, keys, tmp_path):
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    for seq in range(1, 6):
        for kind, replica in enumerate("abc"):
            tell(client, keys, seq, vectors(kind, 8, seq), replica=replica)
        clock.advance(1.0)
        settle(host)
    classes = told(client, keys)
    assert len(classes.names) == 3 and classes.space == "s"
    assert classes == stored(client, keys).classes.published
    nearest = [int(np.linalg.norm(np.array(classes.centroids) - vectors(k, 1)[0], axis=1).argmin()) for k in range(3)]
    assert sorted(nearest) == [0, 1, 2]
    assert any(e["kind"] == "classes" for e in recent_log(client, keys))
    shares = host.snapshot().class_shares
    assert set(shares) == {*classes.names, "default"} and sum(shares.values()) == pytest.approx(1.0)


def test_a_batch_that_comes_twice_counts_once(shared_redis, client, keys, tmp_path):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    for seq in (1, 1, 2, 1):
        tell(client, keys, seq, vectors(0, 4, seq))
    settle(host)
    assert host.session.state.classes.num_vectors == 8


def test_a_restarted_controller_goes_on_with_the_same_classes(shared_redis, client, keys, tmp_path):
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    for kind in range(2):
        tell(client, keys, kind + 1, vectors(kind, 20))
    settle(host)
    before = told(client, keys)
    assert len(before.names) == 2
    second = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    second.connect()
    settle(second)
    assert told(client, keys) == before == second.session.state.classes.published
    clock.advance(5.0)
    tell(client, keys, 3, vectors(2, 20))
    settle(second)
    after = told(client, keys)
    assert len(after.names) == 3 and after.names[:2] == before.names and after.centroids[:2] == before.centroids
    with pytest.raises(FencedError):
        host.session.books.flush(always=True)
    assert told(client, keys) == after, "a fenced controller writes nothing"


def test_classes_are_written_again_after_redis_has_lost_its_data(own_redis, keys, tmp_path):
    client = patient_client(own_redis.url)
    host = make_host(own_redis.url, keys, tmp_path)
    host.connect()
    tell(client, keys, 1, vectors(0, 20))
    settle(host)
    before = told(client, keys)
    assert before.names == ["~class-1"]
    client.flushall()
    settle(host)
    host.session.books.flush(always=True)
    assert told(client, keys) == before


@pytest.mark.parametrize("damage", ["cut", "list", "other", "gone"])
def test_a_damaged_record_of_the_classes_is_kept_aside_and_written_again_at_once(shared_redis, client, keys, tmp_path, damage):  # fmt: skip
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    tell(client, keys, 1, vectors(0, 20))
    settle(host)
    before, bad = told(client, keys), client.get(keys.classes)[:-7]
    client.delete(keys.classes)
    if damage == "cut":
        client.set(keys.classes, bad)
    elif damage == "list":
        client.rpush(keys.classes, b"x")
    elif damage == "other":
        client.set(keys.classes, encode(msgspec.structs.replace(before, radii=[9.0])))
    settle(host, 1)
    assert told(client, keys) == before
    aside = f"{keys.classes}:damaged:{host.session.state.epoch}"
    assert bool(client.exists(aside)) == (damage != "gone")
    if damage == "cut":
        assert client.get(aside) == bad
    notes = [text for _, text in host.session.state.notes if "traffic classes in Redis" in text]
    settle(host)
    assert len(notes) == 1 == sum("traffic classes in Redis" in text for _, text in host.session.state.notes)


def test_a_service_without_classes_learns_and_publishes_none(shared_redis, client, keys, tmp_path):
    host = make_host(shared_redis.url, keys, tmp_path, max_classes=0)
    host.connect()
    tell(client, keys, 1, vectors(0, 50))
    settle(host)
    assert client.get(keys.classes) is None and host.session.state.classes.num_vectors == 0
    assert host.snapshot().class_shares == {}


def test_classes_that_are_turned_off_are_taken_back(shared_redis, client, keys, tmp_path):
    host = make_host(shared_redis.url, keys, tmp_path)
    host.connect()
    tell(client, keys, 1, vectors(0, 20))
    settle(host)
    assert told(client, keys).names
    off = make_host(shared_redis.url, keys, tmp_path, max_classes=0)
    off.connect()
    settle(off)
    assert told(client, keys).names == []


def test_a_flood_of_names_takes_no_place_from_classes(host, client, keys):
    for seq in (1, 2):
        rows = [row(i, bucket=f"b{seq}-{i}") for i in range(100)] + [row(200, bucket="~class-3")]
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
        client.xadd(keys.feedback, {"v": encode(batch)})
    settle(host)
    totals = host.session.state.traffic.totals
    assert len(totals) == MAX_BUCKETS + 1 and {"~class-3", "other"} <= set(totals)


def test_names_of_one_tenant_leave_others_their_part_and_what_has_a_version_its_place(host, client, keys):
    def tell(seq: int, tenant: str, names: list[str]) -> None:
        batch = make_batch(
            [row(i, bucket=name) for i, name in enumerate(names)], replica_id=tenant, boot_epoch=1, seq=seq,
            target_version="t", num_dropped=0, tenant_of=lambda name: tenant,
        )  # fmt: skip
        client.xadd(keys.feedback, {"v": encode(batch)})
        settle(host)

    state = host.session.state
    tell(1, "acme", ["trained"])
    host.session.orders.assign("trained", "v2")
    settle(host)
    tell(2, "acme", [f"junk-{i}" for i in range(200)])
    assert state.traffic.names.counts == {"acme": MAX_BUCKETS - 1}, "what is free is anybody's"
    tell(1, "bolt", [f"bolt-{i}" for i in range(100)])
    tell(3, "acme", [f"more-{i}" for i in range(200)])
    totals = state.traffic.totals
    own = [name for name in totals if name.startswith("bolt")]
    assert len(own) == MAX_BUCKETS // 2 - 1 and "trained" in totals and len(totals) <= MAX_BUCKETS
    assert "junk-0" not in totals and set(host.session.controller.forgotten) >= {"junk-0"}
    assert sum(s.rounds for groups in totals.values() for s in groups.values()) == state.num_rows, "nothing is lost"
    again = make_host(host.config.redis_url, keys, Path("unused"), data_dir=False)
    again.connect()
    assert again.session.state.traffic.names.counts == state.traffic.names.counts


def test_a_flooding_tenants_prompts_leave_room_for_others_in_a_batch(shared_redis, client, keys):
    pub = FeedbackPublisher(shared_redis.url, keys, replica_id="a", target_version="t")
    pub.record_prompt("s", vectors(0, 1)[0], "bolt")
    for vector in vectors(1, 100):
        pub.record_prompt("s", vector, "acme")
    pub.record_prompt("s", vectors(0, 2)[1], "bolt")
    pub.record_rounds(row(0))
    pub.tenant_of = {"math": "bolt"}.get
    assert pub.flush()
    (batch,) = batches(client, keys)
    assert sorted(batch.prompts.tenants) == ["acme"] * (BATCH_PROMPTS - 2) + ["bolt"] * 2
    assert batch.tenants == {"math": "bolt"}
    pub.close()


def test_the_publisher_sends_the_newest_vectors_with_its_rows(shared_redis, client, keys):
    pub = FeedbackPublisher(shared_redis.url, keys, replica_id="a", target_version="t")
    for vector in vectors(0, 3 * BATCH_PROMPTS):
        pub.record_prompt("s", vector)
    assert pub.flush() and batches(client, keys) == [], "they wait for rows"
    pub.record_rounds(row(0))
    assert pub.flush()
    pub.record_rounds(row(1))
    assert pub.flush()
    first, second = batches(client, keys)
    assert second.prompts is None and (first.prompts.space, first.prompts.num_dims) == ("s", DIMS)
    sent = np.frombuffer(first.prompts.vectors, "<f4").reshape(-1, DIMS)
    assert (sent == vectors(0, 3 * BATCH_PROMPTS)[-BATCH_PROMPTS:]).all()
    assert (pub.counters()["prompts"], pub.counters()["prompts_sent"]) == (3 * BATCH_PROMPTS, BATCH_PROMPTS)
    pub.close()


def test_a_batch_of_an_older_replica_has_no_vectors():
    batch = make_batch([row(0)], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    fields = msgspec.msgpack.decode(encode(batch))
    assert decode(msgspec.msgpack.encode(fields[:-2]), FeedbackBatch).prompts is None


def test_a_part_of_a_class_keeps_the_version_of_the_whole_when_it_becomes_a_class(shared_redis, client, keys, tmp_path):
    ensure_first_version(client, keys, "v1", 30, 1.0)
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock)
    host.connect()
    tell(client, keys, 1, vectors(0, 40))
    settle(host)
    assert told(client, keys).names == ["~class-1"]
    host.session.lives.assign("~class-1", "v2", "learned", clock.now(), 7)
    settle(host)
    clock.advance(5.0)
    tell(client, keys, 2, vectors(0, 40, 1) + np.float32(0.17) * np.eye(DIMS, dtype="<f4")[5])  # near it, but beside it
    settle(host)
    assert told(client, keys).names == ["~class-1", "~class-2"]
    desired = read_desired(client, keys)
    assert desired.class_versions == {"~class-1": "v2", "~class-2": "v2"}
    assert host.session.state.assigned == [], "no operator did that"
    assert host.session.controller.parted == [("~class-2", "~class-1")]
    assert "was a part of ~class-1" in desired.reason
    settle(host)
    assert read_desired(client, keys).gen == desired.gen, "once"


def test_the_policy_keeps_nothing_of_a_name_that_gave_way(shared_redis, client, keys, tmp_path):
    ensure_first_version(client, keys, "v1", 30, 1.0)
    clock = ManualClock(1000.0)
    host = make_host(shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(epoch_s=1.0), clock=clock)
    host.connect()
    for seq, name in enumerate(["leaving", "leaving", "staying", "staying"], 1):
        rows = [row(i, bucket=name, ts=clock.now()) for i in range(20)]
        batch = make_batch(rows, replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
        client.xadd(keys.feedback, {"v": encode(batch)})
        clock.advance(2.0)
        settle(host)
    assert b"leaving" in host.session.controller.state()
    host.session.controller.forget_bucket("leaving")
    host.session.controller.drain()
    left = host.session.controller.state()
    assert b"leaving" not in left and b"staying" in left


def test_classes_that_were_one_learn_from_the_text_of_both_and_both_get_the_version(
    shared_redis, client, keys, tmp_path, wait_until
):
    ensure_first_version(client, keys, "v1", 30, 1.0)
    clock = ManualClock(1000.0)
    shards = [Shard("s1", "~class-1", 100), Shard("s2", "~class-2", 100), Shard("o1", "code")]
    host = make_host(shared_redis.url, keys, tmp_path, clock=clock, store=MemoryStore(shards))
    host.connect()
    tell(client, keys, 1, vectors(0, 40))
    settle(host)
    clock.advance(5.0)
    tell(client, keys, 2, vectors(0, 40, 1) + np.float32(0.17) * np.eye(DIMS, dtype="<f4")[5])
    settle(host)
    assert host.session.controller.contexts[-1].pools == {"~class-1": "~class-1", "~class-2": "~class-1"}
    facts = {"others": ["~class-1", "~class-7"], "base_version": "v1"}
    order = decision(1, "train", arm="full", bucket="~class-2", context=facts)
    host.session.controller.queue.append(order)
    wait_until(lambda: settle(host, 1) or host.session.state.pending is not None)
    job = host.session.state.pending.job
    assert (sorted(job.shard_ids), job.rehearsal_shard_ids) == (["s1", "s2"], ["o1"])
    wait_until(lambda: settle(host, 1) or read_desired(client, keys).class_versions, timeout_s=60.0)
    settle(host)
    assert read_desired(client, keys).class_versions == {"~class-1": "v2", "~class-2": "v2"}, "there is no class 7"
