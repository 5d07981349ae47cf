"""Orders: the policy's decisions and the operator's commands, how these wait, and how both are carried out."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from paceline.bandit.beliefs.observation import HostContext
from paceline.contracts import Decision, DesiredState
from paceline.errors import FencedError, PacelineError
from paceline.infra.controller.jobs import Jobs
from paceline.infra.controller.lives import Lives, WeightPool
from paceline.infra.controller.store import Books
from paceline.infra.controller.surroundings import Surroundings
from paceline.names import CLASS_RULE, is_class

logger = logging.getLogger(__name__)

COMMANDS = ("pause", "set_policy", "set_bank", "train", "pin", "unpin", "canary", "rollback", "assign", "unassign")
"""Methods of Orders that operators may call."""


class CommandQueue:
    """Commands that other threads give to the controller's thread, which runs them between two passes."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Callable[[], Any], Future]] = queue.Queue()

    def put(self, fn: Callable[[], Any], *, refused: str = "") -> Future:
        """Have `fn` run; the future has its result or error. `refused`: the reason why it will not. Thread-safe."""
        future: Future = Future()
        if refused:
            future.set_exception(PacelineError(refused))
        else:
            self._waiting.put((fn, future))
        return future

    def run(self, commit: Callable[[], None]) -> None:
        """Run what waits, each with a `commit` of its own, whose error is the command's error too."""
        while (command := self._next()) is not None:
            fn, future = command
            is_done = False
            try:
                result = fn()
                is_done = True
                commit()
            except (PacelineError, ValueError) as e:
                future.set_exception(e)
                if isinstance(e, FencedError):
                    raise
            except Exception as e:
                # what was carried out stays so in memory, and the next commit that Redis takes has it
                text = (
                    f"done, but not stored yet: it is as soon as Redis takes it ({e})" if is_done else f"not done: {e}"
                )
                future.set_exception(PacelineError(text))
                raise
            else:
                future.set_result(result)

    def fail(self, text: str) -> None:
        """Refuse what waits."""
        while (command := self._next()) is not None:
            command[1].set_exception(PacelineError(text))

    def _next(self) -> tuple[Callable[[], Any], Future] | None:
        """The next one that its caller still waits for."""
        while True:
            try:
                fn, future = self._waiting.get_nowait()
            except queue.Empty:
                return None
            if future.set_running_or_notify_cancel():
                return fn, future


async def outcome(call: Future, patience_s: float) -> Any:
    """What a command of `CommandQueue.put` returns, in an event loop; raises what it raises.

    Raises PacelineError when that takes longer than `patience_s`; what waits yet is withdrawn, what was begun goes on.
    """
    result = asyncio.wrap_future(call)
    await asyncio.wait([result], timeout=patience_s)
    if call.cancel():
        raise PacelineError(
            f"not done: the controller did not come to it within {patience_s:g} s, since what it does takes long; nothing was "
            "changed, try again later"
        )
    if not call.done():
        raise PacelineError(
            f"begun, and not at its end after {patience_s:g} s: it may be carried out yet; look at the service's state before "
            "you try again"
        )
    return await result


def _check_class(bucket: str) -> None:
    if not is_class(bucket):
        raise ValueError(f"class {CLASS_RULE}, got {bucket[:80]!r}")


