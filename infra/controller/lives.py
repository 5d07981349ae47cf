"""How does a version go from accepted to live: its life cycle, its canary, the desired record, the pool of old weights?

Everything that changes here is part of the controller's one commit: life cycle, canary and desired record agree whatever
moment the process is killed at. Weights are deleted only after the commit that gives them up.
"""

from __future__ import annotations

import logging

import msgspec

from paceline.adapt.versions.lifecycle import JOB_PREFIX, DrafterStatus, Transition
from paceline.adapt.versions.pool import best_versions, choose_evictions
from paceline.contracts import DesiredState, FeedbackBatch, TrainJob, TrainResult
from paceline.errors import DrafterMismatchError, ManifestError
from paceline.infra.controller import rollout
from paceline.infra.controller.core import READ_COUNT, ControllerCore
from paceline.infra.controller.rollout import Outcome, Verdict
from paceline.infra.controller.store import SwapInFlight
from paceline.infra.state.manifest_facts import shadow_lengths

logger = logging.getLogger(__name__)

_S = DrafterStatus
_SWAP_PATIENCE_S = 60.0
_KEPT_HISTORY = 3
"""Latest versions that were live: rollbacks lead there, so their weights stay."""


class ControllerRollout(ControllerCore):
    """Carries versions through their life; single-threaded."""

    _evicted_at = -1
    """Commit number when a version was last given up; its weights go once a later commit exists."""

    def connect(self) -> None:
        """Take over and restore everything; the table of lives knows the live version from here on."""
        super().connect()
        self._reconcile_lives(self._clock.now())

    # ---- life cycle ---------------------------------------------------------------------------------------------
    def _log_life(self, made: Transition) -> None:
        self._commit.log.append(("lifecycle", msgspec.to_builtins(made)))
        before = made.before.value if made.before is not None else "new"
        logger.info("drafter %s %s -> %s reason=%s", made.version, before, made.after.value, made.reason)

    def _move(self, version: str, to: DrafterStatus, reason: str, now: float) -> None:
        self._log_life(self.state.lifecycle.move(version, to, reason=reason, ts=now))

    def _admit(self, version: str, status: DrafterStatus, reason: str, now: float, **facts: str) -> None:
        self._log_life(self.state.lifecycle.admit(version, status, reason=reason, ts=now, **facts))

    def _note_order(self, job: TrainJob, now: float) -> None:
        """A training job was ordered."""
        lives, key = self.state.lifecycle, _job_key(job)
        if lives.status(key) != _S.TRAINING:
            reason = f"{job.arm.name} on {job.bucket} from {job.base_version}"
            self._admit(key, _S.TRAINING, reason, now, bucket=job.bucket, arm=job.arm.name)

    def _note_result(self, job: TrainJob, result: TrainResult, now: float) -> None:
        """A training job has ended: TRAINED and SHADOWED, or the end of the matter."""
        self._note_order(job, now)  # a job of a state from before the table was kept
        lives, key = self.state.lifecycle, _job_key(job)
        if result.status not in ("accepted", "rejected"):
            self._move(key, _S.FAILED, f"{result.status}: {result.reason}", now)
            return
        self._move(key, _S.TRAINED, f"trained in {result.train_s:.1f} s", now)
        if result.candidate is not None or result.status == "accepted":
            self._move(key, _S.SHADOWED, f"scored in {result.shadow_s:.1f} s: {result.reason}", now)
        if result.status == "rejected" or result.version is None:
            self._move(key, _S.REJECTED, result.reason, now)
            return
        lives.name(key, result.version)
        self.state.evicted = [v for v in self.state.evicted if v != result.version]  # its weights are there again

    def _make_live(self, version: str, reason: str, now: float, *, left: DrafterStatus, force: bool) -> None:
        lives = self.state.lifecycle
        if version not in lives.with_status(_S.LIVE):
            if lives.status(version) is None or (force and not lives.may(version, _S.LIVE)):
                self._admit(version, _S.LIVE, reason, now)
            else:
                self._move(version, _S.LIVE, reason, now)
        for old in sorted(lives.with_status(_S.LIVE) - {version}):
            self._move(old, left, reason if left != _S.RETIRED else f"{version} took over: {reason}", now)

    def _reconcile_lives(self, now: float) -> None:
        """The table follows the desired record, also one that the set-up or the command line wrote."""
        desired, canary = self.state.desired, self.state.rollout.canary
        if desired is None or self._commit.desired is not None:
            return
        if canary is not None and (canary.version, canary.incumbent) != (desired.canary_version, desired.version):
            self._close_canary(Verdict(outcome=Outcome.RETIRED, reason="another desired record was written"), now)
        if self.state.lifecycle.with_status(_S.LIVE) != {desired.version}:
            self._make_live(desired.version, desired.reason or "desired", now, left=_S.RETIRED, force=True)
        if canary is None and desired.canary_version:  # the state that judged it is lost
            self._commit.desired = msgspec.structs.replace(
                desired, gen=0, canary_version="", canary_percent=0, ts=now,
                reason=f"canary {desired.canary_version} called off: nothing is known of its trial",
            )  # fmt: skip

    def check_servable(self, version: str) -> None:
        """Raise what keeps a version from being served.

        ManifestError: it is not in the registry or its weights are gone. DrafterMismatchError: it is for another target.
        """
        self._registry.get_manifest(version, target_version=self.config.target_version or None)
        if version in self.state.evicted or not self._registry.has_weights(version):
            raise ManifestError(f"the weights of drafter {version} were deleted from the pool; publish it again")

    # ---- the desired record -------------------------------------------------------------------------------------
    def _base(self) -> DesiredState | None:
        return self._commit.desired or self.state.desired

    def _want(
        self, version: str, reason: str, now: float, decision_id: int, *, left: DrafterStatus = _S.RETIRED, force: bool = False
    ) -> None:  # fmt: skip
        """Make a version live for all; a canary in flight ends with it.

        Args:
            left: what becomes of the version that was live.
            force: admit the version again even if it came to an end (an operator's or a rollback's word).
        """
        canary = self.state.rollout.canary
        if canary is not None:
            outcome = Outcome.PROMOTED if canary.version == version else Outcome.RETIRED
            self._close_canary(Verdict(outcome=outcome, reason=f"superseded: {reason}"), now, left=left)
        self._book_swap(now, is_superseded=True)
        self._make_live(version, reason, now, left=left, force=force)
        self.state.swap = SwapInFlight(decision_id=decision_id, since=now)
        base = self._base()
        self._commit.desired = DesiredState(
            gen=0, version=version, first_version=base.first_version if base is not None else version,
            holdback_percent=self.config.policy.holdback_percent, reason=reason, ts=now,
        )  # fmt: skip

    def _publish(
        self, version: str, reason: str, now: float, decision_id: int, *, bucket: str = "", arm: str = ""
    ) -> None:
        """Give a version to the requests: by a canary, or at once where there is none or the version was live before."""
        lives, base = self.state.lifecycle, self._base()
        if version in lives.barred():
            self._commit.log.append(("note", {"text": f"{version} is not served: it came to an end before"}))
            return
        life = lives.versions.get(version)
        was_live = life is not None and life.was_live
        if self.config.rollout.canary_percent == 0 or base is None or was_live or version == base.version:
            self._want(version, reason, now, decision_id)
        else:
            self._start_canary(base, version, reason, now, decision_id, bucket=bucket, arm=arm)

    def _start_canary(
        self, base: DesiredState, version: str, reason: str, now: float, decision_id: int, *, bucket: str, arm: str
    ) -> None:
        if self.state.rollout.canary is not None:
            self._close_canary(Verdict(outcome=Outcome.RETIRED, reason=f"superseded by {version}"), now)
        self._book_swap(now, is_superseded=True)
        config = self.config.rollout
        if self.state.lifecycle.status(version) is None:
            self._admit(version, _S.RETIRED, "known to the registry", now)
        self._move(version, _S.CANARY, f"{config.canary_percent}% of adaptive requests: {reason}", now)
        self.state.rollout.begin(
            version, base.version, config, now=now, decision_id=decision_id, bucket=bucket, arm=arm
        )
        self.state.swap = SwapInFlight(decision_id=decision_id, since=now)
        self._commit.desired = msgspec.structs.replace(
            base, gen=0, canary_version=version, canary_percent=config.canary_percent, reason=f"canary: {reason}", ts=now,
            holdback_percent=self.config.policy.holdback_percent,
        )  # fmt: skip

    # ---- the canary ---------------------------------------------------------------------------------------------
    def _fold(self, batch: FeedbackBatch) -> None:
        super()._fold(batch)
        canary = self.state.rollout.canary
        if canary is not None and any(
            r.replica_id == batch.replica_id and r.canary_version == canary.version for r in self._reports
        ):
            rollout.fold(canary, self.state.traffic.bounded(batch), self._clock.now())

    def _step_rollout(self, num_entries: int, now: float) -> None:
        """Judge the canary in flight by what replicas report and requests show."""
        self._reconcile_lives(now)
        canary, desired, config = self.state.rollout.canary, self.state.desired, self.config.rollout
        if canary is None or desired is None or self._commit.desired is not None:
            return
        verdict = rollout.take_reports(canary, self._reports, desired.gen)
        if num_entries < READ_COUNT:  # otherwise rows of requests that look quiet may still be waiting in the stream
            rollout.close_quiet(canary, config, now)
        verdict = verdict or rollout.judge(canary, config, now)
        if verdict is None or (verdict.outcome == Outcome.PROMOTED and self.state.is_paused):
            return
        logger.warning("canary %s version=%s reason=%s", verdict.outcome.value, canary.version, verdict.reason)
        if verdict.outcome == Outcome.PROMOTED:
            self._close_canary(verdict, now)
            if (
                canary.decision_id == 0
            ):  # an operator ordered the trial: its version takes the place of one pinned before
                self.controller.unpin()
            self._want(canary.version, f"canary promoted: {verdict.reason}", now, canary.decision_id)
            return
        self._book_swap(now, is_superseded=True)
        self._close_canary(verdict, now)
        self._commit.desired = msgspec.structs.replace(
            desired, gen=0, canary_version="", canary_percent=0, ts=now,
            reason=f"canary {canary.version} {verdict.outcome.value.replace('_', ' ')}: {verdict.reason}",
        )  # fmt: skip

    def _close_canary(self, verdict: Verdict, now: float, *, left: DrafterStatus = _S.RETIRED) -> None:
        """End the trial in state, life cycle and policy; the caller writes the desired record.

        Args:
            left: what becomes of the version that was live when the trial is promoted.
        """
        canary = self.state.rollout.end(verdict, self.config.rollout, now)
        if verdict.outcome == Outcome.PROMOTED:
            self._make_live(canary.version, verdict.reason, now, left=left, force=False)
        else:
            to = _S.ROLLED_BACK if verdict.outcome == Outcome.ROLLED_BACK else _S.RETIRED
            self._move(canary.version, to, verdict.reason, now)
        try:
            self.controller.canary_ended(canary.decision_id, verdict.outcome.value)
        except Exception as e:
            self._note_error("the policy could not take the end of a canary", e)

    def canary(self, version: str) -> None:
        """Start a canary of a version of the registry by an operator's order.

        Raises: ManifestError when it is not in the registry or has no weights, DrafterMismatchError when it is live or
        canaries are off.
        """
        self.check_servable(version)
        base, config = self._base(), self.config.rollout
        if base is None or config.canary_percent == 0:
            raise DrafterMismatchError(
                "canaries are off (rollout.canary_percent is 0) or nothing is live; pin the version"
            )
        if version == base.version or version == base.canary_version:
            raise DrafterMismatchError(f"drafter {version} is live or on trial already; name another version")
        now = self._clock.now()
        reason = f"canary of {version} ordered by the operator"
        if version in self.state.lifecycle.barred():
            self._admit(version, _S.RETIRED, reason, now)
        manifest = self._registry.get_manifest(version)
        self._start_canary(base, version, reason, now, 0, bucket=manifest.bucket or "", arm=manifest.arm)
        self._note(reason)

    def _book_swap(self, now: float, *, is_superseded: bool = False) -> None:
        """Charge the decision behind a staged version with what staging it cost, once all replicas run it."""
        swap, desired = self.state.swap, self.state.desired
        if swap is None or desired is None or self._commit.desired is not None:
            return
        arrived = [r for r in self._reports if r.gen == desired.gen]
        waiting = [r for r in self._reports if desired.gen not in (r.gen, r.failed_gen)]
        if not is_superseded and now - swap.since < _SWAP_PATIENCE_S and (waiting or not self._reports):
            return
        self.state.swap = None
        seconds = 0.0
        for r in arrived:
            is_flipped = r.swap_gen in (None, r.gen) and bool(r.swap_pause_ms)  # a canary is staged without a flip
            seconds += r.staging_s + (r.swap_pause_ms[-1] / 1e3 if is_flipped else 0.0)
        if seconds > 0:
            # a decision may be staged twice: for its canary, and again for a promotion
            self.controller.staged(swap.decision_id, seconds, now, f"gen{desired.gen}")

    # ---- the pool of old weights --------------------------------------------------------------------------------
    def _servable(self) -> list[str]:
        """Versions that may be recalled: with weights, and not at an end."""
        out = {*self.state.evicted, *self.state.lifecycle.barred()}
        return [m.version for m in self._versions if m.version not in out]

    def _referred(self) -> set[str]:
        """Versions that somebody serves, stages, trains from or would roll back to."""
        kept: set[str] = set()
        for desired in (self.state.desired, self._commit.desired):
            if desired is not None:
                kept |= {desired.version, desired.first_version, desired.canary_version}
        kept |= self.state.lifecycle.with_status(_S.LIVE, _S.CANARY)
        kept |= set(self.state.history[-_KEPT_HISTORY:])
        for report in self._reports:
            kept |= {report.version, report.canary_version, *report.slots.values()}
        return kept

    def _tend_pool(self) -> None:
        """Give up the least useful weights beyond the byte limit, then delete what an earlier commit gave up."""
        state, lives = self.state, self.state.lifecycle
        if state.pending is not None or state.desired is None:  # a job may read its parent or write a version again
            return
        if state.evicted:  # weights that were published again since, and serve
            back = {v for v in self._referred() if v in state.evicted and self._registry.has_weights(v)}
            if back and state.commit > self._evicted_at:
                state.evicted = [v for v in state.evicted if v not in back]
        if state.evicted and state.commit > self._evicted_at:
            kept = self._referred()
            for version in state.evicted:
                if version not in kept and self._registry.has_weights(version):
                    self._registry.delete_weights(version)
                    logger.info("drafter weights deleted version=%s", version)
        used = {v: life.since for v, life in lives.versions.items()}
        held = [m for m in self._versions if m.version not in state.evicted]
        gone = choose_evictions(
            held,
            kept=self._referred(),
            best=best_versions(shadow_lengths(held)),
            worthless=lives.barred(),
            last_used=used,
            max_bytes=self.config.rollout.pool_bytes,
        )
        if gone:
            state.evicted = [*state.evicted, *gone]
            self._evicted_at = state.commit
            text = f"weights of {', '.join(gone)} given up: the pool may hold {self.config.rollout.pool_bytes} bytes"
            self._commit.log.append(("note", {"text": text}))


def _job_key(job: TrainJob) -> str:
    return f"{JOB_PREFIX}{job.job_id}"
