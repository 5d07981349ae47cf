"""Place: the service that faults happen to: its processes, its Redis, its files, and whether it is whole."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from paceline.bench.chaos.checks import ledger_problems
from paceline.bench.chaos.clock import SteppedClock
from paceline.bench.chaos.drafters import Publisher, nudged
from paceline.bench.chaos.load import wait_for
from paceline.config import ServiceConfig, leave_tokens
from paceline.errors import PacelineError
from paceline.infra.app import Service, run_service, stop_service
from paceline.infra.controller.snapshot import ReplicaState, Snapshot, parse_state
from paceline.infra.service.claim import application_name
from paceline.infra.service.stores import StorePaths
from paceline.infra.state.layout import snapshot_name
from paceline.infra.state.redis_clients import Keys, patient_client
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.paths import DECISIONS

PROCESSES = {
    "replica": "ray::ServeReplica:{application}:engine",
    "ingress": "ray::ServeReplica:{application}:ingress",
    "proxy": "ray::ProxyActor",
    "serve-controller": "ray::ServeController",
    "controller": "ray::ControllerActor",
    "trainer": "ray::train_task",
}
"""Kind of process -> how its name begins. Redis, which is a child of this process, is known by its id."""
START_S = 240.0
"""Longest time that a start may take."""
REDIS_MB = 64
"""Soon full."""
_ASKS = 24
"""Questions after which a replica that did not answer one counts as missing; Serve spreads them."""
_ASK_S = 15.0
"""Longest time that is spent on it."""
_SETTLE_S = 20.0
"""Longest time that engines and books have until nothing is left over."""
_SOUND = 2
"""Versions that draft as well as the first one."""


class Place:
    """A running service that may be struck; a context manager. Restarts go on with the same data."""

    def __init__(
        self, config: ServiceConfig, *, check: Callable[[], None] | None = None, clock: SteppedClock | None = None
    ) -> None:
        """check: called while something is waited for; may raise. clock: that its processes shall have."""
        self._given, self.check, self.clock = config, check, clock
        self.http = httpx.Client(timeout=10, limits=httpx.Limits(max_keepalive_connections=0))
        self.keys = Keys(config.model_name)
        self.paths = StorePaths.of(config)

    def __enter__(self) -> Place:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start Redis and the service, publish the sound versions and make the first of them live.

        Raises: PacelineError.
        """
        leave_tokens()
        if self.clock is not None:
            self.clock.enter()
        try:
            self.redis = EmbeddedRedis(self._given.data_dir, max_memory_mb=REDIS_MB).start()
        except BaseException:
            self._leave_clock()
            raise
        try:
            self.service: Service = run_service(dataclasses.replace(self._given, redis_url=self.redis.url))
        except BaseException:
            self.redis.stop()
            self._leave_clock()
            raise
        try:
            self.client: Any = patient_client(self.redis.url)
            self._wait_whole()
            self.publisher = Publisher(Path(self.paths.registry), self.snapshot().first_version)
            self.sound = [self.publisher.put(nudged(self.publisher.state, i)) for i in range(_SOUND)]
            self.make_live(self.sound[0])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self.processes(*PROCESSES):  # nothing that a fault left stopped may outlive the service
            _send(process, "resume")
        stop_service(self.service)
        self.redis.stop()
        self._leave_clock()

    def _leave_clock(self) -> None:
        if self.clock is not None:
            self.clock.leave()

    def _wait_whole(self) -> None:
        wait_for(lambda: not self.ills(), "a whole service", START_S, check=self.check)

    # ---- what it says -----------------------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return self.service.url

    @property
    def num_replicas(self) -> int:
        return self._given.num_replicas

    def ask_state(self) -> Snapshot | None:
        """What some replica says of the service and of itself; None when it refuses. Raises: httpx.TransportError."""
        response = self.http.get(f"{self.url}/paceline/state")
        return parse_state(response.content) if response.status_code == 200 else None

    def snapshot(self) -> Snapshot:
        """A snapshot of the controller that is younger than this call; replicas may show one from their short cache."""
        asked = time.time()

        def read() -> Snapshot | None:
            state = self.ask_state()
            return state if state and state.has_controller and (state.ts or 0.0) > asked else None

        return wait_for(read, "a fresh snapshot of the controller", check=self.check)  # type: ignore[return-value]

    def replicas(self) -> dict[str, ReplicaState]:
        """Replica id -> its own part of the state, of those that answer within a few questions."""
        seen: dict[str, ReplicaState] = {}
        deadline = time.monotonic() + _ASK_S
        for _ in range(_ASKS * self.num_replicas):
            with contextlib.suppress(httpx.TransportError):
                state = self.ask_state()
                if state is not None and state.replica is not None and state.replica.replica_id:
                    seen[state.replica.replica_id] = state.replica
            if len(seen) == self.num_replicas or time.monotonic() > deadline:
                break
        return seen

    def order(self, command: str, **values: str) -> httpx.Response:
        """Give the controller a command."""
        return self.http.post(f"{self.url}/paceline/{command}", json=values, timeout=60)

    def make_live(self, version: str) -> None:
        """Pin a version and wait until every replica runs it. Raises: PacelineError."""
        response = self.order("pin", version=version)
        if response.status_code != 200:
            raise PacelineError(f"a sound version could not be pinned: {response.text[:300]}")
        wait_for(lambda: self.runs(version), f"version {version} on all replicas", check=self.check)

    def runs(self, version: str) -> bool:
        """Whether every replica runs the version, which is the desired one."""
        replicas = self.replicas()
        return len(replicas) == self.num_replicas and all(r.version == version for r in replicas.values())

    def ills(self) -> list[str]:
        """What is wrong with the service at this moment; [] = it is whole."""
        found = [
            f"{len(self.processes(kind))} of {num} processes of kind {kind}"
            for kind, num in self.expected().items()
            if len(self.processes(kind)) != num
        ]
        if found or self.redis.pid is None:
            return found or ["Redis is not there"]
        asked = time.time()
        try:
            replicas = self.replicas()
            state = self.ask_state()
            health = self.http.get(f"{self.url}/healthz").status_code
        except httpx.TransportError as e:
            return [f"the service does not answer: {e!r}"]
        if state is None or not state.has_controller or (state.ts or 0.0) < asked - 2.0:
            return ["the controller is away"]
        if len(replicas) != self.num_replicas:
            return [f"{len(replicas)} of {self.num_replicas} replicas answer"]
        for name, replica in replicas.items():
            if (replica.version, replica.gen) != (state.version, state.gen):
                found.append(f"replica {name} runs {replica.version} of generation {replica.gen}, not {state.version} of {state.gen}")  # fmt: skip
            if isinstance(replica.feedback, dict) and not replica.feedback["redis_up"]:
                found.append(f"replica {name} is without Redis")
        if not state.redis_up or state.is_redis_full:
            found.append(f"the controller's Redis is {'full' if state.is_redis_full else 'away'}")
        found += [text for text in (state.folder_error, state.read_only) if text]
        return found + ([f"/healthz says {health}"] if health != 200 else [])

    def leftovers(self) -> list[str]:
        """What engines without requests should not hold, or the ledger that does not add up; [] = nothing."""

        def look() -> list[str]:
            found = []
            for name, replica in self.replicas().items():
                e = replica.engine
                num = e["num_running"] + e["num_waiting"]
                if num or e["num_free_pages"] != e["num_pages"]:
                    found.append(f"replica {name} holds {num} requests and {e['num_pages'] - e['num_free_pages']} pages, but nobody asks")  # fmt: skip
            try:
                log = self.paths.home / DECISIONS
                found += ledger_problems(self.client, self.keys, log, self._given.policy)
            except Exception as e:  # redis errors, which are not known here by name
                found.append(f"ledger: it cannot be read: {e!r}")
            return found

        found: list[str] = []
        deadline = time.monotonic() + _SETTLE_S
        while (found := look()) and time.monotonic() < deadline:
            if self.check is not None:
                self.check()
            time.sleep(0.3)
        return found

    # ---- its parts --------------------------------------------------------------------------------------------------
    def expected(self) -> dict[str, int]:
        """Kind of process -> how many there should be."""
        config = self._given
        found = {"replica": config.num_replicas, "proxy": 1, "controller": 1}
        return {**found, "ingress": config.ingress.num_replicas} if config.resume else found

    def processes(self, *kinds: str) -> list[psutil.Process]:
        """The running processes of these kinds, the oldest first."""
        if kinds == ("redis",):
            pid = self.redis.pid
            with contextlib.suppress(psutil.NoSuchProcess):  # it may be killed at this moment, and started anew
                return [] if pid is None else [psutil.Process(pid)]
            return []
        application, found = application_name(self._given), []
        starts = tuple(PROCESSES[kind].format(application=application) for kind in kinds if kind in PROCESSES)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(starts) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda p: p.pid)

    @property
    def snapshot_file(self) -> Path:
        """The controller's state as a file."""
        return self.paths.home / snapshot_name(self.publisher.manifest.target_version)

    @property
    def log_file(self) -> Path:
        return self.paths.home / DECISIONS

    def trace_files(self) -> list[Path]:
        return sorted(Path(self.paths.traces).rglob("*.safetensors"))

    def kept_files(self) -> set[Path]:
        """Files that there is no reason to delete: versions that may be asked for, and traces that are far from their limit."""
        versions = [self.publisher.first, *self.sound]
        found = {path for v in versions for path in (self.publisher.manifest_path(v), self.publisher.blob(v))}
        traces = {}
        for path in self.trace_files():
            with contextlib.suppress(FileNotFoundError):  # its time was up
                traces[path] = path.stat().st_size
        return found | set(traces) if sum(traces.values()) < self._given.trace.max_bytes / 2 else found

    @contextmanager
    def stopped(self, processes: Sequence[psutil.Process]) -> Iterator[None]:
        """Let processes stand still for so long."""
        for process in processes:
            _send(process, "suspend")
        try:
            yield
        finally:
            for process in processes:
                _send(process, "resume")


def _send(process: psutil.Process, name: str) -> None:
    """suspend, resume or kill a process that may be gone."""
    with contextlib.suppress(psutil.Error):
        getattr(process, name)()


def kill(process: psutil.Process) -> None:
    """kill -9."""
    _send(process, "kill")
