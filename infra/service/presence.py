"""Presence: which services have no replica at all that takes requests, asked of Serve's controller twice a second while requests come.

Serve's proxy lets a request wait for a replica as long as it takes one to start, which is minutes for a large target. So it is
while the only replica is replaced (`max_surge_percent` 0: its devices must be free first), or starts again after a crash.
"""

from __future__ import annotations

import logging
import threading
import time

import ray
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeInstanceDetails

log = logging.getLogger(__name__)

ENGINE = "engine"
"""Name of the deployment that makes text."""
EVERY_S = 0.5
QUIET_EVERY_S = 4.0
"""Where no request has come for QUIET_AFTER_S: to ask costs both sides 12 ms of a core, 2.5% of one at twice a second."""
QUIET_AFTER_S = 30.0
_SERVING = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.PENDING_MIGRATION, ReplicaState.RECOVERING)
"""RECOVERING: a new controller of Serve has not heard of it yet, and the proxies know it still."""


def routes() -> dict[str, bool]:
    """Route of every application -> whether it has an engine and none of its replicas takes requests."""
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    if client is None:
        return {}
    applications = ServeInstanceDetails(**client.get_serve_details()).applications.values()
    return {
        app.route_prefix.rstrip("/"): ENGINE in app.deployments
        and not any(replica.state in _SERVING for replica in app.deployments[ENGINE].replicas)
        for app in applications
        if app.route_prefix is not None
    }


class Presence:
    """The latest answer of `routes`."""

    def __init__(self) -> None:
        self._routes: dict[str, bool] = {}
        self._wanted_s = self._looked_s = time.monotonic()
        self._wake = threading.Event()

    def is_gone(self, path: str) -> bool:
        """Whether no replica takes requests of the application that Serve gives this path to. Any thread."""
        self._wanted_s = time.monotonic()
        if self._wanted_s - self._looked_s > EVERY_S:  # the first one behind a quiet time
            self._wake.set()
        routes = self._routes
        return routes.get(max((r for r in routes if f"{path}/".startswith(f"{r}/")), key=len, default=""), False)

    def start(self) -> Presence:
        """Ask in a thread for as long as the process lives."""
        threading.Thread(target=self._run, name="presence", daemon=True).start()
        return self

    def _run(self) -> None:
        while True:
            is_quiet = time.monotonic() - self._wanted_s > QUIET_AFTER_S
            self._wake.wait(QUIET_EVERY_S if is_quiet else EVERY_S)
            self._wake.clear()
            self._looked_s = time.monotonic()
            try:
                found = routes()
            except Exception as e:  # Serve's controller is coming back: replicas that run go on
                log.debug("Serve does not say what runs: %s", e)
                found = {}
            for route in found.keys() | self._routes.keys():
                is_gone = found.get(route, False)
                if is_gone != self._routes.get(route, False):
                    what = "no replica takes requests; they get 503" if is_gone else "a replica takes requests again"
                    log.warning("%s: %s", route or "/", what)
            self._routes = found
