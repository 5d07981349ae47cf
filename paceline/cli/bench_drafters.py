"""The options of `paceline bench drafters`, `bench compare` and `bench curves`; cli_bench.py makes them commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from paceline.cli.options import DRAFTER_NAMES, Data, Html, Json, data_folder, numbers, split

DRAFTERS_HELP = (
    "Which drafter gains most, under which policy? Every drafter under every policy and plain decoding run the same prompts "
    "in turn, group by group: acceptance length, speedup over plain and drafting cost with 95% intervals. Exit code 1 "
    "where an answer is not the target's own. How to read it: docs/benchmarks.md."
)
COMPARE_HELP = (
    "A second result of `bench drafters` or `bench engine` over a first one, cell by cell with 95% intervals. Runs of "
    "different configurations are refused. Exit code 1 where --fail-below finds a regression. With --over instead of a "
    "second result: the arms of one result over one of them, such as paceline bench compare d.json --over eagle3/fixed8."
)
CURVES_HELP = (
    "The learning curves of drafter folders that `train-drafter` wrote: nats per row over training seconds and rows. "
    "Example: paceline bench curves eagle3 jetspec runs/mine --html curves.html."
)


def bench_drafters(
    drafters: Annotated[
        str, typer.Option(help=f"Comma list of {', '.join(DRAFTER_NAMES)}, or folders.")
    ] = "lookup,specblock",
    policies: Annotated[
        str,
        typer.Option(
            help="Comma list: adaptive, bastion (each drafter at its own best), fixed, ddtree, bundle (equal budgets, see "
            "--nodes). docs/drafters.md."
        ),
    ] = "adaptive,fixed",
    nodes: Annotated[
        str, typer.Option(help="Comma list: draft nodes of policies with a fixed budget, equal for every drafter.")
    ] = "8",
    batch: Annotated[str, typer.Option(help="Comma list: requests that run together.")] = "1,8",
    temperature: Annotated[str, typer.Option(help="Comma list; 0 = greedy.")] = "0,0.8,1",
    buckets: Annotated[
        str,
        typer.Option(
            help="Comma list of domains (tools, code, math, facts, or those found in --data), random, all, or ''."
        ),
    ] = "all",
    isl: Annotated[
        str, typer.Option(help="Comma list of input lengths: adds load buckets low-N, mixed-N, high-N, random-N.")
    ] = "",
    num_prompts: Annotated[int, typer.Option(help="Counted requests of a cell, at least.")] = 24,
    groups: Annotated[int, typer.Option(help="Counted groups of a cell, at least.")] = 4,
    waves: Annotated[int, typer.Option(help="Requests of a group over the batch; alone, a request is a group.")] = 2,
    warmup: Annotated[int, typer.Option(help="First groups of a cell that are not counted.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="New tokens per request at most.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always generate max-tokens.")] = False,
    check: Annotated[
        int,
        typer.Option(help="Answers a cell and arm checked in fp32, besides those unlike plain's; 0 = compare only."),
    ] = 4,
    embedding: Annotated[
        str, typer.Option(help="What unlike prompts are chosen by: tfidf, or hidden (states of the target).")
    ] = "tfidf",
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: defaults become few prompts, greedy, tools and random.")
    ] = False,
    baseline: Annotated[Optional[str], typer.Option(help="'transformers' adds generate() and prompt lookup.")] = None,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    dtype: Annotated[str, typer.Option(help="auto (as the service) | float32 | bfloat16 | float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda.")] = "auto",
    threads: Annotated[Optional[int], typer.Option(help="torch threads; default: torch's choice.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
    html: Html = None,
) -> None:
    from paceline.bench.drafters.options import BenchOptions
    from paceline.bench.drafters.options import quick as quick_options
    from paceline.bench.drafters.run import run_bench_drafters
    from paceline.bench.drafters.table import lossless_counts

    options = BenchOptions(
        drafters=split(drafters), policies=split(policies), nodes=numbers(nodes, int, "nodes"),
        batches=numbers(batch, int, "batch"), temperatures=numbers(temperature, float, "temperature"),
        buckets=split(buckets), input_tokens=numbers(isl, int, "isl"), num_prompts=num_prompts, min_groups=groups,
        waves=waves, warmup_groups=warmup, max_tokens=max_tokens, ignore_eos=ignore_eos, num_check=check,
        embedding=embedding, model=model, dtype=dtype, device=device, num_threads=threads, baseline=baseline, seed=seed,
        data=data_folder(data), json=json, html=html,
    )  # fmt: skip
    console = Console() if sys.stdout.isatty() else Console(width=190)
    document = run_bench_drafters(quick_options(options) if quick else options, console)
    if lossless_counts(document)["num_mismatches"]:
        raise typer.Exit(1)


def bench_compare(
    first: Annotated[Path, typer.Argument(help="Result to compare with.")],
    second: Annotated[Optional[Path], typer.Argument(help="Result that may be better or worse.")] = None,
    over: Annotated[
        Optional[str],
        typer.Option(
            help="Without a second result: an arm of the first, such as eagle3/fixed8, to hold its other arms against."
        ),
    ] = None,
    fail_below: Annotated[
        Optional[float], typer.Option(help="Exit code 1 where a ratio is surely below this, such as 0.95.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="What --fail-below is held against: speedup, tokens_per_s or acceptance_length.")
    ] = "speedup",
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs of different configurations, with warnings.")
    ] = False,
    json: Json = None,
) -> None:
    from paceline.bench.drafters.compare import CompareOptions, run_compare, run_compare_arms
    from paceline.errors import ConfigError

    console = Console() if sys.stdout.isatty() else Console(width=150)
    if second is None or over is not None:
        if second is not None or over is None:
            raise ConfigError("compare takes a second result or --over ARM, one of them")
        if fail_below is not None or force or metric != "speedup":
            raise ConfigError("--fail-below, --metric and --force need a second result, got --over")
        run_compare_arms(first, over, console, json)
        return
    options = CompareOptions(
        first=first, second=second, metric=metric, fail_below=fail_below, is_forced=force, json=json
    )
    if run_compare(options, console)["failed"]:
        raise typer.Exit(1)


def bench_curves(
    drafters: Annotated[list[str], typer.Argument(help="Bundled drafters by name, or folders of drafters.")],
    html: Html = None,
) -> None:
    from paceline.bench.drafters.curves import run_bench_curves

    run_bench_curves(drafters, html, Console() if sys.stdout.isatty() else Console(width=130))
