"""Session: one take-over of a service: the controller's parts put together from what is stored, driven pass by pass,
and shown as a snapshot.

A controller that comes back after a crash is a new session. Single-threaded; no part knows Ray or threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import redis
from redis.exceptions import RedisError

from paceline.adapt.data.storage_calls import StorageCalls
from paceline.adapt.versions.lifecycle import VersionLife
from paceline.bandit.controller.controller import Controller
from paceline.config import RolloutConfig
from paceline.contracts import CLASS_PREFIX
from paceline.errors import FencedError, PacelineError, StateError, StorageHangsError
from paceline.infra.controller.feedback import READ_COUNT, Feedback
from paceline.infra.controller.jobs import Jobs, Launcher, TrainCoordinator
from paceline.infra.controller.lives import Lives, WeightPool
from paceline.infra.controller.orders import Orders
from paceline.infra.controller.rollout import Canary, RolloutState
from paceline.infra.controller.snapshot import (
    BucketTraffic,
    CanaryRollout,
    Evidence,
    FeedbackCounts,
    Guard,
    IdleRollout,
    LedgerSums,
    Note,
    RunningJob,
    Snapshot,
    Stratum,
    Swaps,
    TrialEnd,
    VersionInfo,
    VersionStage,
)
from paceline.infra.controller.store import Books, ControllerStore, Deeds, HostConfig, HostState
from paceline.infra.controller.surroundings import Surroundings
from paceline.infra.controller.traffic import TrafficStats
from paceline.infra.state.desired import configured_desired
from paceline.infra.state.log import ErrorCount
from paceline.machine import Clock
from paceline.serving.engine.buckets import DEFAULT_BUCKET

if TYPE_CHECKING:  # both load torch
    from paceline.adapt.data.trace_store import TraceStore
    from paceline.adapt.versions.registry import DrafterRegistry

logger = logging.getLogger(__name__)

MAX_BEHIND_S = 60.0
"""A controller that cannot read up decides all the same, with the load of what it reads."""

MakeController = Callable[[bytes], Controller]


def restore_controller(config: HostConfig, stored: bytes, clock: Clock) -> Controller:
    """The policy's controller, restored where there is something. Raises ValueError on what is unreadable."""
    if stored:
        return Controller.restore(stored, config.policy, config.arms, clock=clock)
    return Controller(config.policy, config.arms, clock=clock, rng=np.random.default_rng(config.policy.seed))


def make_policy(make_controller: MakeController, state: HostState) -> Controller:
    """The policy's controller where the state left it. Raises: StateError when its part of the state is unreadable."""
    try:
        controller = make_controller(state.controller)
        if state.open_epoch:
            controller.reopen(state.open_epoch)
    except (msgspec.DecodeError, ValueError) as e:
        raise StateError(
            f"the policy's part of the stored state cannot be read: {e}; start the release that wrote it, or restore a backup"
        ) from e
    return controller


