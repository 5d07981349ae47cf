"""What clients choose themselves moves neither the ledger nor the beliefs: the real controller over a real Redis."""

import uuid

import pytest

from paceline.config import PolicyConfig
from paceline.contracts import ASKED_GROUP, encode
from paceline.infra.controller.feedback import without_asked
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.desired import ensure_first_version
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import ManualClock
from tests.helpers.feedback import round_rows
from tests.helpers.hosts import ledger, make_host, settle
from tests.helpers.scripted import MemoryRegistry, MemoryStore

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
