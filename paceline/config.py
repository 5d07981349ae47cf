"""Every configuration class and the loader that refuses unknown keys."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS

C = TypeVar("C")


def _require(ok: bool, rule: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"{rule}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeConfig:
    """Shape limits of a draft tree."""

    max_draft_tokens: int = 16
    """Draft nodes per request per round, root excluded; of policies adaptive and bastion at most."""
    max_frontier: int = 4
    """Leaves of a block that a re-entrant drafter continues from; 0 turns later blocks off."""
    policy: str = "adaptive"
    """adaptive: as bastion where drafting makes more tokens per second than plain decoding, else plainly. Always drafting:
    bastion (as many nodes as pay), fixed or ddtree (the max_draft_tokens best), bundle (as many, whole sets of children at
    a time, as JetSpec does)."""
    bundle_width: int = 7
    """Policy `bundle`: children that a node gets at once, at most."""
    mix: str = "none"
    """lookup | suffix | suffix-recent: a drafter without weights whose candidates compete with the drafter's own; needs one."""

    def __post_init__(self) -> None:
        _require(1 <= self.max_draft_tokens <= 256, "tree.max_draft_tokens must be in [1, 256]", self.max_draft_tokens)
        _require(0 <= self.max_frontier <= 64, "tree.max_frontier must be in [0, 64]", self.max_frontier)
        known = ("adaptive", "bastion", "fixed", "ddtree", "bundle")
        _require(self.policy in known, f"tree.policy must be one of {', '.join(known)}", self.policy)
        _require(self.bundle_width >= 1, "tree.bundle_width must be >= 1", self.bundle_width)
        _require(self.mix in ("none", *TEXT_DRAFTERS), f"tree.mix must be none, {' or '.join(TEXT_DRAFTERS)}", self.mix)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The round loop, its KV pool and its limits."""

    max_running: int = 64
    """Requests in one round."""
    max_waiting: int = 256
    """Requests in the queue before 429."""
    page_tokens: int = 16
    """Rows of one KV page."""
    kv_bytes: int | None = None
    """Byte budget of target and drafter KV, and of features kept for the prefix cache, together; None = chosen at start from the free memory (serving/loading/kv_size.py)."""
    prefill_chunk_tokens: int = 256
    """Prompt rows that one round may prefill, over all requests."""
    min_prefill_tokens: int = 64
    """Prompt rows of a round however many requests decode; otherwise the rows of the draft trees count against
    prefill_chunk_tokens, which bounds the time between two chunks of an answer."""
    priority_aging_s: float = 30.0
    """Seconds of waiting that are worth one step of priority: nobody waits for ever behind better priorities."""
    prefix_caching: bool = True
    """Keep the full KV pages of ended requests and reuse them for prompts that begin alike, until pages are needed."""
    max_context_tokens: int | None = None
    """Prompt and output tokens of one request; None: the target's own limit, or what kv_bytes holds if that is less."""
    max_buckets: int = 64
    """Traffic classes (buckets) that one replica tells apart, `default` included; requests with a later name are served
    alike and counted under `other`."""
    num_threads: int | None = None
    """torch threads of the engine process; None leaves torch's choice."""
    capture_s: float = 60.0
    """Seconds that a start on CUDA may spend on capturing graphs, the commonest shapes first; 0 = no graphs."""
    tensor_parallel: int = 1
    """Devices that a replica splits the target over, by transformers' own plan; it must divide the target's KV heads."""
    tree: TreeConfig = field(default_factory=TreeConfig)

    def __post_init__(self) -> None:
        _require(self.max_running >= 1, "engine.max_running must be >= 1", self.max_running)
        _require(self.max_waiting >= 1, "engine.max_waiting must be >= 1", self.max_waiting)
        _require(self.page_tokens >= 1, "engine.page_tokens must be >= 1", self.page_tokens)
        _require(self.kv_bytes is None or self.kv_bytes >= 1, "engine.kv_bytes must be >= 1 or null", self.kv_bytes)
        _require(
            self.max_context_tokens is None or self.max_context_tokens >= 2,
            "engine.max_context_tokens must be >= 2 or null",
            self.max_context_tokens,
        )
        _require(self.max_buckets >= 1, "engine.max_buckets must be >= 1", self.max_buckets)
        _require(self.prefill_chunk_tokens >= 1, "engine.prefill_chunk_tokens must be >= 1", self.prefill_chunk_tokens)
        _require(self.min_prefill_tokens >= 1, "engine.min_prefill_tokens must be >= 1", self.min_prefill_tokens)
        _require(self.priority_aging_s > 0, "engine.priority_aging_s must be > 0", self.priority_aging_s)
        _require(1 <= self.tensor_parallel <= 64, "engine.tensor_parallel must be in [1, 64]", self.tensor_parallel)
        _require(self.capture_s >= 0, "engine.capture_s must be >= 0", self.capture_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    """Round statistics on their way to Redis."""

    max_rows: int = 65_536
    """Rows kept while Redis is away; the oldest are dropped and counted."""
    flush_interval_s: float = 0.25
    max_stream_entries: int = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceConfig:
    """Feature traces on their way to the trace store."""

    share: float = 1.0
    """Share of requests traced, by crc32 of the request id; decided at admission, the others cost nothing."""
    max_pending: int = 64
    """Traces waiting for the writer; more are dropped and counted."""
    shard_rows: int = 1024
    """Rows per shard file."""
    flush_interval_s: float = 2.0
    """A shard is closed at this age even when it is not full."""
    max_bytes: int = 256 * 2**20
    """Size of the store; the oldest shards are deleted."""
    max_age_s: float = 3600.0
    topk: int = 8
    """Target log-probabilities kept per output token."""
    opt_out_tenants: tuple[str, ...] = ()
    """Tenants (header x-paceline-tenant) whose requests are never traced."""

    def __post_init__(self) -> None:
        _require(0.0 <= self.share <= 1.0, "trace.share must be in [0, 1]", self.share)
        _require(self.max_age_s > 0, "trace.max_age_s must be > 0", self.max_age_s)
        _require(all(self.opt_out_tenants), "trace.opt_out_tenants must be names, none of them empty", self.opt_out_tenants)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How a new drafter version reaches all requests: its canary, what ends it, which old versions are kept."""

    canary_percent: int = 10
    """Share of adaptive requests, by hash of the request id, that a new version serves until it is judged; 0 = all at once."""
    margin: float = 0.05
    """Relative loss of tokens per second that counts as 'not worse'."""
    alpha: float = 0.05
    """Probability of rolling back a version that is as fast as the incumbent, however often it is looked at."""
    alpha_promote: float = 0.05
    """Probability of promoting, on evidence, a version that is slower by the margin or more."""
    min_requests: int = 8
    """Finished canary requests before a promotion."""
    min_drafted_rounds: int = 16
    """Rounds of them in which the version drafted, before a promotion: requests decoded plainly are no evidence."""
    max_requests: int = 300
    """Finished canary requests after which a canary without a verdict ends by its estimate, if it drafted enough."""
    max_s: float = 1800.0
    """Seconds after which it does, and after which one that drafted too little ends without a promotion."""
    freeze_s: float = 600.0
    """After a rollback no training is ordered on the version's bucket for so long."""
    quiet_s: float = 1.5
    """A request without a round for so long counts as finished."""
    pool_bytes: int = 4 * 2**30
    """Weights kept for recalls; beyond it the least recently used versions lose theirs."""

    def __post_init__(self) -> None:
        _require(0 <= self.canary_percent <= 90, "rollout.canary_percent must be in [0, 90]", self.canary_percent)
        _require(0 < self.margin < 1, "rollout.margin must be in (0, 1)", self.margin)
        _require(0 < self.alpha < 1, "rollout.alpha must be in (0, 1)", self.alpha)
        _require(0 < self.alpha_promote < 1, "rollout.alpha_promote must be in (0, 1)", self.alpha_promote)
        _require(1 <= self.min_requests <= self.max_requests, "rollout.min_requests must be in [1, max_requests]", self.min_requests)  # fmt: skip
        _require(self.min_drafted_rounds >= 1, "rollout.min_drafted_rounds must be >= 1", self.min_drafted_rounds)
        _require(self.max_s > 0, "rollout.max_s must be > 0", self.max_s)
        _require(self.quiet_s > 0, "rollout.quiet_s must be > 0", self.quiet_s)
        _require(self.freeze_s >= 0, "rollout.freeze_s must be >= 0", self.freeze_s)
        _require(self.pool_bytes >= 0, "rollout.pool_bytes must be >= 0", self.pool_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """The controller's policy and its limits; money is device-seconds."""

    policy: str = "payoff"
    """payoff (the default), or a baseline: never | always | interval | dual_ema | cara | thompson | hedge."""
    epoch_s: float = 10.0
    """Seconds between decisions of one bucket."""
    interval_s: float = 120.0
    """Period of the `interval` policy."""
    bank_s: float = 40.0
    """Starting balance; the policy spends only what the bank covers."""
    hysteresis: float = 1.25
    """Expected saving must exceed expected cost by this factor."""
    min_dwell_s: float = 5.0
    """Shortest time between two swaps of a bucket."""
    min_rows: int = 768
    """Fresh supervised rows a bucket needs before a job."""
    horizon_s: float = 240.0
    """Prior for the remaining life of a traffic regime."""
    holdback_percent: int = 10
    """Share of requests that keep the first drafter."""
    job_time_limit_s: float = 120.0
    ema_fast: float = 0.5
    """`dual_ema`: weight of the newest epoch in the fast mean of acceptance length, in (0, 1]."""
    ema_slow: float = 0.05
    """`dual_ema`: the same for the slow mean; smaller than ema_fast."""
    ema_margin: float = 0.1
    """`dual_ema`: relative distance by which the fast mean must fall below the slow one, in (0, 1)."""
    cara_factor: float = 1.0
    """`cara`: train when the accrued cost of staleness reaches this multiple of the cost of training."""
    thompson_draws: int = 512
    """`thompson`: draws behind each decision and its propensity, which is a multiple of 1 / thompson_draws."""
    hedge_rate: float = 16.0
    """`hedge`: learning rate of the weights for losses in [0, 1], once an epoch."""
    hedge_share: float = 0.02
    """`hedge`: share of the weight spread evenly over versions each epoch, so that one that lost can return; in [0, 1)."""
    seed: int = 0

    def __post_init__(self) -> None:
        known = ("never", "always", "interval", "payoff", "dual_ema", "cara", "thompson", "hedge")
        _require(self.policy in known, f"policy.policy must be one of {', '.join(known)}", self.policy)
        _require(self.epoch_s > 0, "policy.epoch_s must be > 0", self.epoch_s)
        _require(
            0 <= self.holdback_percent <= 100, "policy.holdback_percent must be in [0, 100]", self.holdback_percent
        )
        for name in ("interval_s", "bank_s", "hysteresis", "min_dwell_s", "cara_factor"):
            _require(
                0 <= getattr(self, name) < float("inf"), f"policy.{name} must be >= 0 and finite", getattr(self, name)
            )
        for name in ("horizon_s", "job_time_limit_s", "hedge_rate"):
            _require(
                0 < getattr(self, name) < float("inf"), f"policy.{name} must be > 0 and finite", getattr(self, name)
            )
        _require(self.min_rows >= 1, "policy.min_rows must be >= 1", self.min_rows)
        _require(0 < self.ema_fast <= 1, "policy.ema_fast must be in (0, 1]", self.ema_fast)
        _require(
            0 < self.ema_slow < self.ema_fast,
            f"policy.ema_slow must be in (0, ema_fast={self.ema_fast})",
            self.ema_slow,
        )
        _require(0 < self.ema_margin < 1, "policy.ema_margin must be in (0, 1)", self.ema_margin)
        _require(
            10 <= self.thompson_draws <= 100_000, "policy.thompson_draws must be in [10, 100000]", self.thompson_draws
        )
        _require(0 <= self.hedge_share < 1, "policy.hedge_share must be in [0, 1)", self.hedge_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerResources:
    """What a training task asks of Ray; the defaults ask for next to nothing: training takes what serving leaves."""

    num_cpus: float = 0.1
    num_gpus: float = 0.0
    """Above 0 the task trains on the GPU that Ray gives it; a share below 1 is bookkeeping, GPU memory is not divided."""
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources of the nodes that may train, such as {train_slot: 1}."""
    start_timeout_s: float = 60.0
    """Longest time from the order to the task's first sign of life; give a cluster that boots nodes on demand minutes."""

    def __post_init__(self) -> None:
        _require(self.num_cpus >= 0, "trainer_resources.num_cpus must be >= 0", self.num_cpus)
        _require(0 <= self.num_gpus <= 1, "trainer_resources.num_gpus must be in [0, 1]", self.num_gpus)
        for name, quantity in self.resources.items():
            _require(
                name not in ("CPU", "GPU", "memory", "object_store_memory"),
                "trainer_resources.resources must name custom resources (use num_cpus and num_gpus for the others)", name,
            )  # fmt: skip
            _require(quantity > 0, f"trainer_resources.resources.{name} must be > 0", quantity)
        _require(self.start_timeout_s > 0, "trainer_resources.start_timeout_s must be > 0", self.start_timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class IngressConfig:
    """The processes in front of the engines with `resume: true`: HTTP and tokenizer, no model."""

    num_replicas: int = 1
    max_resumes: int = 3
    """Deaths of its replica that one request survives; a request that kills engines must not go round for ever."""
    max_wait_s: float = 60.0
    """Longest time that a request waits while no replica takes it, each time; then it ends with an error."""

    def __post_init__(self) -> None:
        _require(1 <= self.num_replicas <= 64, "ingress.num_replicas must be in [1, 64]", self.num_replicas)
        _require(0 <= self.max_resumes <= 100, "ingress.max_resumes must be in [0, 100]", self.max_resumes)
        _require(0 < self.max_wait_s < float("inf"), "ingress.max_wait_s must be > 0 and finite", self.max_wait_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """One Paceline service: model, replicas, stores, feedback, policy."""

    model: str = "bundled"
    """'bundled' or the folder of a local transformers checkpoint."""
    drafter: str = "bundled"
    """'bundled', 'none', a drafter's name (paceline/paths.py) or the folder of one (config.json and weights)."""
    model_name: str = "paceline"
    """Name in /v1/models."""
    dtype: str = "auto"
    """auto | float32 | bfloat16 | float16."""
    device: str = "auto"
    """auto | cpu | cuda."""
    num_replicas: int = 1
    data_dir: str = "~/.cache/paceline"
    """Trace store, drafter registry, Redis data and logs."""
    redis_url: str | None = field(default=None, repr=False)
    """None: an embedded Redis child process."""
    api_token: str | None = field(default=None, repr=False)
    """Bearer token that clients must send; None = open (loopback)."""
    admin_token: str | None = field(default=None, repr=False)
    """Bearer token of operators: pin, roll back, train and set the policy on the dashboard; None = it only shows."""
    metrics_public: bool = False
    """True: GET /metrics answers anybody, without a token. False: the API or admin token, or this computer (loopback)."""
    host: str = "127.0.0.1"
    port: int = 8000
    access_log: bool = True
    """One JSON line a request in data_dir/access-<replica>.log: labels, token counts, times; never its text."""
    resume: bool = False
    """True: answers outlive the replica that writes them (docs/resume.md), at the price of a second hop."""
    ingress: IngressConfig = field(default_factory=IngressConfig)
    trainer_threads: int = 1
    trainer_resources: TrainerResources = field(default_factory=TrainerResources)
    engine: EngineConfig = field(default_factory=EngineConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        _require(1 <= self.num_replicas <= 1024, "num_replicas must be in [1, 1024]", self.num_replicas)
        _require(self.dtype in ("auto", "float32", "bfloat16", "float16"), "dtype must be auto, float32, bfloat16 or float16", self.dtype)  # fmt: skip
        for name in ("api_token", "admin_token"):
            token = getattr(self, name)
            _require(
                token is None or (token.isascii() and token.strip() == token != ""),
                f"{name} must be ASCII, without spaces around it, or null",
                "something else",
            )
        _require(self.device in ("auto", "cpu", "cuda"), "device must be auto, cpu or cuda", self.device)
        mix = self.engine.tree.mix
        rule = f"engine.tree.mix must be none with drafter none (it drafts at another one's side; for {mix} alone give drafter {mix})"
        _require(self.drafter != "none" or mix == "none", rule, mix)


def build_config(kind: type[C], values: Mapping[str, Any], path: str = "") -> C:
    """Build a configuration from plain values; raises ConfigError on an unknown key or a wrong type."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'configuration'} must be a mapping, got {type(values).__name__}")
    hints = typing.get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(f"{path}{unknown[0]} is not a setting; known settings: {', '.join(sorted(names))}")
    out = {key: _coerce(hints[key], value, f"{path}{key}") for key, value in values.items()}
    return kind(**out)


def _coerce(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build_config(typing.cast(type, hint), value, f"{path}.")
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value is None else _coerce(options[0], value, path)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        return tuple(_coerce(typing.get_args(hint)[0], v, path) for v in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a mapping, got {value!r}")
        key_hint, value_hint = typing.get_args(hint)
        return {_coerce(key_hint, k, path): _coerce(value_hint, v, f"{path}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {hint.__name__}, got {value!r}")
    return value


def load_config(path: str | Path) -> ServiceConfig:
    """Read a YAML service configuration; raises ConfigError with the offending key."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"configuration {path} must be a readable file: {e.strerror}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"configuration {path} must be YAML: {e}") from e
    return build_config(ServiceConfig, values or {})


def to_dict(config: Any) -> dict:
    """Plain values of a configuration, the inverse of build_config."""
    return dataclasses.asdict(config)


def with_tree_options(
    base: TreeConfig,
    *,
    policy: str | None = None,
    max_draft_tokens: int | None = None,
    mix: str | None = None,
) -> TreeConfig:
    """`base` with what is given; None keeps its value. Raises: ConfigError on a value that is not allowed."""
    given: dict[str, Any] = {"policy": policy, "max_draft_tokens": max_draft_tokens, "mix": mix}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
