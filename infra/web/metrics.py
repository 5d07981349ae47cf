"""Metrics: GET /metrics shows every replica's counters and the controller's values in Prometheus' text format.

All of it is read when scraped. Labels never hold request ids, users or version hashes: they would make a series of each.
docs/metrics.md is the tables in words: `python tests/helpers/metrics_page.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from paceline.contracts import TIME_BOUNDS_S, Histogram
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.replica.exchange import ReplicaNumbers
from paceline.infra.web.words import net_interval


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; counters gain `_total` in the text format."""

    name: str
    kind: str
    """'counter' | 'gauge' | 'histogram' (of seconds)."""
    unit: str
    text: str
    labels: tuple[str, ...] = ()


def metric_spec(name: str, kind: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A row; the name is given without the `paceline_` prefix."""
    return MetricSpec(name=f"paceline_{name}", kind=kind, unit=unit, text=text, labels=labels)


PROCESS_LABELS = ("model", "replica")
"""Of every metric that a process of the service counts by itself: the name that it serves under, and its own."""
CONTROLLER_LABELS = ("model",)
"""Of every metric of a controller: the name of its service."""


def replica_spec(name: str, kind: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A row of what processes count by themselves."""
    return metric_spec(name, kind, unit, text, *PROCESS_LABELS, *labels)


def controller_spec(name: str, kind: str, unit: str, text: str, *labels: str) -> MetricSpec:
    """A row of what the controller knows."""
    return metric_spec(name, kind, unit, text, *CONTROLLER_LABELS, *labels)


Value = float | None | msgspec.UnsetType | Mapping[tuple[str, ...], float | Histogram]
"""A value, or values by their labels; None and UNSET: not known, the metric has no sample."""


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
    (controller_spec("controller_redis_up", "gauge", "1", "1 while the controller reaches Redis"), lambda s: s.redis_up),
    (controller_spec("controller_redis_full", "gauge", "1", "1 while Redis has no memory or disk for what the controller has to store"), lambda s: s.is_redis_full),
    (controller_spec("controller_read_only", "gauge", "1", "1 while the stored state cannot be used: nothing is decided or written"), lambda s: bool(s.read_only)),
    (controller_spec("controller_folder_failed", "gauge", "1", "1 while the controller cannot write the data folder"), lambda s: bool(s.folder_error) and not s.folder_hung_s),
    (controller_spec("controller_folder_hung_seconds", "gauge", "s", "For how long the data folder has not answered the controller"), lambda s: s.folder_hung_s),
    (controller_spec("controller_folder_hangs", "counter", "1", "Calls of the data folder that it did not answer within 5 s"), lambda s: s.folder_hangs),
    (controller_spec("controller_fenced", "gauge", "1", "1 when a newer controller took over from this one"), lambda s: s.is_fenced),
    (controller_spec("controller_epoch", "gauge", "1", "Starts of controllers of this service"), lambda s: s.epoch),
    (controller_spec("controller_errors", "counter", "1", "Passes or policy calls that failed"), lambda s: s.errors.count),
    (controller_spec("controller_snapshot_age_seconds", "gauge", "s", "Age of the controller's values on this page"), lambda s: s.age_s),
    (controller_spec("controller_paused", "gauge", "1", "1 while an operator has paused decisions"), lambda s: s.is_paused),
    (controller_spec("controller_pinned", "gauge", "1", "1 while an operator has pinned a version"), lambda s: None if s.bandit is None else s.bandit.pinned is not None),
    (controller_spec("desired_generation", "gauge", "1", "Generation of the desired state"), lambda s: s.gen),
    (controller_spec("replicas_alive", "gauge", "1", "Replicas with a fresh report"), lambda s: len(s.replicas)),
    (controller_spec("replicas_converged", "gauge", "1", "Replicas that run the desired generation"), lambda s: sum(r.runs(s.gen) for r in s.replicas)),
    (controller_spec("training_jobs_running", "gauge", "1", "Training jobs in flight"), lambda s: s.job is not None),
    (controller_spec("decisions", "counter", "1", "Decisions of the policy, by action", "action"), lambda s: None if s.bandit is None else {(action,): n for action, n in s.bandit.num_decisions.items()}),
    (controller_spec("ledger_seconds", "gauge", "s", "Device-seconds spent or saved, by kind", "kind"), lambda s: {(kind,): seconds for kind, seconds in s.ledger.by_kind.items()}),
    (controller_spec("ledger_net_seconds", "gauge", "s", "Device-seconds saved minus spent"), lambda s: s.ledger.net_s),
    (controller_spec("ledger_net_bound_seconds", "gauge", "s", "95% interval of the net; bound is lower or upper", "bound"), lambda s: dict(zip((("lower",), ("upper",)), net_interval(s)[1:], strict=True))),
    (controller_spec("bank_seconds", "gauge", "s", "Device-seconds that the policy may still spend"), lambda s: None if s.bandit is None else s.bandit.bank_s),
    (controller_spec("canary_active", "gauge", "1", "1 while a version is on trial"), lambda s: s.canary is not None),
    (controller_spec("canary_percent", "gauge", "%", "Share of adaptive requests that the version on trial serves"), lambda s: 0 if s.canary is None else s.canary.share_percent),
    (controller_spec("canary_requests", "gauge", "1", "Finished requests of the trial, by version: incumbent or canary", "role"), _canary_requests),
    (controller_spec("canary_speed_ratio", "gauge", "1", "Tokens per second of the version on trial over the incumbent's"), lambda s: None if s.canary is None else s.canary.ratio),
    (controller_spec("regime_age_seconds", "gauge", "s", "Time since the traffic mix last changed"), lambda s: None if s.bandit is None else s.bandit.regime_age_s),
    (controller_spec("drift_alarms", "counter", "1", "Alarms that a bucket's text changed", "bucket"), lambda s: {} if s.bandit is None else {(bucket,): n for bucket, n in s.bandit.drift_alarms.items()}),
    (controller_spec("class_share", "gauge", "1", "Share of the latest requests without a bucket that belong to this class; default has those of none", "bucket"), lambda s: {(bucket,): share for bucket, share in s.class_shares.items()}),
    (controller_spec("stream_lag_entries", "gauge", "1", "Feedback entries not read yet"), lambda s: s.feedback.lag),
    (controller_spec("feedback_rows_folded", "counter", "1", "Rows folded into the controller's state"), lambda s: s.feedback.delivered),
    (controller_spec("feedback_rows_lost", "counter", "1", "Rows that producers dropped"), lambda s: s.feedback.dropped),
    (controller_spec("feedback_duplicates", "counter", "1", "Batches delivered twice and folded once"), lambda s: s.feedback.duplicates),
    (controller_spec("feedback_missing_batches", "counter", "1", "Batches that never arrived (gaps in their numbers)"), lambda s: s.feedback.missing_batches),
    (controller_spec("feedback_lost_entries", "counter", "1", "Entries trimmed before they were read, or unreadable"), lambda s: s.feedback.lost_entries),
    (controller_spec("tokens", "counter", "1", "Emitted tokens", "bucket", "group"), lambda s: {(bucket, g): sums.tokens for bucket, t in s.buckets.items() for g, sums in t.groups().items()}),
    (controller_spec("acceptance_length", "gauge", "tokens", "Tokens per round of the latest 30 s, bonus included", "bucket", "group"), _recent("acceptance_length")),
    (controller_spec("tokens_per_second", "gauge", "1/s", "Tokens per device-second of the latest 30 s", "bucket", "group"), _recent("tokens_per_s")),
)  # fmt: skip
"""Metric -> where the snapshot has it."""
CONTROLLER_METRICS = tuple(spec for spec, _ in _TABLE)
_BEFORE_RESTORE = {
    f"paceline_{name}"
    for name in ("controller_redis_up", "controller_redis_full", "controller_read_only", "controller_fenced", "controller_errors", "replicas_alive", "replicas_converged", "training_jobs_running")
}  # fmt: skip
"""What a controller can tell that has restored nothing yet."""


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_ENDS = tuple(f"{bound:g}" for bound in TIME_BOUNDS_S) + ("+Inf",)


