"""A controller host over a real Redis for tests: a scripted policy, stores in memory, training in real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from paceline.bandit.ledger.totals import LedgerTotals
from paceline.config import RolloutConfig
from paceline.contracts import LedgerEntry, encode
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.store import HostConfig, HostState, held_entries, read_state
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.log import LogFile, stream_newest_first
from paceline.infra.state.redis_clients import Keys, consumer_client
from tests.helpers.fake_replicas import FakeReplicas
from tests.helpers.scripted import MemoryRegistry, MemoryStore, ProcessLauncher, ScriptedController, row


def make_host(
    url: str, keys: Keys, tmp_path: Path, *, launcher: Any = None, data_dir: Path | bool = True, make: Any = ScriptedController,
    store: Any = None, registry: Any = None, rollout: RolloutConfig | None = None, clock: Any = None,
    make_client: Callable[[str], redis.Redis] = consumer_client, spans: Any = None, **config: Any,
) -> ControllerHost:  # fmt: skip
    """A host that is not connected and commits in every pass; without `rollout` versions go live at once.

    data_dir: folder of its files; True = tmp_path / "data", False = none.
    """
    return ControllerHost(
        HostConfig(
            redis_url=url, model=keys.model, data_dir=tmp_path / "data" if data_dir is True else data_dir or None, lease_ttl_s=2.0,
            stop_grace_s=0.3, context_every_s=0.0, commit_every_s=0.0, rollout=rollout or RolloutConfig(canary_percent=0),
            **{"target_version": "t", **config},
        ),
        store=store or MemoryStore(), registry=registry or MemoryRegistry(), clock=clock,
        launcher=launcher or ProcessLauncher(url, str(tmp_path / "journal")), make_controller=make, make_client=make_client,
        spans=spans,
    )  # fmt: skip


def settle(host: ControllerHost, passes: int = 3) -> None:
    """Let the host make some passes, each with its commit."""
    for _ in range(passes):
        host.step(block_ms=0)


def serve_and_stop(host: ControllerHost, client: redis.Redis, keys: Keys) -> ControllerHost:
    """A controller that has decided and booked something, written its files and stopped."""
    host.connect()
    for seq in (1, 2):
        send(client, keys, seq)
        settle(host)
    host.session.orders.pin("v2")
    host.stop()
    return host


def run_canary(host: ControllerHost, fleet: FakeReplicas, wait_until: Callable[..., Any]) -> None:
    """Serve until the canary in flight has ended."""

    def is_over() -> bool:
        fleet.report()
        fleet.serve(8)
        settle(host)
        return host.session.state.rollout.canary is None

    wait_until(is_over, timeout_s=60.0, what="the end of the canary")


def send(
    client: redis.Redis, keys: Keys, seq: int, rows: int = 3, *, boot: int = 1, dropped: int = 0, replica: str = "a",
    keep_rows: bool = False, target: str = "t",
) -> bytes:  # fmt: skip
    """Put one feedback batch into the stream; returns its entry id."""
    batch = make_batch(
        [row(i) for i in range(rows)],
        replica_id=replica,
        boot_epoch=boot,
        seq=seq,
        target_version=target,
        num_dropped=dropped,
        keep_rows=keep_rows,
    )
    return client.xadd(keys.feedback, {"v": encode(batch)})  # type: ignore[return-value]


def stored(client: redis.Redis, keys: Keys) -> HostState:
    """The controller's state as Redis has it; a fresh one before the first commit."""
    return read_state(client, keys) or HostState()


def ledger(client: redis.Redis, keys: Keys, data_dir: Path | None = None) -> dict[str, LedgerEntry]:
    """The ledger as Redis has it, or the log file in `data_dir`. Asserts that none of its entries is lost or doubled."""
    num_booked = stored(client, keys).num_booked
    file = None if data_dir is None else LogFile(data_dir / "decisions.jsonl")
    lines = stream_newest_first(client, keys) if file is None else file.newest_first()
    entries = list(held_entries(lines, num_booked, limit=num_booked))[::-1]
    found = {e.entry_id: e for e in entries}
    assert len(found) == len(entries) == num_booked
    return found


def totals(client: redis.Redis, keys: Keys) -> LedgerTotals:
    """The running totals of a scripted controller as Redis has them."""
    return ScriptedController(stored(client, keys).controller).ledger_totals()


def recent_log(client: redis.Redis, keys: Keys, count: int = 100) -> list[dict]:
    """The newest lines of the log stream, oldest first."""
    return list(itertools.islice(stream_newest_first(client, keys), count))[::-1]