class Session:
    """The parts and their pass. What reads and writes is public: state, controller, books, surroundings, lives, ..."""

    def __init__(
        self,
        config: HostConfig,
        client: redis.Redis,
        *,
        shards: TraceStore,
        registry: DrafterRegistry,
        launcher: Launcher,
        make_controller: MakeController,
        calls: StorageCalls,
        errors: ErrorCount,
        clock: Clock,
        deeds: Deeds | None = None,
    ) -> None:
        """Take over (epoch), restore everything, put the configuration into force.

        Args:
            calls: of `shards`, `registry` and the data folder; they outlive a session, as a call that hangs does.
        Raises: redis errors; StateError, before anything was written, when what is stored cannot be used.
        """
        self.config, self._context_due = config, 0.0
        self._behind_since: float | None = None
        """When what waits in the stream became more than a pass reads; None = it is not."""
        store = ControllerStore(client, config, calls)
        make_policy(make_controller, store.find().state)
        store.acquire_epoch()
        self.state = state = store.load()
        state.model, state.target_version = config.model, config.target_version
        if state.epoch >= store.epoch:  # Redis lost its data and the file knows a higher epoch
            store.acquire_epoch(at_least=state.epoch)
        is_restored = state.commit > 0
        self.controller = make_policy(make_controller, state)
        if state.config_policy != config.policy.policy:  # the operator configured another one since
            state.config_policy = state.policy = config.policy.policy
        self.controller.set_policy(state.policy)
        coordinator = TrainCoordinator(config, store.room, launcher, clock=clock, owner=store.owner)
        self.books = books = Books(config, store, state, self.controller, errors=errors, clock=clock, deeds=deeds)
        self.surroundings = around = Surroundings(books, calls.guard(shards), calls.guard(registry))
        self.pool = WeightPool(books, around)
        self.lives = Lives(books, around)
        self.feedback = Feedback(books, self.lives)
        self.jobs = Jobs(books, around, self.lives, coordinator)
        self.orders = Orders(books, around, self.pool, self.lives, self.jobs)
        self.feedback.ensure_group()
        if not config.keep_rows:
            store.room.drop_acknowledged()  # releases before this one left it there
        self._begin(is_restored)
        self._refresh()
        if not is_restored:
            self._forget_classes(self.books.clock.now())

    def _begin(self, is_restored: bool) -> None:
        """The first commits: adopt a newer record of the set-up, then put the configuration into force."""
        config, books, state, now = self.config, self.books, self.state, self.books.clock.now()
        before, epoch = state.desired, books.store.epoch
        started = {
            "text": f"controller started, epoch {epoch}",
            "epoch": epoch,
            "commit": state.commit if is_restored else 0,  # 0: nothing was restored, ids begin anew
            "num_booked": state.num_booked,
        }
        books.log("note", started)
        books.flush()
        first = config.first_version or (state.desired.first_version if state.desired is not None else "")
        if first:
            books.pending.desired = configured_desired(state.desired, first, config.policy.holdback_percent, now)
            books.flush()
        if before is not None and state.desired is not None and before.first_version != state.desired.first_version:
            self.controller.unpin()  # a pin made for the drafters of another start holds nothing here
            books.note(f"first drafter is {state.desired.first_version}; pins and versions of classes removed")
            books.flush()
        for trial in state.rollout.trials:  # by a clock that may have been set back since
            trial.since = min(trial.since, now)
        self.lives.reconcile(now)
        logger.info(
            "controller restored epoch=%d commit=%d rows=%d pending_job=%s",
            epoch, state.commit, state.num_rows, state.pending.job.job_id if state.pending else None,
        )  # fmt: skip

    def _refresh(self) -> None:
        self.surroundings.refresh()
        try:
            self.pool.tend()
        except (OSError, PacelineError) as e:
            self.books.note_storage("limits of the version pool could not be enforced", e)
        self.lives.follow_reports(self.books.clock.now())
        self._mend_classes()
        self._sort_classes(self.books.clock.now())
        self.feedback.look_at_lag()
        if num_lost := self.books.store.room.keep():
            self.books.note(
                f"the file of this log lacks up to {num_lost} older lines: Redis had no room for more before they were copied"
            )

    def _forget_classes(self, now: float) -> None:
        """Without the state that numbered them, classes that the stores or Redis name are not those that are numbered from now on."""
        desired, around = self.books.desired, self.surroundings
        known = {*around.rows, *(bucket for rows in around.learned_rows.values() for bucket in rows)}
        for bucket in sorted({*known, *(desired.class_versions if desired is not None else ())}):
            if bucket.startswith(CLASS_PREFIX) and bucket not in self.state.classes.published.names:
                num_rows = max(self.state.rows_written.get(bucket, 0), 1)  # some text was under it
                self.controller.begin_bucket(bucket, now, num_rows)
                self.lives.end_class(bucket, f"class {bucket} was numbered by a state that is lost", now)

    def _mend_classes(self) -> None:
        """Have the record of the classes written again where Redis does not hold it as it was written."""
        store, pending = self.books.store, self.books.pending
        if not pending.mends_classes and not store.has_classes():
            pending.mends_classes = True
            self.books.note(
                f"the traffic classes in Redis were damaged or gone: written again; what was there is {store.keys.classes}:damaged:{store.epoch}"
            )

    def _sort_classes(self, now: float) -> None:
        book, before = self.state.classes, self.state.classes.published
        if book.tidy(self.config.max_classes, now, self.books.kept_classes()) and book.published.names != before.names:
            self.books.log("classes", {"rev": book.published.rev, "names": book.published.names})
            logger.info("traffic classes changed rev=%d number=%d", book.published.rev, len(book.published.names))
        for bucket in book.take_ended():  # its number may have gone to another kind of prompts
            self.controller.begin_bucket(bucket, now, self.state.rows_written.get(bucket, 0))
            reason = f"class {bucket} has ended; what comes under this name now is served by the live version"
            self.lives.end_class(bucket, reason, now)
        for bucket, whole in book.take_parted():
            self.lives.inherit(bucket, whole, now)

    def close(self, patience_s: float) -> None:
        """A last commit; a job in flight is asked to stop and killed after `patience_s`. Raises redis errors, FencedError."""
        self.books.settle()
        self.jobs.stop(patience_s)
        self.books.flush()
        try:
            self.books.store.copy_log()
            self.books.store.save_file(self.state)
        except (OSError, StorageHangsError) as e:  # what was committed is committed
            self.books.note_storage("the data folder cannot be written", e)

    def step(self, block_ms: int = 250) -> int:
        """One pass: feedback, surroundings, trials, job, decisions, commit. Returns the entries read.

        Raises: redis errors (call again later, nothing is lost), FencedError (stop).
        """
        self.books.settle()
        num_entries = self.feedback.read(block_ms)
        now = self.books.clock.now()
        if now >= self._context_due:
            self._context_due = now + self.config.context_every_s
            self._refresh()
        is_read_up = num_entries < READ_COUNT and not self.feedback.is_catching_up
        self._behind_since = None if is_read_up else self._behind_since or now
        failure: Exception | None = None
        for do in (lambda: self.lives.judge_trials(now, is_read_up=is_read_up), lambda: self.jobs.poll(now)):
            try:
                do()
            except (RedisError, FencedError, OSError):
                raise
            except Exception as e:  # what was read is committed all the same
                failure = failure or e
        # what waited for a controller that was away is no load of the seconds in which it is read
        if self._behind_since is None or now - self._behind_since > MAX_BEHIND_S:
            self.orders.tick(now)
        self.books.take_drained()
        self.books.flush_due(now)
        if failure is not None:
            raise failure
        return num_entries


