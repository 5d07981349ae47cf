"""What does the dashboard show of a service's state? One plain value for each part of the page.

A part changes only when what it shows changes, so that a page is sent the changed parts alone. Every part copes with a
state that lacks it: a controller that is away, a service without one, an older controller.
"""

from __future__ import annotations

from typing import Any

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.policies.table import POLICIES
from paceline.infra.web.ledger import ledger_section
from paceline.infra.web.words import answers, canary_of, decision_title, net_interval, rollout_words, shares

NUM_DECISIONS = 150
NUM_VERSIONS = 60
NUM_BUCKETS = 40
_DECISION_FIELDS = (
    "decision_id", "ts", "bucket", "action", "arm", "version", "policy", "reason", "expected_gain", "expected_saving_s",
    "expected_cost_s", "realised_gain", "realised_saving_s", "realised_cost_s", "outcome",
)  # fmt: skip


def sections(state: dict[str, Any]) -> dict[str, Any]:
    """Part name -> value; `state` is ServiceView.state()."""
    return {
        "head": _head(state),
        "answers": answers(state),
        "buckets": _buckets(state),
        "regimes": regimes(state),
        "decisions": decisions(state),
        "ledger": ledger_section(state) | {"interval": net_interval(state)},
        "posterior": (state.get("bandit") or {}).get("posterior") or [],
        "versions": versions(state),
        "rollout": {"rollout": state.get("rollout"), "shares": shares(state), "text": rollout_words(state)},
        "swaps": state.get("swaps") or {"count": 0, "pause_ms": [], "times": []},
        "replicas": _replicas(state),
        "jobs": _jobs(state),
        "health": _health(state),
    }


def _head(state: dict[str, Any]) -> dict[str, Any]:
    bandit = state.get("bandit") or {}
    return {
        "model": state.get("model"),
        "target": state.get("target"),
        "policy": state.get("policy"),
        "policies": sorted(POLICIES),
        "arms": [a.name for a in default_arms()],
        "is_paused": bool(state.get("is_paused")),
        "pinned": bandit.get("pinned"),
        "has_controller": bool(state.get("has_controller")),
        "gen": state.get("gen"),
        "version": state.get("version"),
        "first_version": state.get("first_version"),
        "bank_s": bandit.get("bank_s"),
    }


