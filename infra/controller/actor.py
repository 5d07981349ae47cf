"""RAY LEAF: controller actor: one detached named actor per service, which comes back after a kill.

The actor holds no logic; tests target ControllerHost. Its `__init__` does no I/O and cannot fail, since an exception
there during a restart would leave the actor dead for good; a background thread connects with backoff.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError

from paceline.config import TrainerResources
from paceline.contracts import TrainJob, TrainResult
from paceline.errors import PacelineError
from paceline.infra.controller.host import ControllerHost
from paceline.infra.controller.jobs import JobHandle, WorkerLease, failed
from paceline.infra.controller.orders import COMMANDS, outcome
from paceline.infra.controller.snapshot import ControllerErrors, Snapshot, TrafficBin
from paceline.infra.controller.store import HostConfig, SpanSource
from paceline.paths import keep_private

logger = logging.getLogger(__name__)

NAMESPACE = "paceline"
COMMAND_TIMEOUT_S = 15.0
SNAPSHOT_WAIT_S = 0.6
"""For a snapshot made after it was asked for: the loop waits 0.25 s for feedback, and a scrape waits 0.8 s in all."""
ROLE_LABEL, TRAIN_ROLE, HEAD_ROLE = "paceline/role", "train", "head"
"""Label of a node, and its values where training jobs run and where Ray's head is (ray_cluster.yaml)."""
KEEPS_SERVING = {ROLE_LABEL: f"!{TRAIN_ROLE}"}
"""Label selector of what must outlive trainers, whose nodes may be spot machines that come and go with jobs."""
APPLICATION_CHECK_S = 10.0
APPLICATION_CHECKS = 3
"""Checks in a row that must not find the application: longer than Serve's controller takes to come back after a kill (11 s)."""
_MAX_TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSpec:
    """Everything the actor needs to build its host, also after a restart.

    Two specs are equal when they ask for the same controller, whenever they were deployed.
    """

    host: HostConfig
    """Its `model` is the prefix of the Redis keys and part of the actor's name."""
    trace_root: str
    registry_root: str
    learner_root: str
    target: str
    """As configured; a trainer looks for it on its own node."""
    trainer_threads: int = 1
    trainer_resources: TrainerResources = field(default_factory=TrainerResources)
    gate_chain: int | None = None
    log_level: str = "INFO"
    deployed_at: float = field(default=0.0, compare=False)
    """When the service was deployed, in s since 1970 by Redis' clock: replicas of an older deployment that drain yet change nothing."""
    application: str = field(default="", compare=False)
    """Serve application whose controller this is; it ends with it. '' = none, it stays until it is stopped."""
    release: str = field(default="", compare=False)
    """Code that asks for it; see `code_digest`. A later deployment of other code replaces the controller."""
    spans: SpanSource | None = None
    """Where OpenTelemetry's spans go; None = none are made."""


class RayJob:
    """A training job that runs as a Ray task."""

    def __init__(self, ref: ray.ObjectRef, job_id: str) -> None:
        self._ref, self._job_id = ref, job_id

    def is_alive(self) -> bool:
        return not ray.wait([self._ref], timeout=0)[0]

    def result(self) -> TrainResult | None:
        if self.is_alive():
            return None
        try:
            return ray.get(self._ref)
        except RayError as e:  # killed worker, cancelled task, or an error inside it
            lines = str(e).strip().splitlines() or [type(e).__name__]
            return failed(self._job_id, f"the training process ended: {lines[-1][:300]}")

    def kill(self) -> None:
        ray.cancel(self._ref, force=True)


class RayLauncher:
    """Starts jobs as Ray tasks."""

    def __init__(self, spec: ControllerSpec) -> None:
        self._spec = spec

    def launch(self, job: TrainJob, lease: WorkerLease) -> JobHandle:
        from paceline.adapt.online.task import launch_training

        spec = self._spec
        ref = launch_training(
            job,
            threads=spec.trainer_threads,
            resources=spec.trainer_resources,
            trace_root=spec.trace_root,
            registry_root=spec.registry_root,
            learner_root=spec.learner_root,
            target=spec.target,
            lease=lease,
            chain=spec.gate_chain,
        )
        return RayJob(ref, job.job_id)


