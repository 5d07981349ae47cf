"""State routes: what a service tells and takes beyond OpenAI's routes, namely state, versions and commands."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from fastapi import APIRouter, Request
from ray.exceptions import RayError
from starlette.exceptions import HTTPException

from paceline.contracts import combine_meters
from paceline.errors import PacelineError, RequestError
from paceline.infra.controller.actor import get_controller
from paceline.infra.controller.snapshot import (
    CommandResult,
    FeedbackCounts,
    LatencyState,
    Quantiles,
    ReplicaState,
    Snapshot,
    TrafficBin,
    VersionList,
)
from paceline.infra.replica.exchange import ReplicaNumbers
from paceline.infra.replica.watcher import ReplicaWatcher
from paceline.infra.web.access import Access
from paceline.infra.web.commands import FIELDS, parse_command
from paceline.serving.api.http import read_body
from paceline.serving.drafters.slots import DrafterSlots

log = logging.getLogger(__name__)
audit = logging.getLogger("paceline.audit")

FETCH_TIMEOUT_S = 3.0
SCRAPE_WAIT_S = 0.8
FRESH_S = 0.3
MAX_COMMAND_BYTES = 64 * 1024
RunState = Callable[[Callable[[], Snapshot]], Awaitable[Snapshot]]
"""Awaits what may block, for instance DashboardFeed.run."""


class SnapshotCache:
    """The latest snapshot; one background fetch at a time, so that nobody waits long for a controller that is away.

    Thread-safe.
    """

    def __init__(self, fetch: Callable[[], Snapshot | None]) -> None:
        """`fetch` may block or raise; None = the controller is away."""
        self._fetch = fetch
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # of the fetch under way
        self._value: Snapshot | None = None
        self._at = float("-inf")

    def recent(self, wait_s: float) -> Snapshot | None:
        """A snapshot, waiting at most `wait_s` for a fresh one; None when there is none younger than a fetch may hang."""
        with self._lock:
            if time.monotonic() - self._at <= FRESH_S:
                return self._value
            if self._done is None:
                self._done = threading.Event()
                threading.Thread(target=self._refresh, args=(self._done,), name="snapshot", daemon=True).start()
            done = self._done
        done.wait(wait_s)
        with self._lock:
            return self._value if time.monotonic() - self._at <= FETCH_TIMEOUT_S else None

    def forget(self) -> None:
        """Something was changed: the next reader gets a snapshot that is fetched after this."""
        with self._lock:
            self._at, self._done = float("-inf"), None

    def _refresh(self, done: threading.Event) -> None:
        value = None
        try:
            value = self._fetch()
        except Exception as e:  # Ray raises many kinds while a cluster fails over; a scrape shows what is left
            log.debug("controller snapshot is not available: %s", e)
        with self._lock:
            if self._done is done:  # else it was asked for before a change
                self._value, self._at, self._done = value, time.monotonic(), None
        done.set()


def latency_state(processes: Iterable[ReplicaNumbers]) -> LatencyState | None:
    """The past minute of all processes that speak HTTP; None without one."""
    each = [p.recent for p in processes if p.recent is not None]
    if not each:
        return None
    meters = combine_meters(each)
    times = {
        name: getattr(meters.streamed, name).combine(getattr(meters.at_once, name))
        for name in ("first_token", "per_token", "whole")
    }
    failed = sum(n for codes in meters.responses.values() for code, n in codes.items() if code >= 500)
    return LatencyState(
        num_answers=sum(times["whole"].counts),
        num_failed=failed + sum(meters.broken.values()),
        **{name: Quantiles(p50_s=found.quantile(0.5), p99_s=found.quantile(0.99)) for name, found in times.items()},
    )


@dataclass(slots=True)
class ServiceView:
    """What one replica can say about itself and, through the controller, about the service."""

    model: str
    target: str
    replica_id: str
    target_version: str
    slots: DrafterSlots
    counters: Callable[[], dict[str, Any]]
    """Of the engine, feedback and traces; fields of ReplicaState."""
    watcher: ReplicaWatcher | None
    is_adaptive: bool
    processes: Callable[[], Mapping[str, ReplicaNumbers]] = dict
    """Of every process of the service that is known; may block for a second."""
    _snapshots: SnapshotCache = field(init=False)

    def __post_init__(self) -> None:
        self._snapshots = SnapshotCache(
            lambda: ray.get(get_controller(self.model).snapshot.remote(), timeout=FETCH_TIMEOUT_S)
        )

    def controller(self) -> Snapshot | None:
        """The controller's latest snapshot for a scrape, None while it is away; takes less than a second."""
        return self._snapshots.recent(SCRAPE_WAIT_S) if self.is_adaptive else None

    def swap(self) -> dict[str, Any]:
        """This replica's drafter slots."""
        watcher = self.watcher
        return {
            "replica_id": self.replica_id,
            "pid": os.getpid(),
            "gen": watcher.gen if watcher else 0,
            "version": self.slots.live_version,
            "first_version": self.slots.first_version,
            "slots": self.slots.versions(),
            "pins": self.slots.num_pins(),
            "waiting": self.slots.waiting_version,
            "failures": self.slots.failures(),
            "class_versions": self.slots.served(),
            "failed_gen": watcher.failed_gen if watcher else None,
            "failed_reason": watcher.failed_reason if watcher else "",
            "num_swaps": self.slots.num_swaps,
            "pause_ms": list(self.slots.swap_pause_ms),
        }

    def state(self) -> Snapshot:
        """The controller's snapshot plus this replica; only this replica while the controller is away."""
        replica = msgspec.convert({**self.swap(), **self.counters()}, ReplicaState)
        snapshot = self._snapshots.recent(FETCH_TIMEOUT_S) if self.is_adaptive else None
        latency = latency_state(self.processes().values())
        if snapshot is not None and snapshot.ts is not None:
            return msgspec.structs.replace(
                snapshot, replica=replica, latency=latency, target=self.target, has_controller=True
            )
        sent = {} if replica.feedback is msgspec.UNSET else replica.feedback
        return Snapshot(
            model=self.model,
            target=self.target,
            target_version=self.target_version,
            gen=replica.gen,
            version=replica.version,
            first_version=replica.first_version,
            redis_up=snapshot is not None and snapshot.redis_up,
            read_only="" if snapshot is None else snapshot.read_only,
            feedback=FeedbackCounts(**{k: sent[k] for k in ("produced", "delivered", "dropped") if k in sent}),
            replica=replica,
            latency=latency,
            is_adaptive=self.is_adaptive,
        )

    def traffic(self, since: float) -> list[TrafficBin] | None:
        """Time bins of traffic that end after `since`; None while the controller is away."""
        if not self.is_adaptive:
            return None
        try:
            return ray.get(get_controller(self.model).traffic.remote(since), timeout=FETCH_TIMEOUT_S)
        except (ValueError, RayError):
            return None

    def command(self, name: str, *args: Any) -> Snapshot:
        """Have the controller carry out a command; raises PacelineError with its reason."""
        if not self.is_adaptive:
            raise RequestError("this service has no controller: its drafter cannot be trained or it has no Redis")
        try:
            handle = get_controller(self.model)
        except ValueError as e:
            raise PacelineError(f"the controller is away; try again in a few seconds ({e})") from e
        try:
            ray.get(handle.command.remote(name, *args), timeout=20)
        except ray.exceptions.RayTaskError as e:
            cause = e.cause if isinstance(e.cause, Exception) else e
            message = str(cause).strip().splitlines()[-1]
            raise (RequestError(message) if isinstance(cause, ValueError) else PacelineError(message)) from e
        except RayError as e:
            raise PacelineError(f"the controller does not answer: {e}") from e
        self._snapshots.forget()
        return self.state()


