"""Jobs: at most one training job per service, under a lease in Redis: its order, its watch, and what came of it.

A job is a burst of its bucket's learner, on the newest traces, rehearsed with the newest of the others. It is launched only by whoever
sets the lease (SET NX PX) together with an attempt mark; the worker itself renews the lease and writes its result, so both
outlive the controller. A restarted controller finds a result (fold it), a lease (wait), an attempt mark without either (the
worker died: failed), or nothing (launch).
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import redis
from redis.exceptions import RedisError, WatchError

from paceline.adapt.data.trace_store import handed_over, newest
from paceline.adapt.versions.lifecycle import DrafterStatus
from paceline.bandit.controller.state import JobOutcome
from paceline.config import PolicyConfig
from paceline.contracts import ArmSpec, Decision, DesiredState, TrainJob, TrainResult, burst_plan, decode, encode
from paceline.errors import PacelineError
from paceline.infra.controller.lives import Lives
from paceline.infra.controller.store import Books, HostConfig, PendingJob
from paceline.infra.controller.surroundings import Surroundings
from paceline.infra.state.redis_clients import Keys, producer_client
from paceline.infra.state.room import Room
from paceline.machine import Clock
from paceline.names import tenant_of

logger = logging.getLogger(__name__)

_RESULT_TTL_S = 24 * 3600
BEAT_SHARE = 0.25
"""Share of its life after which a worker renews its lease."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the lease key."""

    job_id: str
    token: str
    """Distinguishes two launches of the same job."""
    host: str
    used_s: float | None = None
    """Device-seconds that the worker has taken so far; None until it reports."""


def read_lease(client: redis.Redis, keys: Keys) -> Lease | None:
    """The lease of the job in flight, None where there is none or it is damaged; `client` may be a pipeline that watches."""
    data = client.get(keys.train)
    try:
        return None if data is None else decode(data, Lease)  # type: ignore[arg-type]
    except msgspec.DecodeError as e:
        logger.error("the lease of the training job in Redis (%s) is damaged and counts for nothing: %s", keys.train, e)
        return None


class WorkerLease:
    """The worker's end of the lease: picklable, connects on first use, renews in its own thread.

    `should_stop` is true when the controller asked for a stop, another job took the lease, or the time limit is over, which
    counts from the first time that it is asked: behind imports and loading.
    """

    def __init__(
        self, redis_url: str, keys_model: str, job_id: str, token: str, *, ttl_s: float, limit_s: float
    ) -> None:
        self._url, self._model = redis_url, keys_model
        self.job_id, self._token = job_id, token
        self._ttl_s, self._limit_s = ttl_s, limit_s
        self._client: redis.Redis | None = None
        self._thread: threading.Thread | None = None
        self._stop_asked = False
        self._ended: threading.Event | None = None
        self._deadline: float | None = None
        self._is_finished = False
        self.clock: Callable[[], float] | None = None
        """Device-seconds that the worker has taken, told with every beat; the worker sets it."""
        self._turn = threading.Lock()
        """Of heartbeat and finish: a beat that comes late must not renew what was given back."""

    def __enter__(self) -> WorkerLease:
        """Begin to renew the lease."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="train-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._ended is not None and self._thread is not None
        self._ended.set()
        self._thread.join(5.0)

    def should_stop(self) -> bool:
        if self._deadline is None:
            self._deadline = time.monotonic() + self._limit_s
        return self._stop_asked or time.monotonic() > self._deadline

    def heartbeat(self) -> None:
        """Renew once, unless the job is finished; errors are left to the next beat: Redis may be away for a while."""
        with self._turn:
            if not self._is_finished:
                self._renew()

    def _renew(self) -> None:
        client, keys = self._connect(), Keys(self._model)
        try:
            with client.pipeline(transaction=True) as pipe:
                # the result too: a beat that the server carries out late, behind `finish`, must fail
                pipe.watch(keys.train, keys.train_result(self.job_id))
                lease = read_lease(pipe, keys)
                if lease is not None and (lease.job_id, lease.token) != (self.job_id, self._token):
                    self._stop_asked = True
                    return
                if pipe.get(keys.train_stop) == self.job_id.encode():
                    self._stop_asked = True
                used_s = None if self.clock is None else self.clock()
                mine = Lease(job_id=self.job_id, token=self._token, host=socket.gethostname(), used_s=used_s)
                pipe.multi()
                pipe.set(keys.train, encode(mine), px=int(self._ttl_s * 1000))
                pipe.execute()
        except WatchError:
            logger.debug("lease changed while it was renewed")
        except (RedisError, OSError) as e:
            logger.debug("lease not renewed: %s", e)

    def finish(self, result: TrainResult, patience_s: float = 30.0) -> bool:
        """Write the result and give the lease back; waits for Redis for at most patience_s. False: not written.

        No heartbeat renews the lease from here on.
        """
        with self._turn:
            self._is_finished = True
            return self._finish(result, patience_s)

    def _finish(self, result: TrainResult, patience_s: float) -> bool:
        client, keys = self._connect(), Keys(self._model)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                with client.pipeline(transaction=True) as pipe:
                    pipe.watch(keys.train)
                    lease = read_lease(pipe, keys)
                    pipe.multi()
                    pipe.set(keys.train_result(self.job_id), encode(result), ex=_RESULT_TTL_S, nx=True)
                    if lease is not None and lease.token == self._token:
                        pipe.delete(keys.train)
                    pipe.publish(keys.poke, b"train")
                    pipe.execute()
                return True
            except WatchError:
                continue
            except (RedisError, OSError) as e:
                if time.monotonic() > deadline:
                    logger.error("training result could not be written: %s", e)
                    return False
                time.sleep(0.2)

    def _connect(self) -> redis.Redis:
        if self._client is None:
            self._client = producer_client(self._url, timeout_s=2.0)
        return self._client

    def _run(self) -> None:
        assert self._ended is not None
        while not self._ended.is_set():
            self.heartbeat()
            self._ended.wait(self._ttl_s * BEAT_SHARE)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_client": None, "_thread": None, "_ended": None, "_turn": None, "clock": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _turn=threading.Lock())


class JobHandle(Protocol):
    """A launched worker."""

    def is_alive(self) -> bool: ...

    def result(self) -> TrainResult | None:
        """What it returned; None while it runs or when it ended without returning one."""

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts the worker of a job; it must enter `lease`, train, and call `lease.finish`."""

    def launch(self, job: TrainJob, lease: WorkerLease) -> JobHandle: ...


