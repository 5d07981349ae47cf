"""Lives: each version's way from accepted to live: life cycle, canary, desired record, and the pool of old weights.

Everything that changes here is part of the controller's one commit: life cycle, canary and desired record agree whatever
moment the process is killed at. Weights are deleted only after the commit that gives them up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import msgspec

from paceline.adapt.versions.lifecycle import JOB_PREFIX, DrafterStatus, Transition
from paceline.adapt.versions.pool import best_versions, choose_evictions
from paceline.contracts import (
    DesiredState,
    DrafterManifest,
    EngineFacts,
    FeedbackBatch,
    ReplicaReport,
    TrainJob,
    TrainResult,
)
from paceline.errors import DrafterMismatchError, PacelineError, RequestError
from paceline.infra.controller import rollout
from paceline.infra.controller.rollout import Canary, Outcome, Verdict
from paceline.infra.controller.store import Books, SwapInFlight
from paceline.infra.controller.surroundings import Surroundings
from paceline.infra.state.desired import known_desired
from paceline.infra.state.manifest_facts import shadow_lengths

logger = logging.getLogger(__name__)

_S = DrafterStatus
_SWAP_PATIENCE_S = 60.0
_KEPT_HISTORY = 3
"""Latest versions that were live: rollbacks lead there, so their weights stay."""
MAX_ASSIGNED = 256
"""Classes that may have versions of their own: more buckets than a replica tells apart, few enough for one record."""


class Lives:
    """Carries versions through their life; single-threaded."""

    def __init__(self, books: Books, around: Surroundings) -> None:
        self._books, self._around, self._state, self._policy = books, around, books.state, books.policy
        self.config, self._holdback_percent = books.config.rollout, books.config.policy.holdback_percent
        self._taken: dict[str, tuple[int, int]] = {}
        """Version on trial or under guard -> the look at the replicas that it was judged by last: a look, generation."""
        self._refused: set[tuple[str, str]] = set()
        """(replica, version of a class) whose refusal was noted."""

    # ---- life cycle ---------------------------------------------------------------------------------------------
    def _log_life(self, made: Transition) -> None:
        self._books.log("lifecycle", msgspec.to_builtins(made))
        before = made.before.value if made.before is not None else "new"
        logger.info("drafter %s %s -> %s reason=%s", made.version, before, made.after.value, made.reason)

    def move(self, version: str, to: DrafterStatus, reason: str, now: float) -> None:
        self._log_life(self._state.lifecycle.move(version, to, reason=reason, ts=now))

    def _admit(self, version: str, status: DrafterStatus, reason: str, now: float, **facts: str) -> None:
        self._log_life(self._state.lifecycle.admit(version, status, reason=reason, ts=now, **facts))

    def note_order(self, job: TrainJob, now: float) -> None:
        """A training job was ordered."""
        lives, key = self._state.lifecycle, _job_key(job)
        if lives.status(key) != _S.TRAINING:
            reason = f"{job.arm.name} on {job.bucket} from {job.base_version}"
            self._admit(key, _S.TRAINING, reason, now, bucket=job.bucket, arm=job.arm.name)

    def note_result(self, job: TrainJob, result: TrainResult, now: float) -> None:
        """A training job has ended: TRAINED and SHADOWED, or the end of the matter."""
        lives, key = self._state.lifecycle, _job_key(job)
        if result.status not in ("accepted", "rejected", "learning"):
            self.move(key, _S.FAILED, f"{result.status}: {result.reason}", now)
            return
        self.move(key, _S.TRAINED, f"trained in {result.train_s:.1f} s", now)
        if result.candidate is not None or result.status == "accepted":
            self.move(key, _S.SHADOWED, f"scored in {result.shadow_s:.1f} s: {result.reason}", now)
        if result.version is None:
            self.move(key, _S.REJECTED, result.reason, now)
            return
        lives.name(key, result.version)
        self._state.evicted = [v for v in self._state.evicted if v != result.version]  # its weights are there again

    def _make_live(
        self, versions: set[str], reason: str, now: float, *, left: DrafterStatus = _S.RETIRED, force: bool = True
    ) -> None:
        """Let these versions be the ones that serve: the one for all, and those of classes.

        Args:
            left: what becomes of those that served.
            force: admit a version again even if it came to an end.
        """
        lives = self._state.lifecycle
        before = lives.with_status(_S.LIVE)
        for version in sorted(versions - before):
            if lives.status(version) is None or (force and not lives.may(version, _S.LIVE)):
                self._admit(version, _S.LIVE, reason, now)
            else:
                self.move(version, _S.LIVE, reason, now)
        new = ", ".join(sorted(versions - before))
        for old in sorted(before - versions):
            self.move(old, left, f"{new} took over: {reason}" if new and left == _S.RETIRED else reason, now)

    def reconcile(self, now: float) -> None:
        """The table follows the desired record, also one that the set-up or the command line wrote."""
        desired, canary = self._state.desired, self._state.rollout.canary
        if desired is None or self._books.pending.desired is not None:
            return
        if canary is not None and not canary.is_wanted(desired):
            self._close_canary(Verdict(outcome=Outcome.RETIRED, reason="another desired record was written"), now)
        for guard in [g for g in self._state.rollout.guards.values() if not g.is_wanted(desired)]:
            del self._state.rollout.guards[guard.scope]
            self._books.log(
                "note", {"text": f"guard of {guard.version} on {guard.scope} ended: it serves the class no longer"}
            )
        self._state.assigned = [b for b in self._state.assigned if b in desired.class_versions]
        serving = {desired.version, *desired.class_versions.values()}
        if self._state.lifecycle.with_status(_S.LIVE) != serving:
            self._make_live(serving, desired.reason or "desired", now)
        if canary is None and desired.canary_version:  # the state that judged it is lost
            self._change(desired, f"canary {desired.canary_version} called off: nothing is known of its trial", now)

    # ---- the desired record -------------------------------------------------------------------------------------
    def _change(self, base: DesiredState, reason: str, now: float, *, has_canary: bool = False, **fields: Any) -> None:
        """Write another record than `base`; has_canary: its canary stays on trial, or `fields` begin one."""
        if not has_canary:
            fields |= {"canary_version": "", "canary_percent": 0, "canary_bucket": ""}
        self._books.pending.desired = msgspec.structs.replace(base, gen=0, reason=reason, ts=now, **fields)

    def want(
        self, version: str, reason: str, now: float, decision_id: int, *, kept: Collection[str] | None = None,
        left: DrafterStatus = _S.RETIRED, force: bool = False,
    ) -> None:  # fmt: skip
        """Let a version serve all classes without one of their own; a canary in flight ends with it.

        Args:
            kept: classes that keep a version of their own; None = all that have one.
            left: what becomes of the versions that no longer serve.
            force: admit the version again even if it came to an end (an operator's or a rollback's word).
        """
        canary = self._state.rollout.canary
        if canary is not None:
            outcome = Outcome.PROMOTED if canary.version == version else Outcome.RETIRED
            self._close_canary(Verdict(outcome=outcome, reason=f"superseded: {reason}"), now, left=left)
        self.book_swap(now, is_superseded=True)
        base = self._books.desired or DesiredState(gen=0, version=version, first_version=version, holdback_percent=0)
        own = {b: v for b, v in base.class_versions.items() if kept is None or b in kept}
        self._make_live({version, *own.values()}, reason, now, left=left, force=force)
        self._state.swap = SwapInFlight(decision_id=decision_id, since=now)
        self._change(
            base, reason, now, version=version, class_versions=own, holdback_percent=self._holdback_percent
        )  # fmt: skip

    def assign(self, bucket: str, version: str, reason: str, now: float, decision_id: int) -> None:
        """Give a class a version of its own, as soon as replicas have it; a canary of the class ends with it.

        decision_id: the policy's decision; 0 = an operator's order, which the policy leaves alone.
        Raises: DrafterMismatchError when nothing is live, when the version is on trial for others or serves the class, or
        when too many classes have one.
        """
        base, canary = self._books.desired, self._state.rollout.canary
        if base is None:
            raise DrafterMismatchError("nothing is live yet, so no class can differ from it; try again later")
        if base.class_versions.get(bucket) == version:
            raise DrafterMismatchError(f"class {bucket} has drafter {version} already; name another version")
        _check_room(base, bucket)
        if canary is not None and canary.version == version and canary.scope != bucket:
            raise DrafterMismatchError(f"drafter {version} is on trial; wait for its verdict, or pin or roll back")
        if decision_id == 0:
            self._state.assigned = sorted({*self._state.assigned, bucket})
        self._reassign(base, {**base.class_versions, bucket: version}, bucket, reason, now, decision_id)

    def unassign(self, bucket: str, reason: str, now: float, decision_id: int = 0) -> None:
        """Let the live version serve a class again. Raises: DrafterMismatchError when it has none of its own."""
        base = self._books.desired
        if base is None or bucket not in base.class_versions:
            known = ", ".join(sorted(base.class_versions)) if base is not None else ""
            raise DrafterMismatchError(f"class must have a version of its own ({known or 'none has'}), got {bucket!r}")
        self._state.assigned = [b for b in self._state.assigned if b != bucket]
        others = {b: v for b, v in base.class_versions.items() if b != bucket}
        self._reassign(base, others, bucket, reason, now, decision_id)

    def inherit(self, bucket: str, whole: str, now: float) -> None:
        """Let a class that was a part of another one so far keep the version of that one."""
        base = self._books.desired
        self._policy.part_bucket(bucket, whole, now, self._state.rows_written.get(bucket, 0))
        if base is None or whole not in base.class_versions or bucket in base.class_versions:
            return
        reason = f"class {bucket} was a part of {whole} and keeps its version"
        try:
            _check_room(base, bucket)
        except DrafterMismatchError as e:
            self._books.note(f"{bucket}, so far a part of {whole}, has no version of its own now: {e}")
            return
        if whole in self._state.assigned:
            self._state.assigned = sorted({*self._state.assigned, bucket})
        self.book_swap(now, is_superseded=True)
        versions = {**base.class_versions, bucket: base.class_versions[whole]}  # replicas have it: nothing is staged
        self._change(base, reason, now, has_canary=self._state.rollout.canary is not None, class_versions=versions)
        self._books.note(reason)

    def _reassign(
        self, base: DesiredState, versions: dict[str, str], bucket: str, reason: str, now: float, decision_id: int,
        *, left: DrafterStatus = _S.RETIRED,
    ) -> None:  # fmt: skip
        canary = self._state.rollout.canary
        if canary is not None and canary.scope == bucket:
            outcome = Outcome.PROMOTED if canary.version == versions.get(bucket) else Outcome.RETIRED
            self._close_canary(Verdict(outcome=outcome, reason=f"superseded: {reason}"), now)
        self.book_swap(now, is_superseded=True)
        self._make_live({base.version, *versions.values()}, reason, now, left=left)
        has_canary = self._state.rollout.canary is not None
        self._state.swap = SwapInFlight(decision_id=decision_id, since=now)
        self._change(base, reason, now, has_canary=has_canary, class_versions=versions)

    def publish(self, version: str, reason: str, now: float, decision_id: int, bucket: str, *, arm: str = "") -> None:
        """Give a version to a class: at once where it served before, else under a guard or by a canary, if there are any."""
        lives, base = self._state.lifecycle, self._books.desired
        if base is None or version == base.version_of(bucket):
            return
        if version in lives.barred() or bucket in self._state.assigned:
            why = "it came to an end before" if version in lives.barred() else "an operator has given it another one"
            self.refuse(version, why, now, decision_id, bucket)
            return
        life, guards = lives.versions.get(version), self._state.rollout.guards
        is_proven = life is not None and life.was_live and all(g.version != version for g in guards.values())
        try:
            if version == base.version:
                self.unassign(bucket, reason, now, decision_id)
            elif self.config.guard and 0 < self._holdback_percent < 100 and not is_proven:
                older = guards.get(bucket)  # its version proved nothing yet: nobody goes back to it
                before = base.class_versions.get(bucket, "") if older is None else older.before or ""
                self.assign(bucket, version, reason, now, decision_id)
                self._state.rollout.guard(
                    version, before, self.config, incumbent=base.first_version, holdback_percent=self._holdback_percent,
                    now=now, decision_id=decision_id, bucket=bucket, arm=arm,
                )  # fmt: skip
            elif self.config.canary_percent and not is_proven:
                _check_room(base, bucket)
                self._start_canary(base, version, reason, now, decision_id, bucket=bucket, arm=arm, scope=bucket)
            else:
                self.assign(bucket, version, reason, now, decision_id)
        except DrafterMismatchError as e:
            self.refuse(version, str(e), now, decision_id, bucket)

    def refuse(self, version: str, why: str, now: float, decision_id: int, bucket: str) -> None:
        """Tell the policy that a version was not given to the class that its decision gave it to; it may be another time."""
        self._books.note(f"{version} is not given to class {bucket}: {why}")
        if self._state.lifecycle.status(version) == _S.SHADOWED:
            self.move(version, _S.RETIRED, f"not given to class {bucket}: {why}", now)
        self._tell_end(decision_id, "refused", bucket)

    def _tell_end(self, decision_id: int, outcome: str, bucket: str = "") -> None:
        try:
            self._policy.order_ended(decision_id, outcome, bucket)
        except Exception as e:
            self._books.errors.note("the policy could not take the end of an order", e)

    def full_classes(self) -> list[str]:
        """Classes with traffic that have no version of their own and can get none: too many others have one."""
        desired = self._books.desired
        if desired is None or len(desired.class_versions) < MAX_ASSIGNED:
            return []
        return sorted(bucket for bucket in self._state.traffic.totals if bucket not in desired.class_versions)

    def _start_canary(
        self, base: DesiredState, version: str, reason: str, now: float, decision_id: int, *, bucket: str, arm: str,
        scope: str = "",
    ) -> None:  # fmt: skip
        if version in (base.version, base.canary_version, *base.class_versions.values()):
            raise DrafterMismatchError(
                f"drafter {version} is live or on trial already; name another version, or assign it"
            )
        if self._state.rollout.canary is not None:
            self._close_canary(Verdict(outcome=Outcome.RETIRED, reason=f"superseded by {version}"), now)
        self.book_swap(now, is_superseded=True)
        config = self.config
        if self._state.lifecycle.status(version) is None:
            self._admit(version, _S.RETIRED, "known to the registry", now)
        of_class = f" of {scope}" if scope else ""
        self.move(version, _S.CANARY, f"{config.canary_percent}% of adaptive requests{of_class}: {reason}", now)
        self._state.rollout.begin(
            version, base.version_of(scope), config, now=now, decision_id=decision_id, bucket=bucket, arm=arm, scope=scope
        )  # fmt: skip
        self._state.swap = SwapInFlight(decision_id=decision_id, since=now)
        self._change(
            base, f"canary: {reason}", now, has_canary=True, canary_version=version,
            canary_percent=config.canary_percent, canary_bucket=scope, holdback_percent=self._holdback_percent,
        )  # fmt: skip

    def is_own_target(self, target_version: str) -> bool:
        """Whether what a replica tells is of the service's target."""
        return self._around.is_own(target_version)

    def has_report(self, replica_id: str) -> bool:
        """Whether a replica reported lately."""
        return replica_id in self._around.latest

    def facts_of(self, replica_id: str) -> EngineFacts | None:
        """What a replica's engine is, by its latest report."""
        report = self._around.latest.get(replica_id)
        return None if report is None else report.engine

    # ---- the canary and the guards ---------------------------------------------------------------------------------------------
    def observe(self, batch: FeedbackBatch) -> None:
        """Fold a batch into the traffic statistics, the guards and, from a replica that runs it, the canary's trial."""
        state = self._state
        canary = state.rollout.canary
        serving = set() if state.desired is None else {state.desired.version, *state.desired.class_versions.values()}
        percent, scope = (canary.percent, canary.scope) if canary is not None else (0, "")
        state.traffic.observe(batch, state.rollout.tried_version(serving), percent, scope)
        report = self._around.latest.get(batch.replica_id)
        if report is None:
            return
        now = self._books.clock.now()
        hold_s = report.engine.window_s if report.engine is not None and report.engine.group_unit == "time" else 0.0
        if canary is not None and report.canary_version == canary.version:
            rollout.fold(canary, batch.cells, now, hold_s)
        for bucket in {cell.bucket for cell in batch.cells} & state.rollout.guards.keys():
            guard = state.rollout.guards[bucket]
            if report.class_versions.get(bucket) == guard.version:  # else only the hold-back's side of it would count
                rollout.fold(guard, batch.cells, now, hold_s)

    def judge_trials(self, now: float, *, is_read_up: bool) -> None:
        """Judge the canary in flight and the guards by what replicas report and requests show.

        Args:
            is_read_up: the feedback stream was read to its end; otherwise rows of requests that look quiet may still wait.
        """
        self.reconcile(now)
        desired = self._state.desired
        if desired is None or self._books.pending.desired is not None:
            return
        taken, self._taken = self._taken, {}
        for trial in self._state.rollout.trials:
            wanted = self._books.desired
            if wanted is None or (trial.is_guard and not trial.is_wanted(wanted)):
                continue  # the end of another one in this pass took its class
            look = self._taken[trial.version] = (self._around.num_looks, desired.gen)
            verdict = None
            if taken.get(trial.version) != look:
                verdict = rollout.take_reports(trial, self._around.own, desired)
            if is_read_up:
                rollout.close_quiet(trial, self.config, now)
            verdict = verdict or rollout.judge(trial, self.config, now)
            if verdict is None or (verdict.outcome == Outcome.PROMOTED and self._state.is_paused):
                continue
            if verdict.outcome == Outcome.PROMOTED and trial.scope and not trial.is_guard:
                try:
                    _check_room(desired, trial.scope)
                except DrafterMismatchError as e:  # others were given versions meanwhile
                    verdict = Verdict(outcome=Outcome.RETIRED, reason=f"{verdict.reason}, but {e}")
            what = "guard" if trial.is_guard else "canary"
            logger.warning("%s %s version=%s reason=%s", what, verdict.outcome.value, trial.version, verdict.reason)
            if trial.is_guard:
                self._end_guard(trial, verdict, now)
            else:
                self._end_canary(trial, verdict, now)

    def end_class(self, bucket: str, reason: str, now: float) -> None:
        """What was on trial or served for a class holds no more: its name may be that of other text."""
        rollout, base = self._state.rollout, self._books.desired
        rollout.frozen.pop(bucket, None)
        if rollout.canary is not None and rollout.canary.scope == bucket:
            self._end_canary(rollout.canary, Verdict(outcome=Outcome.RETIRED, reason=reason), now)
        if base is not None and bucket in base.class_versions:
            self.unassign(bucket, reason, now)
            self._books.note(reason)

    def _end_canary(self, canary: Canary, verdict: Verdict, now: float) -> None:
        """Let it serve, or call it off."""
        if verdict.outcome == Outcome.PROMOTED:
            reason = f"canary promoted: {verdict.reason}"
            self._close_canary(verdict, now)
            if canary.scope:
                self.assign(canary.scope, canary.version, reason, now, canary.decision_id)
                return
            if canary.decision_id == 0:  # ordered by an operator: it takes the place of a version pinned before
                self._policy.unpin()
            self.want(canary.version, reason, now, canary.decision_id)
            return
        self.book_swap(now, is_superseded=True)
        self._close_canary(verdict, now)
        base = self._books.desired
        assert base is not None, "a canary is tried beside a live version"
        self._change(base, f"canary {canary.version} {_plain(verdict)}", now)

    def _end_guard(self, guard: Canary, verdict: Verdict, now: float) -> None:
        """Leave the class its version, or give it back the one before."""
        state, base = self._state, self._books.desired
        assert base is not None and guard.before is not None, "a guard's version serves a class"
        state.rollout.end(guard, verdict, self.config, now)
        self._tell_end(guard.decision_id, verdict.outcome.value, guard.scope)
        text = f"guard of {guard.version} on {guard.scope} {_plain(verdict)}"
        self._books.log("note", {"text": text})
        if verdict.outcome == Outcome.PROMOTED:
            return
        kept = {b: v for b, v in base.class_versions.items() if v != guard.version or b in state.assigned}
        others = {b: v for b, v in kept.items() if b != guard.scope}
        unfit = {"", base.version, base.canary_version, *state.lifecycle.barred(), *state.evicted}
        also = [g for g in state.rollout.guards.values() if g.version == guard.version and g.is_wanted(base)]
        for own in (guard, *also):
            if own.before is not None and own.before not in unfit and own.scope not in state.assigned:
                others[own.scope] = own.before
        self._reassign(base, others, guard.scope, text, now, guard.decision_id, left=_status_after(verdict))

    def _close_canary(self, verdict: Verdict, now: float, *, left: DrafterStatus = _S.RETIRED) -> None:
        """End the trial in state, life cycle and policy; the caller writes the desired record.

        Args:
            left: what becomes of the version that was live when the trial is promoted.
        """
        canary = self._state.rollout.canary
        assert canary is not None, "no version is on trial"
        self._state.rollout.end(canary, verdict, self.config, now)
        if verdict.outcome == Outcome.PROMOTED:
            others = set(self._books.desired.class_versions.values()) if self._books.desired is not None else set()
            keeps = self._state.lifecycle.with_status(_S.LIVE) if canary.scope else others
            self._make_live({canary.version, *keeps}, verdict.reason, now, left=left, force=False)
        else:
            self.move(canary.version, _status_after(verdict), verdict.reason, now)
        self._tell_end(canary.decision_id, verdict.outcome.value)

    def order_canary(self, version: str, bucket: str = "") -> None:
        """Start a canary of a version of the registry by an operator's order, on one class or on what the live version
        serves.

        Raises: ManifestError when it is not in the registry or has no weights, DrafterMismatchError when it serves or
        canaries are off.
        """
        manifest = self._around.servable_manifest(version)
        base, config = self._books.desired, self.config
        if base is None or config.canary_percent == 0:
            raise DrafterMismatchError(
                "canaries are off (rollout.canary_percent is 0) or nothing is live; pin the version"
            )
        if bucket:
            _check_room(base, bucket)
        now = self._books.clock.now()
        reason = f"canary of {version}{f' on {bucket}' if bucket else ''} ordered by the operator"
        if version in self._state.lifecycle.barred():
            self._admit(version, _S.RETIRED, reason, now)
        self._start_canary(base, version, reason, now, 0, bucket=manifest.bucket or "", arm=manifest.arm, scope=bucket)
        self._books.note(reason)

    def book_swap(self, now: float, *, is_superseded: bool = False) -> None:
        """Charge the decision behind a staged version with what staging it cost, once all replicas run it."""
        swap, desired = self._state.swap, self._state.desired
        if swap is None or desired is None or self._books.pending.desired is not None:
            return
        arrived = [r for r in self._around.own if r.gen == desired.gen]
        waiting = [r for r in self._around.own if desired.gen not in (r.gen, r.failed_gen)]
        if not is_superseded and now - swap.since < _SWAP_PATIENCE_S and (waiting or not self._around.own):
            return
        self._state.swap = None
        seconds = 0.0
        for r in arrived:
            is_flipped = r.swap_gen in (None, r.gen) and bool(r.swap_pause_ms)  # a canary is staged without a flip
            seconds += r.staging_s + (r.swap_pause_ms[-1] / 1e3 if is_flipped else 0.0)
        if seconds > 0:
            # a decision may be staged twice: for its canary, and again for a promotion
            self._policy.staged(swap.decision_id, seconds, now, f"gen{desired.gen}")

    # ---- roll-backs ---------------------------------------------------------------------------------------------
    def follow_reports(self, now: float) -> None:
        """Roll a live version back that a replica refused, and book what staging cost."""
        self._pass_generations(now)
        for report in self._around.own:
            self._take_refusal(report)
        self._note_refused(now)
        self.book_swap(now)

    def _pass_generations(self, now: float) -> None:
        """Write the record behind a generation that replicas know and this state does not: they follow none before it.

        So it is where the state is older than what was lost: Redis' data went while the controller was away, and the
        snapshot file was some seconds old.
        """
        desired = self._state.desired
        newest = max((r.gen for r in self._around.own), default=0)
        if desired is None or newest <= desired.gen or self._books.pending.desired is not None:
            return
        store = self._books.store
        stored = known_desired(store.client.get(store.keys.desired))
        if stored is not None and stored.gen >= newest:
            return  # the set-up wrote it; the next commit takes it over
        reason = f"written anew: replicas know generation {newest}, the restored state generation {desired.gen}"
        self._state.desired = msgspec.structs.replace(desired, gen=newest)
        self._change(self._state.desired, reason, now, has_canary=True)
        self._books.note(reason)

    def _note_refused(self, now: float) -> None:
        """Say once which versions of classes replicas do not serve; the live one serves there meanwhile."""
        reports = self._around.own
        refused = {(r.replica_id, version): reason for r in reports for version, reason in r.refused.items()}
        for (replica, version), reason in sorted(refused.items()):
            if (replica, version) not in self._refused:
                self._books.note(
                    f"replica {replica} does not serve {version}, the live version takes its classes: {reason}"
                )
        self._refused = set(refused)

    def _take_refusal(self, report: ReplicaReport) -> None:
        state, desired = self._state, self._state.desired
        if desired is None or report.failed_gen != desired.gen or self._books.pending.desired is not None:
            return
        canary = state.rollout.canary
        if canary is not None and rollout.refuses_canary(report, desired):
            return  # the live version is well
        back = self.version_before(desired) or desired.first_version
        if back != desired.version:
            # a later rollback must not lead back to it
            state.history = [v for v in state.history if v != desired.version]
            reason = f"replica {report.replica_id} refused {desired.version}: {report.failed_reason}"
            self.manual("rollback", back, reason, left=_S.ROLLED_BACK, is_whole=False)

    def version_before(self, desired: DesiredState) -> str | None:
        """The version of this target that was live last before the desired one and has not come to an end."""
        state = self._state
        out = {desired.version, *state.lifecycle.barred(), *state.evicted}
        return next((v for v in reversed(state.history) if v not in out and not self._around.is_foreign(v)), None)

    def manual(
        self, action: str, version: str, reason: str, *, left: DrafterStatus = _S.RETIRED, is_whole: bool = True
    ) -> None:
        """Let a version serve by 'pin' or 'rollback', whatever the policy thinks.

        is_whole: also the classes that the policy gave other versions; else only those that have none of their own.
        """
        now, desired = self._books.clock.now(), self._books.desired
        own = desired.class_versions if desired is not None else {}
        kept = self._state.assigned if is_whole else list(own)
        served = set() if desired is None else {desired.version, *own.values()}
        gone = served - {v for b, v in own.items() if b in kept}
        made = self._policy.manual(action, version, now, reason, gone)
        self.want(version, reason, now, made.decision_id, kept=kept, left=left, force=True)
        logger.warning("drafter %s version=%s reason=%s", action, version, reason)

    def rollback(self, version: str | None = None) -> str:
        """Let an older version serve by an operator's order; returns it.

        Without a name: the live version for all classes that the policy gave others, and where there are none the version
        that was the default before.
        Raises: RequestError when there is none, PacelineError before anything is live, ManifestError, DrafterMismatchError.
        """
        desired = self._state.desired
        if desired is None:
            raise PacelineError("there is no live drafter to roll back from")
        given = sorted({v for b, v in desired.class_versions.items() if b not in self._state.assigned})
        back = version or (desired.version if given else self.version_before(desired))
        if back is None:
            raise RequestError(
                f"{desired.version} is the only version that was ever live; pin one of `paceline versions list`"
            )
        self._around.servable_manifest(back)
        left = ", ".join(given) if given else desired.version
        self.manual("rollback", back, f"rolled back from {left} to {back} by the operator")
        return back


