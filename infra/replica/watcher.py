"""Replica watcher: follows the desired state: read, stage into the idle slot, publish, report; again and again.

Redis being away changes nothing for serving: the replica keeps what it has. A version that cannot be staged leaves the
live slot untouched and is reported as failed; it is not tried again until the generation changes. A version of a class
that cannot be loaded, or that failed while it served, is reported as refused: the live version serves the class until the
classes' versions change. A registry that hangs or cannot be read is no version's fault: it is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

import redis
from redis.exceptions import RedisError

from paceline.contracts import DesiredState, EngineFacts, ReplicaReport, TrafficClasses
from paceline.errors import EngineAwayError, EngineStoppedError, PacelineError, StorageHangsError
from paceline.infra.controller.jobs import read_lease
from paceline.infra.controller.store import Deeds
from paceline.infra.state.desired import read_classes, read_desired, write_report
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, Keys, producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import Clock, SystemClock

logger = logging.getLogger(__name__)

_NUM_PAUSES = 64
_LOST_S = 0.2
"""Behind a lost subscription."""
_MOST_AWAY_S = 60.0
"""Longest wait before an engine that did not answer is asked again."""
_AWAY = (EngineAwayError, EngineStoppedError, OSError)
"""No fault of a version: an engine that does not answer or has ended, storage that fails."""
_PASSING = (RuntimeError, MemoryError)
"""What a device without memory raises: a version is refused for it the second time."""
_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 600.0
"""Waits before a version of a class that could not be loaded is tried again: its blob may be back, or memory."""


class Drafters(Protocol):
    """What serves in this replica; called in the watcher's thread."""

    @property
    def live_version(self) -> str: ...

    def versions(self) -> dict[str, str]:
        """Slot name -> version."""

    def stage(self, version: str) -> bool:
        """Load and validate a version into the idle slot.

        True when it is staged (or resident already); False when no slot is idle yet: it is tried again, with the newest
        desired version. Raises PacelineError when the version must not be used.
        """

    def publish(self, version: str) -> float:
        """Pin new requests to the staged version from a round boundary on; the pause of the engine thread in ms.

        Raises: EngineAwayError where the engine does not answer, as all calls of an engine may: it is tried again.
        """

    def set_canary(self, version: str, percent: int, bucket: str) -> None:
        """Let a staged version serve that percentage of adaptive requests, of one class or ('') of those without a version
        of their own; ('', 0, '') calls the canary off.

        Raises PacelineError where the replica takes part in no canary.
        """

    def route(self, class_versions: dict[str, str]) -> None:
        """Pin later requests of each class to its version once that is resident."""

    def missing(self) -> list[str]:
        """Versions of classes that are not resident, the most wanted first."""

    def load(self, version: str) -> bool:
        """Bring the version of a class into memory; False where it has no room now. Raises like `stage`."""

    def served(self) -> dict[str, str]:
        """Class -> its own version, where that is resident."""

    def failures(self) -> dict[str, str]:
        """Version -> reason of drafters that failed while serving; the live one is reported as refused."""

    def num_errors(self) -> dict[str, int]:
        """Version -> requests that ended in an error."""


class Followers(Protocol):
    """Who is told what the watcher learns, before anything is staged."""

    def desired_changed(self, desired: DesiredState) -> None: ...

    def training_changed(self, is_training: bool) -> None: ...

    def classes_changed(self, classes: TrafficClasses) -> None: ...


class Counted(Protocol):
    """Whose rows are reported: produced, delivered and dropped."""

    def counters(self) -> dict: ...


