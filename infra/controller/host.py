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

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.errors import FencedError, PacelineError, StateError
from paceline.infra.controller.jobs import Launcher
from paceline.infra.controller.orders import CommandQueue
from paceline.infra.controller.session import MakeController, Session, restore_controller, snapshot_view
from paceline.infra.controller.snapshot import ControllerErrors, Snapshot, TrafficBin
from paceline.infra.controller.store import BEAT_S, HostConfig, ProcessDeeds, read_progress
from paceline.infra.state.log import ErrorCount
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, Keys, cannot_store, consumer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import Clock

if TYPE_CHECKING:  # both load torch
    from paceline.adapt.data.trace_store import TraceStore
    from paceline.adapt.versions.registry import DrafterRegistry

logger = logging.getLogger(__name__)

_STOPPED = "the controller has stopped"
_AWAY = "Redis is unreachable, nothing was changed; try again when it is back"
_FENCED = "another controller took over from this one, which waits for its end; nothing was changed"
_SNAPSHOT_S = 0.25
"""Snapshots are made no closer to each other, however many ask."""
_RIVAL_GONE_S = 3 * BEAT_S
"""A controller that took over and has committed nothing for so long is gone."""
_RIVAL_LOOK_S = 2.0


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
        spans: ProcessDeeds | None = None,
    ) -> None:
        """No I/O happens here; `connect` does it, and `start` calls it with backoff in a thread.

        Args:
            make_controller: stored state (b"" = none) -> Controller; None = the bandit's.
            make_client: Redis URL -> client for blocking reads.
            spans: is told of decisions and jobs, and closed by `stop`.
            clock: None = Redis' own, so that a controller on another node goes on with the same time.
        """
        self.config, self.shards, self.registry, self.launcher = config, store, registry, launcher
        self.is_fenced = False
        """Another controller took over and lives."""
        self._rival: tuple[Any, float] | None = None
        """What that one had committed at the latest look, and since when."""
        self._errors, self._clock = ErrorCount(), clock or RedisClock()
        self._make_client, self._spans = make_client, spans
        self._calls = StorageCalls(f"the data folder {config.data_dir or ''}".strip(), config.storage_patience_s)
        self._make_session = partial(
            Session, config, shards=store, registry=registry, launcher=launcher, errors=self._errors, clock=self._clock,
            calls=self._calls, deeds=None if spans is None else spans.deeds,
            make_controller=make_controller or (lambda stored: restore_controller(config, stored, self._clock)),
        )  # fmt: skip
        self._client: redis.Redis | None = None
        self._session: Session | None = None
        self._breaker = Breaker()
        """Of Redis; the next one of what fails although Redis answers."""
        self._trouble = Breaker()
        self._is_full, self._refusal = False, ""
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
        """Take over and restore everything; raises redis errors and StateError. Repeated calls start over from what is stored."""
        if self._client is not None:
            self._client.close()
        self._client = self._make_client(self.config.redis_url)
        if isinstance(self._clock, RedisClock):
            self._clock.look(self._client)
        self._session = self._make_session(self._client)
        self._breaker.succeeded()
        self._refusal = ""
        self.is_fenced = False
        self._make_snapshot()

    def step(self, block_ms: int = 250) -> int:
        """Carry out waiting commands, then one pass; see Session.step."""
        with self._driving:
            if isinstance(self._clock, RedisClock) and self._client is not None:
                self._clock.try_to_look(self._client)
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
        while not self._stop.is_set():
            try:
                if self.is_fenced and self._has_rival():
                    self._pause(_RIVAL_LOOK_S, _FENCED)
                    continue
                if self._session is None or self.is_fenced:
                    self.connect()
                self.step()
                self._trouble.succeeded()
                self._is_full = False
                if self._breaker.succeeded():
                    logger.info("redis is back; the controller goes on")
            except FencedError as e:
                self.is_fenced, self._rival = True, None
                self._errors.last = str(e)
                logger.error("%s; it goes on when that one is gone", e)
            except OUTAGE_ERRORS as e:
                self._rival = None  # it cannot commit either
                if self._breaker.is_up is not False:
                    logger.warning("redis is away, no decisions until it is back: %s", e)
                if self._session is not None:
                    self._session.feedback.restart()  # a reply that was lost may have handed entries out
                self._pause(self._breaker.failed(), _AWAY)
            except StateError as e:
                if str(e) != self._refusal:
                    logger.error("READ-ONLY: serving goes on, nothing is decided or written: %s", e)
                self._refusal = str(e)
                self._breaker.succeeded()
                self._pause(self._trouble.failed(), f"the controller is read-only: {e}")
            except Exception as e:
                self._is_full = cannot_store(e)
                self._errors.note("redis cannot store anything" if self._is_full else "controller pass failed", e)
                self._breaker.succeeded()  # whatever it is, Redis answered
                self._pause(self._trouble.failed(), f"nothing can be stored now ({e}); try again later")
        self._commands.fail(_STOPPED)

    def _has_rival(self) -> bool:
        """Whether the controller that took over lives: it commits at least every BEAT_S. Raises redis errors."""
        assert self._client is not None, "whoever is fenced has connected"
        seen, now = read_progress(self._client, Keys(self.config.model)), self._clock.now()
        self._breaker.succeeded()
        if self._rival is None or self._rival[0] != seen:
            self._rival = seen, now
        return now - self._rival[1] < _RIVAL_GONE_S

    def _pause(self, seconds: float, reason: str) -> None:
        """Refuse commands for this reason and wait."""
        self._make_snapshot()
        self._commands.fail(reason)
        self._stop.wait(seconds)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the loop after a last commit; a job in flight is asked to stop and then killed.

        A loop that is still inside a call after twice timeout_s keeps its session: it makes no commit any more.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._driving.acquire(timeout=timeout_s):
            try:
                self._close_session(timeout_s)
            finally:
                self._driving.release()
        else:
            logger.warning("the controller's loop is still inside a call; its latest commit stands")
        if self._spans is not None:
            self._spans.close()

    def _close_session(self, timeout_s: float) -> None:
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
        return self._commands.put(fn, refused=_STOPPED if self._stop.is_set() else _FENCED if self.is_fenced else "")

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
            age_s=None if latest.ts is None else max(0.0, self._clock.now() - latest.ts),
            redis_up=bool(self._breaker.is_up),
            is_redis_full=self._is_full,
            read_only=self._refusal,
            is_fenced=self.is_fenced,
            folder_error=self._calls.error or latest.folder_error,
            folder_hung_s=self._calls.hung_s,
            folder_hangs=self._calls.num_hangs,
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
