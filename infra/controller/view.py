"""View: what the controller shows, as one dict of plain values for live view, state route and metrics."""

from __future__ import annotations

import msgspec

from paceline.adapt.versions.lifecycle import VersionLife
from paceline.infra.controller.rollout import rollout_view
from paceline.infra.controller.session import Session
from paceline.infra.state.log import ErrorCount

NUM_DECISIONS = 500


def snapshot_view(session: Session, now: float, errors: ErrorCount) -> dict:
    """Assemble the view; a policy that cannot be shown is noted among the errors."""
    state, store, surroundings, config = session.state, session.books.store, session.surroundings, session.config
    controller, totals = session.controller, session.controller.ledger_totals()
    counters = list(surroundings.counters.values())
    try:
        bandit = controller.snapshot()
    except Exception as e:
        errors.note("the policy could not be shown", e)
        bandit = {}
    desired, pending = state.desired, state.pending
    dropped = max(state.num_dropped, sum(c.get("dropped", 0) for c in counters))
    return {
        "ts": now,
        "model": config.model,
        "target_version": config.target_version,
        "epoch": state.epoch,
        "commit": state.commit,
        "gen": desired.gen if desired else 0,
        "version": desired.version if desired else "",
        "first_version": desired.first_version if desired else "",
        "holdback_percent": desired.holdback_percent if desired else 0,
        "history": list(state.history),
        "versions": [{k: v for k, v in msgspec.to_builtins(m).items() if k != "config"} for m in surroundings.versions],
        "policy": state.policy,
        "is_paused": state.is_paused,
        "notes": [{"ts": ts, "text": text} for ts, text in state.notes],
        "decisions": [msgspec.to_builtins(d) for d in list(store.decisions.values())[-NUM_DECISIONS:]],
        "ledger": ledger_totals(totals.by_kind()),
        "ledger_cells": totals.rows(),
        "saved_interval_s": list(totals.saved_interval_s()),
        "ledger_entries": [msgspec.to_builtins(e) for e in store.ledger],
        "buckets": state.traffic.buckets(now),
        "rows": dict(surroundings.rows),
        "job": None
        if pending is None
        else {
            "job_id": pending.job.job_id,
            "bucket": pending.job.bucket,
            "arm": pending.job.arm.name,
            "since": pending.since,
            "decision_id": pending.decision_id,
        },
        "swaps": {
            "count": len(state.swap_times),
            "pause_ms": list(state.swap_pauses_ms),
            "times": list(state.swap_times),
        },
        "rollout": rollout_view(state.rollout, config.rollout, now),
        "lifecycle": {version: _life(life) for version, life in state.lifecycle.versions.items()},
        "evicted": list(state.evicted),
        "replicas": [msgspec.to_builtins(r) for r in surroundings.reports],
        "feedback": {
            "produced": max(sum(c.get("produced", 0) for c in counters), state.num_rows + dropped),
            "delivered": state.num_rows,
            "dropped": dropped,
            "duplicates": state.num_duplicates,
            "missing_batches": state.num_missing_batches,
            "lost_entries": state.num_lost_entries,
            "lag": session.feedback.lag,
        },
        "bandit": bandit,
    }


def _life(life: VersionLife) -> dict:
    """A version's state and its transitions, oldest first."""
    values = msgspec.to_builtins(life)
    return {"state": values.pop("status"), **values}


def ledger_totals(by_kind: dict[str, float]) -> dict:
    """Device-seconds spent, saved, net and by kind."""
    saved = by_kind.get("saving", 0.0)
    spent = sum(s for kind, s in by_kind.items() if kind != "saving")
    return {"spent_s": spent, "saved_s": saved, "net_s": saved - spent, "by_kind": dict(by_kind)}