@dataclass(kw_only=True, slots=True)
class _Watch:
    """What this controller has seen of the job in flight since it launched or found it."""

    handle: JobHandle | None = None
    job_id: str = ""
    """Job that `handle` and `token` belong to; '' = another controller launched the one in flight."""
    token: str = ""
    launched_at: float | None = None
    alive_at: float | None = None
    used_s: float | None = None
    """Device-seconds that the worker last reported; None: nothing yet."""
    began_at: float | None = None
    """When its first report was seen."""
    used_at: float | None = None
    """When the last one was."""
    stop_at: float | None = None
    was_killed: bool = False


class TrainCoordinator:
    """At most one job in flight; `poll` drives it and returns the result exactly once it is known.

    The caller persists which job is pending, deletes `leftovers` in the transaction that folds the result, and calls
    `forget`.
    """

    def __init__(
        self,
        config: HostConfig,
        room: Room,
        launcher: Launcher,
        *,
        clock: Clock,
        owner: str,
    ) -> None:
        """room: for what a full Redis would refuse, with a client of it."""
        self._config, self._client, self._keys, self._launcher = config, room.client, Keys(config.model), launcher
        self._room = room
        self._clock, self._owner, self._watch = clock, owner, _Watch()
        self._start_s = max(config.start_s, config.lease_ttl_s)
        self._foreign_since: float | None = None
        """Since when another job's lease keeps this one waiting."""

    def poll(self, job: TrainJob) -> TrainResult | None:
        """Launch the job if nobody did, watch it, enforce its time limit. Raises redis errors (call again later)."""
        now, watch = self._clock.now(), self._watch
        if (written := self._written(job)) is not None:
            return written
        lease = read_lease(self._client, self._keys)
        if lease is not None and lease.job_id != job.job_id:
            return self._wait_for(lease, job, now)
        self._foreign_since = None
        if lease is not None and lease.used_s is not None and lease.used_s != watch.used_s:
            watch.began_at = watch.began_at or now
            watch.used_s, watch.used_at = lease.used_s, now
        handle = watch.handle if watch.job_id == job.job_id else None
        if lease is None and handle is None and not self._client.exists(self._keys.train_attempt(job.job_id)):
            self._launch(job, now)
            return None
        if watch.alive_at is None or watch.launched_at is None:
            watch.alive_at = watch.launched_at = now
        if handle is not None:
            returned = handle.result()
            if returned is not None:
                is_lost = (
                    returned.status == "failed" and returned.train_s == 0.0
                )  # whoever tells of its end, not itself
                return msgspec.structs.replace(returned, train_s=self._taken_s()) if is_lost else returned
            if handle.is_alive():
                watch.alive_at = now
            elif lease is None or lease.token == watch.token:
                return self._lost(job, lease, "the training process ended without a result")
        elif lease is not None:
            watch.alive_at = now
        if now - watch.alive_at > 1.5 * self._config.lease_ttl_s:
            return self._lost(job, lease, "the training process is gone")
        return self._enforce_limit(job, lease, now)

    def _wait_for(self, lease: Lease, job: TrainJob, now: float) -> TrainResult | None:
        """Another job, of a controller before this one, is still running: it is asked to stop, and its lease waited for."""
        if self._foreign_since is None:
            self._foreign_since = now
            self.request_stop(lease.job_id)
        waited_s = now - self._foreign_since
        if waited_s < job.time_limit_s + self._start_s:
            return None
        self._foreign_since = None
        reason = (
            f"job {lease.job_id}, which no controller knows, held the lease for {waited_s:.0f} s more: end its process "
            f"(ray::train_task) on {lease.host or 'its node'}"
        )
        logger.error("training could not begin job=%s: %s", job.job_id, reason)
        return failed(job.job_id, reason)

    def _written(self, job: TrainJob) -> TrainResult | None:
        data = self._client.get(self._keys.train_result(job.job_id))
        try:
            return None if data is None else decode(data, TrainResult)  # type: ignore[arg-type]
        except msgspec.DecodeError as e:
            return failed(job.job_id, f"its result in Redis is damaged: {e}", train_s=self._taken_s())

    def request_stop(self, job_id: str) -> None:
        """Ask the worker to stop at its next check."""
        self._room.write(lambda: self._client.set(self._keys.train_stop, job_id, ex=3600))

    def leftovers(self, job_id: str) -> list[str]:
        """Keys that the transaction which folds the job's result deletes."""
        return [self._keys.train_result(job_id), self._keys.train_stop, self._keys.train_attempt(job_id)]

    def kill(self) -> None:
        """End the worker now (service shutdown)."""
        if self._watch.handle is not None:
            self._watch.handle.kill()

    def forget(self) -> None:
        """The result is folded: be ready for the next job."""
        self._watch = _Watch()

    def _launch(self, job: TrainJob, now: float) -> None:
        token = f"{self._owner}:{now:.6f}"
        lease = Lease(job_id=job.job_id, token=token, host=socket.gethostname())
        if not self._room.write(lambda: self._take(lease)):
            return
        self._watch = _Watch(job_id=job.job_id, token=token, launched_at=now, alive_at=now)
        config = self._config
        worker_lease = WorkerLease(
            config.redis_url, config.model, job.job_id, token, ttl_s=config.lease_ttl_s, limit_s=job.time_limit_s
        )
        logger.info(
            "training launched job=%s bucket=%s arm=%s base=%s", job.job_id, job.bucket, job.arm.name, job.base_version
        )
        try:
            self._watch.handle = self._launcher.launch(job, worker_lease)
        except Exception as e:
            logger.exception("training could not be launched job=%s", job.job_id)
            worker_lease.finish(failed(job.job_id, f"the training process could not be started: {e}"), patience_s=0.0)

    def _take(self, lease: Lease) -> bool:
        """Set the lease and the attempt mark of a job; False: somebody else was first."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.watch(self._keys.train)
            if read_lease(pipe, self._keys) is not None:
                return False
            pipe.multi()
            pipe.set(self._keys.train, encode(lease), px=int(self._start_s * 1000))  # time to start a process
            pipe.set(self._keys.train_attempt(lease.job_id), lease.token, ex=7 * 24 * 3600)
            pipe.delete(self._keys.train_stop)
            pipe.publish(self._keys.poke, b"train")
            try:
                pipe.execute()
            except WatchError:
                return False
        return True

    def _enforce_limit(self, job: TrainJob, lease: Lease | None, now: float) -> TrainResult | None:
        """Stop, then kill a worker that is over its limit and has not stopped by itself: one that is starved of its core may
        not get to look at its clock, and slows serving down as long as it lives."""
        watch = self._watch
        assert watch.launched_at is not None
        if watch.began_at is None:
            is_over = now - watch.launched_at > job.time_limit_s + self._start_s
        else:
            is_over = now - watch.began_at > job.time_limit_s + self._config.stop_grace_s
        if not is_over:
            return None
        if watch.stop_at is None:
            watch.stop_at = now
            self.request_stop(job.job_id)
            logger.warning("training over its time limit, asked to stop job=%s", job.job_id)
        elif now - watch.stop_at > self._config.stop_grace_s and not watch.was_killed:
            watch.was_killed = True
            logger.warning("training did not stop, killed job=%s", job.job_id)
            self.kill()
            return self._lost(job, lease, f"killed after its time limit of {job.time_limit_s:g} s")
        return None

    def _lost(self, job: TrainJob, lease: Lease | None, reason: str) -> TrainResult:
        if lease is not None and lease.job_id == job.job_id:
            self._client.delete(self._keys.train)
        if (written := self._written(job)) is not None:  # it may have ended well between two looks
            return written
        return failed(job.job_id, reason, train_s=self._taken_s())

    def _taken_s(self) -> float:
        """Device-seconds that a worker without a result has taken: what it reported, and at most a beat since."""
        used_s, used_at = self._watch.used_s, self._watch.used_at
        if used_s is None or used_at is None:
            return 0.0
        return used_s + min(max(self._clock.now() - used_at, 0.0), BEAT_SHARE * self._config.lease_ttl_s)


def failed(job_id: str, reason: str, *, train_s: float = 0.0) -> TrainResult:
    """Result of a job that ended without one."""
    return TrainResult(job_id=job_id, status="failed", version=None, reason=reason, train_s=train_s, shadow_s=0.0)


class Jobs:
    """Orders the job of a decision, follows it, hands its outcome to the policy and its version to the life cycles."""

    def __init__(self, books: Books, around: Surroundings, lives: Lives, coordinator: TrainCoordinator) -> None:
        self._books, self._around, self._lives, self._coordinator = books, around, lives, coordinator

    def order(self, decision: Decision, now: float) -> None:
        """Make the job of a train decision the pending one; it is launched once that is committed."""
        state, job = self._books.state, self._make(decision)
        if job is None or state.pending is not None:
            why = "no trace shards are left, or they cannot be read" if job is None else "a job is in flight"
            self._finish(decision.decision_id, failed(f"none-{decision.decision_id}", why), now)
            return
        state.pending = PendingJob(job=job, decision_id=decision.decision_id, since=now)
        self._lives.note_order(job, now)

    def _make(self, decision: Decision) -> TrainJob | None:
        desired = self._books.state.desired
        assert desired is not None
        try:
            shards = self._around.own_shards()
        except (OSError, PacelineError) as e:  # the policy holds the job for ordered: it must come to an end
            self._books.note_storage("the trace store cannot be read for a job", e)
            return None
        return order_job(
            decision, self._books.policy.arm_of(decision), shards, desired=desired, policy=self._books.config.policy
        )

    def poll(self, now: float) -> None:
        """Launch or watch the pending job; fold its result once there is one. Raises redis errors."""
        books, pending = self._books, self._books.state.pending
        if pending is None or books.pending.decisions or books.pending.desired:
            return  # the order is not committed yet: nothing may be launched before it is
        result = self._coordinator.poll(pending.job)
        if result is None:
            return
        books.state.pending = None
        books.pending.delete += self._coordinator.leftovers(pending.job.job_id)
        self._coordinator.forget()
        books.log("job", {**msgspec.to_builtins(result), "bucket": pending.job.bucket, "arm": pending.job.arm.name})
        books.record_deed(
            "training", now - pending.since, decision_id=pending.decision_id, job_id=result.job_id,
            bucket=pending.job.bucket, arm=pending.job.arm.name, base_version=pending.job.base_version,
            status=result.status, drafter_version=result.version, num_rows=result.num_rows, train_s=result.train_s,
            shadow_s=result.shadow_s,
            reason=None if result.status == "failed" else result.reason,  # of a crash it is whatever a library said
        )  # fmt: skip
        self._lives.note_result(pending.job, result, now)
        self._finish(pending.decision_id, result, now)
        logger.info("training ended job=%s status=%s reason=%s", result.job_id, result.status, result.reason)

    def _finish(self, decision_id: int, result: TrainResult, now: float) -> None:
        try:
            outcome = self._books.policy.job_finished(result, decision_id=decision_id, now=now)
        except Exception as e:
            self._books.errors.note("the policy could not take a training result", e)
            return
        version = result.version
        if outcome.publish is not None:
            bucket, arm = outcome.decision.bucket, outcome.decision.arm or ""
            if self._around.is_foreign(outcome.publish):
                self._lives.refuse(outcome.publish, "it is for another target", now, decision_id, bucket)
                return
            self._lives.publish(outcome.publish, outcome.reason, now, decision_id, bucket, arm=arm)
            if self._books.state.rollout.canary is None:  # else the others wait for the verdict
                for other in self._together(outcome):
                    self._lives.publish(outcome.publish, outcome.reason, now, decision_id, other, arm=arm)
        elif version is not None and self._books.state.lifecycle.status(version) == DrafterStatus.SHADOWED:
            self._lives.move(version, DrafterStatus.RETIRED, outcome.reason, now)

    def _together(self, outcome: JobOutcome) -> list[str]:
        """Classes that learned together with the decision's and still have the version that the job began from."""
        state, desired = self._books.state, self._books.desired
        assert desired is not None, "a job has a version to begin from"
        names = {*state.classes.published.names} - {*state.assigned}
        base = outcome.decision.context.get("base_version")
        return [b for b in outcome.others if b in names and desired.version_of(b) == base]

    def stop(self, patience_s: float) -> None:
        """Ask the job in flight to stop, wait for its end for at most patience_s, then kill it."""
        pending = self._books.state.pending
        if pending is None:
            return
        self._coordinator.request_stop(pending.job.job_id)
        deadline = time.monotonic() + patience_s
        while self._books.state.pending is not None and time.monotonic() < deadline:
            self.poll(self._books.clock.now())
            time.sleep(0.05)
        if self._books.state.pending is not None:
            self.kill()

    def kill(self) -> None:
        """End the worker of the job in flight now; no error when there is none."""
        self._coordinator.kill()


def order_job(
    decision: Decision, arm: ArmSpec, shards: list[Any], *, desired: DesiredState, policy: PolicyConfig
) -> TrainJob | None:
    """Turn a train decision into a job; None when the bucket has no shards.

    Args:
        arm: sized arm; twice its rows are handed over, since the learner may have read part of them, but no shard that was
            whole before a bucket's present text began.
        shards: ShardInfo of the target, oldest first. For a tenant's own bucket only those of its own buckets count, for any
            other bucket those of nobody's own.
    """
    shards = [s for s in shards if tenant_of(s.bucket) == tenant_of(decision.bucket)]
    together = {decision.bucket, *decision.context.get("others", ())}
    present = {bucket: [s for s in shards if s.bucket == bucket] for bucket in together}
    for bucket, num_rows in decision.context.get("usable_rows", {}).items():
        present[bucket] = newest(present.get(bucket, []), num_rows)
    of_now = {s.shard_id for found in present.values() for s in found}
    others = sorted({s.bucket for s in shards} - together)
    own, rehearsal = handed_over(
        arm, [s for s in shards if s.shard_id in of_now], [[s for s in shards if s.bucket == b] for b in others]
    )
    if not own:
        return None
    base = desired.version_of(decision.bucket)
    text = "\n".join((str(decision.decision_id), base, decision.bucket, arm.name, str(arm.num_rows), own[-1].shard_id))
    limit_s = float(decision.context.get("time_limit_s", policy.job_time_limit_s))
    return TrainJob(
        job_id=hashlib.sha256(text.encode()).hexdigest()[:16],
        bucket=decision.bucket,
        arm=arm,
        base_version=base,
        first_version=desired.first_version,
        shard_ids=[s.shard_id for s in own],
        rehearsal_shard_ids=[s.shard_id for s in rehearsal],
        seed=policy.seed + decision.decision_id,
        time_limit_s=min(limit_s, policy.job_time_limit_s),
        min_gain=float(decision.context.get("min_gain", 0.0)),
        plan=burst_plan(decision),
        text_began=float(decision.context.get("text_began", 0.0)),
    )
