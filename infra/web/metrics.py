"""Which metrics exist, in what unit, with which labels; and the controller's values in Prometheus' text format.

Labels never hold request ids, users or version hashes: they would make a series of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paceline.infra.web.words import canary_of, net_interval


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; counters gain `_total` in the text format."""

    name: str
    kind: str
    """'counter' | 'gauge'."""
    unit: str
    text: str
    labels: tuple[str, ...] = ()


def metric_spec(name: str, kind: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A row; the name is given without the `paceline_` prefix."""
    return MetricSpec(name=f"paceline_{name}", kind=kind, unit=unit, text=text, labels=labels)


CONTROLLER_METRICS: tuple[MetricSpec, ...] = (
    metric_spec("controller_redis_up", "gauge", "1", "1 while the controller reaches Redis"),
    metric_spec("controller_fenced", "gauge", "1", "1 when a newer controller took over from this one"),
    metric_spec("controller_epoch", "gauge", "1", "Starts of controllers of this service"),
    metric_spec("controller_errors", "counter", "1", "Passes or policy calls that failed"),
    metric_spec("controller_snapshot_age_seconds", "gauge", "s", "Age of the controller's values on this page; it grows while the controller hangs"),
    metric_spec("controller_paused", "gauge", "1", "1 while an operator has paused decisions"),
    metric_spec("controller_pinned", "gauge", "1", "1 while an operator has pinned a version"),
    metric_spec("desired_generation", "gauge", "1", "Generation of the desired state"),
    metric_spec("replicas_alive", "gauge", "1", "Replicas with a fresh report"),
    metric_spec("replicas_converged", "gauge", "1", "Replicas that run the desired generation"),
    metric_spec("training_jobs_running", "gauge", "1", "Training jobs in flight"),
    metric_spec("decisions", "counter", "1", "Decisions kept in the log, by action", "action"),
    metric_spec("ledger_seconds", "gauge", "s", "Device-seconds spent or saved, by kind", "kind"),
    metric_spec("ledger_net_seconds", "gauge", "s", "Device-seconds saved minus spent"),
    metric_spec("ledger_net_bound_seconds", "gauge", "s", "95% interval of the net; bound is lower or upper", "bound"),
    metric_spec("bank_seconds", "gauge", "s", "Device-seconds that the policy may still spend"),
    metric_spec("canary_active", "gauge", "1", "1 while a version is on trial"),
    metric_spec("canary_percent", "gauge", "%", "Share of adaptive requests that the version on trial serves"),
    metric_spec("canary_requests", "gauge", "1", "Finished requests of the trial, by version: incumbent or canary", "role"),
    metric_spec("canary_speed_ratio", "gauge", "1", "Tokens per second of the version on trial over the incumbent's"),
    metric_spec("regime_age_seconds", "gauge", "s", "Time since the traffic mix last changed"),
    metric_spec("drift_alarms", "counter", "1", "Alarms that a bucket's text changed", "bucket"),
    metric_spec("stream_lag_entries", "gauge", "1", "Feedback entries not read yet"),
    metric_spec("feedback_rows_folded", "counter", "1", "Rows folded into the controller's state"),
    metric_spec("feedback_rows_lost", "counter", "1", "Rows that producers dropped"),
    metric_spec("feedback_duplicates", "counter", "1", "Batches delivered twice and folded once"),
    metric_spec("feedback_missing_batches", "counter", "1", "Batches that never arrived (gaps in their numbers)"),
    metric_spec("feedback_lost_entries", "counter", "1", "Entries trimmed before they were read, or unreadable"),
    metric_spec("tokens", "counter", "1", "Emitted tokens", "bucket", "group"),
    metric_spec("acceptance_length", "gauge", "tokens", "Tokens per round of the latest 30 s, bonus included", "bucket", "group"),
    metric_spec("tokens_per_second", "gauge", "1/s", "Tokens per device-second of the latest 30 s", "bucket", "group"),
)  # fmt: skip


class ControllerCollector:
    """Collector over the controller's snapshot, read when scraped."""

    def __init__(self, read_snapshot: Callable[[], dict[str, Any]]) -> None:
        self._read = read_snapshot

    def collect(self) -> Iterable[Metric]:
        values = _values(self._read())
        for spec in CONTROLLER_METRICS:
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            metric = family(spec.name, f"{spec.text} (unit {spec.unit})", labels=spec.labels)
            for labels, value in values.get(spec.name.removeprefix("paceline_"), {}).items():
                metric.add_metric(labels, float(value))
            yield metric


def controller_metrics(snapshot: dict[str, Any]) -> tuple[bytes, str]:
    """Body and content type for one snapshot of the controller."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ControllerCollector(lambda: snapshot))  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _values(s: dict[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric name -> label values -> value; parts that the snapshot lacks are left out."""
    feedback, replicas = s.get("feedback") or {}, s.get("replicas") or []
    bandit, canary = s.get("bandit") or {}, canary_of(s)
    plain: dict[str, Any] = {
        "controller_redis_up": s.get("redis_up"),
        "controller_fenced": s.get("is_fenced"),
        "controller_epoch": s.get("epoch"),
        "controller_errors": (s.get("errors") or {}).get("count"),
        "controller_snapshot_age_seconds": None if s.get("ts") is None else max(0.0, time.time() - s["ts"]),
        "controller_paused": s.get("is_paused"),
        "controller_pinned": None if not bandit else bandit.get("pinned") is not None,
        "bank_seconds": bandit.get("bank_s"),
        "regime_age_seconds": bandit.get("regime_age_s"),
        "canary_active": None if not s.get("rollout") else canary is not None,
        "canary_percent": None if not s.get("rollout") else (canary or {}).get("share_percent", 0),
        "canary_speed_ratio": (canary or {}).get("ratio"),
        "desired_generation": s.get("gen"),
        "replicas_alive": len(replicas),
        "replicas_converged": sum(r["gen"] == s.get("gen") for r in replicas),
        "training_jobs_running": int(bool(s.get("job"))),
        "ledger_net_seconds": (s.get("ledger") or {}).get("net_s"),
        "stream_lag_entries": feedback.get("lag"),
        "feedback_rows_folded": feedback.get("delivered"),
        "feedback_rows_lost": feedback.get("dropped"),
        "feedback_duplicates": feedback.get("duplicates"),
        "feedback_missing_batches": feedback.get("missing_batches"),
        "feedback_lost_entries": feedback.get("lost_entries"),
    }
    out: dict[str, dict[tuple[str, ...], float]] = {
        name: {(): float(value)} for name, value in plain.items() if value is not None
    }
    actions: dict[tuple[str, ...], float] = {}
    for d in s.get("decisions") or []:
        actions[(d["action"],)] = actions.get((d["action"],), 0.0) + 1
    out["decisions"] = actions
    out["ledger_seconds"] = {(kind,): v for kind, v in ((s.get("ledger") or {}).get("by_kind") or {}).items()}
    if s.get("ledger"):
        _, low, high = net_interval(s)
        out["ledger_net_bound_seconds"] = {("lower",): low, ("upper",): high}
    if canary is not None:
        own, both = canary.get("num_canary_requests") or 0, canary.get("num_requests") or 0
        out["canary_requests"] = {("canary",): own, ("incumbent",): both - own}
    out["drift_alarms"] = {(bucket,): n for bucket, n in (bandit.get("drift_alarms") or {}).items()}
    for name in ("tokens", "acceptance_length", "tokens_per_second"):
        out[name] = {}
    for bucket, groups in (s.get("buckets") or {}).items():
        for group, sums in groups.items():
            if group != "recent":
                out["tokens"][(bucket, group)] = sums["tokens"]
        for group, sums in groups["recent"].items():
            for name, key in (("acceptance_length", "acceptance_length"), ("tokens_per_second", "tokens_per_s")):
                if sums[key] is not None:
                    out[name][(bucket, group)] = sums[key]
    return out
