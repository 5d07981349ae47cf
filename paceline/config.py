"""Configuration: every section of a service as a record, read from YAML, from options and from plain values.

`paceline serve` takes the settings that have help as options; the others are set in a file (`--config`). Environment
variables that stand for an option are named here.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import math
import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated as A
from typing import Any, TypeVar

from paceline.contracts import SPAN_S
from paceline.errors import ConfigError
from paceline.names import LABEL_RULE, MODEL_RULE, ROUTE_RULE, TOKEN_RULE, is_label, is_model_name, is_route, is_token
from paceline.paths import (
    BUNDLED_DRAFTERS,
    DATA_DIR,
    MODEL_NAMES,
    TEXT_DRAFTERS,
    default_drafter,
    default_mix,
    is_hub_id,
)
from paceline.records import DEVICES, DRAFTERS, DTYPES, MODELS, Setting, build, record, require

C = TypeVar("C")
TREE_POLICIES = ("adaptive", "bastion", "fixed", "ddtree", "bundle")
POLICIES = ("payoff", "never", "always", "interval", "dual_ema", "cara", "thompson", "hedge")
POLICY_HELP = " | ".join(POLICIES) + "."
POLICY_GROUP = "paceline.policies"
"""Group of the entry points by which installed packages bring policies."""
MODULE_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@functools.cache
def policy_entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of every policy that an installed package brings; nothing is imported."""
    return {p.name: p for p in importlib.metadata.entry_points(group=POLICY_GROUP) if p.name not in POLICIES}


@record("engine.tree.")
class TreeConfig:
    """Shape limits of a draft tree."""

    max_draft_tokens: A[
        int, Setting("Draft nodes per request and round, at most, root excluded.", panel="Drafting", ge=1, le=256)
    ] = 16
    max_frontier: A[int, Setting(ge=0, le=64)] = 4
    """Leaves of a block that a re-entrant drafter continues from; 0 turns later blocks off."""
    policy: A[
        str,
        Setting(
            "adaptive (as bastion where drafting makes more tokens per second than plain decoding, else plainly) or, always "
            "drafting: bastion (as many nodes as pay) | fixed or ddtree (the --max-draft-tokens best) | bundle (as many, whole "
            "sets of children at a time, as JetSpec does).",
            flag="tree-policy", panel="Drafting", choices=TREE_POLICIES,
        ),
    ] = "adaptive"  # fmt: skip
    bundle_width: A[int, Setting(ge=1)] = 7
    """Policy `bundle`: children that a node gets at once, at most."""
    mix: A[
        str,
        Setting(
            "none | lookup | suffix | suffix-recent: a drafter without weights that drafts in the other one's place where a "
            "text goes on as it did before; not with a drafter without weights.",
            panel="Drafting", choices=("none", *TEXT_DRAFTERS),
        ),
    ] = "none"  # fmt: skip


@record("engine.")
class EngineConfig:
    """The round loop, its KV pool and its limits."""

    max_running: A[int, Setting(ge=1)] = 64
    """Requests in one round."""
    max_waiting: A[int, Setting(ge=1)] = 256
    """Requests in the queue before 429."""
    page_tokens: A[int, Setting(ge=1)] = 16
    """Rows of one KV page."""
    kv_bytes: A[int | None, Setting(ge=1)] = None
    """Byte budget of target and drafter KV, and of features kept for the prefix cache, together; None = chosen at start from the free memory (serving/loading/kv_size.py)."""
    prefill_chunk_tokens: A[int, Setting(ge=1)] = 256
    """Prompt rows that one round may prefill, over all requests."""
    min_prefill_tokens: A[int, Setting(ge=1)] = 64
    """Prompt rows of a round however many requests decode; otherwise the rows of the draft trees count against
    prefill_chunk_tokens, which bounds the time between two chunks of an answer. A drafter that has to catch up with a long
    prompt does so from round to round, in each for about as long as prefill_chunk_tokens prompt rows take."""
    priority_aging_s: A[float, Setting(gt=0)] = 30.0
    """Seconds of waiting that are worth one step of priority: nobody waits for ever behind better priorities."""
    prefix_caching: bool = True
    """Keep the full KV pages of ended requests and reuse them for prompts that begin alike, until pages are needed."""
    max_context_tokens: A[int | None, Setting(ge=2)] = None
    """Prompt and output tokens of one request; None: the target's own limit, or what kv_bytes holds if that is less."""
    max_buckets: A[int, Setting(ge=1)] = 64
    """Traffic classes (buckets) that one replica tells apart, `default` included. Where all are taken every tenant gets an
    even part; requests with any other name are served alike and counted under `other`."""
    max_classes: A[int, Setting(ge=0, le=64)] = 16
    """Classes that requests without a bucket are sorted into by their prompts (docs/operate.md); 0 = none: all of them share
    `default`."""
    max_class_versions: A[int, Setting(ge=0, le=24)] = 4
    """Drafter versions of single classes that a replica holds beside the live one, its successor and the first; each takes
    its weights, and its part of every row of kv_bytes. Classes beyond that are served by the live version."""
    max_class_deltas: A[int, Setting(ge=0, le=64)] = 0
    """Versions of single classes that a replica holds as deltas of the first drafter, all drafted in one pass; each takes its
    factors alone. 0 = none: classes learn whole versions."""
    delta_rank: A[int, Setting(ge=1, le=128)] = 32
    """Rank of the deltas that classes learn."""
    num_threads: A[
        int | None,
        Setting(
            "CPU threads of a replica; default: OMP_NUM_THREADS, or the computer's cores over the most replicas.",
            flag="threads", ge=1,
        ),
    ] = None  # fmt: skip
    capture_s: A[float, Setting(ge=0)] = 60.0
    """Seconds that a start on CUDA may spend on capturing graphs, the commonest shapes first; 0 = no graphs."""
    tensor_parallel: A[int, Setting(ge=1, le=64)] = 1
    """Devices that a replica splits the target over, by transformers' own plan; it must divide the target's KV heads."""
    tree: TreeConfig = field(default_factory=TreeConfig)


