"""What does a service tell and take beyond OpenAI's routes: state, versions, pin, rollback?"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from fastapi import APIRouter, Request
from ray.exceptions import RayError
from starlette.exceptions import HTTPException

from paceline.errors import PacelineError, RequestError
from paceline.infra.controller_actor import get_controller
from paceline.infra.controller_snapshot import SnapshotCache
from paceline.infra.replica_watcher import ReplicaWatcher
from paceline.serving.draft_weights import DrafterSlots

_CACHE_S = 0.3
_COMMANDS = ("pin", "unpin", "rollback", "pause", "resume", "policy")


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


def service_router(view: ServiceView, *, allows_changes: bool) -> APIRouter:
    """GET /paceline/versions and the commands as POST /paceline/<command>."""
    router = APIRouter()

    def versions() -> dict[str, Any]:
        state = view.state()
        return {k: state.get(k) for k in ("gen", "version", "first_version")} | {
            "versions": state.get("versions") or []
        }

    async def command(name: str, request: Request) -> dict[str, Any]:
        if name not in _COMMANDS:
            raise HTTPException(404, f"command must be one of {', '.join(_COMMANDS)}, got {name!r}")
        if not allows_changes:
            raise HTTPException(403, "changes are off: set api_token, or bind the service to 127.0.0.1")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "commands must be sent as application/json")  # a web page cannot do that unasked
        args = _arguments(name, await request.body())
        method = {"resume": "pause", "policy": "set_policy"}.get(name, name)
        try:
            state = await asyncio.to_thread(view.command, method, *args)
        except RequestError:
            raise
        except PacelineError as e:
            raise HTTPException(503, str(e)) from e
        return {k: state.get(k) for k in ("gen", "version", "policy", "is_paused")}

    router.add_api_route("/paceline/versions", versions, methods=["GET"])
    router.add_api_route("/paceline/{name}", command, methods=["POST"])
    return router


def _arguments(name: str, raw: bytes) -> tuple[Any, ...]:
    """Arguments of a command from its JSON body; raises RequestError."""
    try:
        body = json.loads(raw or b"{}")
    except ValueError as e:
        raise RequestError(f"the body must be JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    wanted = {"pin": "version", "rollback": "version", "policy": "policy"}.get(name)
    unknown = sorted(set(body) - {wanted})
    if unknown:
        raise RequestError(f"{unknown[0]} is not a field of {name}; it takes {wanted or 'none'}")
    value = body.get(wanted) if wanted else None
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{wanted} must be a string, got {value!r}")
    if name in ("pin", "policy") and not value:
        raise RequestError(f"{wanted} must be given")
    if name in ("pause", "resume"):
        return (name == "pause",)
    return (value,) if value else ()
