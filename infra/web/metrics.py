"""Controller metrics: names, units, labels and where in the snapshot each value is, in Prometheus' text format.

Labels never hold request ids, users or version hashes: they would make a series of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.web.words import net_interval


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


_Value = float | None | msgspec.UnsetType | Mapping[tuple[str, ...], float]
"""A value, or values by their labels; None and UNSET: not known, the metric has no sample."""


def _age_s(s: Snapshot) -> float | None:
    return None if s.ts is None else max(0.0, time.time() - s.ts)


def _canary_requests(s: Snapshot) -> _Value:
    if s.canary is None:
        return {}
    own = s.canary.num_canary_requests
    return {("canary",): own, ("incumbent",): s.canary.num_requests - own}


def _recent(field: str) -> Callable[[Snapshot], _Value]:
    """Values of a field of the sums of the latest 30 s, by bucket and group, where they are known."""

    def read(s: Snapshot) -> _Value:
        found = {(b, g): getattr(sums, field) for b, t in s.buckets.items() for g, sums in t.recent.items()}
        return {labels: value for labels, value in found.items() if value is not None}

    return read


_TABLE: tuple[tuple[MetricSpec, Callable[[Snapshot], _Value]], ...] = (
    (metric_spec("controller_redis_up", "gauge", "1", "1 while the controller reaches Redis"), lambda s: s.redis_up),
    (metric_spec("controller_fenced", "gauge", "1", "1 when a newer controller took over from this one"), lambda s: s.is_fenced),
    (metric_spec("controller_epoch", "gauge", "1", "Starts of controllers of this service"), lambda s: s.epoch),
    (metric_spec("controller_errors", "counter", "1", "Passes or policy calls that failed"), lambda s: s.errors.count),
    (metric_spec("controller_snapshot_age_seconds", "gauge", "s", "Age of the controller's values on this page; it grows while the controller hangs"), _age_s),
    (metric_spec("controller_paused", "gauge", "1", "1 while an operator has paused decisions"), lambda s: s.is_paused),
    (metric_spec("controller_pinned", "gauge", "1", "1 while an operator has pinned a version"), lambda s: None if s.bandit is None else s.bandit.pinned is not None),
    (metric_spec("desired_generation", "gauge", "1", "Generation of the desired state"), lambda s: s.gen),
    (metric_spec("replicas_alive", "gauge", "1", "Replicas with a fresh report"), lambda s: len(s.replicas)),
    (metric_spec("replicas_converged", "gauge", "1", "Replicas that run the desired generation"), lambda s: sum(r.gen == s.gen for r in s.replicas)),
    (metric_spec("training_jobs_running", "gauge", "1", "Training jobs in flight"), lambda s: s.job is not None),
    (metric_spec("decisions", "counter", "1", "Decisions kept in the log, by action", "action"), lambda s: {(action,): n for action, n in Counter(d.action for d in s.decisions).items()}),
    (metric_spec("ledger_seconds", "gauge", "s", "Device-seconds spent or saved, by kind", "kind"), lambda s: {(kind,): seconds for kind, seconds in s.ledger.by_kind.items()}),
    (metric_spec("ledger_net_seconds", "gauge", "s", "Device-seconds saved minus spent"), lambda s: s.ledger.net_s),
    (metric_spec("ledger_net_bound_seconds", "gauge", "s", "95% interval of the net; bound is lower or upper", "bound"), lambda s: dict(zip((("lower",), ("upper",)), net_interval(s)[1:], strict=True))),
    (metric_spec("bank_seconds", "gauge", "s", "Device-seconds that the policy may still spend"), lambda s: None if s.bandit is None else s.bandit.bank_s),
    (metric_spec("canary_active", "gauge", "1", "1 while a version is on trial"), lambda s: s.canary is not None),
    (metric_spec("canary_percent", "gauge", "%", "Share of adaptive requests that the version on trial serves"), lambda s: 0 if s.canary is None else s.canary.share_percent),
    (metric_spec("canary_requests", "gauge", "1", "Finished requests of the trial, by version: incumbent or canary", "role"), _canary_requests),
    (metric_spec("canary_speed_ratio", "gauge", "1", "Tokens per second of the version on trial over the incumbent's"), lambda s: None if s.canary is None else s.canary.ratio),
    (metric_spec("regime_age_seconds", "gauge", "s", "Time since the traffic mix last changed"), lambda s: None if s.bandit is None else s.bandit.regime_age_s),
    (metric_spec("drift_alarms", "counter", "1", "Alarms that a bucket's text changed", "bucket"), lambda s: {} if s.bandit is None else {(bucket,): n for bucket, n in s.bandit.drift_alarms.items()}),
    (metric_spec("stream_lag_entries", "gauge", "1", "Feedback entries not read yet"), lambda s: s.feedback.lag),
    (metric_spec("feedback_rows_folded", "counter", "1", "Rows folded into the controller's state"), lambda s: s.feedback.delivered),
    (metric_spec("feedback_rows_lost", "counter", "1", "Rows that producers dropped"), lambda s: s.feedback.dropped),
    (metric_spec("feedback_duplicates", "counter", "1", "Batches delivered twice and folded once"), lambda s: s.feedback.duplicates),
    (metric_spec("feedback_missing_batches", "counter", "1", "Batches that never arrived (gaps in their numbers)"), lambda s: s.feedback.missing_batches),
    (metric_spec("feedback_lost_entries", "counter", "1", "Entries trimmed before they were read, or unreadable"), lambda s: s.feedback.lost_entries),
    (metric_spec("tokens", "counter", "1", "Emitted tokens", "bucket", "group"), lambda s: {(bucket, g): sums.tokens for bucket, t in s.buckets.items() for g, sums in t.groups().items()}),
    (metric_spec("acceptance_length", "gauge", "tokens", "Tokens per round of the latest 30 s, bonus included", "bucket", "group"), _recent("acceptance_length")),
    (metric_spec("tokens_per_second", "gauge", "1/s", "Tokens per device-second of the latest 30 s", "bucket", "group"), _recent("tokens_per_s")),
)  # fmt: skip
"""Metric -> where the snapshot has it."""
CONTROLLER_METRICS = tuple(spec for spec, _ in _TABLE)
_BEFORE_RESTORE = {
    f"paceline_{name}"
    for name in ("controller_redis_up", "controller_fenced", "controller_errors", "replicas_alive", "replicas_converged", "training_jobs_running")
}  # fmt: skip
"""What a controller can tell that has restored nothing yet."""


class ControllerCollector:
    """Collector over one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for spec, read in _TABLE:
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            metric = family(spec.name, f"{spec.text} (unit {spec.unit})", labels=spec.labels)
            is_known = self._snapshot.ts is not None or spec.name in _BEFORE_RESTORE
            value = read(self._snapshot) if is_known else None
            if value is not None and value is not msgspec.UNSET:
                for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                    metric.add_metric(labels, float(number))
            yield metric


def controller_metrics(snapshot: Snapshot) -> tuple[bytes, str]:
    """Body and content type for one snapshot of the controller."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ControllerCollector(snapshot))  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST
