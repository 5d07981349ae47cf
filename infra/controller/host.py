"""Host: a session of the controller in a thread that survives outages, takes commands and shows a snapshot.

A plain class without Ray. `start`, `stop`, `call`, `snapshot` and `traffic` may be called from any thread; everything else
belongs to the loop's thread. A service that nobody looks at makes no snapshots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import redis
from redis.exceptions import RedisError

from paceline.clock import Clock, SystemClock
from paceline.errors import FencedError, PacelineError
from paceline.infra.controller.jobs import Launcher
from paceline.infra.controller.orders import CommandQueue
from paceline.infra.controller.session import MakeController, Session, restore_controller, snapshot_view
from paceline.infra.controller.snapshot import ControllerErrors, Snapshot, TrafficBin
from paceline.infra.controller.store import HostConfig
from paceline.infra.state.log import ErrorCount
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, consumer_client

if TYPE_CHECKING:  # both load torch
    from paceline.adapt.data.trace_store import TraceStore
    from paceline.adapt.versions.registry import DrafterRegistry

logger = logging.getLogger(__name__)

_STOPPED = "the controller has stopped"
_SNAPSHOT_S = 0.25
"""Snapshots are made no closer to each other, however many ask."""


class ControllerHost:
    """The one controller of a service; `session` exists once `connect` has returned."""

    def __init__(
        self,
        config: HostConfig,
        *,
        store: TraceStore,
        registry: DrafterRegistry,
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
        self._make_client = make_client
        self._make_session = partial(
            Session, config, shards=store, registry=registry, launcher=launcher, errors=self._errors, clock=self._clock,
            make_controller=make_controller or (lambda stored: restore_controller(config, stored, self._clock)),
        )  # fmt: skip
        self._client: redis.Redis | None = None
        self._session: Session | None = None
        self._breaker = Breaker()
        self._commands = CommandQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._driving = threading.RLock()  # of who makes a pass, or looks at the session between two
        self._made = threading.Condition()
        self._snapshot, self._num_snapshots = Snapshot(), 0
        self._is_asked = False
        self._snapshot_at = float("-inf")

    @property
    def session(self) -> Session:
        assert self._session is not None, "connect() comes first"
        return self._session

    def connect(self) -> None:
        """Take over and restore everything; raises redis errors. Repeated calls start over from what is stored."""
        self._client = self._make_client(self.config.redis_url)
        self._session = self._make_session(self._client)
        self._breaker.succeeded()
        self._make_snapshot()

    def step(self, block_ms: int = 250) -> int:
        """Carry out waiting commands, then one pass; see Session.step."""
        with self._driving:
            self.session.books.settle()
            self._commands.run(self._commit_command)
            num_entries = self.session.step(block_ms)
            if self._is_asked and time.monotonic() - self._snapshot_at >= _SNAPSHOT_S:
                self._make_snapshot()
        return num_entries

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
                    self.session.feedback.restart()
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
        self._commands.fail(_STOPPED)

    def _pause(self, seconds: float) -> None:
        self._make_snapshot()
        self._commands.fail("Redis is unreachable, nothing was changed; try again when it is back")
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
                session.close(min(3.0, timeout_s / 2))
        except (RedisError, OSError, PacelineError) as e:
            logger.warning("the controller's last commit failed, the one before it stands: %s", e)
        self._make_snapshot()
        self._client.close()

    def call(self, fn: Callable[[], Any]) -> Future:
        """Run `fn` in the loop's thread and commit; the future has its result or error. Thread-safe."""
        return self._commands.put(fn, refused=_STOPPED if self._stop.is_set() or self.is_fenced else "")

    def _commit_command(self) -> None:
        self.session.books.flush(always=True)
        self._make_snapshot()

    def snapshot(self, wait_s: float = 0.0) -> Snapshot:
        """What is live, decisions, ledger, traffic, job, stream and Redis. Thread-safe.

        It is made when somebody asks: the latest one is answered, and the loop is asked for a newer one, for which this
        waits at most `wait_s`. Without a background thread the caller drives the loop, and gets one made here.
        """
        if self._thread is None:
            with self._driving:
                self._make_snapshot()
        with self._made:
            number, self._is_asked = self._num_snapshots, True
            if wait_s > 0:
                self._made.wait_for(lambda: self._num_snapshots > number, wait_s)
            latest = self._snapshot
        return msgspec.structs.replace(
            latest,
            redis_up=self._breaker.is_up is not False and self._session is not None,
            is_fenced=self.is_fenced,
            errors=ControllerErrors(count=self._errors.num, last=self._errors.last),
        )

    def traffic(self, since: float = 0.0) -> list[TrafficBin]:
        """Time bins of traffic that end after `since`, oldest first; see TrafficStats.series. Thread-safe, never blocks."""
        return self._session.state.traffic.series(since) if self._session is not None else []

    def _make_snapshot(self) -> None:
        if self._session is not None:
            self._is_asked = False
            view = snapshot_view(self._session)
            with self._made:
                self._snapshot, self._snapshot_at = view, time.monotonic()
                self._num_snapshots += 1
                self._made.notify_all()
