"""RAY LEAF: deployment: one replica inside Ray Serve: it is built, serves, answers health checks, drains and closes.

The replica is its own HTTP ingress (a second hop would cost most of the streaming throughput). What it is made of comes
from a factory named by an import path, so that this module knows neither stores nor Redis.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve._private import constants as serve_constants
from ray.serve._private import replica as serve_replica
from ray.serve.config import BackpressureConfig

from paceline.config import ServiceConfig, to_dict
from paceline.errors import ConfigError
from paceline.infra.replica.late_timers import StepWatch
from paceline.names import ENGINE
from paceline.serving.api.app import build_api
from paceline.serving.api.generation import ApiParts

if TYPE_CHECKING:  # torch comes with it, which the process that starts a service does without
    from paceline.serving.engine.thread import EngineThread

log = logging.getLogger(__name__)

DEPLOYED_AT = "deployed_at"


@dataclass(kw_only=True, slots=True)
class ReplicaParts:
    """What a factory hands over: everything is built and the engine thread runs."""

    api: ApiParts
    thread: EngineThread
    closers: Sequence[Callable[[], None]] = ()
    """Called in this order after the engine has drained."""
    drain_s: float = 60.0
    """Longest time that requests get to finish at shutdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentLimits:
    """What Ray Serve is told about the replicas."""

    num_replicas: int = 1
    """With `autoscaling` the least."""
    max_replicas: int = 1
    autoscaling: Mapping[str, Any] | None = None
    """Serve's `autoscaling_config`; None = always `num_replicas`."""
    max_ongoing_requests: int = 320
    """Above what the engine takes by itself, so that health and state routes still get through."""
    max_queued_requests: int = 64
    graceful_shutdown_timeout_s: float = 900.0
    """At least as long as the longest stream: Serve cuts what is left without an error."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0


def replica_values(config: ServiceConfig, deployed_at: float) -> dict[str, Any]:
    """What a factory is given: a configuration and when it was deployed (s since 1970)."""
    return {**to_dict(config), DEPLOYED_AT: deployed_at}


def load_factory(path: str) -> Callable[[dict[str, Any], str], ReplicaParts]:
    """The factory at `package.module:name`; raises ConfigError when there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"factory must be an import path 'module:name', got {path!r}: {e}") from e


def close_grpc_port() -> None:
    """Keep this replica off a port for gRPC between deployments; a replica calls it while it is built.

    Serve opens one in every replica, on all interfaces and without Ray's token, and unpickles what anybody sends to it.
    Nothing uses it unless Serve was told to send requests that way.
    """
    if serve_constants.RAY_SERVE_USE_GRPC_BY_DEFAULT or serve_constants.RAY_SERVE_PROXY_USE_GRPC:
        log.warning(
            "Serve's gRPC between deployments runs code for whoever reaches its port, which Ray's token does not guard: "
            "unset RAY_SERVE_USE_GRPC_BY_DEFAULT, RAY_SERVE_PROXY_USE_GRPC and RAY_SERVE_THROUGHPUT_OPTIMIZED, or use "
            "RAY_USE_TLS with certificates of clients"
        )
        return
    serve_replica.add_port_to_grpc_server = lambda server, address: 0  # a server without a port


class RunningReplica:
    """One replica's parts from their making to their end, whatever reaches them."""

    def __init__(self, factory: str, config: dict[str, Any]) -> None:
        close_grpc_port()
        StepWatch().start()
        replica_id = serve.get_replica_context().replica_id.unique_id
        self.parts = load_factory(factory)(config, replica_id)
        self._is_closed = False
        log.info("replica ready id=%s", replica_id)

    def check_health(self) -> None:
        """Raise when the engine thread is dead or silent; Redis and the controller do not matter here."""
        thread = self.parts.thread
        if thread.error is not None:
            raise RuntimeError(f"the engine thread died: {thread.error}")
        age_s = thread.heartbeat_age_s()
        if not thread.is_alive or age_s > self.parts.api.max_silence_s:
            raise RuntimeError(f"the engine thread has been silent for {age_s:.0f} s")

    async def close(self) -> None:
        """Drain the engine, then close what belongs to it; once."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.parts.thread.stop(drain=True, timeout_s=self.parts.drain_s)
        for close in self.parts.closers:
            try:
                close()
            except Exception:  # the others must still be closed
                log.exception("closing %s failed", close)


class EngineReplica:
    """A replica that is its own HTTP ingress."""

    def __init__(self, factory: str, config: dict[str, Any]) -> None:
        self._running = RunningReplica(factory, config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        self._running.parts.api.sends_request_id = False  # Serve's middleware does it
        return build_api(self._running.parts.api)

    async def check_health(self) -> None:
        self._running.check_health()

    async def __del__(self) -> None:
        """Serve calls this once after the last request, or after graceful_shutdown_timeout_s."""
        if hasattr(self, "_running"):
            await self._running.close()


def bind_replicas(factory: str, config: dict[str, Any], limits: DeploymentLimits) -> Application:
    """The Serve application of replicas built by `factory(config, replica_id)`."""
    return bind_engine(serve.ingress()(EngineReplica), factory, config, limits)


def bind_engine(kind: type, factory: str, config: dict[str, Any], limits: DeploymentLimits) -> Application:
    """The deployment `engine` of a class that is made like EngineReplica."""
    number: dict[str, Any] = {"num_replicas": limits.num_replicas}
    if limits.autoscaling is not None:
        number = {"autoscaling_config": dict(limits.autoscaling)}
    return deployment(
        kind, ENGINE, limits, **number, max_ongoing_requests=limits.max_ongoing_requests,
        health_check_period_s=2, health_check_timeout_s=10,
        max_surge_percent=0,  # a replacement needs its own devices: with none free a rolling restart would never end
        # no runtime_env: it would cost a fresh worker process at every start
        ray_actor_options={"num_cpus": limits.num_cpus, "num_gpus": limits.num_gpus},
    ).bind(factory, config)  # fmt: skip


def deployment(kind: type, name: str, limits: DeploymentLimits, **options: Any) -> Any:
    """A Serve deployment with what every deployment of the service is told, and `options`."""
    return serve.deployment(
        kind,
        name=name,
        max_queued_requests=limits.max_queued_requests,
        graceful_shutdown_timeout_s=limits.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        **options,
    )