class WeightPool:
    """The weights in the registry: no more bytes than allowed, and none deleted that somebody needs."""

    def __init__(self, books: Books, around: Surroundings) -> None:
        self._books, self._around, self._state = books, around, books.state
        self._max_bytes = books.config.rollout.pool_bytes
        self._evicted_at = -1
        """Commit number when a version was last given up; its weights go once a later commit exists."""

    def servable(self) -> list[str]:
        """Versions that may be recalled: with weights, and not at an end."""
        out = {*self._state.evicted, *self._state.lifecycle.barred()}
        return [m.version for m in self._around.versions if m.version not in out]

    def _stored(self) -> list[DrafterManifest]:
        """All versions of the registry: those of an earlier target take room, too."""
        return [*self._around.versions, *self._around.foreign.values()]

    def _referred(self) -> set[str]:
        """Versions that somebody serves, stages, trains from or would roll back to, and what deltas add to."""
        kept: set[str] = set()
        for desired in (self._state.desired, self._books.pending.desired):
            if desired is not None:
                kept |= {desired.version, desired.first_version, desired.canary_version}
                kept |= set(desired.class_versions.values())
        kept |= self._state.lifecycle.with_status(_S.LIVE, _S.CANARY)
        kept |= set(self._state.history[-_KEPT_HISTORY:]) | {
            g.before or "" for g in self._state.rollout.guards.values()
        }
        for report in self._around.reports:
            kept |= {report.version, report.canary_version, *report.slots.values()}
        deltas = (m for m in self._stored() if m.delta_of is not None)
        # those of an earlier target hold nothing that nobody serves
        gone = {*self._state.evicted, *self._around.foreign}
        return kept | {m.delta_of for m in deltas if m.version in kept or m.version not in gone}  # type: ignore[misc]

    def tend(self) -> None:
        """Give up the least useful weights beyond the byte limit, then delete what an earlier commit gave up."""
        state, registry = self._state, self._around.registry
        if state.pending is not None or state.desired is None:  # a job may read its parent or write a version again
            return
        if state.evicted and state.commit > self._evicted_at:
            kept, there = self._referred(), registry.with_weights().intersection(state.evicted)
            state.evicted = [v for v in state.evicted if v not in there & kept]  # published again since, and serve
            for version in sorted(there - kept):
                registry.delete_weights(version)
                logger.info("drafter weights deleted version=%s", version)
        used = {v: life.since for v, life in state.lifecycle.versions.items()}
        evicted = set(state.evicted)
        held = [m for m in self._stored() if m.version not in evicted]
        gone = choose_evictions(
            held,
            kept=self._referred(),
            best=best_versions(shadow_lengths([m for m in held if m.version not in self._around.foreign])),
            worthless={*state.lifecycle.barred(), *self._around.foreign},
            last_used=used,
            max_bytes=self._max_bytes,
        )
        if gone:
            state.evicted = [*state.evicted, *gone]
            self._evicted_at = state.commit
            text = f"weights of {', '.join(gone)} given up: the pool may hold {self._max_bytes} bytes"
            self._books.log("note", {"text": text})


def _plain(verdict: Verdict) -> str:
    return f"{verdict.outcome.value.replace('_', ' ')}: {verdict.reason}"


def _status_after(verdict: Verdict) -> DrafterStatus:
    """Of a version that was not promoted."""
    return _S.ROLLED_BACK if verdict.outcome == Outcome.ROLLED_BACK else _S.RETIRED


def _check_room(base: DesiredState, bucket: str) -> None:
    if bucket not in base.class_versions and len(base.class_versions) >= MAX_ASSIGNED:
        raise DrafterMismatchError(
            f"class_versions must have at most {MAX_ASSIGNED} classes, got one more; unassign one"
        )


def _job_key(job: TrainJob) -> str:
    return f"{JOB_PREFIX}{job.job_id}"