@record("feedback.")
class FeedbackConfig:
    """Round statistics on their way to Redis."""

    max_rows: A[int, Setting(ge=1)] = 65_536
    """Rows kept while Redis is away; the oldest are dropped and counted."""
    flush_interval_s: A[float, Setting(gt=0)] = 0.25
    max_stream_entries: A[int, Setting(ge=1)] = 10_000
    max_stream_bytes: A[int, Setting(ge=1)] = 64 * 2**20
    """Size of the stream while no controller reads it, a quarter of the embedded Redis; the oldest batches are dropped."""
    keep_rows: bool = False
    """The stream keeps every row beside the sums that the controller reads, for `paceline export --what feedback`: about
    110 bytes a request and round. What the controller has read stays too, up to the limits above."""


@record("trace.")
class TraceConfig:
    """Feature traces on their way to the trace store."""

    share: A[float, Setting(ge=0, le=1)] = 1.0
    """Share of requests traced, by crc32 of the request id; decided at admission, the others cost nothing."""
    max_pending: A[int, Setting(ge=1)] = 64
    """Traces waiting for the writer; more are dropped and counted."""
    shard_rows: A[int, Setting(ge=1)] = 1024
    """Rows per shard file."""
    flush_interval_s: A[float, Setting(gt=0)] = 2.0
    """A shard is closed at this age even when it is not full."""
    max_bytes: A[int, Setting(ge=0)] = 256 * 2**20
    """Size of the store; the oldest shards are deleted."""
    max_age_s: A[float, Setting(gt=0)] = 3600.0
    topk: A[int, Setting(ge=1)] = 8
    """Target log-probabilities kept per output token."""
    opt_out_tenants: tuple[str, ...] = ()
    """Tenants (header x-paceline-tenant) whose requests are never traced."""

    def __post_init__(self) -> None:
        for tenant in self.opt_out_tenants:
            require(is_label(tenant), f"trace.opt_out_tenants {LABEL_RULE}", tenant)


@record("rollout.")
class RolloutConfig:
    """How a new drafter version reaches all requests: its guard or canary, what ends it, which old versions are kept."""

    guard: bool = True
    """A version that a burst's replay found surely better serves its class at once, compared with the hold-back's requests
    and taken back if it is slower; false, or without a hold-back: it begins as a canary."""
    canary_percent: A[int, Setting(ge=0, le=90)] = 10
    """Share of adaptive requests, by hash of the request id, that a new version serves until it is judged; 0 = all at once."""
    margin: A[float, Setting(gt=0, lt=1)] = 0.05
    """Relative loss of tokens per second that counts as 'not worse'."""
    alpha: A[float, Setting(gt=0, lt=1)] = 0.05
    """Probability of rolling back a version that is as fast as the incumbent, however often it is looked at."""
    alpha_promote: A[float, Setting(gt=0, lt=1)] = 0.05
    """Probability of promoting, on evidence, a version that is slower by the margin or more."""
    min_requests: A[int, Setting(ge=1)] = 8
    """Finished requests of the version before a promotion; this and the next one hold for guards as well."""
    min_drafted_rounds: A[int, Setting(ge=1)] = 16
    """Rounds of them in which the version drafted, before a promotion: requests decoded plainly are no evidence."""
    max_requests: int = 300
    """Finished requests after which a canary without a verdict ends by its estimate, if it drafted enough; a guard ends."""
    max_s: A[float, Setting(gt=0)] = 1800.0
    """Seconds after which a canary does, and after which one that drafted too little ends without a promotion."""
    freeze_s: A[float, Setting(ge=0)] = 600.0
    """After a rollback no training is ordered on the version's bucket for so long."""
    quiet_s: A[float, Setting(gt=0)] = 1.5
    """A request without a round for so long counts as finished."""
    pool_bytes: A[int, Setting(ge=0)] = 4 * 2**30
    """Weights kept for recalls; beyond it the least recently used versions lose theirs."""

    def __post_init__(self) -> None:
        fits = self.min_requests <= self.max_requests
        require(fits, f"rollout.min_requests must be in [1, max_requests={self.max_requests}]", self.min_requests)