NUM_DECISIONS = 500
_OF_TRIAL = ("version", "incumbent", "since", "bucket", "scope", "arm", "decision_id", "num_drafted_rounds")
"""What a snapshot shows of a trial or guard as that has it."""
T = TypeVar("T", CanaryRollout, Guard)


def snapshot_view(session: Session) -> Snapshot:
    """Assemble the record; a policy that cannot be shown is noted among the errors."""
    now = session.books.clock.now()
    state, store, around, config = session.state, session.books.store, session.surroundings, session.config
    controller, totals = session.controller, session.controller.ledger_totals()
    desired, pending = state.desired, state.pending
    try:
        bandit = controller.snapshot()
    except Exception as e:
        session.books.errors.note("the policy could not be shown", e)
        bandit = None
    return Snapshot(
        ts=now,
        model=config.model,
        target_version=config.target_version,
        epoch=state.epoch,
        commit=state.commit,
        gen=desired.gen if desired else 0,
        version=desired.version if desired else "",
        first_version=desired.first_version if desired else "",
        holdback_percent=desired.holdback_percent if desired else 0,
        class_versions=desired.class_versions if desired else {},
        history=list(state.history),
        versions=[msgspec.convert(m, VersionInfo, from_attributes=True) for m in around.versions],
        policy=state.policy,
        is_paused=state.is_paused,
        notes=[Note(ts=ts, text=text) for ts, text in state.notes],
        decisions=list(store.decisions.values())[-NUM_DECISIONS:],
        ledger=ledger_sums(totals.by_kind()),
        ledger_cells=totals.rows(),
        saved_interval_s=totals.saved_interval_s(),
        ledger_entries=list(store.ledger),
        buckets=bucket_traffic(state.traffic, now),
        rows=dict(around.rows),
        class_shares={bucket or DEFAULT_BUCKET: share for bucket, share in state.classes.shares_of_classes().items()},
        job=None if pending is None else RunningJob(
            job_id=pending.job.job_id, bucket=pending.job.bucket, arm=pending.job.arm.name, since=pending.since,
            decision_id=pending.decision_id,
        ),
        swaps=Swaps(count=len(state.swap_times), pause_ms=list(state.swap_pauses_ms), times=list(state.swap_times)),
        rollout=rollout_view(state.rollout, config.rollout, now),
        lifecycle={version: _stage(life) for version, life in state.lifecycle.versions.items()},
        evicted=list(state.evicted),
        replicas=list(around.reports),
        feedback=_feedback(state, list(around.counters.values()), session.feedback.lag),
        bandit=bandit,
        folder_error=session.books.folder_error,
    )  # fmt: skip


