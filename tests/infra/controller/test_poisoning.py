"""What clients choose themselves moves neither the ledger nor the beliefs: the real controller over a real Redis."""

import random
import uuid

import msgspec
import pytest

from paceline.config import PolicyConfig
from paceline.contracts import ASKED_GROUP, FeedbackBatch, PromptVectors, RequestSums, SizeSums, encode
from paceline.infra.controller.feedback import without_asked
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import ManualClock
from tests.helpers.feedback import round_rows
from tests.helpers.hosts import ledger, make_host, settle, stored
from tests.helpers.scripted import MemoryRegistry, MemoryStore, row

EPOCH_S, NUM_EPOCHS = 5.0, 40
DEAR_MS, USUAL_MS = 60.0, 10.0


def booked_s(redis_url: str, folder, forged_group: str) -> tuple[float, dict]:
    """(device-seconds that the ledger calls saved, what the traffic view counts) when both versions are equally fast and
    two requests of 42 an epoch are dear, which their clients put into `forged_group`; '' = there are none."""
    keys, clock = Keys(uuid.uuid4().hex[:8]), ManualClock(1000.0)
    client, registry = patient_client(redis_url), MemoryRegistry()
    registry.known.add("v3")
    ensure_first_version(client, keys, "v1", 30, 1.0)
    host = make_host(
        redis_url, keys, folder / keys.model, make=None, policy=PolicyConfig(policy="never", epoch_s=EPOCH_S),
        store=MemoryStore(), registry=registry, clock=clock, snapshot_every_s=0.0,
    )  # fmt: skip
    host.connect()
    host.call(lambda: host.session.orders.pin("v3"))
    settle(host)
    for epoch in range(NUM_EPOCHS):
        rows = []
        for i in range(40):
            group, version = ("static", "v1") if i % 4 == 0 else ("adaptive", "v3")
            for k in range(5):
                rows.append(
                    (
                        f"q{epoch}-{i}",
                        "math",
                        group,
                        version,
                        True,
                        k,
                        4,
                        2,
                        3,
                        4,
                        1.0,
                        6.0,
                        USUAL_MS,
                        False,
                        clock.now(),
                    )
                )
        for i in range(2 if forged_group else 0):
            for k in range(20):
                rows.append(
                    (
                        f"f{epoch}-{i}",
                        "math",
                        forged_group,
                        "v1",
                        True,
                        k,
                        4,
                        0,
                        1,
                        4,
                        1.0,
                        6.0,
                        DEAR_MS,
                        False,
                        clock.now(),
                    )
                )
        batch = make_batch(
            [round_rows(rows)], replica_id="a", boot_epoch=1, seq=epoch + 1, target_version="t", num_dropped=0
        )
        client.xadd(keys.feedback, {"v": encode(batch)})
        clock.advance(EPOCH_S)
        settle(host)
    saved = sum(e.seconds for e in ledger(client, keys).values() if e.kind == "saving")
    views = {group: totals.emitted for group, totals in host.session.state.traffic.totals["math"].items()}
    return saved, views


def test_dear_requests_of_a_client_that_names_its_group_book_no_saving(shared_redis: EmbeddedRedis, tmp_path) -> None:
    honest, _ = booked_s(shared_redis.url, tmp_path, "")
    asked, views = booked_s(shared_redis.url, tmp_path, ASKED_GROUP)
    forged, _ = booked_s(shared_redis.url, tmp_path, "static")
    assert asked == pytest.approx(honest, abs=1e-6)
    assert forged > honest + 10.0, "the same requests among those that were drawn would be booked as a saving"
    assert views[ASKED_GROUP] == NUM_EPOCHS * 2 * 20, "they are shown all the same"


def test_a_batch_without_such_rows_is_left_as_it_is() -> None:
    rows = [
        ("q", "math", group, "v1", True, 0, 4, 2, 3, 1, 1.0, 6.0, 10.0, False, 1.0) for group in ("static", "adaptive")
    ]
    batch = make_batch([round_rows(rows)], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    assert without_asked(batch) is batch
    rows.append(("f", "math", ASKED_GROUP, "v1", True, 0, 4, 2, 3, 1, 1.0, 6.0, 10.0, False, 1.0))
    mixed = make_batch([round_rows(rows)], replica_id="a", boot_epoch=1, seq=1, target_version="t", num_dropped=0)
    assert [c.group for c in without_asked(mixed).cells] == [c.group for c in batch.cells]


BAD = [float("nan"), float("inf"), -1e300, 1e300, -1, 2**62, 0]


def hostile(rng: random.Random, seq: int) -> FeedbackBatch:
    """A batch in which one thing or another is what no engine measures."""
    rows = [row(i, bucket=rng.choice(["math", f"junk-{rng.random()}", "~class-9999", "other", ""])) for i in range(3)]
    batch = make_batch(rows, replica_id="x", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)
    cells = []
    for cell in batch.cells:
        size, request = (
            rng.choice([*fields]) for fields in (SizeSums.__struct_fields__, RequestSums.__struct_fields__)
        )
        sums = {k: msgspec.structs.replace(s, **{size: rng.choice(BAD)}) for k, s in cell.sizes.items()}
        requests = {k: msgspec.structs.replace(s, **{request: rng.choice(BAD)}) for k, s in cell.requests.items()}
        span = rng.choice([cell.span, 0, -5, 2**40])
        cells.append(msgspec.structs.replace(cell, sizes=sums, requests=requests, span=span))
    vectors = PromptVectors(space="s", num_dims=rng.choice([0, -3, 12, 2**31]), vectors=rng.randbytes(48), tenants=["a", "b"])  # fmt: skip
    return msgspec.structs.replace(batch, cells=cells, prompts=vectors)


def test_what_no_engine_measures_keeps_the_controller_from_nothing(shared_redis: EmbeddedRedis, tmp_path) -> None:
    keys, clock, rng = Keys(uuid.uuid4().hex[:8]), ManualClock(1000.0), random.Random(3)
    client = patient_client(shared_redis.url)
    ensure_first_version(client, keys, "v1", 30, 1.0)
    host = make_host(
        shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(policy="payoff", epoch_s=EPOCH_S), clock=clock,
        store=MemoryStore(), snapshot_every_s=0.0,
    )  # fmt: skip
    host.connect()
    for seq in range(1, 61):
        client.xadd(keys.feedback, {"v": encode(hostile(rng, seq))} if seq % 7 else {"v": rng.randbytes(40)})
        honest = make_batch([row(i, ts=clock.now()) for i in range(20)], replica_id="a", boot_epoch=1, seq=seq, target_version="t", num_dropped=0)  # fmt: skip
        client.xadd(keys.feedback, {"v": encode(honest)})
        clock.advance(EPOCH_S)
        settle(host, 1)
    state = stored(client, keys)
    honest_rows = 60 * 20
    assert state.num_rows >= honest_rows and host.session.controller._state.epoch >= 55, "it decides once an epoch"
    assert client.xpending(keys.feedback, "bandit")["pending"] == 0, "nothing is read again and again"
    again = make_host(shared_redis.url, keys, tmp_path, make=None, policy=PolicyConfig(policy="payoff", epoch_s=EPOCH_S), clock=clock)  # fmt: skip
    again.connect()
    assert again.session.state.num_rows == state.num_rows, "what was stored can be read"
