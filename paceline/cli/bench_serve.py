"""The options of `paceline bench serve` and `paceline bench shapes`: parsed here, carried out in bench/."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer
from rich.console import Console

from paceline.cli.options import Data, Json, data_folder, numbers, split

SERVE_HELP = (
    "How fast is a server? Closed loops (--concurrency) and open ones (--rate) of streaming requests against any "
    "OpenAI-compatible server: time to the first token, gaps between chunks, output and user tokens per second with 95% "
    "intervals, ramp-up and drain left out; acceptance where the server tells it. Exit code 1 on any error. "
    "Example: paceline bench serve --url http://127.0.0.1:8000 --concurrency 1,8,32 --json serve.json. docs/benchmarks.md."
)


def serve(
    url: Annotated[str, typer.Option(help="Address of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    start: Annotated[
        bool, typer.Option("--serve", help="Start `paceline serve` for this run, on a free port, and stop it afterwards.")
    ] = False,
    model: Annotated[Optional[str], typer.Option(help="Default: the first that /v1/models names.")] = None,
    route: Annotated[str, typer.Option(help="completions | chat.")] = "completions",
    concurrency: Annotated[
        str, typer.Option(help="Comma list of closed loops: clients that send again when answered; '' for none.")
    ] = "1,4,16",
    rate: Annotated[
        str, typer.Option(help="Comma list of open loops: requests per second, arriving at random (Poisson).")
    ] = "",
    requests: Annotated[int, typer.Option(help="Requests of a load, at least; at least four times its clients.")] = 64,
    warmup: Annotated[int, typer.Option(help="Requests before each load that are not counted.")] = 8,
    seconds: Annotated[float, typer.Option(help="A load sends no request later than this.")] = 120.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    buckets: Annotated[str, typer.Option(help="Comma list of traffic classes, taken in turn.")] = "tools,code,math,facts",
    name_buckets: Annotated[
        bool, typer.Option("--name-buckets", help="Send each prompt's traffic class as x-paceline-bucket, as clients of Paceline do.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a stream counts as dead.")] = 120.0,
    tries: Annotated[int, typer.Option(help="How often a request is sent while the answer is 429 (Retry-After is kept).")] = 8,
    extra_body: Annotated[
        str, typer.Option(help="JSON object added to every request, such as '{\"ignore_eos\": true}'; null drops a field.")
    ] = "{}",
    api_key: Annotated[
        Optional[str], typer.Option(help="Bearer token; better given as the environment variable.", envvar="PACELINE_API_TOKEN")
    ] = None,
    note: Annotated[str, typer.Option(help="Words kept in the JSON: which server, started how, what else ran.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:  # fmt: skip
    from paceline.bench.serve.options import ServeBenchOptions
    from paceline.bench.serve.run import has_failed, run_serve_bench

    options = ServeBenchOptions(
        url=None if start else url, model=model, route=route, concurrencies=numbers(concurrency, int, "concurrency"),
        rates_per_s=numbers(rate, float, "rate"), num_requests=requests, warmup=warmup, max_s=seconds,
        max_tokens=max_tokens, temperature=temperature, buckets=split(buckets), names_buckets=name_buckets, timeout_s=timeout, num_tries=tries,
        extra_body=extra_body, api_key=api_key, note=note, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    if has_failed(run_serve_bench(options, Console() if sys.stdout.isatty() else Console(width=170))):
        raise typer.Exit(1)


SHAPES_HELP = (
    "What does drafting cost at the size of an 8B target? Bytes and operations counted from the published layouts of "
    "SpecBlock, EAGLE-3, JetSpec and DFlash, against verifying, at equal depth and node budget; times with random weights: "
    "whole rounds as CUDA graphs where there is a GPU, otherwise one layer on the CPU multiplied, which is an estimate. "
    "Example: paceline bench shapes --contexts 1024,8192 --json shapes.json. docs/benchmarks.md."
)


def shapes(
    models: Annotated[str, typer.Option(help="Comma list of llama-3.1-8b, qwen3-8b.")] = "llama-3.1-8b,qwen3-8b",
    contexts: Annotated[
        str, typer.Option(help="Comma list of committed tokens per request; times are taken at the first.")
    ] = "1024,8192,32768",
    batch: Annotated[str, typer.Option(help="Comma list of requests in a round; times are taken at the first.")] = "1,8",
    nodes: Annotated[int, typer.Option(help="Draft nodes verified per request, the same for every drafter.")] = 60,
    depth: Annotated[int, typer.Option(help="Deepest token of SpecBlock and EAGLE-3, 1 to 8.")] = 8,
    topk: Annotated[int, typer.Option(help="Nodes that EAGLE-3 continues at each depth.")] = 10,
    leaves: Annotated[int, typer.Option(help="Leaves that SpecBlock's second block continues.")] = 10,
    accepted: Annotated[int, typer.Option(help="Accepted tokens of the round before, taken in by the first call.")] = 4,
    no_time: Annotated[bool, typer.Option("--no-time", help="Count only.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed runs, of which the best (CPU) or the median (GPU) counts.")] = 5,
    device: Annotated[str, typer.Option(help="auto (cuda if there is one) | cpu | cuda.")] = "auto",
    threads: Annotated[Optional[int], typer.Option(help="torch threads; default: torch's choice.")] = None,
    json: Json = None,
) -> None:  # fmt: skip
    from paceline.bench.shapes.drafters import DraftPlan
    from paceline.bench.shapes.run import DrafterShapesOptions, run_drafter_shapes

    options = DrafterShapesOptions(
        models=split(models), contexts=numbers(contexts, int, "contexts"), batches=numbers(batch, int, "batch"), nodes=nodes,
        plan=DraftPlan(depth=depth, topk=topk, leaves=leaves, accepted=accepted), is_timing=not no_time, repeats=repeats,
        device=device, num_threads=threads, json=json,
    )  # fmt: skip
    run_drafter_shapes(options, Console() if sys.stdout.isatty() else Console(width=170))