@record("policy.")
class PolicyConfig:
    """The controller's policy and its limits; money is device-seconds."""

    policy: A[str, Setting(POLICY_HELP)] = "payoff"
    """payoff (the default), a baseline, a policy of an installed package, or MODULE:CLASS of your own."""
    epoch_s: A[float, Setting(gt=0)] = 10.0
    """Seconds between decisions of one bucket."""
    interval_s: A[float, Setting(ge=0)] = 120.0
    """Period of the `interval` policy."""
    bank_s: A[float, Setting(ge=0)] = 40.0
    """Starting balance for every device that serving keeps busy, a part of it for a part; nothing is bought that is expected to cost more than is left."""
    bank_income: A[float, Setting(ge=0, le=1)] = 0.01
    """Share of the serving time that takes the place of bank_s once it is more: what trying may cost in the long run."""
    hysteresis: A[float, Setting(ge=0)] = 1.25
    """Expected saving must exceed expected cost by this factor."""
    min_rows: A[int, Setting(ge=1)] = 768
    """Fresh supervised rows a bucket needs before a job."""
    horizon_s: A[float, Setting(gt=0)] = 240.0
    """Prior for the remaining life of a traffic regime."""
    ends_at: A[
        str,
        Setting(
            "When the service will end, if that is known (a batch, a rented node), such as 2026-12-01T08:00Z: `payoff` and "
            "`thompson` learn nothing that could not pay by then."
        ),
    ] = ""
    holdback_percent: A[int, Setting(ge=0, le=100)] = 10
    """Share of requests that keep the first drafter."""
    trusts_groups: bool = False
    """Requests that ask for a group (x-paceline-group) are compared with those for which it was drawn: for a load whose
    every client is one's own, as the demo's. Else they count in neither ledger nor beliefs nor canaries."""
    trainer_price: A[float, Setting(ge=0, le=100)] = 1.0
    """What a second of the trainer's device is worth in seconds of a serving one: 1 where it could serve as well, less for
    one that would idle or is rented cheaper, as a spot GPU. What serving loses beside it is measured and comes on top."""
    job_time_limit_s: A[float, Setting(gt=0)] = 120.0
    ema_fast: A[float, Setting(gt=0, le=1)] = 0.5
    """`dual_ema`: weight of the newest epoch in the fast mean of acceptance length, in (0, 1]."""
    ema_slow: A[float, Setting(gt=0)] = 0.05
    """`dual_ema`: the same for the slow mean; smaller than ema_fast."""
    ema_margin: A[float, Setting(gt=0, lt=1)] = 0.1
    """`dual_ema`: relative distance by which the fast mean must fall below the slow one, in (0, 1)."""
    cara_factor: A[float, Setting(ge=0)] = 1.0
    """`cara`: train when the accrued cost of staleness reaches this multiple of the cost of training."""
    thompson_draws: A[int, Setting(ge=10, le=100_000)] = 512
    """`thompson`: draws behind each decision and its propensity, which is a multiple of 1 / thompson_draws."""
    hedge_rate: A[float, Setting(gt=0)] = 16.0
    """`hedge`: learning rate of the weights for losses in [0, 1], once an epoch."""
    hedge_share: A[float, Setting(ge=0, lt=1)] = 0.02
    """`hedge`: share of the weight spread evenly over versions each epoch, so that one that lost can return; in [0, 1)."""
    seed: A[int, Setting(ge=0)] = 0

    def __post_init__(self) -> None:
        is_known = (
            self.policy in POLICIES or MODULE_CLASS.fullmatch(self.policy) or self.policy in policy_entry_points()
        )
        names = ", ".join((*POLICIES, *policy_entry_points()))
        require(
            bool(is_known), f"policy.policy must be one of {names}, or MODULE:CLASS of one of your own", self.policy
        )
        self.end_s  # noqa: B018 - raises
        slower = self.ema_slow < self.ema_fast
        require(slower, f"policy.ema_slow must be in (0, ema_fast={self.ema_fast})", self.ema_slow)

    @property
    def end_s(self) -> float:
        """`ends_at` in seconds since 1970; infinite where no end is known."""
        if not self.ends_at:
            return math.inf
        rule = "policy.ends_at must be a date and a time with their zone, such as 2026-12-01T08:00Z"
        try:
            end = datetime.datetime.fromisoformat(self.ends_at)
        except ValueError:
            raise ConfigError(f"{rule}, got {self.ends_at!r}") from None
        require(end.tzinfo is not None, rule, self.ends_at)
        return end.timestamp()