def _family(spec: MetricSpec, value: Value) -> Metric:
    metric = _FAMILIES[spec.kind](spec.name, f"{spec.text} (unit {spec.unit})", labels=spec.labels)
    if value is not None and value is not msgspec.UNSET:
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            if isinstance(number, Histogram):
                metric.add_metric(labels, list(zip(_ENDS, accumulate(number.counts), strict=True)), number.sum_s)
            else:
                metric.add_metric(labels, float(number))
    return metric


def render(values: Iterable[tuple[MetricSpec, Value]]) -> bytes:
    """Prometheus' text of metrics with their values."""
    families = [_family(spec, value) for spec, value in values]
    return generate_latest(SimpleNamespace(collect=lambda: families))  # type: ignore[arg-type]


def controller_metrics(snapshot: Snapshot, model: str) -> bytes:
    """The text for one snapshot of the controller of a service; model: the service's name."""
    is_restored = snapshot.ts is not None
    return render(
        (spec, _of_model(model, read(snapshot)) if is_restored or spec.name in _BEFORE_RESTORE else None)
        for spec, read in _TABLE
    )


def _of_model(model: str, value: Value) -> Value:
    if value is None or value is msgspec.UNSET:
        return None
    return {(model, *labels): v for labels, v in (value.items() if isinstance(value, Mapping) else [((), value)])}  # type: ignore[misc]