def ledger_sums(by_kind: dict[str, float]) -> LedgerSums:
    """Device-seconds spent, saved, net and by kind."""
    saved = by_kind.get("saving", 0.0)
    spent = sum(s for kind, s in by_kind.items() if kind != "saving")
    return LedgerSums(spent_s=spent, saved_s=saved, net_s=saved - spent, by_kind=dict(by_kind))


def bucket_traffic(stats: TrafficStats, now: float) -> dict[str, BucketTraffic]:
    """Bucket -> sums by group; a group of a name that is none of ours shows in the recent window only."""
    recent, known = stats.recent(now), BucketTraffic.__struct_fields__
    return {
        bucket: BucketTraffic(
            **{group: sums.view() for group, sums in groups.items() if group in known and group != "recent"},
            recent={group: sums.view() for group, sums in recent.get(bucket, {}).items()},
        )
        for bucket, groups in stats.totals.items()
    }


def rollout_view(state: RolloutState, config: RolloutConfig, now: float) -> IdleRollout | CanaryRollout:
    """The numbers of trial and guards, what is frozen, how the last of them ended."""
    canary, last = state.canary, msgspec.convert(state.last, TrialEnd)
    frozen = {bucket: until for bucket, until in state.frozen.items() if until > now}
    guards = [_trial(g, Guard, config) for _, g in sorted(state.guards.items())]
    common: dict[str, Any] = {
        "frozen_until": frozen, "last": last, "alpha": config.alpha, "margin": config.margin, "guards": guards
    }  # fmt: skip
    if canary is None:
        return IdleRollout(**common, reason=last.reason)
    return _trial(
        canary,
        CanaryRollout,
        config,
        **common,
        num_excluded=canary.num_excluded,
        num_open=len(canary.open),
        num_errors=list(canary.test.errors),
        evidence_against=canary.test.evidence_against(),
        thresholds=Evidence(slower=math.log(1 / config.alpha), fast_enough=math.log(1 / config.alpha_promote)),
        strata={
            name: Stratum(num_incumbent=s.requests[0], num_canary=s.requests[1], ratio=s.ratio())
            for name, s in canary.test.strata.items()
        },
    )


def _trial(trial: Canary, kind: type[T], config: RolloutConfig, **more: Any) -> T:
    """What a snapshot shows of a trial and of a guard alike."""
    test = trial.test
    incumbent, own = test.num_requests
    return kind(
        **{name: getattr(trial, name) for name in _OF_TRIAL},
        share_percent=trial.percent,
        num_requests=incumbent + own,
        num_canary_requests=own,
        min_drafted_rounds=config.min_drafted_rounds,
        ratio=test.ratio(),
        log_evidence=Evidence(slower=test.evidence_worse(), fast_enough=test.evidence_fast_enough()),
        **more,
    )


def _stage(life: VersionLife) -> VersionStage:
    return VersionStage(
        state=life.status, since=life.since, bucket=life.bucket, arm=life.arm, was_live=life.was_live,
        transitions=list(life.transitions),
    )  # fmt: skip


def _feedback(state: HostState, counters: list[dict[str, int]], lag: int | None) -> FeedbackCounts:
    dropped = max(state.num_dropped, sum(c.get("dropped", 0) for c in counters))
    return FeedbackCounts(
        produced=max(sum(c.get("produced", 0) for c in counters), state.num_rows + dropped),
        delivered=state.num_rows,
        dropped=dropped,
        duplicates=state.num_duplicates,
        missing_batches=state.num_missing_batches,
        lost_entries=state.num_lost_entries,
        lag=lag,
    )
