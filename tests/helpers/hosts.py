"""A controller host over a real Redis for tests: a scripted policy, stores in memory, training in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from paceline.config import RolloutConfig
from paceline.contracts import encode
from paceline.infra.controller.host import ControllerHost, HostConfig
from paceline.infra.replica.feedback import make_batch
from paceline.infra.state.redis_clients import Keys
from tests.helpers.scripted import MemoryRegistry, MemoryStore, ProcessLauncher, ScriptedController, row


def make_host(
    url: str, keys: Keys, tmp_path: Path, *, launcher: Any = None, data_dir: bool = True, make: Any = ScriptedController,
    store: Any = None, registry: Any = None, rollout: RolloutConfig | None = None, **config: Any,
) -> ControllerHost:  # fmt: skip
    """A host that is not connected; without `rollout` versions go live at once."""
    return ControllerHost(
        HostConfig(
            redis_url=url, model=keys.model, data_dir=tmp_path / "data" if data_dir else None, lease_ttl_s=2.0,
            stop_grace_s=0.3, context_every_s=0.0, rollout=rollout or RolloutConfig(canary_percent=0),
            **{"target_version": "t", **config},
        ),
        store=store or MemoryStore(), registry=registry or MemoryRegistry(),
        launcher=launcher or ProcessLauncher(url, str(tmp_path / "journal")), make_controller=make,
    )  # fmt: skip


def settle(host: ControllerHost, passes: int = 3) -> None:
    """Let the host make some passes, each with its commit."""
    for _ in range(passes):
        host._commit_due = 0.0
        host.step(block_ms=1)


def send(
    client: redis.Redis, keys: Keys, seq: int, rows: int = 3, *, boot: int = 1, dropped: int = 0, replica: str = "a"
) -> bytes:
    """Put one feedback batch into the stream; returns its entry id."""
    batch = make_batch(
        [row(i) for i in range(rows)],
        replica_id=replica,
        boot_epoch=boot,
        seq=seq,
        target_version="t",
        num_dropped=dropped,
    )
    return client.xadd(keys.feedback, {"v": encode(batch)})  # type: ignore[return-value]