@record("trainer_resources.")
class TrainerResources:
    """What a training task asks of Ray; the defaults ask for next to nothing: training takes what serving leaves."""

    num_cpus: A[float, Setting(ge=0)] = 0.1
    num_gpus: A[float, Setting(ge=0, le=1)] = 0.0
    """Above 0 the task trains on the GPU that Ray gives it; a share below 1 is bookkeeping, GPU memory is not divided."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of the nodes that may train, such as {train_slot: 1}."""
    niceness: A[int, Setting(ge=0, le=19)] = 19
    """How far training steps back on cores that others want (nice 1): at 19 a busy core leaves it next to nothing, at 0 it
    takes its share, also of what serving needs."""
    start_timeout_s: A[float, Setting(gt=0)] = 60.0
    """Longest time from the order to the task's first sign of life; give a cluster that boots nodes on demand minutes."""

    def __post_init__(self) -> None:
        section = "trainer_resources.resources"
        for name, quantity in self.resources.items():
            is_custom = name not in ("CPU", "GPU", "memory", "object_store_memory")
            require(is_custom, f"{section} must name custom resources (use num_cpus and num_gpus for the others)", name)
            require(quantity > 0, f"{section}.{name} must be > 0", quantity)


@record("autoscaling.")
class AutoscalingConfig:
    """Replicas that come and go with the requests, from `num_replicas` to `max_replicas`: Ray Serve's own autoscaling, by its
    names (docs/api/scaling.md)."""

    max_replicas: A[
        int | None,
        Setting(
            "Most serving replicas: others than --replicas start while requests wait for a place in a round, and drain once "
            "the rest can hold all (docs/api/scaling.md). Default: as many as --replicas, always.",
            flag="max-replicas", ge=1, le=1024,
        ),
    ] = None  # fmt: skip
    target_ongoing_requests: A[float | None, Setting(gt=0)] = None
    """Requests, running and waiting, that there is one replica for; None = engine.max_running: a replica is full before
    another one starts."""
    look_back_period_s: A[float, Setting(gt=0)] = 20.0
    """Requests count by their mean over so long."""
    upscale_delay_s: A[float, Setting(ge=0)] = 10.0
    """More replicas must be wanted for so long before one starts: a burst that ends before its weights are loaded needs none."""
    downscale_delay_s: A[float, Setting(ge=0)] = 600.0
    """Fewer must be wanted for so long before one drains: several times what starting it again would take."""


@record("ingress.")
class IngressConfig:
    """The processes in front of the engines with `resume: true`: HTTP and tokenizer, no model."""

    num_replicas: A[int, Setting(ge=1, le=64)] = 1
    max_resumes: A[int, Setting(ge=0, le=100)] = 3
    """Deaths of its replica that one request survives; a request that kills engines must not go round for ever."""
    max_wait_s: A[float, Setting(gt=0)] = 60.0
    """Longest time that a request waits while no replica takes it, each time; then it ends with an error."""


MAX_BODY_BYTES = 8 * 2**20
"""Bodies of requests beyond this are refused whatever limits say."""


@record("limits.")
class ClientLimits:
    """What one tenant may ask of the service; every replica keeps to its part of the rates. None = no limit."""

    requests_per_minute: A[float | None, Setting(gt=0)] = None
    tokens_per_minute: A[float | None, Setting(gt=0)] = None
    """Prompt and answer tokens. An answer is counted when it ends, so that a minute may go over by what runs then."""
    max_unfinished: A[int | None, Setting(ge=1)] = None
    """HTTP requests at once, from their first byte to the end of the answer; each replica counts its own."""
    max_body_bytes: A[int, Setting(ge=1, le=MAX_BODY_BYTES)] = MAX_BODY_BYTES
    buckets: tuple[str, ...] | None = None
    """Traffic classes that it may name; requests under another name count as `other`. None = any, as far as
    engine.max_buckets has room for an even part."""
    shares_training: bool = False
    """Its text trains drafters for everybody, and it gets theirs. Otherwise a tenant that a token vouches for has buckets of
    its own (`code` counts as `code@acme`), whose drafters learn from its text alone and serve nobody else."""

    def __post_init__(self) -> None:
        for name in self.buckets or ():
            require(is_label(name), f"limits.buckets {LABEL_RULE}", name)


TOKEN_ROLES = ("client", "admin")


