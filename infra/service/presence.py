"""Presence: what Serve's controller says of replicas, asked twice a second while requests come, where Serve's own news fall short.

Serve's proxy lets a request wait for a replica as long as it takes one to start, which is minutes for a large target. So it is
while the only replica is replaced (`max_surge_percent` 0: its devices must be free first), or starts again after a crash.

Processes that call replicas wait for news of them in one call to Serve's controller (LongPollClient), made anew behind each
answer. Where that call ends by an error or never does, as it may when the controller dies, Ray's code never asks again, and the
process never learns of a replica that started since (https://github.com/ray-project/ray/issues/63784).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
import weakref
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.serve._private.common import ReplicaState
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeInstanceDetails

from paceline.names import ENGINE, INGRESS

log = logging.getLogger(__name__)

EVERY_S = 0.5
LEAST_S = 0.25
"""Between two looks, however many requests want one: while no replica runs they cost 5% of a core on either side."""
POLL_S = 0.05
QUIET_EVERY_S = 4.0
"""Where no request has come for QUIET_AFTER_S: to ask costs both sides 12 ms of a core, 2.5% of one at twice a second."""
QUIET_AFTER_S = 30.0
_SERVING = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.PENDING_MIGRATION, ReplicaState.RECOVERING)
"""RECOVERING: a new controller of Serve has not heard of it yet, and the proxies know it still."""
UNTOLD_S = 5.0
"""How long a replica that runs may be unknown here before news are asked for anew; they take well below a second."""
_RETRY_S, _MOST_RETRY_S = 1.0, 30.0


def details() -> ServeInstanceDetails | None:
    """What Serve's controller says; None: there is none."""
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    return None if client is None else ServeInstanceDetails(**client.get_serve_details())


def routes(found: ServeInstanceDetails) -> dict[str, bool | None]:
    """Route of every application -> whether no replica takes its requests: an ingress' where there is one, for that one lets
    them wait for an engine. None: it has no engine, so it is none of ours."""
    return {
        app.route_prefix.rstrip("/"): not any(
            r.state in _SERVING for r in app.deployments.get(INGRESS, app.deployments[ENGINE]).replicas
        )
        if ENGINE in app.deployments
        else None
        for app in found.applications.values()
        if app.route_prefix is not None
    }


class Listening:
    """Has this process listen to Serve's controller whatever happens to a call; one a process."""

    def __init__(self) -> None:
        self._told: weakref.WeakKeyDictionary[LongPollClient, dict[tuple[str, str], set[str]]]
        self._told = weakref.WeakKeyDictionary()
        """Client that listens -> (application, deployment) -> its replicas by the latest news."""
        self._untold_since: dict[str, float] = {}
        """Replica that runs and that a client was not told of -> s of the steady clock."""
        self._num_lost: weakref.WeakKeyDictionary[LongPollClient, int] = weakref.WeakKeyDictionary()
        """Client -> its calls since the latest news that ended without any."""

    def start(self) -> Listening:
        """Take the place of what Ray's clients do behind an answer."""
        process = LongPollClient._process_update

        def poll_next(client: LongPollClient) -> None:
            if client.is_running:
                client._callbacks_processed_count = 0
                client._current_ref = ref = client.host_actor.listen_for_change.remote(client.snapshot_ids)
                # a call that was given up may still be answered
                ref._on_completed(
                    lambda updates: client._process_update(updates) if client._current_ref is ref else None
                )

        def process_update(client: LongPollClient, updates: Any) -> None:
            if isinstance(updates, Exception) and not isinstance(updates, RayTaskError):
                self._lost(client, updates)
                return
            self._num_lost.pop(client, None)
            for key, update in updates.items() if isinstance(updates, dict) and client.is_running else ():
                if isinstance(key, tuple) and key[0] == LongPollNamespace.DEPLOYMENT_TARGETS:
                    names = {r.replica_id.unique_id for r in update.object_snapshot.running_replicas}
                    self._told.setdefault(client, {})[(key[1].app_name, key[1].name)] = names
            client._callbacks_processed_count = 0  # where some of an answer before it have yet to run, too
            process(client, updates)

        LongPollClient._poll_next, LongPollClient._process_update = poll_next, process_update  # type: ignore[method-assign, assignment]
        return self

    def _lost(self, client: LongPollClient, error: Exception) -> None:
        """Have a client whose call ended without news ask later."""
        num = self._num_lost[client] = self._num_lost.get(client, 0) + 1
        if num == 1:
            log.warning("Serve's controller gave no news of replicas, it is asked again: %s", type(error).__name__)
        if client.is_running and client.event_loop.is_running():
            wait_s = min(num * _RETRY_S, _MOST_RETRY_S)
            client.event_loop.call_soon_threadsafe(client.event_loop.call_later, wait_s, _ask_anew, client)

    def look(self, found: ServeInstanceDetails) -> None:
        """Ask for news anew where a replica runs that a client was not told of."""
        now = time.monotonic()
        untold: dict[str, list[LongPollClient]] = {}
        for client, told in list(self._told.items()):
            for (application, deployment), names in list(told.items()) if client.is_running else ():
                app = found.applications.get(application)
                there = (
                    app.deployments[deployment].replicas if app is not None and deployment in app.deployments else ()
                )
                for name in {r.replica_id for r in there if r.state == ReplicaState.RUNNING} - names:
                    untold.setdefault(name, []).append(client)
        since = {name: self._untold_since.get(name, now) for name in untold}
        late = sorted(name for name in untold if now - since[name] >= UNTOLD_S)
        self._untold_since = {name: now if name in late else since[name] for name in untold}
        if late:
            log.warning(
                "replicas %s run, and this process was not told: it asks Serve's controller anew", ", ".join(late)
            )
        for client in {c for name in late for c in untold[name]}:
            if client.event_loop.is_running():
                client.event_loop.call_soon_threadsafe(_ask_anew, client)