def _buckets(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Buckets by recent tokens, with the latest 30 s of every group and what is believed of them."""
    found = state.get("buckets") or {}
    beliefs = (state.get("bandit") or {}).get("beliefs") or {}
    speculation: dict[str, dict[str, bool]] = {}
    for row in (state.get("replica") or {}).get("speculation") or []:
        roles = speculation.setdefault(row["bucket"], {})
        roles[row["role"]] = roles.get(row["role"], False) or row["is_on"]
    rows = []
    for name, groups in found.items():
        recent = groups.get("recent") or {}
        rows.append(
            {
                "bucket": name,
                "recent": recent,
                "tokens": sum(g["tokens"] for k, g in groups.items() if k != "recent"),
                "recent_tokens": sum(g["tokens"] for g in recent.values()),
                "belief": beliefs.get(name),
                "speculation": speculation.get(name, {}),
                "rows": (state.get("rows") or {}).get(name, 0),
            }
        )
    return sorted(rows, key=lambda r: (-r["recent_tokens"], -r["tokens"], r["bucket"]))[:NUM_BUCKETS]


def regimes(state: dict[str, Any]) -> dict[str, Any]:
    """When regimes of the traffic mix began, how old the present one is expected to become, drift alarms by bucket."""
    bandit = state.get("bandit") or {}
    return {
        "starts": [round(t, 1) for t in bandit.get("regime_starts") or []],
        "horizon_s": round(bandit.get("horizon_s") or 0.0),
        "alarms": bandit.get("drift_alarms") or {},
    }


def decisions(state: dict[str, Any]) -> dict[str, Any]:
    """The newest decisions, newest last, each with a title; and the latest notes."""
    rows = [
        {**{k: d.get(k) for k in _DECISION_FIELDS}, "title": decision_title(d)}
        for d in (state.get("decisions") or [])[-NUM_DECISIONS:]
    ]
    return {"rows": rows, "notes": state.get("notes") or []}


def versions(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Drafter versions as nodes of a family tree, oldest first: parent, what made it, scores by bucket, roles."""
    bandit = state.get("bandit") or {}
    live, first = state.get("version"), state.get("first_version")
    canary = (canary_of(state) or {}).get("version")
    scores: dict[str, dict[str, float]] = {}
    for bucket, by_version in (bandit.get("scores") or {}).items():
        for version, length in by_version.items():
            scores.setdefault(version, {})[bucket] = length
    rows = []
    for m in sorted(state.get("versions") or [], key=lambda m: (m.get("created") or 0.0, m["version"])):
        version = m["version"]
        facts = (
            ("live", live), ("first", first), ("canary", canary if canary != live else None), ("pinned", bandit.get("pinned")),
        )  # fmt: skip
        roles = [role for role, v in facts if v == version]
        if version in (bandit.get("barred") or []):
            roles.append("barred")
        kept = ("version", "parent", "arm", "bucket", "num_train_rows", "created", "num_bytes", "metrics")
        row = {k: m.get(k) for k in kept} | {"roles": roles, "scores": scores.get(version, {})}
        stage = _stage(state, version)
        rows.append(row | {"stage": None if stage in roles else stage})
    must = [r for r in rows if r["roles"]]
    rest = [r for r in rows if not r["roles"]][-max(0, NUM_VERSIONS - len(must)) :]
    return sorted(must + rest, key=lambda r: (r["created"] or 0.0, r["version"]))


def _stage(state: dict[str, Any], version: str) -> str | None:
    """Life-cycle stage of a version, where the controller tells it."""
    found = (state.get("lifecycle") or {}) if isinstance(state.get("lifecycle"), dict) else {}
    value = found.get(version)
    if isinstance(value, dict):
        value = value.get("state")
    return value if isinstance(value, str) else None


def _replicas(state: dict[str, Any]) -> list[dict[str, Any]]:
    gen = state.get("gen")
    kept = ("replica_id", "gen", "version", "slots", "failed_gen", "failed_reason", "swap_pause_ms", "staging_s")
    return [
        {k: r.get(k) for k in kept} | {"is_converged": r.get("gen") == gen}
        for r in sorted(state.get("replicas") or [], key=lambda r: str(r.get("replica_id")))
    ]


def _jobs(state: dict[str, Any]) -> dict[str, Any]:
    done = [d for d in state.get("decisions") or [] if d.get("action") == "train"]
    kept = (*_DECISION_FIELDS[:7], "expected_cost_s", "realised_cost_s", "realised_gain", "outcome")
    running = state.get("job")
    busy = running["decision_id"] if running else None
    past = [{k: d.get(k) for k in kept} for d in done if d.get("decision_id") != busy]
    return {"running": running, "past": past[-30:]}


def _health(state: dict[str, Any]) -> dict[str, Any]:
    replica = state.get("replica") or {}
    engine = replica.get("engine") or {}
    kept = ("num_running", "num_waiting", "num_pages", "num_free_pages", "num_tokens", "num_finished", "num_aborted")
    return {
        "redis_up": bool(state.get("redis_up")),
        "has_controller": bool(state.get("has_controller")),
        "is_fenced": bool(state.get("is_fenced")),
        "errors": state.get("errors") or {"count": 0, "last": ""},
        "epoch": state.get("epoch"),
        "ts": state.get("ts"),
        "feedback": state.get("feedback") or {},
        "replica_id": replica.get("replica_id"),
        "engine": {k: engine.get(k) for k in kept},
        "traces": replica.get("traces"),
        "is_training": bool(replica.get("training")),
    }
