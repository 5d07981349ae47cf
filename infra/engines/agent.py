"""Agent: has an engine follow the desired state, by its driver, and reports what it is and serves."""

from __future__ import annotations

from paceline.infra.controller.store import Deeds
from paceline.infra.engines.protocol import EngineDriver
from paceline.infra.replica.watcher import Counted, ReplicaWatcher
from paceline.infra.state.redis_clients import Keys
from paceline.machine import Clock


def start_agent(
    driver: EngineDriver, redis_url: str, keys: Keys, *, replica_id: str, target_version: str, feedback: Counted | None = None,
    deeds: Deeds | None = None, clock: Clock | None = None, first_read_s: float = 5.0,
) -> ReplicaWatcher:  # fmt: skip
    """A watcher that runs until it is stopped; see ReplicaWatcher.start for what has happened when this returns."""
    watcher = ReplicaWatcher(
        redis_url, keys, driver, replica_id=replica_id, target_version=target_version, followers=driver, feedback=feedback, deeds=deeds, clock=clock,
        facts=driver.facts,
    )  # fmt: skip
    return watcher.start(first_read_s)