@functools.cache
def listening() -> Listening:
    """This process' own, begun."""
    return Listening().start()


def _ask_anew(client: LongPollClient) -> None:
    """Have a client ask for all that there is, in its event loop."""
    client.snapshot_ids.update(dict.fromkeys(client.snapshot_ids, -1))
    try:
        client._poll_next()
    except Exception as e:
        log.warning("Serve's controller cannot be asked for news of replicas, later again: %s", e)
        client.event_loop.call_later(_RETRY_S, _ask_anew, client)


class Presence:
    """The latest answer of `routes`, and a process that is told of replicas."""

    def __init__(self) -> None:
        self._routes: dict[str, bool | None] = {}
        self._wanted_s = self._looked_s = time.monotonic()
        self._wake = threading.Event()
        self._read_s = -math.inf
        """When the latest look that has ended began."""

    async def is_gone(self, path: str) -> bool:
        """Whether no replica takes requests of the application that Serve gives this path to, by a look that began behind the question.

        What was read before it may be old: a request that came before the first look has waited for a replica, and the next one
        must not be refused since there was none. Where no answer comes in time the request waits in Serve's proxy, as ever.
        """
        self._wanted_s = asked_s = time.monotonic()
        if self._wanted_s - self._looked_s > EVERY_S:  # the first one behind a quiet time
            self._wake.set()
        if not self._of(path):
            return False
        self._wake.set()
        # the look under way gets no answer: no later one will in time
        if self._read_s < self._looked_s < asked_s - 2 * EVERY_S:
            return False
        while self._read_s < asked_s:
            if time.monotonic() > asked_s + 2 * EVERY_S:
                return False
            await asyncio.sleep(POLL_S)
        return bool(self._of(path))

    def is_own(self, path: str) -> bool:
        """Whether Serve gives this path to an application with an engine, as far as is known."""
        return self._of(path) is not None

    def _of(self, path: str) -> bool | None:
        routes = self._routes
        return routes.get(max((r for r in routes if f"{path}/".startswith(f"{r}/")), key=len, default=""))

    def start(self) -> Presence:
        """Ask in a thread for as long as the process lives."""
        listening()
        threading.Thread(target=self._run, name="presence", daemon=True).start()
        return self

    def _run(self) -> None:
        while True:
            is_quiet = time.monotonic() - self._wanted_s > QUIET_AFTER_S
            self._wake.wait(QUIET_EVERY_S if is_quiet else EVERY_S)
            time.sleep(max(0.0, self._looked_s + LEAST_S - time.monotonic()))
            self._wake.clear()
            self._looked_s = time.monotonic()
            try:
                now = details()
                found = {} if now is None else routes(now)
                if now is not None:
                    listening().look(now)
            except Exception as e:  # Serve's controller is coming back: replicas that run go on
                log.debug("Serve does not say what runs: %s", e)
                found = {}
            for route in found.keys() | self._routes.keys():
                is_gone = bool(found.get(route))
                if is_gone != bool(self._routes.get(route)):
                    what = "no replica takes requests; they get 503" if is_gone else "a replica takes requests again"
                    log.warning("%s: %s", route or "/", what)
            self._routes = found
            self._read_s = self._looked_s