@record("tokens.")
class TokenEntry:
    """One bearer token of a token file, in clear or as its SHA-256."""

    token: str | None = field(default=None, repr=False)
    sha256: str | None = field(default=None, repr=False)
    """Hexadecimal, in place of the token: the file then holds no secret."""
    tenant: str | None = None
    """Whose requests it sends; None: the token is a tenant of its own. Clients only."""
    role: A[str, Setting(choices=TOKEN_ROLES)] = "client"
    """client (the API) | admin (dashboard and commands)."""
    name: str | None = None
    """What the audit log calls it."""

    def __post_init__(self) -> None:
        rule = "tokens must each have either token or sha256"
        require((self.token is None) != (self.sha256 is None), rule, "both" if self.token else "neither")
        if self.token is not None:
            require(is_token(self.token), f"tokens.token {TOKEN_RULE}", "something else")
        else:
            is_hash = re.fullmatch("[0-9a-fA-F]{64}", self.sha256 or "") is not None
            require(is_hash, "tokens.sha256 must be 64 hexadecimal digits", "something else")
        for what in ("tenant", "name"):
            label = getattr(self, what)
            require(label is None or is_label(label), f"tokens.{what} {LABEL_RULE}", label)
        require(
            self.tenant is None or self.role == "client", "tokens.tenant must be absent with role admin", self.tenant
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of the token."""
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256((self.token or "").encode()).digest()


@record("")
class TokenFile:
    """Tokens of a service and limits of its tenants, in a file that is read again whenever it changes (`token_file`)."""

    tokens: tuple[TokenEntry, ...] = ()
    tenants: dict[str, ClientLimits] = field(default_factory=dict)
    """Tenant -> its limits, in place of `limits`."""

    def __post_init__(self) -> None:
        for name in self.tenants:
            require(is_label(name), f"tenants {LABEL_RULE}", name)
        places: dict[bytes, int] = {}
        for place, entry in enumerate(self.tokens):
            first = places.setdefault(entry.digest, place)
            if first != place:
                raise ConfigError(f"tokens[{place}] is the same token as tokens[{first}]; each needs its own")


DEFAULT_PORT = 8000
VARIABLES = {
    "redis_url": "PACELINE_REDIS_URL",
    "api_token": "PACELINE_API_TOKEN",
    "admin_token": "PACELINE_ADMIN_TOKEN",
    "token_file": "PACELINE_TOKEN_FILE",
    "otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
}
"""Environment variable of a setting of ServiceConfig; with _FILE behind its name: of a file that holds the value."""


@record("")
class ServiceConfig:
    """One Paceline service: model, replicas, stores, feedback, policy."""

    model: A[str, Setting(MODELS)] = "bundled"
    drafter: A[
        str,
        Setting(
            f"none | {DRAFTERS}; suffix-recent counts the tenant's other answers too. With another --model and no "
            "--drafter: lookup; smollm2: its own, with --mix suffix.",
            panel="Drafting",
        ),
    ] = "bundled"
    model_name: A[
        str,
        Setting(
            "Name of the service: in /v1/models, of its Serve application, of its state in data_dir and Redis. Each of several "
            "in one Ray cluster has another one.",
        ),
    ] = "paceline"  # fmt: skip
    served_model_names: A[
        tuple[str, ...],
        Setting(
            "Another name under which clients may ask for the model, as gpt-4o-mini; again for more.",
            flag="served-model-name", is_repeated=True,
        ),
    ] = ()  # fmt: skip
    dtype: A[str, Setting("auto | float32 | bfloat16 | float16 | int8 (CPU only).", choices=DTYPES)] = "auto"
    device: A[str, Setting("auto | cpu | cuda.", choices=DEVICES)] = "auto"
    num_replicas: A[
        int, Setting("Serving replicas; with --max-replicas: the least.", flag="replicas", ge=1, le=1024)
    ] = 1  # fmt: skip
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    data_dir: A[str, Setting("Folder of trace store, drafter registry, Redis data and logs.")] = DATA_DIR
    store_url: A[
        str | None,
        Setting(
            "Where traces, versions, learners and the controller's snapshot lie if not in data_dir: s3://BUCKET/PREFIX, or another "
            "URL that fsspec knows. Nodes then share no folder.",
        ),
    ] = None  # fmt: skip
    redis_url: A[
        str | None, Setting("Use this Redis instead of an embedded one.", env=VARIABLES["redis_url"])
    ] = field(default=None, repr=False)  # fmt: skip
    api_token: A[
        str | None,
        Setting(
            "Bearer token that clients must send; default: open (loopback).", env=VARIABLES["api_token"], panel="Access"
        ),
    ] = field(default=None, repr=False)
    admin_token: A[
        str | None,
        Setting(
            "Bearer token of operators: pin, roll back, train and set the policy on the dashboard; default: it only shows.",
            env=VARIABLES["admin_token"], panel="Access",
        ),
    ] = field(default=None, repr=False)  # fmt: skip
    token_file: A[
        str | None,
        Setting(
            "YAML file of further tokens, each with its tenant; read again when it changes.",
            env=VARIABLES["token_file"], panel="Access",
        ),
    ] = None  # fmt: skip
    metrics_public: A[
        bool,
        Setting(
            "Let anybody scrape /metrics. Private: with the API or admin token as bearer, or from this computer where the "
            "service listens on loopback and has no API token.",
            flag="metrics-public/--metrics-private", panel="Access",
        ),
    ] = False  # fmt: skip
    host: A[str, Setting("Address to listen on.", panel="Access")] = "127.0.0.1"
    port: A[int, Setting("Port to listen on; 0: any free one.", panel="Access", ge=0, le=65535)] = DEFAULT_PORT
    route_prefix: A[
        str,
        Setting(
            "Path below which all routes are, as /name; several services of one Ray cluster share a port. In a Serve "
            "configuration (infra/service.yaml) the application's own route_prefix counts.",
            panel="Access",
        ),
    ] = "/"  # fmt: skip
    ray_address: A[
        str | None,
        Setting(
            "Join this Ray cluster, where other services may run; auto: the one that `ray start` made here "
            "(docs/api/scaling.md). Default: a Ray of its own, which ends with it.",
            env="RAY_ADDRESS",
        ),
    ] = None  # fmt: skip
    tls_cert: A[str | None, Setting("PEM file with the certificate and its chain: HTTPS.", panel="Access")] = None
    tls_key: A[str | None, Setting("PEM file with the certificate's private key.", panel="Access")] = None
    access_log: bool = True
    """One JSON line a request in DATA_DIR/services/NAME/access-<replica>.log: labels, token counts, times; never its text."""
    otlp_traces_endpoint: A[
        str | None,
        Setting(
            "Send OpenTelemetry traces of requests and decisions to this collector by OTLP, as http://127.0.0.1:4318; needs "
            "the extra 'otel' (docs/api/tracing.md).",
            env=VARIABLES["otlp_traces_endpoint"], panel="Traces",
        ),
    ] = None  # fmt: skip
    otlp_traces_ratio: A[
        float | None,
        Setting(
            "Share of the requests that are traced, unless a caller's traceparent says it; default: OTEL_TRACES_SAMPLER's, or 1.",
            panel="Traces", ge=0, le=1,
        ),
    ] = None  # fmt: skip
    resume: A[
        bool,
        Setting(
            "Answers outlive the replica that writes them; costs a second hop (docs/serve.md).",
            flag="resume/--no-resume",
        ),
    ] = False
    limits: ClientLimits = field(default_factory=ClientLimits)
    """Of every tenant without limits of its own; without tokens, of every address."""
    ingress: IngressConfig = field(default_factory=IngressConfig)
    trainer_threads: A[int, Setting(ge=1)] = 1
    trainer_resources: TrainerResources = field(default_factory=TrainerResources)
    gate_chain: A[int | None, Setting(ge=1, le=32)] = None
    """Versions are scored as an engine would accept their tokens that verifies a chain of so many a round, such as vLLM's
    num_speculative_tokens, to which `paceline export-drafter` takes them; null: as this engine does, by trees."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        for name in ("api_token", "admin_token"):
            token = getattr(self, name)
            require(token is None or is_token(token), f"{name} {TOKEN_RULE}, or be null", "something else")
        most, engine = self.autoscaling.max_replicas, self.engine
        rule = f"autoscaling.max_replicas (--max-replicas) must be at least num_replicas (--replicas), which is {self.num_replicas}"
        require(most is None or most >= self.num_replicas, rule, most)
        target, held = self.autoscaling.target_ongoing_requests, engine.max_running + engine.max_waiting
        rule = f"autoscaling.target_ongoing_requests must be at most engine.max_running + engine.max_waiting, {held}: a replica refuses more"
        require(target is None or target <= held, rule, target)
        has_both = (self.tls_cert is None) == (self.tls_key is None)
        require(has_both, "tls_cert must be given together with tls_key", self.tls_cert or self.tls_key)
        url = self.otlp_traces_endpoint
        is_url = url is None or re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) is not None
        require(is_url, "otlp_traces_endpoint must be a URL such as http://127.0.0.1:4318", url)
        for name in (self.model_name, *self.served_model_names):
            require(is_model_name(name), f"model_name and served_model_names {MODEL_RULE}", name)
        require(is_route(self.route_prefix), f"route_prefix {ROUTE_RULE}", self.route_prefix)
        is_on_cpu = self.dtype != "int8" or (self.device != "cuda" and self.engine.tensor_parallel == 1)
        require(is_on_cpu, "dtype must not be int8 with device cuda or engine.tensor_parallel > 1", self.dtype)
        mix = self.engine.tree.mix
        rule = f"engine.tree.mix must be none with drafter {self.drafter} (it drafts beside one with weights; for {mix} alone give drafter {mix})"
        require(mix == "none" or self.drafter not in ("none", *TEXT_DRAFTERS), rule, mix)


