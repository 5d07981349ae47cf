"""Metrics: GET /metrics shows a replica's counters and the controller's values in Prometheus' text format.

All of it is read when scraped. Labels never hold request ids, users or version hashes: they would make a series of each.
docs/metrics.md is the tables in words: `python tests/helpers/metrics_page.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
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


Value = float | None | msgspec.UnsetType | Mapping[tuple[str, ...], float]
"""A value, or values by their labels; None and UNSET: not known, the metric has no sample."""


def _age_s(s: Snapshot) -> float | None:
    return None if s.ts is None else max(0.0, time.time() - s.ts)


def _canary_requests(s: Snapshot) -> Value:
    if s.canary is None:
        return {}
    own = s.canary.num_canary_requests
    return {("canary",): own, ("incumbent",): s.canary.num_requests - own}


def _recent(field: str) -> Callable[[Snapshot], Value]:
    """Values of a field of the sums of the latest 30 s, by bucket and group, where they are known."""

    def read(s: Snapshot) -> Value:
        found = {(b, g): getattr(sums, field) for b, t in s.buckets.items() for g, sums in t.recent.items()}
        return {labels: value for labels, value in found.items() if value is not None}

    return read


_TABLE: tuple[tuple[MetricSpec, Callable[[Snapshot], Value]], ...] = (
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


def _family(spec: MetricSpec, value: Value) -> Metric:
    family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    metric = family(spec.name, f"{spec.text} (unit {spec.unit})", labels=spec.labels)
    if value is not None and value is not msgspec.UNSET:
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            metric.add_metric(labels, float(number))
    return metric


def render(values: Iterable[tuple[MetricSpec, Value]]) -> bytes:
    """Prometheus' text of metrics with their values."""
    families = [_family(spec, value) for spec, value in values]
    return generate_latest(SimpleNamespace(collect=lambda: families))  # type: ignore[arg-type]


def controller_metrics(snapshot: Snapshot) -> bytes:
    """The text for one snapshot of the controller."""
    is_restored = snapshot.ts is not None
    return render(
        (spec, read(snapshot) if is_restored or spec.name in _BEFORE_RESTORE else None) for spec, read in _TABLE
    )


_Counters = tuple[tuple[str, MetricSpec], ...]
"""Key of the counters -> metric."""

ENGINE_METRICS: _Counters = (
    ("num_rounds", metric_spec("rounds", "counter", "1", "Decode rounds")),
    ("num_tokens", metric_spec("emitted_tokens", "counter", "tokens", "Tokens sent to clients")),
    ("num_prefill_rows", metric_spec("prefill_rows", "counter", "rows", "Prompt rows run through the target")),
    ("num_finished", metric_spec("requests_finished", "counter", "1", "Requests that ended by themselves")),
    ("num_aborted", metric_spec("requests_aborted", "counter", "1", "Requests ended early")),
    ("num_expired", metric_spec("requests_expired", "counter", "1", "Requests ended because their deadline came; they count as ended early too")),
    ("num_preemptions", metric_spec("preemptions", "counter", "1", "Requests that lost their pages and went back to the queue")),
    ("num_callback_errors", metric_spec("callback_errors", "counter", "1", "Events, statistics rows and traces that their taker refused")),
    ("num_bucket_capped", metric_spec("requests_bucket_capped", "counter", "1", "Requests counted under bucket 'other': too many names (engine.max_buckets)")),
    ("num_drafter_failures", metric_spec("drafter_failures", "counter", "1", "Drafters switched off because they failed")),
    ("num_swaps", metric_spec("swaps", "counter", "1", "Drafter versions published")),
    ("num_buckets", metric_spec("buckets", "gauge", "1", "Buckets that the replica tells apart")),
    ("num_running", metric_spec("requests_running", "gauge", "1", "Requests in the current round")),
    ("num_waiting", metric_spec("requests_waiting", "gauge", "1", "Requests in the queue")),
    ("num_pages", metric_spec("kv_pages", "gauge", "pages", "KV pages of the pool")),
    ("num_free_pages", metric_spec("kv_pages_free", "gauge", "pages", "KV pages that a request can get: without an owner, or cached and in no use")),
    ("num_cached_pages", metric_spec("prefix_cache_pages", "gauge", "pages", "KV pages in the prefix cache, those in use included")),
    ("num_prefix_lookups", metric_spec("prefix_cache_lookups", "counter", "1", "Admissions that looked into the prefix cache")),
    ("num_prefix_hits", metric_spec("prefix_cache_hits", "counter", "1", "Admissions that found cached rows")),
    ("num_prefix_hit_tokens", metric_spec("prefix_cache_hit_tokens", "counter", "tokens", "Tokens whose KV rows were found instead of computed, after a preemption too")),
    ("num_prefix_evictions", metric_spec("prefix_cache_evictions", "counter", "pages", "Cached pages given up because pages were needed")),
)  # fmt: skip
FEEDBACK_METRICS: _Counters = (
    ("produced", metric_spec("feedback_rows_produced", "counter", "rows", "Round statistics recorded")),
    ("delivered", metric_spec("feedback_rows_delivered", "counter", "rows", "Round statistics that Redis took")),
    ("dropped", metric_spec("feedback_rows_dropped", "counter", "rows", "Round statistics lost to a full ring or a refusal")),
    ("redis_up", metric_spec("redis_up", "gauge", "1", "1 while Redis takes feedback, 0 while it is away")),
)  # fmt: skip
TRACE_METRICS: _Counters = (
    ("traces_written", metric_spec("traces_written", "counter", "1", "Feature traces written to the trace store")),
    ("traces_dropped", metric_spec("traces_dropped", "counter", "1", "Feature traces lost to a full queue or a failing store")),
)  # fmt: skip
TRAINING = metric_spec("training", "gauge", "1", "1 while a training job runs for this service")
SWAP_PAUSE = metric_spec("swap_pause_ms", "gauge", "ms", "Engine-thread pause of the latest swap")
SPECULATION = metric_spec(
    "speculation_on", "gauge", "1", "1 while the tree policy drafts for this bucket, 0 while it decodes plainly because drafting does not pay",
    "bucket", "role", "mode",
)  # fmt: skip
FORWARD = metric_spec(
    "target_forward", "gauge", "1", "What computes the target's forwards: native-ISA (compiled), kernels (Triton), fused, modules-reordered or modules (torch)",
    "forward",
)  # fmt: skip
REPLICA_METRICS: tuple[MetricSpec, ...] = (
    *(spec for table in (ENGINE_METRICS, FEEDBACK_METRICS, TRACE_METRICS) for _, spec in table),
    TRAINING,
    SWAP_PAUSE,
    SPECULATION,
    FORWARD,
)
"""Everything that one replica exposes about itself; the middle parts only where it has feedback and traces."""