class Orders:
    """Asks the policy and does what it says; does what operators say."""

    def __init__(self, books: Books, around: Surroundings, pool: WeightPool, lives: Lives, jobs: Jobs) -> None:
        self._books, self._state, self._policy = books, books.state, books.policy
        self._around, self._pool, self._lives, self._jobs = around, pool, lives, jobs

    # ---- the policy ---------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Let the policy decide and carry out what it decides; nothing while paused, or in a pass that changed what serves: what
        the policy would see is the state before."""
        desired = self._state.desired
        if self._state.is_paused or desired is None or self._is_foreign_live(desired):
            return
        if self._books.desired is not desired:
            return
        started = time.perf_counter()
        try:
            decisions = self._policy.tick(now, self._context(desired, now))
        except Exception as e:  # serving and feedback go on without decisions
            self._books.errors.note("the policy failed to decide", e)
            return
        closed = self._policy.closed_epoch()
        if closed is not None:  # a replay of the decision log needs the traffic as well (docs/policies.md)
            self._books.log("feedback", msgspec.to_builtins(closed))
        for decision in decisions:
            self._act(decision, now)
            if decision.action != "hold":
                self._note(decision, time.perf_counter() - started)

    def _note(self, decision: Decision, seconds: float) -> None:
        d = decision
        self._books.record_deed(
            "decision", seconds, decision_id=d.decision_id, action=d.action, bucket=d.bucket, arm=d.arm, policy=d.policy,
            drafter_version=d.version, expected_gain=d.expected_gain, expected_saving_s=d.expected_saving_s,
            expected_cost_s=d.expected_cost_s, propensity=d.propensity, reason=d.reason,
        )  # fmt: skip

    def _is_foreign_live(self, desired: DesiredState) -> bool:
        """Whether the service was given another target and its first drafter is not live yet."""
        return bool({desired.version, desired.first_version} & self._around.foreign.keys())

    def _context(self, desired: DesiredState, now: float) -> HostContext:
        state, around = self._state, self._around
        return HostContext(
            live_version=desired.version,
            first_version=desired.first_version,
            rows=dict(around.rows),
            rows_written=dict(state.rows_written),
            versions=self._pool.servable(),
            job_running=state.pending is not None or state.rollout.canary is not None,
            frozen=state.rollout.frozen_buckets(now),
            num_replicas=max(1, len(around.own)),
            learned_rows=around.learned_rows,
            shadow=around.shadow,
            class_versions=desired.class_versions,
            pools=state.classes.pools(),
            assigned=[*state.assigned, *self._lives.full_classes()],
        )

    def _act(self, decision: Decision, now: float) -> None:
        if decision.action == "train":
            self._jobs.order(decision, now)
        elif decision.version is not None and decision.action in ("recall", "rollback", "pin"):
            if self._around.is_foreign(decision.version):
                why = "it is for another target"
                self._lives.refuse(decision.version, why, now, decision.decision_id, decision.bucket)
                return
            self._lives.publish(decision.version, decision.reason, now, decision.decision_id, decision.bucket)

    # ---- operators ----------------------------------------------------------------------------------------------
    def pause(self, is_paused: bool = True) -> None:
        """Make no decisions (feedback is still folded), or make them again."""
        self._state.is_paused = is_paused
        self._books.note("decisions paused" if is_paused else "decisions resumed")

    def set_policy(self, name: str) -> None:
        """Switch the policy; raises ConfigError for an unknown one."""
        self._policy.set_policy(name)
        self._state.policy = name
        self._books.note(f"policy set to {name}")

    def set_bank(self, start_s: float) -> None:
        """Set the bank's starting balance, device-seconds; raises ValueError outside its range."""
        self._policy.set_bank(start_s)
        self._books.note(f"starting balance of the bank set to {start_s:g} device-seconds")

    def train(self, bucket: str, arm: str = "") -> int:
        """Start a training job now, paid or not; returns its decision id. Raises ValueError where that cannot be."""
        desired = self._books.desired
        if desired is None or self._state.pending is not None or self._is_foreign_live(desired):
            raise ValueError("a training job is in flight, or no drafter of this target is live yet; try again later")
        if (canary := self._state.rollout.canary) is not None:
            raise ValueError(f"drafter {canary.version} is on trial; wait for its verdict, or pin or roll back")
        now = self._books.clock.now()
        decision = self._policy.train_now(bucket, arm, now, self._context(desired, now))
        self._act(decision, now)
        self._books.note(f"training of {decision.arm} on {bucket} ordered (decision {decision.decision_id})")
        return decision.decision_id

    def pin(self, version: str) -> None:
        """Let a version serve every class but those assigned, and keep it until `unpin`.

        Raises: ManifestError when it is not in the registry, DrafterMismatchError when it is for another target.
        """
        self._around.servable_manifest(version)
        self._lives.manual("pin", version, f"pinned to {version} by the operator")

    def unpin(self) -> None:
        """Let the policy decide again."""
        self._policy.unpin()
        self._books.note("pin removed")

    def canary(self, version: str, bucket: str = "") -> None:
        """Try a version on part of the requests, or of a class's; see Lives.order_canary."""
        if bucket:
            _check_class(bucket)
        self._lives.order_canary(version, bucket)

    def assign(self, bucket: str, version: str) -> None:
        """Give a class a version of its own until `unassign`; the policy leaves the class alone meanwhile.

        Raises: ValueError for a name that no class can have, ManifestError when the version is not in the registry,
        DrafterMismatchError when it is for another target, on trial or there already.
        """
        _check_class(bucket)
        self._around.servable_manifest(version)
        reason = f"{version} assigned to class {bucket} by the operator"
        self._lives.assign(bucket, version, reason, self._books.clock.now(), 0)
        self._books.note(reason)

    def unassign(self, bucket: str) -> None:
        """Let the live version serve a class again; raises DrafterMismatchError when it has none of its own."""
        reason = f"class {bucket} given back to the live version by the operator"
        self._lives.unassign(bucket, reason, self._books.clock.now())
        self._books.note(reason)

    def rollback(self, version: str | None = None) -> str:
        """Take back what the policy gave to classes, or go back to an older version; see Lives.rollback."""
        return self._lives.rollback(version)
