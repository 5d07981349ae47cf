"""Presence: whether a service has a replica at all that takes requests, asked of Serve's controller twice a second.

Serve's proxy lets a request wait for a replica as long as it takes one to start, which is minutes for a large target. So it is
while the only replica is replaced (`max_surge_percent` 0: its devices must be free first), or starts again after a crash.
"""

from __future__ import annotations

import logging
import threading

import ray
from ray import serve
from ray.serve._private.common import ReplicaState

log = logging.getLogger(__name__)

ENGINE = "engine"
"""Name of the deployment that makes text."""
EVERY_S = 0.5
_SERVING = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.PENDING_MIGRATION)


def has_replica() -> bool | None:
    """Whether an engine takes requests; None where that cannot be told, or where other applications share the proxy."""
    if not ray.is_initialized():
        return None
    applications = serve.status().applications.values()
    engines = [app.deployments[ENGINE] for app in applications if ENGINE in app.deployments]
    if not engines or len(engines) < len(applications):
        return None
    return any(engine.replica_states.get(state, 0) for engine in engines for state in _SERVING)


class Presence:
    """The latest answer of `has_replica`."""

    def __init__(self) -> None:
        self.is_gone = False
        """No replica takes requests. Any thread."""

    def start(self) -> Presence:
        """Ask in a thread for as long as the process lives."""
        threading.Thread(target=self._run, name="presence", daemon=True).start()
        return self

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            try:
                is_gone = has_replica() is False
            except Exception as e:  # Serve's controller is coming back: replicas that run go on
                log.debug("Serve does not say what runs: %s", e)
                is_gone = False
            if is_gone != self.is_gone:
                log.warning("no replica takes requests; they get 503" if is_gone else "a replica takes requests again")
            self.is_gone = is_gone