_Counters = tuple[tuple[str, MetricSpec], ...]
"""Key of the counters -> metric."""

ENGINE_METRICS: _Counters = (
    ("num_rounds", replica_spec("rounds", "counter", "1", "Decode rounds")),
    ("num_tokens", replica_spec("emitted_tokens", "counter", "tokens", "Tokens sent to clients")),
    ("num_prefill_rows", replica_spec("prefill_rows", "counter", "rows", "Prompt rows run through the target")),
    ("num_finished", replica_spec("requests_finished", "counter", "1", "Requests that ended by themselves")),
    ("num_aborted", replica_spec("requests_aborted", "counter", "1", "Requests ended early")),
    ("num_expired", replica_spec("requests_expired", "counter", "1", "Requests ended because their deadline came; they count as ended early too")),
    ("num_preemptions", replica_spec("preemptions", "counter", "1", "Requests that lost their pages and went back to the queue")),
    ("num_callback_errors", replica_spec("callback_errors", "counter", "1", "Events, statistics rows and traces that their taker refused")),
    ("num_bucket_capped", replica_spec("requests_bucket_capped", "counter", "1", "Requests counted under bucket 'other': too many names (engine.max_buckets)")),
    ("num_drafter_failures", replica_spec("drafter_failures", "counter", "1", "Drafters switched off because they failed")),
    ("num_swaps", replica_spec("swaps", "counter", "1", "Drafter versions published")),
    ("num_buckets", replica_spec("buckets", "gauge", "1", "Buckets that the replica tells apart")),
    ("num_classed", replica_spec("requests_classed", "counter", "1", "Requests without a bucket that were sorted into a class")),
    ("num_unclassed", replica_spec("requests_unclassed", "counter", "1", "Requests without a bucket that were like no class")),
    ("num_classes", replica_spec("classes", "gauge", "1", "Classes that requests without a bucket are sorted into; 0 = none, they share default")),
    ("num_running", replica_spec("requests_running", "gauge", "1", "Requests in the current round")),
    ("num_waiting", replica_spec("requests_waiting", "gauge", "1", "Requests in the queue")),
    ("num_pages", replica_spec("kv_pages", "gauge", "pages", "KV pages of the pool")),
    ("num_free_pages", replica_spec("kv_pages_free", "gauge", "pages", "KV pages that a request can get: without an owner, or cached and in no use")),
    ("num_cached_pages", replica_spec("prefix_cache_pages", "gauge", "pages", "KV pages in the prefix cache, those in use included")),
    ("num_prefix_lookups", replica_spec("prefix_cache_lookups", "counter", "1", "Admissions that looked into the prefix cache")),
    ("num_prefix_hits", replica_spec("prefix_cache_hits", "counter", "1", "Admissions that found cached rows")),
    ("num_prefix_hit_tokens", replica_spec("prefix_cache_hit_tokens", "counter", "tokens", "Tokens whose KV rows were found instead of computed")),
    ("num_prefix_evictions", replica_spec("prefix_cache_evictions", "counter", "pages", "Cached pages given up because pages were needed")),
)  # fmt: skip
FEEDBACK_METRICS: _Counters = (
    ("produced", replica_spec("feedback_rows_produced", "counter", "rows", "Round statistics recorded")),
    ("delivered", replica_spec("feedback_rows_delivered", "counter", "rows", "Round statistics that Redis took")),
    ("dropped", replica_spec("feedback_rows_dropped", "counter", "rows", "Round statistics lost to a full ring or a refusal")),
    ("prompts", replica_spec("prompt_vectors", "counter", "1", "Vectors of prompts without a bucket recorded for the controller")),
    ("prompts_sent", replica_spec("prompt_vectors_sent", "counter", "1", "Of those the ones that were sent; of many the newest are")),
    ("redis_up", replica_spec("redis_up", "gauge", "1", "1 while Redis takes feedback, 0 while it is away")),
)  # fmt: skip
TRACE_METRICS: _Counters = (
    ("traces_written", replica_spec("traces_written", "counter", "1", "Feature traces written to the trace store")),
    ("traces_dropped", replica_spec("traces_dropped", "counter", "1", "Feature traces lost to a full queue or a failing store")),
)  # fmt: skip
SPAN_METRICS: _Counters = (
    ("exported", replica_spec("spans_exported", "counter", "1", "OpenTelemetry's spans that the collector took")),
    ("dropped", replica_spec("spans_dropped", "counter", "1", "Spans lost to a full queue, or to a collector that is away or refuses")),
)  # fmt: skip
LOG_METRICS: _Counters = (
    ("lines_dropped", replica_spec("log_lines_dropped", "counter", "lines", "Lines of log files lost to a full queue or a disk that refused them")),
)  # fmt: skip
OWN_METRICS: _Counters = (
    ("rss_bytes", replica_spec("resident_memory_bytes", "gauge", "bytes", "Memory that the process has in RAM")),
    ("num_files", replica_spec("open_files", "gauge", "1", "Files and sockets that the process has open")),
    ("host_kv_bytes", replica_spec("host_kv_bytes", "gauge", "bytes", "Part of the KV pool that lies in RAM, which the process gets when it first writes there")),
)  # fmt: skip
TRAINING = replica_spec("training", "gauge", "1", "1 while a training job runs for this service")
SWAP_PAUSE = replica_spec("swap_pause_ms", "gauge", "ms", "Engine-thread pause of the latest swap")
SPECULATION = replica_spec(
    "speculation_on", "gauge", "1", "1 while this bucket is drafted for, 0 while it is not because it does not pay",
    "bucket", "role", "mode",
)  # fmt: skip
FORWARD = replica_spec(
    "target_forward", "gauge", "1", "What computes the target: native-ISA (compiled), kernels (Triton), fused, modules-reordered or modules (torch)",
    "forward",
)  # fmt: skip
QUEUE_TIME = replica_spec(
    "queue_seconds", "histogram", "s", "From the submission of a request (one a choice) to its first admission"
)
FIRST_TOKEN = replica_spec(
    "time_to_first_token_seconds", "histogram", "s", "From the arrival of a request to its first tokens", "stream"
)
PER_TOKEN = replica_spec(
    "inter_token_seconds",
    "histogram",
    "s",
    "From one chunk of a choice to the next, by the tokens of the latter",
    "stream",
)
WHOLE = replica_spec(
    "request_seconds",
    "histogram",
    "s",
    "From the arrival of a request to the end of its answer",
    "stream",
)
RESPONSES = replica_spec(
    "responses",
    "counter",
    "1",
    "Responses that have ended, by status code; 499: the client left first",
    "route",
    "code",
)
BROKEN = replica_spec(
    "answers_broken", "counter", "1", "Answers that broke off after their status 200 was sent", "route"
)
HTTP_METRICS: tuple[MetricSpec, ...] = (FIRST_TOKEN, PER_TOKEN, WHOLE, RESPONSES, BROKEN)
"""Of the process that speaks HTTP: the replica, or the ingress with `resume: true`."""
REPLICA_METRICS: tuple[MetricSpec, ...] = (
    *(
        spec
        for table in (ENGINE_METRICS, FEEDBACK_METRICS, TRACE_METRICS, SPAN_METRICS, LOG_METRICS, OWN_METRICS)
        for _, spec in table
    ),
    TRAINING,
    SWAP_PAUSE,
    SPECULATION,
    FORWARD,
    QUEUE_TIME,
    *HTTP_METRICS,
)
"""Everything that one replica exposes about itself; feedback, traces and spans only where it has them."""
_TOLD_FROM_THE_START = [
    (r, c) for r in ("/v1/completions", "/v1/chat/completions", "/v1/responses") for c in ("200", "429", "500", "503")
]
"""Responses that begin at 0: of a series that begins at 1 Prometheus' rate misses the first."""
_Values = Iterable[tuple[MetricSpec, Value]]


