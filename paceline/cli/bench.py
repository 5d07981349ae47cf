"""The options of `paceline bench`: parsed here, carried out in bench/ and infra/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from paceline.cli.bench_drafters import (
    COMPARE_HELP,
    CURVES_HELP,
    DRAFTERS_HELP,
    bench_compare,
    bench_curves,
    bench_drafters,
)
from paceline.cli.options import DRAFTERS, Data, Json, data_folder, numbers, split

bench_app = typer.Typer(
    help="Measure speed: arms alternate in one run, ratios come with intervals.", no_args_is_help=True
)


bench_app.command("drafters", help=DRAFTERS_HELP)(bench_drafters)
bench_app.command("compare", help=COMPARE_HELP)(bench_compare)
bench_app.command("curves", help=CURVES_HELP)(bench_curves)


@bench_app.command(
    "engine",
    help="How fast is the engine, and does speculation ever cost speed? Plain engine, speculative engine and transformers "
    "run the same prompts in turn, group by group; every ratio has a 95% interval. Exit code 1 where speculation is surely "
    "slower than 0.98x plain, or a greedy answer is not the target's own. How to read it: docs/benchmarks.md.",
)
def bench_engine(
    batch: Annotated[str, typer.Option(help="Comma list: requests that run together.")] = "1,4,16,64",
    temperature: Annotated[str, typer.Option(help="Comma list; 0 = greedy, and is checked to be lossless.")] = "0,0.8",
    buckets: Annotated[
        str,
        typer.Option(
            help="Comma list of tools, code (the drafter knows them), math, facts (it does not), random (token ids)."
        ),
    ] = "tools,code",
    arms: Annotated[
        str,
        typer.Option(help="plain and any of speculative, transformers, transformers_lookup (only at batch 1)."),
    ] = "plain,speculative,transformers,transformers_lookup",
    prompts: Annotated[int, typer.Option(help="Counted requests of a cell, at least.")] = 24,
    groups: Annotated[
        int, typer.Option(help="Counted groups of a cell, at least: more of them, narrower intervals.")
    ] = 6,
    warmup: Annotated[
        int, typer.Option(help="First groups of a cell that are not counted: the budget controller learns.")
    ] = 3,
    waves: Annotated[
        int,
        typer.Option(help="Requests of a group over the batch: one that ends is followed by the next, so long as any."),
    ] = 3,
    max_tokens: Annotated[int, typer.Option(help="New tokens per request at most.")] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Always generate max-tokens: more rounds at full batch, less real text."),
    ] = False,
    check: Annotated[int, typer.Option(help="Greedy answers a cell checked in fp32; 0 = only compare engines.")] = 8,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt rows that a round may prefill.")] = 256,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: defaults become batch 1 and 8, greedy, few prompts.")
    ] = False,
    shapes: Annotated[
        Optional[str],
        typer.Option(
            help="Instead: rounds of random-weight models, comma list of llama-3.1-8b, qwen3-8b, against the memory floor. "
            "Needs a GPU."
        ),
    ] = None,
    scale_down: Annotated[
        bool, typer.Option("--scale-down", help="With --shapes: small layers, so that a CPU can run it; labelled so.")
    ] = False,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[str, typer.Option(help=f"{DRAFTERS}.")] = "specblock",
    dtype: Annotated[str, typer.Option(help="auto (as the service) | float32 | bfloat16 | float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto | cpu | cuda.")] = "auto",
    threads: Annotated[Optional[int], typer.Option(help="torch threads; default: torch's choice.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=170)
    if shapes is not None:
        from paceline.bench.engine.shapes import ShapesOptions, run_shapes

        run_shapes(
            ShapesOptions(
                shapes=split(shapes), batches=numbers(batch, int, "batch"), is_scaled_down=scale_down, is_quick=quick,
                device=device, num_threads=threads, seed=seed, json=json,
            ),
            console,
        )  # fmt: skip
        return
    from paceline.bench.engine import run as engine_bench

    options = engine_bench.EngineBenchOptions(
        batches=numbers(batch, int, "batch"), temperatures=numbers(temperature, float, "temperature"),
        buckets=split(buckets), arms=split(arms), num_prompts=prompts, min_groups=groups, warmup_groups=warmup,
        waves=waves, max_tokens=max_tokens, ignore_eos=ignore_eos, num_check=check, prefill_chunk_tokens=prefill_chunk, model=model,
        drafter=drafter, dtype=dtype, device=device, num_threads=threads, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    summary = engine_bench.run_engine_bench(engine_bench.quick(options) if quick else options, console)["summary"]
    if summary["verdict"] == "violated" or summary["num_mismatches"]:
        raise typer.Exit(1)


@bench_app.command(
    "soak",
    help="Does the engine leak? Random traffic (mixed lengths and temperatures, shared prefixes, aborts, few KV pages) for "
    "some minutes, then the slope of resident memory over the second half with its interval, and whether pages, pins and "
    "requests balance. Exit code 1 if something does not balance or memory surely grows. docs/benchmarks.md.",
)
def bench_soak(
    minutes: Annotated[float, typer.Option(help="Minutes of traffic; memory is judged from 5 on.")] = 20.0,
    concurrency: Annotated[int, typer.Option(help="Requests that run at once; up to twice as many wait or run.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    kv_share: Annotated[
        float,
        typer.Option(
            help="KV pages as a share of what all requests need at full length; the fewer, the more preemptions."
        ),
    ] = 0.2,
    max_growth: Annotated[float, typer.Option(help="MiB per hour of resident memory that count as a leak.")] = 32.0,
    sample: Annotated[float, typer.Option(help="Seconds between samples of resident memory.")] = 1.0,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[str, typer.Option(help=f"none | {DRAFTERS}.")] = "specblock",
    device: Annotated[str, typer.Option(help="cpu | cuda | auto.")] = "cpu",
    threads: Annotated[Optional[int], typer.Option(help="torch threads; default: torch's choice.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    from paceline.bench.engine.soak import SoakOptions, run_soak

    options = SoakOptions(
        minutes=minutes, concurrency=concurrency, max_tokens=max_tokens, kv_share=kv_share, sample_s=sample,
        max_growth_mib_per_h=max_growth, model=model, drafter=drafter, device=device, num_threads=threads, seed=seed,
        data=data_folder(data), json=json,
    )  # fmt: skip
    if run_soak(options, Console() if sys.stdout.isatty() else Console(width=150))["verdict"] in ("failed", "leaks"):
        raise typer.Exit(1)


@bench_app.command(
    "streams",
    help="What do N concurrent streaming clients of an OpenAI-compatible server see? Errors, answers without [DONE], lost "
    "tokens, time to the first token, gaps between chunks, tokens per second over time; with --check, greedy answers are "
    "asked again one at a time and compared. Exit code 1 on any error or changed answer. docs/benchmarks.md.",
)
def bench_streams(
    url: Annotated[str, typer.Option(help="Address of the server, without /v1.")] = "http://127.0.0.1:8000",
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Start `paceline serve` for this run, on a free port, and stop it afterwards."),
    ] = False,
    clients: Annotated[
        int, typer.Option(help="Clients; each sends its next request when its answer is complete.")
    ] = 32,
    minutes: Annotated[float, typer.Option(help="Minutes of load; answers then under way may finish.")] = 10.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer; each asks for a quarter of it to all of it.")] = 128,
    temperature: Annotated[str, typer.Option(help="Comma list; each request draws one.")] = "0,0.8",
    buckets: Annotated[str, typer.Option(help="Comma list of traffic classes.")] = "tools,code,math,facts",
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Ask greedy answers again at the end and compare.")] = False,
    num_check: Annotated[int, typer.Option(help="With --check: how many.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which a stream counts as dead.")] = 120.0,
    api_token: Annotated[
        Optional[str], typer.Option(help="Bearer token of the server.", envvar="PACELINE_API_TOKEN")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    from paceline.bench.serve.load import StreamLoadOptions, has_failed, run_stream_load

    options = StreamLoadOptions(
        url=None if serve else url, clients=clients, minutes=minutes, max_tokens=max_tokens,
        temperatures=numbers(temperature, float, "temperature"), buckets=split(buckets), is_chat=chat, is_checking=check,
        num_check=num_check, timeout_s=timeout, api_token=api_token, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    if has_failed(run_stream_load(options, Console() if sys.stdout.isatty() else Console(width=150))):
        raise typer.Exit(1)


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
    drafter: Annotated[str, typer.Option(help="The first version: a bundled drafter's name, or a folder.")] = "bundled",
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
    from paceline.bench.shadow.check import run_shadow_check
    from paceline.bench.shadow.workloads import ShadowCheckOptions

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
        str,
        typer.Option(help=f"none | {DRAFTERS}; those without weights have no traces: feedback only."),
    ] = "specblock",
    share: Annotated[float, typer.Option(help="Share of requests traced, 0 to 1 (trace.share).")] = 1.0,
    threads: Annotated[int, typer.Option(help="torch threads; with 1 the engine's CPU time is one thread's.")] = 1,
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
) -> None:
    from paceline.infra.replica.feedback_cost import FeedbackCostOptions, run_feedback_cost

    options = FeedbackCostOptions(
        num_prompts=num_prompts, max_tokens=max_tokens, batch=batch, temperature=temperature, buckets=split(buckets),
        drafter=drafter, share=share, num_threads=threads, model=model, seed=seed, data=data_folder(data), json=json,
    )  # fmt: skip
    run_feedback_cost(options, Console())


@bench_app.command(
    "kernels",
    help="Time of every kernel per shape of an 8B target, its bytes, and its share of the bandwidth that a plain copy "
    "reaches on the same device; then the floor of a round: weights and K/V read once. With a CUDA device the kernels "
    "that serve there are timed by CUDA events; without one the CPU references run on scaled-down shapes (a check of "
    "the command, not of a GPU). Shapes are the product of --contexts, --requests and --nodes. "
    "Example: paceline bench kernels --kernels tree_attention --contexts 1024,32768 --requests 1,16 --json k.json",
)
def bench_kernels(
    kernels: Annotated[
        str,
        typer.Option(
            help="Comma list of all, tree_attention, slot_attention, scatter_rows, commit_rows, draft_ingest, topk_lse, "
            "tree_build, tree_accept."
        ),
    ] = "all",
    models: Annotated[
        str, typer.Option(help="Comma list of the targets whose sizes are used: llama-3.1-8b, qwen3-8b.")
    ] = "llama-3.1-8b,qwen3-8b",
    contexts: Annotated[
        str, typer.Option(help="Comma list of committed tokens per request, 1 to 131072.")
    ] = "1024,8192,32768",
    requests: Annotated[str, typer.Option(help="Comma list of requests in a round, 1 to 256.")] = "1,8,64",
    nodes: Annotated[
        str, typer.Option(help="Comma list of draft nodes per request, 1 to 256; each request verifies one row more.")
    ] = "1,16,64",
    repeats: Annotated[int, typer.Option(help="Timed calls per cell, of which the median counts.")] = 20,
    device: Annotated[str, typer.Option(help="auto (cuda if there is one) | cpu | cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16 on cuda, float32 on cpu) | float32 | bfloat16 | float16.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of inputs.")] = 0,
    json: Json = None,
) -> None:
    from paceline.bench.shapes.kernels import KernelBenchOptions, run_bench_kernels

    options = KernelBenchOptions(
        kernels=split(kernels), models=split(models), contexts=numbers(contexts, int, "contexts"),
        requests=numbers(requests, int, "requests"), nodes=numbers(nodes, int, "nodes"), repeats=repeats,
        device=device, dtype=dtype, seed=seed, json=json,
    )  # fmt: skip
    run_bench_kernels(options, Console() if sys.stdout.isatty() else Console(width=130))
