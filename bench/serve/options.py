"""Options of `paceline bench serve`: the server, the loads, the requests."""

from __future__ import annotations

import json
from typing import Annotated as A
from typing import Any

from paceline.bench.common.workloads import load_prompts
from paceline.bench.serve.cell import Load
from paceline.bench.serve.client import StreamRequest
from paceline.records import DataFolder, JsonFile, Setting, record, require

ROUTES = ("completions", "chat")
SERVER, LOAD, REQUESTS = "Server", "Load", "Requests"
"""Headings of options in --help."""
MIN_WAVES = 4
"""Requests of a closed loop are at least so many times its clients: fewer leave no time at full load."""


@record()
class ServeBenchOptions:
    """Closed loops (--concurrency) and open ones (--rate) of streaming requests against any OpenAI-compatible server: time
    to the first token, gaps between chunks, output and user tokens per second with 95% intervals, ramp-up and drain left
    out; acceptance where the server tells it.

    Exit code 1 on any error. docs/benchmarks.md.

    Example: paceline bench serve --url http://127.0.0.1:8000 --concurrency 1,8,32 --json serve.json.
    """

    url: A[str, Setting("Address of the server, with or without /v1.", panel=SERVER)] = "http://127.0.0.1:8000"
    is_local: A[
        bool,
        Setting(
            "Start `paceline serve` for this run, on a free port, and stop it afterwards.", flag="serve", panel=SERVER
        ),
    ] = False
    model: A[str | None, Setting("Default: the first that /v1/models names.", panel=SERVER)] = None
    route: A[str, Setting("completions | chat.", panel=SERVER, choices=ROUTES)] = "completions"
    concurrencies: A[
        tuple[int, ...],
        Setting(
            "Comma list of closed loops: clients that send again when answered; '' for none.",
            flag="concurrency", panel=LOAD, ge=1, le=4096,
        ),
    ] = (1, 4, 16)  # fmt: skip
    rates_per_s: A[
        tuple[float, ...],
        Setting(
            "Comma list of open loops, after the closed ones: requests per second, arriving at random (Poisson).",
            flag="rate", panel=LOAD, gt=0,
        ),
    ] = ()  # fmt: skip
    num_requests: A[
        int,
        Setting(
            f"Requests of a load, at least; a closed loop sends {MIN_WAVES} times its clients if that is more.",
            flag="requests", panel=LOAD, ge=1,
        ),
    ] = 64  # fmt: skip
    warmup: A[int, Setting("Requests before each load that are not counted.", panel=LOAD, ge=0)] = 8
    max_s: A[float, Setting("A load sends no request later than this.", flag="seconds", panel=LOAD, gt=0)] = 120.0
    max_tokens: A[int, Setting("Longest answer.", panel=REQUESTS, ge=1)] = 128
    temperature: A[float, Setting("0 = greedy.", panel=REQUESTS, ge=0)] = 0.0
    buckets: A[
        tuple[str, ...], Setting("Comma list of traffic classes, taken in turn.", panel=REQUESTS, non_empty=True)
    ] = ("tools", "code", "math", "facts")
    names_buckets: A[
        bool,
        Setting(
            "Send each prompt's traffic class as x-paceline-bucket, as clients of Paceline do.",
            flag="name-buckets", panel=REQUESTS,
        ),
    ] = False  # fmt: skip
    timeout_s: A[
        float, Setting("Seconds of silence after which a stream counts as dead.", flag="timeout", panel=REQUESTS, gt=0)
    ] = 120.0
    num_tries: A[
        int,
        Setting(
            "How often a request is sent while the answer is 429 (Retry-After is kept).",
            flag="tries",
            panel=REQUESTS,
            ge=1,
        ),
    ] = 8
    extra_body: A[
        str,
        Setting(
            "JSON object added to every request, such as '{\"ignore_eos\": true}'; null drops a field.", panel=REQUESTS
        ),
    ] = "{}"
    api_key: A[
        str | None,
        Setting("Bearer token; better given as the environment variable.", panel=SERVER, env="PACELINE_API_TOKEN"),
    ] = None
    note: A[str, Setting("Words kept in the JSON: which server, started how, what else ran.")] = ""
    seed: A[int, Setting("Seed of prompts, arrivals and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "url must begin with http:// or https://", self.url)
        require(bool(self.concurrencies or self.rates_per_s), "concurrency and rate must not both be empty", "")
        try:
            is_object = isinstance(json.loads(self.extra_body), dict)
        except ValueError:
            is_object = False
        require(is_object, "extra-body must be a JSON object", self.extra_body)

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