def _replica_values(numbers: ReplicaNumbers) -> _Values:
    counters = numbers.counters
    tables = (
        ("engine", ENGINE_METRICS),
        ("feedback", FEEDBACK_METRICS),
        ("traces", TRACE_METRICS),
        ("spans", SPAN_METRICS),
        ("logs", LOG_METRICS),
        ("process", OWN_METRICS),
    )
    for name, table in tables:
        source = counters.get(name)
        if source is not None:
            yield from ((spec, source.get(key) or 0) for key, spec in table)
    yield TRAINING, bool(counters.get("training"))
    rows = counters.get("speculation") or []
    own_labels = SPECULATION.labels[len(PROCESS_LABELS) :]
    yield SPECULATION, {tuple(str(row[label]) for label in own_labels): row["is_on"] for row in rows}
    if forward := (counters.get("engine") or {}).get("forward"):
        yield FORWARD, {(forward,): 1}
    if numbers.swap_pause_ms is not None:
        yield SWAP_PAUSE, numbers.swap_pause_ms
    if numbers.queue is not None:
        yield QUEUE_TIME, {(): numbers.queue}
    yield from http_values(numbers)


def http_values(numbers: ReplicaNumbers) -> _Values:
    """HTTP_METRICS of a process that speaks HTTP, without the labels of the process."""
    meters = numbers.http
    if meters is None:
        return
    each = (("true", meters.streamed), ("false", meters.at_once))
    yield FIRST_TOKEN, {(name,): times.first_token for name, times in each}
    yield PER_TOKEN, {(name,): times.per_token for name, times in each}
    yield WHOLE, {(name,): times.whole for name, times in each}
    responses: dict[tuple[str, ...], float | Histogram] = dict.fromkeys(_TOLD_FROM_THE_START, 0)
    responses |= {(route, str(code)): n for route, codes in meters.responses.items() for code, n in codes.items()}
    broken: dict[tuple[str, ...], float | Histogram] = {(route,): 0 for route, _ in _TOLD_FROM_THE_START}
    broken |= {(route,): n for route, n in meters.broken.items()}
    yield RESPONSES, responses
    yield BROKEN, broken


