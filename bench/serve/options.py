"""Options of `paceline bench serve`: the server, the loads, the requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.common.workloads import load_prompts
from paceline.bench.serve.cell import Load
from paceline.bench.serve.client import StreamRequest
from paceline.errors import ConfigError

ROUTES = ("completions", "chat")
MIN_WAVES = 4
"""Requests of a closed loop are at least so many times its clients: fewer leave no time at full load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions:
    """See `paceline bench serve --help`."""

    url: str | None = "http://127.0.0.1:8000"
    """None: a local service is started and stopped."""
    model: str | None = None
    """None: the first model that /v1/models names."""
    route: str = "completions"
    concurrencies: tuple[int, ...] = (1, 4, 16)
    rates_per_s: tuple[float, ...] = ()
    """Open-loop loads, after the closed ones."""
    num_requests: int = 64
    """Of a load, at least; a closed loop sends MIN_WAVES times its clients if that is more."""
    warmup: int = 8
    """Requests before each load that are not counted (at its concurrency, an open loop's four at a time)."""
    max_s: float = 120.0
    """A load sends nothing later than this."""
    max_tokens: int = 128
    temperature: float = 0.0
    buckets: tuple[str, ...] = ("tools", "code", "math", "facts")
    names_buckets: bool = False
    """Tell the server each prompt's bucket (x-paceline-bucket)."""
    timeout_s: float = 120.0
    """Longest silence of a stream; also how long answers may run on after the last request."""
    num_tries: int = 8
    """How often a request is sent while the server answers 429."""
    extra_body: str = "{}"
    """JSON object of fields added to every request body; null leaves a field out."""
    api_key: str | None = None
    note: str = ""
    """Kept in the document: what the server is, and what else ran."""
    seed: int = 0
    data: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.url is None or self.url.startswith(("http://", "https://")), "url must begin with http:// or https://", self.url),
            (self.route in ROUTES, f"route must be {' or '.join(ROUTES)}", self.route),
            (bool(self.concurrencies or self.rates_per_s), "concurrency and rate must not both be empty", ""),
            (all(1 <= c <= 4096 for c in self.concurrencies), "concurrency must be a comma list of numbers in [1, 4096]", self.concurrencies),
            (all(r > 0 for r in self.rates_per_s), "rate must be a comma list of numbers > 0", self.rates_per_s),
            (self.num_requests >= 1, "requests must be >= 1", self.num_requests),
            (self.warmup >= 0, "warmup must be >= 0", self.warmup),
            (self.max_s > 0, "seconds must be > 0", self.max_s),
            (self.max_tokens >= 1, "max_tokens must be >= 1", self.max_tokens),
            (self.temperature >= 0, "temperature must be >= 0", self.temperature),
            (bool(self.buckets), "buckets must not be empty", self.buckets),
            (self.timeout_s > 0, "timeout must be > 0", self.timeout_s),
            (self.num_tries >= 1, "tries must be >= 1", self.num_tries),
        )  # fmt: skip
        for ok, rule, value in checks:
            if not ok:
                raise ConfigError(f"{rule}, got {value}")
        try:
            is_object = isinstance(json.loads(self.extra_body), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ConfigError(f"extra_body must be a JSON object, got {self.extra_body!r}")

    @property
    def extra(self) -> dict[str, Any]:
        return json.loads(self.extra_body)

    def loads(self) -> list[Load]:
        """Every load, closed ones first."""
        return [*(Load(concurrency=c) for c in self.concurrencies), *(Load(rate_per_s=r) for r in self.rates_per_s)]

    def count(self, load: Load) -> int:
        """Counted requests of a load."""
        return max(self.num_requests, MIN_WAVES * (load.concurrency or 1))


def plan_requests(options: ServeBenchOptions) -> tuple[list[tuple[list[StreamRequest], list[StreamRequest]]], int]:
    """((warm-up requests, counted requests) of each load, requests whose prompt an earlier one had).

    Prompts go round the buckets and are repeated only when a bucket has no more: a server with a prefix cache would
    find a repeated one there.
    """
    sizes = [(options.warmup, options.count(load)) for load in options.loads()]
    total = sum(a + b for a, b in sizes)
    each = -(-total // len(options.buckets))
    pools = {b: load_prompts(b, options.data, each, options.seed) for b in options.buckets}
    requests = [
        StreamRequest(
            prompt=pools[bucket][i // len(options.buckets)].text, bucket=bucket, max_tokens=options.max_tokens,
            temperature=options.temperature, seed=options.seed + i,
        )
        for i in range(total)
        for bucket in [options.buckets[i % len(options.buckets)]]
    ]  # fmt: skip
    num_repeated = total - len({(r.bucket, r.prompt) for r in requests})
    plan, at = [], 0
    for warmup, counted in sizes:
        plan.append((requests[at : at + warmup], requests[at + warmup : at + warmup + counted]))
        at += warmup + counted
    return plan, num_repeated
