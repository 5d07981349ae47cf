"""What does the controller show: one dict of plain values for the live view, the state route and the metrics."""

from __future__ import annotations

import msgspec

from paceline.adapt.versions.lifecycle import VersionLife
from paceline.config import RolloutConfig
from paceline.contracts import Decision, DrafterManifest, LedgerEntry, ReplicaReport
from paceline.infra.controller.rollout import rollout_view
from paceline.infra.controller.store import HostState

NUM_DECISIONS = 500
NUM_LEDGER = 5_000


def snapshot_view(
    state: HostState,
    *,
    model: str,
    target_version: str,
    now: float,
    decisions: list[Decision],
    ledger: list[LedgerEntry],
    manifests: list[DrafterManifest],
    reports: list[ReplicaReport],
    rows: dict[str, int],
    counters: list[dict[str, int]],
    lag: int | None,
    rollout: RolloutConfig,
) -> dict:
    """Assemble the view; `counters` are the feedback counters that replicas reported last, also of those gone since."""
    desired, pending = state.desired, state.pending
    dropped = max(state.num_dropped, sum(c.get("dropped", 0) for c in counters))
    return {
        "ts": now,
        "model": model,
        "target_version": target_version,
        "epoch": state.epoch,
        "commit": state.commit,
        "gen": desired.gen if desired else 0,
        "version": desired.version if desired else "",
        "first_version": desired.first_version if desired else "",
        "holdback_percent": desired.holdback_percent if desired else 0,
        "history": list(state.history),
        "versions": [{k: v for k, v in msgspec.to_builtins(m).items() if k != "config"} for m in manifests],
        "policy": state.policy,
        "is_paused": state.is_paused,
        "notes": [{"ts": ts, "text": text} for ts, text in state.notes],
        "decisions": [msgspec.to_builtins(d) for d in decisions[-NUM_DECISIONS:]],
        "ledger": ledger_totals(state.ledger_totals.by_kind()),
        "ledger_cells": state.ledger_totals.rows(),
        "saved_interval_s": list(state.ledger_totals.saved_interval_s()),
        "ledger_entries": [msgspec.to_builtins(e) for e in ledger[-NUM_LEDGER:]],
        "buckets": state.traffic.buckets(now),
        "rows": dict(rows),
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
        "rollout": rollout_view(state.rollout, rollout, now),
        "lifecycle": {version: _life(life) for version, life in state.lifecycle.versions.items()},
        "evicted": list(state.evicted),
        "replicas": [msgspec.to_builtins(r) for r in reports],
        "feedback": {
            "produced": max(sum(c.get("produced", 0) for c in counters), state.num_rows + dropped),
            "delivered": state.num_rows,
            "dropped": dropped,
            "duplicates": state.num_duplicates,
            "missing_batches": state.num_missing_batches,
            "lost_entries": state.num_lost_entries,
            "lag": lag,
        },
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