def render_processes(
    processes: Mapping[str, ReplicaNumbers], read: Callable[[ReplicaNumbers], _Values] = _replica_values
) -> bytes:
    """Prometheus' text of what `read` finds in the numbers of each process, by id; one family for all of them."""
    families: dict[MetricSpec, dict[tuple[str, ...], float | Histogram]] = {}
    for process_id, numbers in processes.items():
        for spec, value in read(numbers):
            values = families.setdefault(spec, {})
            if value is not None and value is not msgspec.UNSET:
                for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                    values[(numbers.model, process_id, *labels)] = number
    return render(families.items())


def speculation_rows(
    states: Iterable[tuple[tuple[str, str, bool], str]], roles: dict[str, str], class_versions: dict[str, str]
) -> list[dict[str, Any]]:
    """[{bucket, role, mode, is_on}] of what the tree policy decided; versions without a role are left out.

    Args:
        states: ((drafter version, bucket, is_greedy), trial | on | off | probe) of every statistic that it keeps.
        roles: role -> drafter version, or the text drafter's name; a version with several roles gets the first.
        class_versions: class -> its own version, whose role there is 'class'.
    """
    by_version: dict[str, str] = {}
    for role, version in roles.items():
        by_version.setdefault(version, role)
    found: dict[tuple[str, str, str], bool] = {}
    for (version, bucket, is_greedy), state in states:
        own = "class" if class_versions.get(bucket) == version else by_version.get(version)
        if own is not None:
            found[(bucket, own, "greedy" if is_greedy else "sampled")] = state in ("trial", "on")
    return [{"bucket": b, "role": r, "mode": m, "is_on": is_on} for (b, r, m), is_on in sorted(found.items())]


def render_metrics(
    replicas: Mapping[str, ReplicaNumbers], controller: Snapshot | None = None, *, model: str = ""
) -> tuple[bytes, str]:
    """Body and content type.

    Args:
        replicas: replica id -> its numbers, of one service.
        controller: the controller's snapshot, whose metrics are appended; None = it is away.
        model: the service's name, where no replica tells it.
    """
    body = render_processes(replicas)
    if controller is not None:
        body += controller_metrics(controller, next((numbers.model for numbers in replicas.values()), model))
    return body, CONTENT_TYPE_LATEST