def build_host(spec: ControllerSpec) -> ControllerHost:
    """The host that a spec describes; no connection is made yet."""
    from paceline.adapt.data.trace_store import TraceStore
    from paceline.adapt.versions.registry import DrafterRegistry

    return ControllerHost(
        spec.host,
        store=TraceStore(spec.trace_root),
        registry=DrafterRegistry(spec.registry_root),
        launcher=RayLauncher(spec),
        spans=None if spec.spans is None else spec.spans.open(actor_name(spec.host.model)),
    )


@functools.cache
def code_digest() -> str:
    """Digest of the product's modules: two processes with the same one run the same code."""
    digest = hashlib.sha256()
    for name in ("paceline", *(f"paceline.{top}" for top in ("adapt", "bandit", "infra", "kernels", "serving"))):
        folders = importlib.import_module(name).__path__
        for folder in list(folders)[:1]:  # that of `paceline` has a checkout behind it, tests and all
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{name}/{path.relative_to(folder)}".encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class ControllerActor:
    """Hosts one ControllerHost. Contains no logic."""

    def __init__(self, spec: ControllerSpec) -> None:
        keep_private()
        self._spec = spec
        self._host: ControllerHost | None = None
        self._is_stopped = False
        self._error = ""
        threading.Thread(target=self._build, name="controller-build", daemon=True).start()
        if spec.application:
            threading.Thread(target=self._follow_application, name="controller-end", daemon=True).start()

    def _follow_application(self) -> None:
        """End this actor once Serve does not know the application any more: it was deleted, or Serve was shut down."""
        num_missed = 0
        while num_missed < APPLICATION_CHECKS:
            time.sleep(APPLICATION_CHECK_S)
            try:
                is_there = self._spec.application in serve.status().applications
            except Exception as e:  # Serve's own controller is coming back: nothing can be said
                logger.debug("Serve does not answer: %s", e)
                continue
            num_missed = 0 if is_there else num_missed + 1
        logger.info("application %s is gone; its controller ends", self._spec.application)
        self._is_stopped = True
        if self._host is not None:
            self._host.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _build(self) -> None:
        delay_s = 0.2
        while not self._is_stopped:
            try:
                from paceline.infra.state.log import configure_logging

                folder = self._spec.host.data_dir
                configure_logging(
                    self._spec.log_level, file=None if folder is None else folder.expanduser() / "controller.log"
                )
                self._host = build_host(self._spec).start()
                return
            except Exception as e:
                self._error = str(e)
                logger.exception("controller could not be built, trying again")
                time.sleep(delay_s)
                delay_s = min(5.0, 2 * delay_s)

    async def snapshot(self) -> Snapshot:
        """See ControllerHost.snapshot; while it is being built only the errors."""
        if self._host is None:
            return Snapshot(errors=ControllerErrors(count=int(bool(self._error)), last=self._error))
        return await asyncio.to_thread(self._host.snapshot, SNAPSHOT_WAIT_S)

    async def traffic(self, since: float) -> list[TrafficBin]:
        """See ControllerHost.traffic; [] while it is being built."""
        return [] if self._host is None else self._host.traffic(since)

    async def command(self, name: str, *args: Any) -> Any:
        """Run one of COMMANDS; raises what Orders raises."""
        host = self._host
        if name not in COMMANDS:
            raise PacelineError(f"command must be one of {', '.join(COMMANDS)}, got {name!r}")
        if host is None:
            raise PacelineError("the controller is starting; try again in a few seconds")
        return await outcome(host.call(lambda: getattr(host.session.orders, name)(*args)), COMMAND_TIMEOUT_S)

    async def gives_way_to(self, spec: ControllerSpec) -> bool:
        """Whether a controller of `spec` must take this one's place.

        So it is where it is configured differently, or of other code, and deployed later: replicas of one deployment on nodes
        with different files or code must not replace each other's for ever.
        """
        mine = self._spec
        is_other = mine != spec or getattr(spec, "release", "") != mine.release
        if is_other and spec.deployed_at == mine.deployed_at:
            logger.error(
                "a replica of the same deployment wants a controller with another configuration or code: its node's model, "
                "drafter or package differ; wanted %s, running %s", spec, mine,
            )  # fmt: skip
        return is_other and spec.deployed_at > mine.deployed_at

    async def is_of(self, spec: ControllerSpec) -> bool:
        """Whether this controller is configured as `spec`, whenever that was deployed."""
        return self._spec == spec

    async def release(self) -> str:
        """The code that this controller runs; see `code_digest`. Releases without this method give way to one with it."""
        return self._spec.release

    async def pid(self) -> int:
        import os

        return os.getpid()

    async def stop(self) -> None:
        """Commit and end the loop; a training job in flight is stopped. Kill the actor afterwards."""
        self._is_stopped = True
        if self._host is not None:
            await asyncio.to_thread(self._host.stop)