def most_replicas(config: ServiceConfig) -> int:
    """Replicas that there are at most."""
    return config.autoscaling.max_replicas or config.num_replicas


def with_environment(config: ServiceConfig) -> ServiceConfig:
    """`config` with what the environment, or a file that it names, says where it says nothing.

    Raises: ConfigError when such a file cannot be read.
    """
    return override(config, {name: getattr(config, name) or from_environment(var) for name, var in VARIABLES.items()})


def leave_tokens() -> None:
    """Take the tokens out of this process's environment: a service that its own client alone talks to is open to it."""
    for name in ("api_token", "admin_token", "token_file"):
        for variable in (VARIABLES[name], f"{VARIABLES[name]}_FILE"):
            os.environ.pop(variable, None)


def with_absolute_paths(config: ServiceConfig) -> ServiceConfig:
    """`config` whose relative paths are those of this process: processes of a running cluster work in other folders.

    `~` stays, which is another folder on each computer.
    """
    found = {name: getattr(config, name) for name in ("data_dir", "token_file", "tls_cert", "tls_key")}
    if config.model not in MODEL_NAMES and not is_hub_id(config.model):
        found["model"] = config.model
    if config.drafter not in ("none", "bundled", *BUNDLED_DRAFTERS, *TEXT_DRAFTERS):
        found["drafter"] = config.drafter
    is_given = {name: value for name, value in found.items() if value and not str(value).startswith("~")}
    return override(config, {name: str(Path(value).absolute()) for name, value in is_given.items()})


