"""Sections: what the dashboard shows of a service's state, one plain value for each part of the page.

A part changes only when what it shows changes, so that a page is sent the changed parts alone. Every part copes with a
controller that is away and with a service without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from paceline.bandit.ledger.totals import LedgerCell
from paceline.bandit.policies.table import POLICIES
from paceline.contracts import Decision, LedgerEntry
from paceline.infra.controller.snapshot import LedgerSums, ReplicaState, Snapshot
from paceline.infra.web.words import answers, decision_title, net_interval, rollout_words, shares

NUM_DECISIONS = 150
NUM_VERSIONS = 60
NUM_BUCKETS = 40
NUM_JOBS = 30
_DECISION_FIELDS = (
    "decision_id", "ts", "bucket", "action", "arm", "version", "policy", "reason", "expected_gain", "expected_saving_s",
    "expected_cost_s", "realised_gain", "realised_saving_s", "realised_cost_s", "outcome",
)  # fmt: skip
_JOB_FIELDS = (*_DECISION_FIELDS[:7], "expected_cost_s", "realised_cost_s", "realised_gain", "outcome")
_VERSION_FIELDS = (
    "version", "parent", "arm", "bucket", "num_train_rows", "created", "num_bytes", "delta_of", "metrics",
)  # fmt: skip
_REPLICA_FIELDS = (
    "replica_id", "gen", "version", "slots", "class_versions", "refused", "failed_gen", "failed_reason", "swap_pause_ms",
    "staging_s",
)  # fmt: skip
_ENGINE_FIELDS = (
    "num_running", "num_waiting", "num_pages", "num_free_pages", "num_tokens", "num_finished", "num_aborted",
)  # fmt: skip


def sections(state: Snapshot) -> dict[str, Any]:
    """Part name -> value; `state` is ServiceView.state()."""
    return {
        "head": _head(state),
        "answers": answers(state),
        "latency": state.latency,
        "buckets": _buckets(state),
        "regimes": regimes(state),
        "decisions": decisions(state),
        "ledger": ledger_section(state) | {"interval": net_interval(state)},
        "posterior": state.bandit.posterior if state.bandit is not None else [],
        "versions": versions(state),
        "rollout": {"rollout": state.rollout, "shares": shares(state), "text": rollout_words(state)},
        "swaps": state.swaps,
        "replicas": _replicas(state),
        "jobs": _jobs(state),
        "health": _health(state),
    }


def _fields(record: msgspec.Struct, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _head(state: Snapshot) -> dict[str, Any]:
    names = (
        "model",
        "target",
        "policy",
        "is_paused",
        "has_controller",
        "is_adaptive",
        "gen",
        "version",
        "first_version",
    )
    return _fields(state, names) | {
        "policies": sorted({*POLICIES, *filter(None, [state.policy])}),  # the one in force may be another's class
        "arms": state.bandit.arms if state.bandit is not None else [],
        "pinned": state.bandit.pinned if state.bandit is not None else None,
        "bank_s": state.bandit.bank_s if state.bandit is not None else None,
        "num_buckets": len(state.buckets),
    }


def _buckets(state: Snapshot) -> list[dict[str, Any]]:
    """The NUM_BUCKETS busiest by recent tokens, with the latest 30 s of every group and what is believed of them."""
    beliefs = state.bandit.beliefs if state.bandit is not None else {}
    speculation: dict[str, dict[str, bool]] = {}
    for row in state.replica.speculation if state.replica is not None else []:
        roles = speculation.setdefault(row.bucket, {})
        roles[row.role] = roles.get(row.role, False) or row.is_on
    rows: list[dict[str, Any]] = [
        {
            "bucket": name,
            "recent": traffic.recent,
            "tokens": sum(sums.tokens for sums in traffic.groups().values()),
            "recent_tokens": sum(sums.tokens for sums in traffic.recent.values()),
            "belief": beliefs.get(name),
            "speculation": speculation.get(name, {}),
            "rows": state.rows.get(name, 0),
            "class_share": state.class_shares.get(name),
            "version": state.class_versions.get(name),
        }
        for name, traffic in state.buckets.items()
    ]
    return sorted(rows, key=lambda r: (-r["recent_tokens"], -r["tokens"], r["bucket"]))[:NUM_BUCKETS]


def regimes(state: Snapshot) -> dict[str, Any]:
    """When regimes of the traffic mix began, how old the present one is expected to become, drift alarms by bucket."""
    bandit = state.bandit
    if bandit is None:
        return {"starts": [], "horizon_s": 0, "alarms": {}}
    return {
        "starts": [round(t, 1) for t in bandit.regime_starts],
        "horizon_s": round(bandit.horizon_s),
        "alarms": bandit.drift_alarms,
    }


def decisions(state: Snapshot) -> dict[str, Any]:
    """The newest decisions, newest last, each with a title; and the latest notes."""
    rows = [_fields(d, _DECISION_FIELDS) | {"title": decision_title(d)} for d in state.decisions[-NUM_DECISIONS:]]
    return {"rows": rows, "notes": state.notes}


def versions(state: Snapshot) -> list[dict[str, Any]]:
    """Drafter versions as nodes of a family tree, oldest first: parent, what made it, scores by bucket, roles."""
    scores: dict[str, dict[str, float]] = {}
    for bucket, by_version in (state.bandit.scores if state.bandit is not None else {}).items():
        for version, length in by_version.items():
            scores.setdefault(version, {})[bucket] = length
    rows = []
    for v in sorted(state.versions, key=lambda v: (v.created, v.version)):
        roles = _roles(state, v.version)
        life = state.lifecycle.get(v.version)
        stage = life.state if life is not None and life.state not in roles else None
        more = {"roles": roles, "scores": scores.get(v.version, {}), "stage": stage}
        rows.append(_fields(v, _VERSION_FIELDS) | more)
    must = [r for r in rows if r["roles"]]
    rest = [r for r in rows if not r["roles"]]
    del rest[: max(0, len(rest) - max(0, NUM_VERSIONS - len(must)))]
    return sorted(must + rest, key=lambda r: (r["created"], r["version"]))


def _roles(state: Snapshot, version: str) -> list[str]:
    bandit, tried = state.bandit, state.canary.version if state.canary is not None else None
    facts = {
        "live": version == state.version,
        "first": version == state.first_version,
        "canary": version == tried != state.version,
        "pinned": bandit is not None and version == bandit.pinned,
        "barred": bandit is not None and version in bandit.barred,
    }
    classes = [f"for {bucket}" for bucket, own in sorted(state.class_versions.items()) if own == version]
    return [role for role, is_so in facts.items() if is_so] + classes


def _replicas(state: Snapshot) -> list[dict[str, Any]]:
    return [
        _fields(r, _REPLICA_FIELDS) | {"is_converged": r.runs(state.gen)}
        for r in sorted(state.replicas, key=lambda r: r.replica_id)
    ]


def _jobs(state: Snapshot) -> dict[str, Any]:
    busy = state.job.decision_id if state.job is not None else None
    past: list[Decision] = [d for d in state.decisions if d.action == "train" and d.decision_id != busy]
    return {"running": state.job, "past": [_fields(d, _JOB_FIELDS) for d in past[-NUM_JOBS:]]}


def _health(state: Snapshot) -> dict[str, Any]:
    replica = state.replica or ReplicaState()
    return {
        **_fields(
            state,
            (
                "redis_up",
                "is_redis_full",
                "read_only",
                "folder_error",
                "has_controller",
                "is_adaptive",
                "is_fenced",
                "errors",
                "epoch",
                "ts",
                "feedback",
            ),
        ),
        "replica_id": replica.replica_id,
        "engine": {name: replica.engine.get(name) for name in _ENGINE_FIELDS},
        "traces": None if replica.traces is msgspec.UNSET else replica.traces,
        "is_training": replica.training,
    }


NUM_POINTS = 240
NUM_ROWS = 20
_SAVING = "saving"


def over_time(entries: Iterable[LedgerEntry], sums: LedgerSums, num_points: int = NUM_POINTS) -> dict[str, list]:
    """Cumulative spent, saved and net at up to `num_points` times; the last point is the totals.

    Entries are the newest ones only; what was booked before them is the offset, so that the lines end at the totals.
    """
    rows = sorted(entries, key=lambda e: (e.ts, e.entry_id))
    spent = sums.spent_s - sum(e.seconds for e in rows if e.kind != _SAVING)
    saved = sums.saved_s - sum(e.seconds for e in rows if e.kind == _SAVING)
    out: dict[str, list] = {"ts": [], "spent_s": [], "saved_s": [], "net_s": []}
    stride = max(1, -(-len(rows) // num_points))
    for i, e in enumerate(rows):
        if e.kind == _SAVING:
            saved += e.seconds
        else:
            spent += e.seconds
        if i % stride == stride - 1 or i == len(rows) - 1:
            for key, value in (("ts", e.ts), ("spent_s", spent), ("saved_s", saved), ("net_s", saved - spent)):
                out[key].append(round(value, 4))
    return out


def breakdown(cells: Iterable[LedgerCell], by: str) -> list[dict[str, Any]]:
    """[{name, spent_s, saved_s}] of the controller's totals, summed by 'bucket', 'version' or 'arm'; the largest first."""
    sums: dict[str, dict[str, float]] = {}
    for cell in cells:
        row = sums.setdefault(getattr(cell, by) or "(none)", {"spent_s": 0.0, "saved_s": 0.0})
        row["spent_s"] += cell.spent_s
        row["saved_s"] += cell.saved_s
    rows = [{"name": name, **row} for name, row in sums.items()]
    return sorted(rows, key=lambda r: (-r["spent_s"] - abs(r["saved_s"]), r["name"]))


def ledger_section(state: Snapshot) -> dict[str, Any]:
    """Totals, lines over time and break-downs."""
    sums = state.ledger
    by_kind = [
        {"name": kind, "spent_s": 0.0 if kind == _SAVING else s, "saved_s": s if kind == _SAVING else 0.0}
        for kind, s in sorted(sums.by_kind.items())
    ]
    split = {by: breakdown(state.ledger_cells, by)[:NUM_ROWS] for by in ("bucket", "version", "arm")}
    return {
        "totals": {"spent_s": sums.spent_s, "saved_s": sums.saved_s, "net_s": sums.net_s},
        "bank_s": state.bandit.bank_s if state.bandit is not None else None,
        "lines": over_time(state.ledger_entries, sums),
        "by": {"kind": by_kind, **split},
        "num_entries": len(state.ledger_entries),
    }