def actor_name(model: str) -> str:
    return f"paceline-controller-{model}"


def ensure_controller(spec: ControllerSpec, is_wanted: Callable[[], bool] = lambda: True) -> Any:
    """Handle of the service's controller. Do not keep the handle.

    Made when there is none or the old one is dead, on any node but those that train, which come and go. One of another
    configuration or an older release is stopped after a last commit and replaced by one that restores its state; one of a
    later deployment is left alone.
    is_wanted: asked before every try. Raises: PacelineError when it does not answer, or is not wanted any more.
    """
    remote = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(ControllerActor)
    named = remote.options(
        name=actor_name(spec.host.model),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_concurrency=32,
        label_selector=KEEPS_SERVING,
    )
    last: Exception | str = "others keep replacing it"
    for _ in range(_MAX_TRIES):
        if not is_wanted():
            last = "it is not wanted any more"
            break
        try:
            handle = named.remote(spec)
            is_older = not hasattr(handle, "release")
            if not is_older and not ray.get(handle.gives_way_to.remote(spec), timeout=60):  # type: ignore[attr-defined]
                return handle
            logger.warning("the controller of model=%s has another configuration or release; replaced", spec.host.model)
            _stop_handle(handle)  # this actor, not the name: another replica may have replaced it already
        except (RayActorError, ray.exceptions.GetTimeoutError) as e:
            last = e
            logger.warning("controller actor does not answer: %s", e)
            time.sleep(0.5)
    raise PacelineError(f"the controller actor could not be started: {last}")


def get_controller(model: str) -> Any:
    """Handle of a running controller; raises ValueError when there is none."""
    return ray.get_actor(actor_name(model), namespace=NAMESPACE)


def stop_controller(model: str, timeout_s: float = 15.0, *, spec: ControllerSpec | None = None) -> None:
    """Stop the controller's loop and remove the actor; no error when there is none.

    spec: leave one alone that says that it is not of it; None = whosesoever it is.
    """
    try:
        handle = get_controller(model)
    except ValueError:
        return
    try:
        if spec is not None and hasattr(handle, "is_of") and not ray.get(handle.is_of.remote(spec), timeout=timeout_s):
            return
    except (RayError, TimeoutError) as e:  # one that hangs goes too: whose it is makes it anew
        logger.warning("whose the controller is cannot be told: %s", e)
    _stop_handle(handle, timeout_s)


def _stop_handle(handle: Any, timeout_s: float = 15.0) -> None:
    try:
        ray.get(handle.stop.remote(), timeout=timeout_s)
    except (RayError, TimeoutError) as e:
        logger.warning("controller did not stop in time: %s", e)
    ray.kill(handle, no_restart=True)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:  # the kill is a message; until it is carried out the name leads to this actor
        try:
            ray.get(handle.pid.remote(), timeout=2.0)
        except RayActorError:
            return
        except (RayError, TimeoutError) as e:
            logger.debug("controller is ending: %s", e)
        time.sleep(0.05)
