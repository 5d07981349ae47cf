"""Snapshot builder: makes the record of infra/controller/snapshot.py from what the controller holds."""

from __future__ import annotations

import math

import msgspec

from paceline.adapt.versions.lifecycle import VersionLife
from paceline.bandit.controller.view import LedgerCell
from paceline.config import RolloutConfig
from paceline.infra.controller.rollout import RolloutState
from paceline.infra.controller.session import Session
from paceline.infra.controller.snapshot import (
    BucketTraffic,
    CanaryRollout,
    Evidence,
    FeedbackCounts,
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
from paceline.infra.controller.store import HostState
from paceline.infra.controller.traffic import TrafficStats
from paceline.infra.state.log import ErrorCount

NUM_DECISIONS = 500


def snapshot_view(session: Session, now: float, errors: ErrorCount) -> Snapshot:
    """Assemble the record; a policy that cannot be shown is noted among the errors."""
    state, store, around, config = session.state, session.books.store, session.surroundings, session.config
    controller, totals = session.controller, session.controller.ledger_totals()
    desired, pending = state.desired, state.pending
    try:
        bandit = controller.snapshot()
    except Exception as e:
        errors.note("the policy could not be shown", e)
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
        history=list(state.history),
        versions=[msgspec.convert(m, VersionInfo, from_attributes=True) for m in around.versions],
        policy=state.policy,
        is_paused=state.is_paused,
        notes=[Note(ts=ts, text=text) for ts, text in state.notes],
        decisions=list(store.decisions.values())[-NUM_DECISIONS:],
        ledger=ledger_sums(totals.by_kind()),
        ledger_cells=msgspec.convert(totals.rows(), list[LedgerCell]),
        saved_interval_s=totals.saved_interval_s(),
        ledger_entries=list(store.ledger),
        buckets=bucket_traffic(state.traffic, now),
        rows=dict(around.rows),
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
    """The trial's numbers, what is frozen, how the last trial ended."""
    canary, last = state.canary, msgspec.convert(state.last, TrialEnd)
    frozen = {bucket: until for bucket, until in state.frozen.items() if until > now}
    if canary is None:
        return IdleRollout(frozen_until=frozen, last=last, alpha=config.alpha, margin=config.margin, reason=last.reason)
    test = canary.test
    incumbent, own = test.num_requests
    return CanaryRollout(
        frozen_until=frozen,
        last=last,
        alpha=config.alpha,
        margin=config.margin,
        version=canary.version,
        incumbent=canary.incumbent,
        share_percent=canary.percent,
        since=canary.since,
        bucket=canary.bucket,
        arm=canary.arm,
        decision_id=canary.decision_id,
        num_requests=incumbent + own,
        num_canary_requests=own,
        num_drafted_rounds=canary.num_drafted_rounds,
        min_drafted_rounds=config.min_drafted_rounds,
        num_open=len(canary.open),
        num_excluded=canary.num_excluded,
        num_errors=list(test.errors),
        ratio=test.ratio(),
        log_evidence=Evidence(slower=test.evidence_worse(), fast_enough=test.evidence_fast_enough()),
        evidence_against=test.evidence_against(),
        thresholds=Evidence(slower=math.log(1 / config.alpha), fast_enough=math.log(1 / config.alpha_promote)),
        strata={
            name: Stratum(num_incumbent=s.requests[0], num_canary=s.requests[1], ratio=s.ratio())
            for name, s in test.strata.items()
        },
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
