"""Host: a session of the controller in a thread that survives outages, takes commands and shows a snapshot.

A plain class without Ray. `start`, `stop`, `call`, `snapshot` and `traffic` may be called from any thread; everything else
belongs to the loop's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import redis
from redis.exceptions import RedisError

from paceline.clock import Clock, SystemClock
from paceline.errors import ConfigError, FencedError, PacelineError
from paceline.infra.controller.jobs import Launcher
from paceline.infra.controller.session import HostConfig, MakeController, Session, restore_controller
from paceline.infra.controller.snapshot import ControllerErrors, Snapshot, TrafficBin
from paceline.infra.controller.surroundings import Shards, Versions
from paceline.infra.controller.view import snapshot_view
from paceline.infra.state.log import ErrorCount
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, consumer_client

logger = logging.getLogger(__name__)


class ControllerHost:
    """The one controller of a service; `session` exists once `connect` has returned."""

    def __init__(
        self,
        config: HostConfig,
        *,
        store: Shards,
        registry: Versions,
        launcher: Launcher,
        clock: Clock | None = None,
        make_controller: MakeController | None = None,
        make_client: Callable[[str], redis.Redis] = consumer_client,
    ) -> None:
        """No I/O happens here; `connect` does it, and `start` calls it with backoff in a thread.

        Args:
            make_controller: stored state (b"" = none) -> Controller; None = the bandit's.
            make_client: Redis URL -> client for blocking reads.
        """
        self.config, self.shards, self.registry, self.launcher = config, store, registry, launcher
        self.is_fenced = False
        self._errors, self._clock = ErrorCount(), clock or SystemClock()
        self._make_controller = make_controller or (lambda stored: restore_controller(config, stored, self._clock))
        self._make_client = make_client
        self._client: redis.Redis | None = None
        self._session: Session | None = None
        self._breaker = Breaker()
        self._commands: queue.Queue[tuple[Callable[[], Any], Future]] = queue.Queue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._snapshot = Snapshot()

    @property
    def session(self) -> Session:
        assert self._session is not None, "connect() comes first"
        return self._session

    def connect(self) -> None:
        """Take over and restore everything; raises redis errors. Repeated calls start over from what is stored."""
        self._client = self._make_client(self.config.redis_url)
        self._session = Session(
            self.config,
            self._client,
            shards=self.shards,
            registry=self.registry,
            launcher=self.launcher,
            make_controller=self._make_controller,
            errors=self._errors,
            clock=self._clock,
        )
        self._breaker.succeeded()
        self._publish_snapshot()

    def step(self, block_ms: int = 250) -> int:
        """Carry out waiting commands, then one pass; see Session.step."""
        self.session.books.settle()
        self._run_commands()
        num_entries = self.session.step(block_ms)
        self._publish_snapshot()
        return num_entries

    # ---- thread -------------------------------------------------------------------------------------------------
    def start(self) -> ControllerHost:
        """Run in a background thread until `stop`; connects with backoff, never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="controller-host", daemon=True)
            self._thread.start()
        return self

    def run(self) -> None:
        """Loop of the background thread."""
        while not self._stop.is_set() and not self.is_fenced:
            try:
                if self._session is None:
                    self.connect()
                self.step()
                if self._breaker.succeeded():
                    logger.info("redis is back; the controller goes on")
                    self.session.feedback.consumer.restart()
            except FencedError as e:
                self.is_fenced = True
                self._errors.last = str(e)
                logger.error("controller stops: %s", e)
            except OUTAGE_ERRORS as e:
                if self._breaker.is_up is not False:
                    logger.warning("redis is away, no decisions until it is back: %s", e)
                self._pause(self._breaker.failed())
            except Exception as e:
                self._errors.note("controller pass failed", e)
                self._pause(self._breaker.failed())
        self._fail_commands("the controller has stopped")

    def _pause(self, seconds: float) -> None:
        self._publish_snapshot()
        self._fail_commands("Redis is unreachable, nothing was changed; try again when it is back")
        self._stop.wait(seconds)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the loop after a last commit; a job in flight is asked to stop and then killed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        session = self._session
        if session is None or self._client is None:
            return
        try:
            if not self.is_fenced:
                session.books.settle()
                session.jobs.stop(min(3.0, timeout_s / 2))
                session.books.flush()
                session.books.store.save_file(session.state)
        except (RedisError, OSError, PacelineError) as e:
            logger.warning("the controller's last commit failed, the one before it stands: %s", e)
        self._client.close()

    # ---- commands -----------------------------------------------------------------------------------------------
    def call(self, fn: Callable[[], Any]) -> Future:
        """Run `fn` in the loop's thread and commit; the future has its result or error. Thread-safe."""
        future: Future = Future()
        if self._stop.is_set() or self.is_fenced:
            future.set_exception(PacelineError("the controller has stopped"))
        else:
            self._commands.put((fn, future))
        return future

    def _run_commands(self) -> None:
        while (command := self._next_command()) is not None:
            fn, future = command
            try:
                result = fn()
                self.session.books.flush(always=True)
                self._publish_snapshot()
            except (ConfigError, PacelineError, ValueError) as e:
                future.set_exception(e)
                if isinstance(e, FencedError):
                    raise
            except Exception as e:
                future.set_exception(PacelineError(f"not done: {e}"))
                raise
            else:
                future.set_result(result)

    def _fail_commands(self, text: str) -> None:
        while (command := self._next_command()) is not None:
            command[1].set_exception(PacelineError(text))

    def _next_command(self) -> tuple[Callable[[], Any], Future] | None:
        """The next one that its caller still waits for."""
        while True:
            try:
                fn, future = self._commands.get_nowait()
            except queue.Empty:
                return None
            if future.set_running_or_notify_cancel():
                return fn, future

    # ---- view ---------------------------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """What is live, decisions, ledger, traffic, job, stream and Redis. Thread-safe, never blocks."""
        with self._lock:
            latest = self._snapshot
        return msgspec.structs.replace(
            latest,
            redis_up=self._breaker.is_up is not False and self._session is not None,
            is_fenced=self.is_fenced,
            errors=ControllerErrors(count=self._errors.num, last=self._errors.last),
        )

    def traffic(self, since: float = 0.0) -> list[TrafficBin]:
        """Time bins of traffic that end after `since`, oldest first; see TrafficStats.series. Thread-safe, never blocks."""
        for _ in range(20):
            try:
                return self._session.state.traffic.series(since) if self._session is not None else []
            except RuntimeError:  # the loop's thread added a bucket to the open bin while it was read
                continue
        return []

    def _publish_snapshot(self) -> None:
        if self._session is not None:
            view = snapshot_view(self._session, self._clock.now(), self._errors)
            with self._lock:
                self._snapshot = view