def from_environment(variable: str) -> str | None:
    """Value of a variable, else of the file that VARIABLE_FILE names, as secrets are mounted; None = neither."""
    path = os.environ.get(f"{variable}_FILE")
    if os.environ.get(variable) or not path:
        return os.environ.get(variable) or None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{variable}_FILE must name a readable text file, got {path!r}: {e}") from e


OTLP_PROTOCOLS = ("http/protobuf", "grpc")


def otlp_protocol() -> str:
    """How spans go to the collector, one of OTLP_PROTOCOLS, by OpenTelemetry's own variables. Raises: ConfigError."""
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = os.environ.get(name) or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or OTLP_PROTOCOLS[0]
    require(protocol in OTLP_PROTOCOLS, f"{name} must be one of {', '.join(OTLP_PROTOCOLS)}", protocol)
    return protocol


def max_queued_spans() -> int:
    """Spans of one process that wait for the collector, at most; more are dropped. Raises: ConfigError."""
    return _number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)


def max_batched_spans() -> int:
    """Spans that are sent at once, at most: no more than may wait, else OpenTelemetry refuses both. Raises: ConfigError."""
    return min(_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512), max_queued_spans())


def span_delay_ms() -> int:
    """Milliseconds between two batches of spans. Raises: ConfigError."""
    return _number("OTEL_BSP_SCHEDULE_DELAY", 5000)


def _number(name: str, default: int) -> int:
    """A variable that is a whole number above 0; default: OpenTelemetry's."""
    text = os.environ.get(name) or str(default)
    require(text.isdecimal() and int(text) > 0, f"{name} must be a whole number > 0", text)
    return int(text)


def load_config(path: str | Path) -> ServiceConfig:
    """Read a YAML service configuration; raises ConfigError with the offending key."""
    return build(ServiceConfig, _file_values(path))


def _file_values(path: str | Path) -> Any:
    """What stands in a YAML service configuration."""
    return read_yaml(path, "configuration") or {}


def load_token_file(path: str | Path) -> TokenFile:
    """Read a YAML file of tokens; raises ConfigError with the offending key, and never with a token."""
    values = read_yaml(path, "token_file", is_secret=True) or {}
    try:
        return build(TokenFile, values)
    except ConfigError as e:
        raise ConfigError(f"token_file {path}: {_without_values(e)}") from None


def read_yaml(path: str | Path, what: str, *, is_secret: bool = False) -> Any:
    """The values of a file, None of an empty one; is_secret: no error quotes it.

    Raises: ConfigError when it cannot be read, is no YAML or gives a key twice, of which YAML's reader drops the first.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).expanduser().read_text(encoding="utf-8"))
        root = loader.get_single_node()
        twice = _repeated_key(root)  # of the document as it is written: merges are written out below
        values = None if twice or root is None else loader.construct_document(root)
    except OSError as e:
        raise ConfigError(f"{what} {path} must be a readable file: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # the second of other bytes than UTF-8, or of 2020-13-40
        mark = getattr(e, "problem_mark", None)
        if mark is not None:  # without the line itself, in which a token may stand
            where = f"{'an error' if is_secret else getattr(e, 'problem', None)} at line {mark.line + 1}"
        else:
            where = "unreadable" if is_secret else " ".join(str(e).split())
        raise ConfigError(f"{what} {path} must be YAML: {where}") from (None if is_secret else e)
    if twice:
        name, line, first = twice
        key = "that" if is_secret else repr(name)
        raise ConfigError(f"{what} {path} must give each key once: {key} of line {line} is in line {first} already")
    return values


def _repeated_key(root: Any) -> tuple[str, int, int] | None:
    """(key, its line, the line before that has it) of a mapping in the document."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))  # an alias is the node that it stands for
        lines: dict[tuple[str, str], int] = {}
        for part in node.value:
            if not isinstance(part, tuple):
                waiting.append(part)
                continue
            key, value = part
            waiting += [key, value]
            if isinstance(key.value, str):
                line, known = key.start_mark.line + 1, (key.tag, key.value)
                if known in lines:
                    return key.value, line, lines[known]
                lines[known] = line
    return None


def _without_values(error: ConfigError) -> str:
    """An error about a file of secrets without the value that is wrong."""
    return str(error).partition(", got ")[0]


