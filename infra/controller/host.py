"""How does the controller live: a thread that survives outages, takes commands and shows a snapshot.

A plain class without Ray. `start`, `stop`, `call` and `snapshot` may be called from any thread; everything else belongs
to the loop's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
from redis.exceptions import RedisError

from paceline.bandit.controller.view import PolicyView
from paceline.errors import ConfigError, FencedError, PacelineError
from paceline.infra.controller.core import HostConfig, Shards, Versions
from paceline.infra.controller.snapshot import ControllerErrors, Snapshot, TrafficBin
from paceline.infra.controller.step import ControllerPass
from paceline.infra.controller.view import snapshot_view
from paceline.infra.state.redis_clients import OUTAGE_ERRORS

__all__ = ["ControllerHost", "HostConfig", "Shards", "Versions"]

logger = logging.getLogger(__name__)


class ControllerHost(ControllerPass):
    """Runs the passes in a background thread."""

    def connect(self) -> None:
        """Take over and restore everything; raises redis errors."""
        super().connect()
        self._refresh_context()
        self._publish_snapshot()

    def step(self, block_ms: int = 250) -> int:
        """Carry out waiting commands, then one pass."""
        self._settle()
        self._run_commands()
        num_entries = super().step(block_ms)
        self._publish_snapshot()
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
                if not self._is_connected:
                    self.connect()
                self.step()
                if self._breaker.succeeded():
                    logger.info("redis is back; the controller goes on")
                    self._consumer.restart()
            except FencedError as e:
                self.is_fenced = True
                self.last_error = str(e)
                logger.error("controller stops: %s", e)
            except OUTAGE_ERRORS as e:
                if self._breaker.is_up is not False:
                    logger.warning("redis is away, no decisions until it is back: %s", e)
                self._pause(self._breaker.failed())
            except Exception as e:
                self._note_error("controller pass failed", e)
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
        if not self._is_connected:
            return
        try:
            if not self.is_fenced:
                self._settle()
                self._stop_job(min(3.0, timeout_s / 2))
                self._flush()
                self._store.save_file(self.state)
        except (RedisError, OSError, PacelineError) as e:
            logger.warning("the controller's last commit failed, the one before it stands: %s", e)
        self._client.close()

    def _stop_job(self, patience_s: float) -> None:
        pending = self.state.pending
        if pending is None:
            return
        self._coordinator.request_stop(self._client, pending.job.job_id)
        deadline = time.monotonic() + patience_s
        while self.state.pending is not None and time.monotonic() < deadline:
            self._poll_job(self._clock.now())
            time.sleep(0.05)
        if self.state.pending is not None:
            self._coordinator.kill()

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
        while True:
            try:
                fn, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn()
                self._take_drained()
                self._flush(always=True)
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
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(PacelineError(text))

    # ---- view ---------------------------------------------------------------------------------------------------
    def snapshot(self) -> Snapshot:
        """What is live, decisions, ledger, traffic, job, stream and Redis. Thread-safe, never blocks."""
        with self._lock:
            latest = self._snapshot
        return msgspec.structs.replace(
            latest,
            redis_up=self._breaker.is_up is not False and self._is_connected,
            is_fenced=self.is_fenced,
            errors=ControllerErrors(count=self.num_errors, last=self.last_error),
        )

    def traffic(self, since: float = 0.0) -> list[TrafficBin]:
        """Time bins of traffic that end after `since`, oldest first; see TrafficStats.series. Thread-safe, never blocks."""
        for _ in range(20):
            try:
                return self.state.traffic.series(since) if self._is_connected else []
            except RuntimeError:  # the loop's thread added a bucket to the open bin while it was read
                continue
        return []

    def _publish_snapshot(self) -> None:
        if not self._is_connected:
            return
        view = snapshot_view(
            self.state,
            model=self.config.model,
            target_version=self.config.target_version,
            now=self._clock.now(),
            decisions=self._store.decisions.values(),
            ledger=self._store.ledger.values(),
            manifests=self._versions,
            reports=self._reports,
            rows=self._rows,
            counters=self._counters_seen.values(),
            lag=self._lag,
            rollout=self.config.rollout,
            bandit=self._bandit_view(),
        )
        with self._lock:
            self._snapshot = view

    def _bandit_view(self) -> PolicyView | None:
        try:
            return self.controller.snapshot()
        except Exception as e:
            self._note_error("the policy could not be shown", e)
            return None