def _replica_values(counters: dict[str, Any], pauses_ms: Sequence[float]) -> Iterable[tuple[MetricSpec, Value]]:
    for name, table in (("engine", ENGINE_METRICS), ("feedback", FEEDBACK_METRICS), ("traces", TRACE_METRICS)):
        source = counters.get(name)
        if source is not None:
            yield from ((spec, source.get(key) or 0) for key, spec in table)
    yield TRAINING, bool(counters.get("training"))
    rows = counters.get("speculation") or []
    yield SPECULATION, {tuple(str(row[label]) for label in SPECULATION.labels): row["is_on"] for row in rows}
    if forward := (counters.get("engine") or {}).get("forward"):
        yield FORWARD, {(forward,): 1}
    if pauses_ms:
        yield SWAP_PAUSE, pauses_ms[-1]


def speculation_rows(
    states: Iterable[tuple[tuple[str, str, bool], str]], roles: dict[str, str]
) -> list[dict[str, Any]]:
    """[{bucket, role, mode, is_on}] of what the tree policy decided; versions without a role are left out.

    Args:
        states: ((drafter version, bucket, is_greedy), trial | on | off | probe) of every statistic that it keeps.
        roles: role -> drafter version; a version with several roles gets the first.
    """
    by_version: dict[str, str] = {}
    for role, version in roles.items():
        by_version.setdefault(version, role)
    found: dict[tuple[str, str, str], bool] = {}
    for (version, bucket, is_greedy), state in states:
        if version in by_version:
            found[(bucket, by_version[version], "greedy" if is_greedy else "sampled")] = state in ("trial", "on")
    return [{"bucket": b, "role": r, "mode": m, "is_on": is_on} for (b, r, m), is_on in sorted(found.items())]


def render_metrics(
    counters: dict[str, Any], swap_pause_ms: Sequence[float] = (), controller: Snapshot | None = None
) -> tuple[bytes, str]:
    """Body and content type.

    Args:
        counters: {"engine": Engine.stats(), "feedback": ..., "traces": ..., "training": bool, "speculation": rows of
            speculation_rows}; all but the first optional.
        controller: the controller's snapshot, whose metrics are appended; None = it is away.
    """
    body = render(_replica_values(counters, swap_pause_ms))
    if controller is not None:
        body += controller_metrics(controller)
    return body, CONTENT_TYPE_LATEST
