"""Server benchmark: options, requests and reports of the speed of an OpenAI-compatible server under closed and open loads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import Bar, new_table, progress, say_file
from paceline.bench.common.workloads import load_prompts
from paceline.bench.serve.cell import CellRunner, Load
from paceline.bench.serve.client import StreamClient, StreamRequest, find_features
from paceline.bench.serve.local_service import LOAD, REQUESTS, SERVER, ServerOptions, watch_lag
from paceline.bench.serve.server_metrics import NOT_OFFERED, acceptance_between, read_page
from paceline.bench.serve.stats import CHUNKS, percentiles_ms, summarize
from paceline.records import Setting, record, require

ROUTES = ("completions", "chat")
MIN_WAVES = 4
"""Requests of a closed loop are at least so many times its clients: fewer leave no time at full load."""


@record()
class ServeBenchOptions(ServerOptions):
    """Closed loops (--concurrency) and open ones (--rate) of streaming requests against any OpenAI-compatible server: time
    to the first token, gaps between chunks, output and user tokens per second with 95% intervals, ramp-up and drain left
    out; acceptance where the server tells it.

    Exit code 1 on any error. docs/benchmarks.md.

    Example: paceline bench serve --url http://127.0.0.1:8000 --concurrency 1,8,32 --json serve.json.
    """

    model: A[str | None, Setting("Default: the first that /v1/models names.", panel=SERVER)] = None
    route: A[str, Setting("completions | chat.", panel=SERVER, choices=ROUTES)] = "completions"
    concurrencies: A[
        tuple[int, ...],
        Setting("Comma list of closed loops: clients that send again when answered; '' for none.", flag="concurrency", panel=LOAD, ge=1, le=4096),
    ] = (1, 4, 16)  # fmt: skip
    rates_per_s: A[
        tuple[float, ...],
        Setting("Comma list of open loops: requests per second, arriving at random (Poisson).", flag="rate", panel=LOAD, gt=0),
    ] = ()  # fmt: skip
    num_requests: A[
        int,
        Setting(f"Requests of a load, at least; of a closed loop {MIN_WAVES} times its clients.", flag="requests", panel=LOAD, ge=1),
    ] = 64  # fmt: skip
    warmup: A[int, Setting("Requests before each load that are not counted.", panel=LOAD, ge=0)] = 8
    max_s: A[float, Setting("A load sends no request later than this.", flag="seconds", panel=LOAD, gt=0)] = 120.0
    temperature: A[float, Setting("0 = greedy.", panel=REQUESTS, ge=0)] = 0.0
    names_buckets: A[
        bool, Setting("Send x-paceline-bucket, as clients of Paceline do.", flag="name-buckets", panel=REQUESTS)
    ] = False
    num_tries: A[
        int, Setting("Times that a request is sent while the answer is 429.", flag="tries", panel=REQUESTS, ge=1)
    ] = 8
    extra_body: A[
        str, Setting("JSON object added to requests, as '{\"ignore_eos\": true}'; null drops a field.", panel=REQUESTS)
    ] = "{}"
    api_token: A[
        str | None, Setting("Bearer token; better in the environment.", panel=SERVER, env="PACELINE_API_TOKEN")
    ] = None
    note: A[str, Setting("Words kept in the JSON: which server, started how, what else ran.")] = ""

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)  # a class with slots has no super() without arguments
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


_OPEN_WARMUP_CLIENTS = 4


def run_serve_bench(options: ServeBenchOptions, console: Console) -> dict[str, Any]:
    """Put every load on the server, print a table, return (and keep on disk) the document.

    Raises: PacelineError when the server cannot be reached or started, or refuses a plain streaming request.
    """
    shown = dataclasses.replace(options, api_token="given" if options.api_token else None)  # never written to a file
    plan, num_repeated = plan_requests(options)
    with options.server(console) as url:
        extra = {"url": url, "num_repeated_prompts": num_repeated, "cells": []}
        result = ResultFile(options.json, command="bench serve", options=shown, extra=extra)
        document = asyncio.run(_run(options, url, plan, result, console))
    print_serve_bench(document, console)
    return document


async def _run(
    options: ServeBenchOptions, url: str, plan: Sequence[tuple[list[StreamRequest], list[StreamRequest]]], result: ResultFile, console: Console
) -> dict[str, Any]:  # fmt: skip
    is_chat = options.route == "chat"
    lags_s: list[float] = []
    async with options.client(url, options.api_token) as http:
        features = await find_features(http, url, is_chat=is_chat, model=options.model, extra=options.extra)
        result.update(server={k: getattr(features, k) for k in ("model", "has_token_ids", "has_usage", "has_done")})
        client = StreamClient(
            http, is_chat=is_chat, features=features, extra=options.extra, names_buckets=options.names_buckets
        )
        cells: list[dict[str, Any]] = []
        for load, (warmup, counted) in zip(options.loads(), plan, strict=True):
            with progress(console, f"{load.name}: warm-up", len(warmup) + len(counted)) as bar:
                errors = 0

                def runner(load: Load, bar: Bar = bar) -> CellRunner:
                    def on_answer(answer: Any) -> None:
                        nonlocal errors
                        errors += answer.result.problem is not None
                        bar.step(1, f"{errors} problems" if errors else "")

                    return CellRunner(
                        client, load, max_s=options.max_s, drain_s=options.timeout_s, num_tries=options.num_tries,
                        rng=random.Random(f"{options.seed}-{load.name}"), on_answer=on_answer,
                    )  # fmt: skip

                if warmup:
                    await runner(Load(concurrency=load.concurrency or _OPEN_WARMUP_CLIENTS)).run(warmup)
                bar.name(load.name)
                before = await read_page(http)
                lags_s.clear()
                watch = asyncio.create_task(watch_lag(lags_s, lambda _: None))
                try:
                    run = await runner(load).run(counted)
                finally:
                    watch.cancel()
                metrics = acceptance_between(before, await read_page(http))
                cells.append({**summarize(run, load, features, metrics), "client_lag_ms": percentiles_ms(lags_s)})
                result.update(cells=cells)
    return result.close()


def has_failed(document: dict[str, Any]) -> bool:
    """Whether any load saw an error, or nothing but refusals, which for lack of room are counted apart."""
    return any(cell["num_errors"] or not cell["num_whole"] for cell in document["cells"])


def print_serve_bench(document: dict[str, Any], console: Console) -> None:
    """The table and what a reader must know of it."""
    server = document["server"]
    title = f"{escape(server['model'])}, {document['options']['route']}: full load only, 95% intervals"
    names = ("load", "whole", "output tokens/s", "user tokens/s", "TTFT ms p50/p95/p99", "gap ms p50/p95/p99", "acceptance length", "window s")  # fmt: skip
    table = new_table(title, names)
    for c in document["cells"]:
        mark = "~" if c["token_count"] == CHUNKS else ""
        table.add_row(
            c["load"], f"{c['num_whole']}/{c['num_requests']}", mark + _figure(c["output_tokens_per_s"]), mark + _figure(c["user_tokens_per_s"]),
            _percentiles(c["ttft_ms"]), _percentiles(c["gap_ms"]), _acceptance(c["acceptance"]), "-" if c["window"] is None else f"{c['window']['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    for c in document["cells"]:
        window = c["window"]
        if window is None:
            console.print(f"[yellow]{c['load']}[/yellow]: over before the load was full; more --requests or --seconds are needed", soft_wrap=True)  # fmt: skip
        else:
            console.print(f"{c['load']}: left out {window['excluded_ramp_up_s']:.1f} s ramp-up and {window['excluded_drain_s']:.1f} s drain; client lag p99 {c['client_lag_ms']['p99'] or 0:.1f} ms", soft_wrap=True)  # fmt: skip
        lag, gap = c["client_lag_ms"]["p99"], c["gap_ms"]["p50"]
        if lag is not None and gap is not None and lag > gap:
            console.print(f"  [yellow]this client runs up to {lag:.0f} ms late, a gap is {gap:.0f} ms[/yellow]: gaps and times to the first token are partly the client's own", soft_wrap=True)  # fmt: skip
        if c["num_refusals"]:
            console.print(f"  {c['num_refusals']} x HTTP 429, {c['refused_wait_s']:.1f} s waited as asked", soft_wrap=True)  # fmt: skip
        if c["num_sent_late"]:
            console.print(f"  [yellow]{c['num_sent_late']} requests sent more than 50 ms late[/yellow]: this client is too slow for the rate", soft_wrap=True)  # fmt: skip
        for kind, count in c["problems"].items():
            console.print(f"  [red]{count} x {kind}[/red]: {escape(c['examples'][kind])}", soft_wrap=True)
    for words in sorted({f"tokens ({c['token_count']}): {c['token_count_means']}" for c in document["cells"]}):
        console.print(words, soft_wrap=True)
    for words in sorted({f"acceptance: {c['acceptance']['source']}" for c in document["cells"]}):
        console.print(words, soft_wrap=True)
    if not server["has_done"]:
        console.print("[yellow]the server never sends \\[DONE][/yellow]: an answer with a finish reason counts as whole", soft_wrap=True)  # fmt: skip
    if document["num_repeated_prompts"]:
        console.print(f"{document['num_repeated_prompts']} requests repeat an earlier prompt; a prefix cache makes their first token faster", soft_wrap=True)  # fmt: skip
    say_file(console, "JSON", document["options"]["json"])


def _figure(value: dict[str, Any] | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    ends = [f"{end:.{digits}f}" for end in value["interval"] or ()]
    return f"{value['value']:.{digits}f}" + (f" [{', '.join(ends)}]" if ends else "")


def _percentiles(values: dict[str, Any]) -> str:
    return "-" if values["p50"] is None else " / ".join(f"{values[p]:.1f}" for p in ("p50", "p95", "p99"))


def _acceptance(found: dict[str, Any]) -> str:
    return NOT_OFFERED if found["source"] == NOT_OFFERED else _figure(found.get("acceptance_length"), 2)
