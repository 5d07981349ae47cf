"""Replica metrics: GET /metrics shows a replica's counters and the controller's values in Prometheus' text format.

All of it is read when scraped. docs/metrics.md is the table in words: `python tests/helpers/metrics_page.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.web.metrics import MetricSpec, controller_metrics, metric_spec

_Table = tuple[tuple[str, MetricSpec], ...]
"""Key of the counters -> metric."""

ENGINE_METRICS: _Table = (
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
FEEDBACK_METRICS: _Table = (
    ("produced", metric_spec("feedback_rows_produced", "counter", "rows", "Round statistics recorded")),
    ("delivered", metric_spec("feedback_rows_delivered", "counter", "rows", "Round statistics that Redis took")),
    ("dropped", metric_spec("feedback_rows_dropped", "counter", "rows", "Round statistics lost to a full ring or a refusal")),
    ("redis_up", metric_spec("redis_up", "gauge", "1", "1 while Redis takes feedback, 0 while it is away")),
)  # fmt: skip
TRACE_METRICS: _Table = (
    ("traces_written", metric_spec("traces_written", "counter", "1", "Feature traces written to the trace store")),
    ("traces_dropped", metric_spec("traces_dropped", "counter", "1", "Feature traces lost to a full queue or a failing store")),
)  # fmt: skip
TRAINING = metric_spec("training", "gauge", "1", "1 while a training job runs for this service")
SWAP_PAUSE = metric_spec("swap_pause_ms", "gauge", "ms", "Engine-thread pause of the latest swap")
SPECULATION = metric_spec(
    "speculation_on", "gauge", "1", "1 while the tree policy drafts for this bucket, 0 while it decodes plainly because drafting does not pay",
    "bucket", "role", "mode",
)  # fmt: skip
REPLICA_METRICS: tuple[MetricSpec, ...] = (
    *(spec for table in (ENGINE_METRICS, FEEDBACK_METRICS, TRACE_METRICS) for _, spec in table),
    TRAINING,
    SWAP_PAUSE,
    SPECULATION,
)
"""Everything that one replica exposes about itself; the middle parts only where it has feedback and traces."""


class _Counters:
    """A collector over one reading of the counters."""

    def __init__(self, counters: dict[str, Any], swap_pause_ms: Sequence[float]) -> None:
        self._counters, self._pauses = counters, swap_pause_ms

    def collect(self) -> Iterable[Metric]:
        tables = (("engine", ENGINE_METRICS), ("feedback", FEEDBACK_METRICS), ("traces", TRACE_METRICS))
        for name, table in tables:
            source = self._counters.get(name)
            if source is not None:
                for key, spec in table:
                    yield _metric(spec, float(source.get(key) or 0))
        yield _metric(TRAINING, float(bool(self._counters.get("training"))))
        speculation = GaugeMetricFamily(SPECULATION.name, f"{SPECULATION.text} (unit 1)", labels=SPECULATION.labels)
        for row in self._counters.get("speculation") or []:
            speculation.add_metric([str(row[label]) for label in SPECULATION.labels], float(row["is_on"]))
        yield speculation
        if self._pauses:
            yield _metric(SWAP_PAUSE, float(self._pauses[-1]))


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


def _metric(spec: MetricSpec, value: float) -> Metric:
    family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    return family(spec.name, f"{spec.text} (unit {spec.unit})", value=value)


def render_metrics(
    counters: dict[str, Any], swap_pause_ms: Sequence[float] = (), controller: Snapshot | None = None
) -> tuple[bytes, str]:
    """Body and content type.

    Args:
        counters: {"engine": Engine.stats(), "feedback": ..., "traces": ..., "training": bool, "speculation": rows of
            speculation_rows}; all but the first optional.
        controller: the controller's snapshot, whose metrics are appended; None = it is away.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Counters(counters, swap_pause_ms))  # type: ignore[arg-type]
    body = generate_latest(registry)
    if controller is not None:
        body += controller_metrics(controller)[0]
    return body, CONTENT_TYPE_LATEST
