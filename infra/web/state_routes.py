"""What does a service tell and take beyond OpenAI's routes: state, versions, pin, rollback?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from fastapi import APIRouter, Request
from ray.exceptions import RayError
from starlette.exceptions import HTTPException

from paceline.errors import PacelineError, RequestError
from paceline.infra.controller.actor import get_controller
from paceline.infra.controller.snapshot import SnapshotCache
from paceline.infra.replica.watcher import ReplicaWatcher
from paceline.infra.web.access import Access
from paceline.infra.web.commands import FIELDS, parse_command
from paceline.serving.drafters.slots import DrafterSlots

_CACHE_S = 0.3
MAX_COMMAND_BYTES = 64 * 1024
RunState = Callable[[Callable[[], dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Awaits what tells the state, for instance DashboardFeed.run."""


@dataclass(slots=True)
class ServiceView:
    """What one replica can say about itself and, through the controller, about the service."""

    model: str
    target: str
    replica_id: str
    target_version: str
    slots: DrafterSlots
    counters: Callable[[], dict[str, Any]]
    watcher: ReplicaWatcher | None
    is_adaptive: bool
    _cached: dict[str, Any] | None = None
    _cached_at: float = 0.0
    _scraped: SnapshotCache = field(init=False)

    def __post_init__(self) -> None:
        self._scraped = SnapshotCache(self._snapshot)

    def controller(self) -> dict[str, Any] | None:
        """The controller's latest snapshot for a scrape, None while it is away; takes less than a second."""
        return self._scraped.recent() if self.is_adaptive else None

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
            "failed_gen": watcher.failed_gen if watcher else None,
            "failed_reason": watcher.failed_reason if watcher else "",
            "num_swaps": self.slots.num_swaps,
            "pause_ms": list(self.slots.swap_pause_ms),
        }

    def state(self) -> dict[str, Any]:
        """The controller's snapshot plus this replica; only this replica while the controller is away."""
        swap: dict[str, Any] = {**self.swap(), **self.counters()}
        local: dict[str, Any] = {"replica": swap, "target": self.target}
        snapshot = self._snapshot() if self.is_adaptive else None
        if snapshot and "gen" in snapshot:
            return {**snapshot, **local, "has_controller": True}
        base = {k: swap[k] for k in ("gen", "version", "first_version")}
        return {
            **base, **local, "target_version": self.target_version, "model": self.model, "has_controller": False,
            "redis_up": (snapshot or {}).get("redis_up", False), "feedback": _feedback(swap.get("feedback")),
        }  # fmt: skip

    def traffic(self, since: float) -> list[dict[str, Any]] | None:
        """Time bins of traffic that end after `since` (TrafficStats.series); None while the controller is away."""
        if not self.is_adaptive:
            return None
        try:
            return ray.get(get_controller(self.model).traffic.remote(since), timeout=3)
        except (ValueError, RayError, AttributeError):  # away, or of a release before it had this
            return None

    def command(self, name: str, *args: Any) -> dict[str, Any]:
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
        self._cached = None
        return self.state()

    def _snapshot(self) -> dict[str, Any] | None:
        now = time.monotonic()
        if self._cached is None or now - self._cached_at > _CACHE_S:
            try:
                self._cached = ray.get(get_controller(self.model).snapshot.remote(), timeout=3)
            except (ValueError, RayError):
                self._cached = None
            self._cached_at = time.monotonic()
        return self._cached


def _feedback(counters: dict[str, Any] | None) -> dict[str, int]:
    return {k: int((counters or {}).get(k, 0)) for k in ("produced", "delivered", "dropped")}


def service_router(view: States, access: Access, run: RunState) -> APIRouter:
    """GET /paceline/versions and the commands as POST /paceline/<command>; checks tokens itself.

    Args:
        run: awaits view.state, which may block for seconds, in threads that are not the API's.
    """
    router = APIRouter()

    async def versions(request: Request) -> dict[str, Any]:
        access.check_read(request)
        state = await run(view.state)
        return {k: state.get(k) for k in ("gen", "version", "first_version")} | {
            "versions": state.get("versions") or []
        }

    async def command(name: str, request: Request) -> dict[str, Any]:
        access.check_command(request)
        return await run_command(view, name, request)

    router.add_api_route("/paceline/versions", versions, methods=["GET"])
    router.add_api_route("/paceline/{name}", command, methods=["POST"])
    return router


class Commands(Protocol):
    """What carries out commands; see ServiceView.command."""

    def command(self, name: str, *args: Any) -> dict[str, Any]: ...


class States(Commands, Protocol):
    """What also tells the service's state; see ServiceView.state."""

    def state(self) -> dict[str, Any]: ...


async def run_command(view: Commands, name: str, request: Request) -> dict[str, Any]:
    """Carry out a command that was allowed: the new generation, version and policy.

    Raises: HTTPException 404 (no such command), 413, 503 (the controller is away); RequestError for wrong values.
    """
    if name not in FIELDS:
        raise HTTPException(404, f"command must be one of {', '.join(FIELDS)}, got {name!r}")
    raw = b""
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_COMMAND_BYTES:
            raise HTTPException(413, f"the body must be at most {MAX_COMMAND_BYTES} bytes")
    method, args = parse_command(name, raw)
    try:
        state = await asyncio.to_thread(view.command, method, *args)
    except RequestError:
        raise
    except PacelineError as e:
        raise HTTPException(503, str(e)) from e
    return {k: state.get(k) for k in ("gen", "version", "policy", "is_paused")}
