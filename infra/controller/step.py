"""What happens in one pass of the controller: feedback, context, decisions, the job in flight, commit."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from paceline.adapt.versions.lifecycle import DrafterStatus
from paceline.bandit.beliefs.observation import HostContext, JobCosts
from paceline.contracts import (
    Decision,
    DesiredState,
    ReplicaReport,
    TrainJob,
    TrainResult,
)
from paceline.errors import DrafterMismatchError, PacelineError
from paceline.infra.controller.core import COMMIT_ENTRIES
from paceline.infra.controller.jobs import order_job
from paceline.infra.controller.lives import ControllerRollout
from paceline.infra.controller.rollout import refuses_canary
from paceline.infra.controller.store import PendingJob
from paceline.infra.state.desired import read_reports
from paceline.infra.state.manifest_facts import learned_rows, shadow_lengths

logger = logging.getLogger(__name__)

_MAX_SWAPS = 500
_SWEEP_S = 30.0


class ControllerPass(ControllerRollout):
    """Asks the Controller what to do and does it; single-threaded."""

    _sweep_due = 0.0

    def step(self, block_ms: int = 250) -> int:
        """One pass: feedback, context, decisions, the job, commit. Returns the entries read.

        Raises: redis errors (call again later, nothing is lost), FencedError (stop).
        """
        self._settle()
        num_entries = self._read(block_ms)
        now = self._clock.now()
        if now >= self._context_due:
            self._context_due = now + self.config.context_every_s
            self._refresh_context()
        self._step_rollout(num_entries, now)
        self._poll_job(now)
        self._tick(now)
        self._take_drained()
        due = now >= self._commit_due or len(self._commit.ack_ids) >= COMMIT_ENTRIES
        if not self._commit.is_empty and (due or self._commit.decisions or self._commit.desired):
            self._flush()
        return num_entries

    def _settle(self) -> None:
        """Find out first whether a commit whose reply was lost has happened; nothing may be folded before."""
        if not self._commit.is_empty and self._commit.is_uncertain:
            self._flush()

    def _tick(self, now: float) -> None:
        state = self.state
        if state.is_paused or state.desired is None:
            return
        if {state.desired.version, state.desired.first_version} & self._foreign:
            return  # the service was given another target and its first drafter is not live yet
        context = self._context(state.desired, now)
        try:
            decisions = self.controller.tick(now, context)
        except Exception as e:  # serving and feedback go on without decisions
            self._note_error("the policy failed to decide", e)
            return
        closed = self.controller.closed_epoch()
        if closed is not None:  # a replay of the decision log needs the traffic as well (docs/policies.md)
            self._commit.log.append(("feedback", msgspec.to_builtins(closed)))
        for decision in decisions:
            self._act(decision, now)

    def _context(self, desired: DesiredState, now: float) -> HostContext:
        state = self.state
        return HostContext(
            live_version=desired.version,
            first_version=desired.first_version,
            rows=dict(self._rows),
            rows_written=dict(state.rows_written),
            versions=self._servable(),
            job_running=state.pending is not None or state.rollout.canary is not None,
            frozen=state.rollout.frozen_buckets(now),
            num_replicas=max(1, len(self._reports)),
            learned_rows=learned_rows(self._versions),
            shadow=shadow_lengths(self._versions),
        )

    def _act(self, decision: Decision, now: float) -> None:
        if decision.action == "train":
            job = self._make_job(decision)
            if job is None or self.state.pending is not None:
                why = "no trace shards are left, or they cannot be read" if job is None else "a job is in flight"
                self._finish_job(
                    decision.decision_id,
                    TrainResult(
                        job_id=f"none-{decision.decision_id}",
                        status="failed",
                        version=None,
                        reason=why,
                        train_s=0.0,
                        shadow_s=0.0,
                    ),
                    now,
                )
                return
            self.state.pending = PendingJob(job=job, decision_id=decision.decision_id, since=now)
            self._note_order(job, now)
        elif decision.action in ("recall", "rollback", "pin") and decision.version is not None:
            if self._is_foreign(decision.version):
                return
            self._publish(decision.version, decision.reason, now, decision.decision_id, bucket=decision.bucket)

    # ---- training -----------------------------------------------------------------------------------------------
    def _make_job(self, decision: Decision) -> TrainJob | None:
        assert self.state.desired is not None
        try:
            shards = self._own_shards()
        except (OSError, PacelineError) as e:  # the policy holds the job for ordered: it must come to an end
            self._note_error("the trace store cannot be read for a job", e)
            return None
        return order_job(
            decision,
            self.controller.arm_of(decision),
            shards,
            desired=self.state.desired,
            policy=self.config.policy,
        )

    def _own_shards(self) -> list[Any]:
        return [s for s in self._shards.list_shards() if self.config.target_version in ("", s.target_version)]

    def _poll_job(self, now: float) -> None:
        pending = self.state.pending
        if pending is None or self._commit.decisions or self._commit.desired:
            return  # the order is not committed yet: nothing may be launched before it is
        result = self._coordinator.poll(self._client, pending.job)
        if result is None:
            return
        self.state.pending = None
        self._commit.delete += self._coordinator.leftovers(pending.job.job_id)
        self._coordinator.forget()
        self._commit.log.append(
            ("job", {**msgspec.to_builtins(result), "bucket": pending.job.bucket, "arm": pending.job.arm.name})
        )
        self._note_result(pending.job, result, now)
        self._finish_job(pending.decision_id, result, now, pending.job)
        logger.info("training ended job=%s status=%s reason=%s", result.job_id, result.status, result.reason)

    def _finish_job(self, decision_id: int, result: TrainResult, now: float, job: TrainJob | None = None) -> None:
        try:
            outcome = self.controller.job_finished(result, decision_id=decision_id, now=now, costs=JobCosts())
        except Exception as e:
            self._note_error("the policy could not take a training result", e)
            return
        lives, version = self.state.lifecycle, result.version
        if outcome.publish is not None and not self._is_foreign(outcome.publish):
            bucket, arm = (job.bucket, job.arm.name) if job is not None else ("", "")
            self._publish(outcome.publish, outcome.reason, now, decision_id, bucket=bucket, arm=arm)
        elif version is not None and lives.status(version) == DrafterStatus.SHADOWED:
            self._move(version, DrafterStatus.RETIRED, outcome.reason, now)

    # ---- what replicas and stores say ---------------------------------------------------------------------------
    def _refresh_context(self) -> None:
        try:
            self._look_at_stores()
        except (OSError, PacelineError) as e:
            self._note_error("trace store or registry cannot be read", e)
        self._reports = read_reports(self._client, self._keys)
        self._keep_limits()
        self._lag = self._consumer.lag()
        now = self._clock.now()
        for report in self._reports:
            self._take_report(report, now)
        self._book_swap(now)

    def _keep_limits(self) -> None:
        """Limits of trace store and version pool hold here too: a replica that writes nothing sweeps nothing."""
        now, trace = self._clock.now(), self.config.trace
        try:
            if trace is not None and now >= self._sweep_due:
                self._sweep_due = now + _SWEEP_S
                self._shards.enforce_limits(trace.max_bytes, trace.max_age_s, now)
            self._tend_pool()
        except (OSError, PacelineError) as e:
            self._note_error("limits of the stores could not be enforced", e)

    def _look_at_stores(self) -> None:
        shards = self._own_shards()
        seen = set(self.state.seen_shards)
        rows: dict[str, int] = {}
        for s in shards:
            rows[s.bucket] = rows.get(s.bucket, 0) + s.num_rows
            if s.shard_id not in seen:
                self.state.rows_written[s.bucket] = self.state.rows_written.get(s.bucket, 0) + s.num_rows
        self._rows = rows
        self.state.seen_shards = [s.shard_id for s in shards]
        target = self.config.target_version
        every = self._registry.list()
        self._versions = [m for m in every if target in ("", m.target_version)]
        self._foreign = {m.version for m in every} - {m.version for m in self._versions}
        self.state.history = [v for v in self.state.history if v not in self._foreign]

    def _take_report(self, report: ReplicaReport, now: float) -> None:
        state, desired = self.state, self.state.desired
        if report.counters:
            self._counters_seen[report.replica_id] = dict(report.counters)
        swapped = report.gen if report.swap_gen is None else report.swap_gen
        mark = f"{report.replica_id}:{swapped}"
        if swapped > 1 and report.swap_pause_ms and mark not in state.seen_swaps:
            state.seen_swaps = [*state.seen_swaps, mark][-_MAX_SWAPS:]
            state.swap_times = [*state.swap_times, report.ts][-_MAX_SWAPS:]
            state.swap_pauses_ms = [*state.swap_pauses_ms, report.swap_pause_ms[-1]][-_MAX_SWAPS:]
        if desired is not None and report.failed_gen == desired.gen and self._commit.desired is None:
            if state.rollout.canary is not None and refuses_canary(state.rollout.canary, report, desired.gen):
                return  # the live version is well
            back = self._version_before(desired) or desired.first_version
            if back != desired.version:
                # a later rollback must not lead back to it
                state.history = [v for v in state.history if v != desired.version]
                reason = f"replica {report.replica_id} refused {desired.version}: {report.failed_reason}"
                self._manual("rollback", back, reason, left=DrafterStatus.ROLLED_BACK)

    # ---- the operator's orders ----------------------------------------------------------------------------------
    def pause(self, is_paused: bool = True) -> None:
        """Make no decisions (feedback is still folded), or make them again."""
        self.state.is_paused = is_paused
        self._note("decisions paused" if is_paused else "decisions resumed")

    def set_policy(self, name: str) -> None:
        """Switch the policy; raises ConfigError for an unknown one."""
        self.controller.set_policy(name)
        self.state.policy = name
        self._note(f"policy set to {name}")

    def set_bank(self, start_s: float) -> None:
        """Set the bank's starting balance, device-seconds; raises ValueError outside its range."""
        self.controller.set_bank(start_s)
        self._note(f"starting balance of the bank set to {start_s:g} device-seconds")

    def train(self, bucket: str, arm: str) -> int:
        """Start a training job now, paid or not; returns its decision id. Raises ValueError where that cannot be."""
        desired = self._base()
        if (
            desired is None
            or self.state.pending is not None
            or {desired.version, desired.first_version} & self._foreign
        ):
            raise ValueError("a training job is in flight, or no drafter of this target is live yet; try again later")
        now = self._clock.now()
        decision = self.controller.train_now(bucket, arm, now, self._context(desired, now))
        self._act(decision, now)
        self._note(f"training of {arm} on {bucket} ordered (decision {decision.decision_id})")
        return decision.decision_id

    def pin(self, version: str) -> None:
        """Make a version live and keep it until `unpin`.

        Raises: ManifestError when it is not in the registry, DrafterMismatchError when it is for another target.
        """
        self.check_servable(version)
        self._manual("pin", version, f"pinned to {version} by the operator")

    def unpin(self) -> None:
        self.controller.unpin()
        self._note("pin removed")

    def rollback(self, version: str | None = None) -> str:
        """Make the version before the live one (or the named one) live again; returns it."""
        desired = self.state.desired
        if desired is None:
            raise PacelineError("there is no live drafter to roll back from")
        back = version or self._version_before(desired)
        if back is None:
            raise PacelineError(
                f"{desired.version} is the only version that was ever live; pin one of `paceline versions`"
            )
        self.check_servable(back)
        self._manual("rollback", back, f"rolled back from {desired.version} to {back} by the operator")
        return back

    def _version_before(self, desired: DesiredState) -> str | None:
        """The version of this target that was live last before the desired one and has not come to an end."""
        out = {desired.version, *self.state.lifecycle.barred(), *self.state.evicted}
        return next((v for v in reversed(self.state.history) if v not in out and not self._is_foreign(v)), None)

    def _is_foreign(self, version: str) -> bool:
        """Whether a version is known to be for another target; what cannot be read is left to the replicas to refuse."""
        try:
            self._registry.get_manifest(version, target_version=self.config.target_version or None)
        except DrafterMismatchError as e:
            logger.warning("not used: %s", e)
            return True
        except (PacelineError, OSError) as e:
            logger.debug("manifest of %s cannot be read: %s", version, e)
        return False

    def _manual(self, action: str, version: str, reason: str, *, left: DrafterStatus = DrafterStatus.RETIRED) -> None:
        now = self._clock.now()
        made = self.controller.manual(action, version, now, reason)
        self._want(version, reason, now, made.decision_id, left=left, force=True)
        logger.warning("drafter %s version=%s reason=%s", action, version, reason)