def override(config: C, changes: Mapping[str, Any]) -> C:
    """`config` with other values; keys are dotted names, such as 'engine.tree.mix'. Raises: ConfigError."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, rest = name.partition(".")
        if rest:
            below.setdefault(section, {})[rest] = value
        else:
            own[section] = value
    own |= {section: override(getattr(config, section), values) for section, values in below.items()}
    return dataclasses.replace(config, **own)  # type: ignore[type-var]


@record()
class ServeOptions:
    """Settings of a file (--config) and options; options win. A service needs neither: `paceline serve` serves the
    bundled model.

    Examples: paceline serve --model smollm2. paceline serve --model ~/models/qwen3 --drafter suffix. paceline serve --config service.yaml --port 8080.
    """

    config: A[Path | None, Setting("YAML file with any setting of ServiceConfig; options given here win.")] = None
    changes: A[dict[str, Any], Setting(changes=ServiceConfig)] = field(default_factory=dict)
    """Dotted names of settings and their values."""
    verbose: A[bool, Setting("Show the processes' logs.", short="-v")] = False

    def service(self) -> ServiceConfig:
        """What is to be served. Raises: ConfigError."""
        values, changes = _file_values(self.config) if self.config else {}, dict(self.changes)
        base = build(ServiceConfig, values)
        model = changes.get("model", base.model)
        if "drafter" not in changes and base.drafter == "bundled" and ("model" in changes or "drafter" not in values):
            changes = _default_drafting(model, base) | changes
        return override(base, changes)


def build_service(values: Mapping[str, Any]) -> ServiceConfig:
    """ServiceConfig from plain values, with the drafter that a model has where none is named. Raises: ConfigError."""
    config = build(ServiceConfig, values)
    return config if "drafter" in values else override(config, _default_drafting(config.model, config))


def _default_drafting(model: str, base: ServiceConfig) -> dict[str, Any]:
    """Changes of `base` for a model for which no drafter is named."""
    if model == "bundled":
        return {}
    drafter = default_drafter(model)
    mix = {"engine.tree.mix": default_mix(model, drafter)} if base.engine.tree.mix == "none" else {}
    return {"drafter": drafter, **mix}


_OWN_ENGINE = {
    "num_replicas",
    "autoscaling.max_replicas",
    "resume",
    "engine.num_threads",
    "engine.tree.mix",
    "engine.tree.policy",
}
"""Settings that `attach` has options for, since `serve` has, and no use."""


@record()
class AttachOptions:
    """Settings of the control plane alone are those of `paceline serve`; an engine's own are its own.

    Examples: paceline attach --redis-url redis://HOST:6379/0 --data-dir /shared --model DIR --drafter eagle3 (vLLM with its
    plugin, docs/api/vllm.md). The same with --engine sglang --url http://A:30000 --url http://B:30000 (docs/api/sglang.md).
    """

    engine: A[
        str,
        Setting(
            "vllm: engines that report on their own, by the plugin | sglang: those of --url, driven from here.",
            choices=("vllm", "sglang"), panel="Engines",
        ),
    ] = "vllm"  # fmt: skip
    url: A[
        tuple[str, ...],
        Setting("A running SGLang, http://HOST:PORT; one each.", is_repeated=True, panel="Engines"),
    ] = ()
    engine_key: A[
        str | None,
        Setting("SGLang's --admin-api-key, or its --api-key where it has only that.", env="PACELINE_ENGINE_KEY", panel="Engines"),
    ] = field(default=None, repr=False)  # fmt: skip
    window_s: A[
        float,
        Setting(
            "Of an SGLang: one drafter serves all requests at a time; which one is drawn anew so often, by the shares of "
            "hold-back and canary. A multiple of 5.",
            gt=0, panel="Engines",
        ),
    ] = 30.0  # fmt: skip
    max_stale_tokens: A[
        int,
        Setting(
            "Of an SGLang: requests that begin with more cached tokens are evidence of nothing once drafters were exchanged.",
            ge=0, panel="Engines",
        ),
    ] = 64  # fmt: skip
    serve: ServeOptions = field(default_factory=ServeOptions)

    def __post_init__(self) -> None:
        require(self.window_s % SPAN_S == 0, f"window-s must be a multiple of {SPAN_S:g}", self.window_s)
        is_sglang = self.engine == "sglang"
        require(is_sglang == bool(self.url), "url must be given with engine sglang, and only with it", self.url)
        for url in self.url:
            is_url = re.fullmatch(r"https?://[^/\s]+/?", url) is not None
            require(is_url, "url must be one such as http://127.0.0.1:30000", url)
        require(len(set(self.url)) == len(self.url), "url must name each SGLang once", self.url)
        own = sorted(_OWN_ENGINE & self.serve.changes.keys())
        require(
            not own, "options must not be those of Paceline's own engine, which the engines here have themselves", own
        )


def to_dict(config: Any) -> dict:
    """Plain values of a configuration, the inverse of build."""
    return dataclasses.asdict(config)