def service_router(view: ServiceView, access: Access, run: RunState) -> APIRouter:
    """GET /paceline/versions and the commands as POST /paceline/<command>; checks tokens itself.

    Args:
        run: awaits view.state, which may block for seconds, in threads that are not the API's.
    """
    router = APIRouter()

    async def versions(request: Request) -> dict[str, Any]:
        access.check_read(request)
        return msgspec.to_builtins(msgspec.convert(await run(view.state), VersionList, from_attributes=True))

    async def command(name: str, request: Request) -> dict[str, Any]:
        with audited(name, request, access):
            access.check_command(request)
            return msgspec.to_builtins(await run_command(view, name, request))

    router.add_api_route("/paceline/versions", versions, methods=["GET"])
    router.add_api_route("/paceline/{name}", command, methods=["POST"])
    return router


@contextmanager
def audited(name: str, request: Request, access: Access) -> Iterator[None]:
    """Write a line about a command, whatever becomes of it: who gave it from where, and how it ended.

    Of commands refused to others than operators only so many get one: whoever is refused could fill the log. One that the
    controller was given, and whose end is not known, counts among those that were carried out.
    """
    peer = None if request.client is None else request.client.host
    # the name is the caller's text until it is known to be one of ours
    fields: dict[str, Any] = {
        "command": name if name in FIELDS else "unknown",
        "who": access.operator(request),
        "peer": peer,
    }
    status, outcome = 200, "done"
    try:
        yield
    except asyncio.CancelledError:  # as Serve does with a request whose client is gone
        status, outcome = 499, "the client left before its end"
        raise
    except Exception as e:
        own = getattr(e, "status_code", getattr(e, "status", None))
        status = own or (400 if isinstance(e, RequestError) else 500)
        outcome = f"refused {status}: {_reason(e)}"
        raise
    finally:
        args = getattr(request.state, "command_args", None)
        fields |= {"outcome": outcome} if args is None else {"args": list(args), "outcome": outcome}
        is_given = args is not None and (status == 499 or status >= 500)
        if status == 200 or is_given:
            audit.info("command", extra={"fields": fields})
        elif (left_out := 0 if access.is_admin(request) else access.refusals.take()) is not None:
            more = {"refused_without_a_line": left_out} if left_out else {}
            audit.warning("command", extra={"fields": fields | more})


def _reason(error: Exception) -> str:
    return str(getattr(error, "detail", error))[:200]


async def run_command(view: ServiceView, name: str, request: Request) -> CommandResult:
    """Carry out a command that was allowed: the new generation, version and policy.

    Raises: HTTPException 404 (no such command), 413, 503 (the controller is away); Hangup; RequestError for wrong values.
    """
    if name not in FIELDS:
        raise HTTPException(404, f"command must be one of {', '.join(FIELDS)}, got {name!r}")
    method, args = parse_command(name, await read_body(request, MAX_COMMAND_BYTES))
    request.state.command_args = args
    try:
        state = await asyncio.to_thread(view.command, method, *args)
    except RequestError:
        raise
    except PacelineError as e:
        raise HTTPException(503, str(e)) from e
    return msgspec.convert(state, CommandResult, from_attributes=True)