class ReplicaWatcher:
    """Reconciles one replica."""

    def __init__(
        self,
        redis_url: str,
        keys: Keys,
        drafters: Drafters,
        *,
        replica_id: str,
        target_version: str = "",
        followers: Followers | None = None,
        feedback: Counted | None = None,
        deeds: Deeds | None = None,
        facts: EngineFacts | None = None,
        poll_s: float = 2.0,
        report_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._client = producer_client(redis_url, timeout_s=1.0)
        self._keys, self._replica_id, self._target_version = keys, replica_id, target_version
        self._drafters, self._followers, self._feedback, self._deeds = drafters, followers, feedback, deeds
        self._facts, self._poll_s, self._report_s = facts, poll_s, report_s
        self._clock = clock or SystemClock()
        self._breaker = Breaker()
        self._away_s = 0.0
        """Until the next pass, where Redis is away."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pubsub: redis.client.PubSub | None = None
        self._pauses_ms: deque[float] = deque(maxlen=_NUM_PAUSES)
        self._next_report = 0.0
        self._retry_stage = False
        self._engine_breaker, self._retry_at = Breaker(base_s=2 * poll_s, cap_s=_MOST_AWAY_S), 0.0
        """When a version is tried again whose engine was away (each try stops its steps) or whose weights could not be read, in s
        of the steady clock."""
        self.desired: DesiredState | None = None
        self.gen = 0
        """Generation that this replica runs."""
        self.version = drafters.live_version
        self.canary_version, self._canary_percent, self._canary_bucket = "", 0, ""
        self._routes: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._unloadable: dict[str, tuple[float, float]] = {}
        """Version that could not be loaded -> (wait before the next try, when that is), in s of the steady clock."""
        self._tried: set[str] = set()
        self._has_loaded = False  # in the latest pass, so that others may wait yet
        self.swap_gen = 0
        """Generation that last changed here which version serves whom."""
        self.failed_gen: int | None = None
        self.failed_reason = ""
        self.staging_s = 0.0
        """Seconds that the latest staging took."""
        self.num_swaps = 0
        self.is_training = False
        """Whether a training job holds the lease (the engine marks its rounds with it)."""
        self.classes = TrafficClasses()
        """Classes of unnamed traffic that the followers were told last."""

    @property
    def is_redis_up(self) -> bool:
        return self._breaker.is_up is not False

    def start(self, first_read_s: float = 5.0) -> ReplicaWatcher:
        """Reconcile (waiting at most first_read_s for Redis), then keep watching in a thread.

        When it returns, the versions of all classes that there is room for are loaded, so that a replica which joins others
        serves every class from its first request on as they do.
        """
        deadline = time.monotonic() + first_read_s
        while not (is_read := self.reconcile()) and time.monotonic() < deadline and not self._stop.is_set():
            time.sleep(0.1)
        while is_read and self._has_loaded and not self._stop.is_set():  # one a pass
            is_read = self.reconcile()
        self._thread = threading.Thread(target=self._run, name="replica-watcher", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        try:
            self._client.delete(self._keys.replica(self._replica_id))
            self._client.zrem(self._keys.replicas, self._replica_id)
        except (RedisError, OSError) as e:
            logger.debug("report is left to expire: %s", e)
        self._close_pubsub()
        self._client.close()

    def reconcile(self) -> bool:
        """One pass; False when Redis is away (everything stays as it is)."""
        try:
            desired = read_desired(self._client, self._keys)
            is_training = read_lease(self._client, self._keys) is not None
            self._follow_classes()
            if isinstance(self._clock, RedisClock):  # windows of time go by it, however long the process lives
                self._clock.try_to_look(self._client)
        except OUTAGE_ERRORS as e:
            self._note_outage(e)
            return False
        except (RedisError, PacelineError) as e:
            self._breaker.succeeded()
            logger.warning("desired state cannot be read: %s", e)
            return True
        if self._breaker.succeeded():
            logger.info("redis is back; watching the desired state again")
        if is_training != self.is_training:
            try:
                if self._followers is not None:
                    self._followers.training_changed(is_training)
                self.is_training = is_training
            except EngineAwayError as e:
                logger.warning("the engine is told later whether training runs: %s", e)
        changed = desired is not None and self._follow(desired)
        if self.desired is not None:
            changed |= self._follow_routes(self.desired.class_versions)
        return self._report(force=self._check_live() or changed)

    def _follow_routes(self, routes: dict[str, str]) -> bool:
        """Have one version of a class loaded, the most wanted one that there is room for; True when there is news."""
        drafters, refused = self._drafters, self._refused
        self._has_loaded = False
        if has_changed := routes != self._routes:
            self._routes, self._refused, self._tried = dict(routes), (refused := {}), set()
            self._unloadable = {}
            started = time.perf_counter()
            drafters.route(self._routes)
            # the engine waits for the lock at most so long
            self._pauses_ms.append(1e3 * (time.perf_counter() - started))
            self.num_swaps += 1
            self.swap_gen = self.desired.gen if self.desired is not None else self.gen
        self._tried.update(drafters.served().values())
        failures, before = drafters.failures(), dict(refused)
        for version in drafters.missing() if routes else ():
            if version in failures and version in self._tried:  # not by what happened to it before this order
                refused.setdefault(version, f"failed while serving: {failures[version]}")
            wait_s, due = self._unloadable.get(version, (0.0, 0.0))
            if (version in refused and not wait_s) or time.monotonic() < due:
                continue
            started = time.perf_counter()
            try:
                if drafters.load(version):
                    seconds = time.perf_counter() - started
                    self._note_swap(seconds, version=version, buckets=[b for b, v in routes.items() if v == version])
                    self.staging_s += seconds
                    self._has_loaded = True  # the next one soon, after a report
                    self._tried.add(version)
                    self._unloadable.pop(version, None)
                    refused.pop(version, None)
                    return True
            except (StorageHangsError, *_AWAY) as e:
                logger.warning("drafter %s is loaded when registry and engine answer: %s", version, e)
                break  # so do the others
            except (PacelineError, ValueError, *_PASSING) as e:
                if wait_s or not isinstance(e, _PASSING):
                    refused[version] = str(e)
                wait_s = min(2 * wait_s, _MOST_RETRY_S) or _FIRST_RETRY_S
                self._unloadable[version] = (wait_s, time.monotonic() + wait_s)
                logger.error("drafter of a class not loaded version=%s next_try_s=%.0f reason=%s", version, wait_s, e)
        return has_changed or refused != before

    def _follow_classes(self) -> None:
        """Pass on the classes that the one controller has written; where they are gone or damaged, those known stay.

        Raises: redis errors.
        """
        try:
            classes = read_classes(self._client, self._keys)
        except PacelineError as e:
            logger.warning("traffic classes cannot be read: %s", e)
            return
        if classes is not None and classes != self.classes:
            self.classes = classes
            if self._followers is not None:
                self._followers.classes_changed(classes)

    def _follow(self, desired: DesiredState) -> bool:
        if self.desired is not None and desired.gen < self.desired.gen:
            # Redis lost its data or an old writer came through: keep the newer record; the controller rewrites it
            logger.warning("desired generation went back from %d to %d; ignored", self.desired.gen, desired.gen)
            return False
        if self.desired is None or desired.gen > self.desired.gen:
            self.desired, self._retry_stage, self._retry_at = desired, False, 0.0
            self._engine_breaker.succeeded()
            if self._followers is not None:
                self._followers.desired_changed(desired)
        elif not self._retry_stage or time.monotonic() < self._retry_at:
            return False
        if desired.gen in (self.gen, self.failed_gen):
            return False
        return self._swap(desired)

    def _check_live(self) -> bool:
        """Report the live drafter as refused when it failed while serving."""
        reason = self._drafters.failures().get(self.version)
        if reason is None or self.failed_gen == self.gen or self.gen == 0:
            return False
        self.failed_gen, self.failed_reason = self.gen, f"failed while serving: {reason}"
        return True

    def _swap(self, desired: DesiredState) -> bool:
        if not self._retry_stage:
            self.staging_s = 0.0
        self._retry_stage, started = False, time.perf_counter()
        before, num_swaps = (self.version, self.canary_version), self.num_swaps
        try:
            if (
                self.canary_version not in ("", desired.canary_version, desired.version)
                or self.canary_version in self._drafters.failures()
            ):
                self._try_out("", 0, "")  # a slot that failed may be loaded with another version, which is on no trial
            if desired.version != self.version:
                if not self._staged(desired.version):
                    return False
                self._pauses_ms.append(self._drafters.publish(desired.version))
                self.num_swaps += 1
                self.version, self.swap_gen = desired.version, desired.gen
                if self.canary_version == desired.version:  # publishing it ended its trial
                    self.canary_version, self._canary_percent, self._canary_bucket = "", 0, ""
            wanted = (desired.canary_version, desired.canary_percent, desired.canary_bucket)
            if wanted != (self.canary_version, self._canary_percent, self._canary_bucket):
                if desired.canary_version != self.canary_version and not self._staged(desired.canary_version):
                    return False
                self._try_out(*wanted)
        except _AWAY as e:
            wait_s = self._engine_breaker.failed()
            logger.warning("drafter %s is tried again in %.0f s: %s", desired.version, wait_s, e)
            self._retry_stage, self._retry_at = True, time.monotonic() + wait_s
            self.failed_reason = str(e)
            return True
        except (PacelineError, ValueError, RuntimeError) as e:
            self.failed_gen, self.failed_reason = desired.gen, str(e)
            logger.error("drafter refused gen=%d version=%s reason=%s", desired.gen, desired.version, e)
            return True
        logger.info(
            "drafter live gen=%d version=%s canary=%s staging_s=%.3f",
            desired.gen,
            desired.version,
            desired.canary_version or "none",
            self.staging_s,
        )
        if (self.version, self.canary_version) != before:
            self._note_swap(
                time.perf_counter() - started, version=self.version, canary_version=self.canary_version or None,
                generation=desired.gen, pause_ms=self._pauses_ms[-1] if self.num_swaps > num_swaps else None,
            )  # fmt: skip
        self.gen = desired.gen
        self.failed_gen, self.failed_reason = None, ""
        self._engine_breaker.succeeded()
        return True

    def note_pause(self, pause_ms: float) -> None:
        """Report an exchange of drafters that was no order's, as between two windows of time. Any thread."""
        self._pauses_ms.append(pause_ms)

    def _note_swap(self, seconds: float, *, version: str, **attributes: Any) -> None:
        if self._deeds is not None:
            self._deeds.record_deed("swap", seconds, {"drafter_version": version, **attributes})

    def _staged(self, version: str) -> bool:
        """Stage a version; False when no slot is idle yet, or the registry hangs (the next pass tries again)."""
        started = time.perf_counter()
        try:
            is_staged = not version or self._drafters.stage(version)
        except (StorageHangsError, EngineAwayError) as e:  # no fault of the version
            logger.warning("drafter %s is staged when registry and engine answer: %s", version, e)
            is_staged = False
        if not is_staged:
            self._retry_stage = True
            return False
        self.staging_s += time.perf_counter() - started
        return True

    def _try_out(self, version: str, percent: int, bucket: str) -> None:
        self._drafters.set_canary(version, percent, bucket)
        self.canary_version, self._canary_percent, self._canary_bucket = version, percent, bucket

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            replica_id=self._replica_id,
            gen=self.gen,
            version=self.version,
            slots=self._drafters.versions(),
            failed_gen=self.failed_gen,
            failed_reason=self.failed_reason,
            swap_pause_ms=list(self._pauses_ms),
            swap_gen=self.swap_gen,
            canary_version=self.canary_version,
            failures=self._drafters.failures(),
            errors=self._drafters.num_errors(),
            class_versions=self._drafters.served(),
            refused=dict(self._refused),
            staging_s=self.staging_s,
            counters=self._read_counters(),
            engine=self._facts,
            target_version=self._target_version,
            ts=self._clock.now(),
        )

    def _read_counters(self) -> dict[str, int]:
        values = self._feedback.counters() if self._feedback is not None else {}
        return {name: int(values[name]) for name in ("produced", "delivered", "dropped") if name in values}

    def _report(self, *, force: bool) -> bool:
        if not force and time.monotonic() < self._next_report:
            return True
        try:
            write_report(self._client, self._keys, self.report())
        except OUTAGE_ERRORS as e:
            self._note_outage(e)
            return False
        except RedisError as e:
            logger.warning("replica report was refused: %s", e)
        self._next_report = time.monotonic() + self._report_s
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.is_redis_up:
                self._wait_for_hint()
            else:
                self._stop.wait(self._away_s)
            if not self._stop.is_set():
                try:
                    self.reconcile()
                except Exception:  # a replica that stops following the desired state would never swap again
                    logger.exception("reconciling failed; trying again")
                    self._stop.wait(1.0)

    def _wait_for_hint(self) -> None:
        """Wait for a poke or the poll interval; what is wrong with Redis is found by the pass behind it."""
        is_soon = (self._retry_stage and self._engine_breaker.is_up is not False) or self._has_loaded
        deadline = time.monotonic() + (min(0.2, self._poll_s) if is_soon else self._poll_s)
        try:
            if self._pubsub is None:
                self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
                self._pubsub.subscribe(self._keys.poke)
            while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
                if self._pubsub.get_message(timeout=min(left, 0.25)) is not None:
                    return
        except (RedisError, OSError) as e:
            logger.debug("no pokes are heard: %s", e)
            self._close_pubsub()
            # as long as a connection takes to be there again; one that refuses to subscribe is asked as often as it is read
            self._stop.wait(_LOST_S if isinstance(e, OUTAGE_ERRORS) else max(deadline - time.monotonic(), _LOST_S))

    def _close_pubsub(self) -> None:
        if self._pubsub is not None:
            try:
                self._pubsub.close()
            except (RedisError, OSError) as e:
                logger.debug("pub/sub connection was gone: %s", e)
            self._pubsub = None

    def _note_outage(self, error: Exception) -> None:
        if self.is_redis_up:
            logger.warning("redis is away, the replica keeps drafter %s: %s", self.version or "none", error)
        self._away_s = self._breaker.failed()
