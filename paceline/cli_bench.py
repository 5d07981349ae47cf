"""The options of `paceline bench`: parsed here, carried out in bench/ and infra/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from paceline.cli_options import Data, Json, data_folder, numbers, split

bench_app = typer.Typer(
    help="Measure speed: arms alternate in one run, ratios come with intervals.", no_args_is_help=True
)


@bench_app.command(
    "drafters",
    help="Acceptance length and speed of drafters against the plain loop, per bucket, batch and temperature.",
)
def bench_drafters(
    drafters: Annotated[
        str, typer.Option(help="Comma list of none, lookup, specblock, or folders.")
    ] = "none,lookup,specblock",
    batch: Annotated[str, typer.Option(help="Comma list of batch sizes.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Comma list of temperatures.")] = "0,0.8",
    buckets: Annotated[str, typer.Option(help="Comma list of traffic classes.")] = "tools,code,math,facts",
    num_prompts: Annotated[int, typer.Option(help="Prompts per row.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt at most.")] = 128,
    threads: Annotated[int, typer.Option(help="torch threads.")] = 2,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    baseline: Annotated[str | None, typer.Option(help="'transformers' adds generate() and its prompt lookup.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    from paceline.bench.drafters import BenchOptions, run_bench_drafters

    options = BenchOptions(
        drafters=split(drafters), batches=numbers(batch, int, "batch"),
        temperatures=numbers(temperature, float, "temperature"), buckets=split(buckets), num_prompts=num_prompts,
        max_tokens=max_tokens, num_threads=threads, model=model, baseline=baseline, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    run_bench_drafters(options, Console())


@bench_app.command(
    "shadow",
    help="Compare shadow scores (replay on logged texts, which decide what may serve) with real decoding, for several "
    "drafter versions: error of acceptance length with intervals. Exit code 1 if a paired error exceeds 2%.",
)
def bench_shadow(
    versions: Annotated[int, typer.Option(help="Drafter versions: the bundled one and trained ones.")] = 6,
    buckets: Annotated[str, typer.Option(help="Comma list of traffic classes.")] = "tools,code,math,facts",
    temperature: Annotated[str, typer.Option(help="Comma list of temperatures.")] = "0,0.8",
    num_prompts: Annotated[int, typer.Option(help="Requests per row.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="New tokens per request at most.")] = 96,
    train_prompts: Annotated[int, typer.Option(help="Requests per bucket whose traces the versions learn from.")] = 48,
    adaptive_prompts: Annotated[
        int, typer.Option(help="Requests per row that are also decoded with the adaptive budget, for information.")
    ] = 4,
    batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 8,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="The first version: 'bundled' or the folder of a drafter.")] = "bundled",
    dtype: Annotated[
        str, typer.Option(help="auto (as the service) | float32 (text does not depend on rounding) | bfloat16.")
    ] = "auto",
    threads: Annotated[int, typer.Option(help="torch threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and training.")] = 0,
    data: Data = None,
    json: Json = None,
    work: Annotated[
        Optional[Path], typer.Option(help="Folder that keeps traces, versions and rows; a second run goes on there.")
    ] = None,
) -> None:
    from paceline.bench.shadow_check import run_shadow_check
    from paceline.bench.shadow_workloads import ShadowCheckOptions

    options = ShadowCheckOptions(
        num_versions=versions, buckets=split(buckets), temperatures=numbers(temperature, float, "temperature"),
        num_prompts=num_prompts, max_tokens=max_tokens, num_train_prompts=train_prompts,
        num_adaptive_prompts=adaptive_prompts, batch=batch, model=model, drafter=drafter, dtype=dtype,
        num_threads=threads, seed=seed, data=data_folder(data), json=json, work=work,
    )  # fmt: skip
    result = run_shadow_check(options, Console() if sys.stdout.isatty() else Console(width=150))
    if not result["passed"]:
        raise typer.Exit(1)


@bench_app.command(
    "feedback",
    help="What feedback (to an embedded Redis) and feature traces cost: the same engine with and without them, prompt by prompt.",
)
def bench_feedback(
    num_prompts: Annotated[int, typer.Option(help="Prompts in all, the buckets in turn.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt at most.")] = 96,
    batch: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    buckets: Annotated[str, typer.Option(help="Comma list of traffic classes.")] = "tools,code,math,facts",
    drafter: Annotated[
        str, typer.Option(help="specblock or a folder; with lookup or none, which have no traces, feedback only.")
    ] = "specblock",
    share: Annotated[float, typer.Option(help="Share of requests traced, 0 to 1 (trace.share).")] = 1.0,
    threads: Annotated[int, typer.Option(help="torch threads; with 1 the engine's CPU time is one thread's.")] = 1,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    from paceline.infra.feedback_cost import FeedbackCostOptions, run_feedback_cost

    options = FeedbackCostOptions(
        num_prompts=num_prompts, max_tokens=max_tokens, batch=batch, temperature=temperature, buckets=split(buckets),
        drafter=drafter, share=share, num_threads=threads, model=model, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    run_feedback_cost(options, Console())
