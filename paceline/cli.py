"""The command line: every command parses its options, then calls one function of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape

from paceline.errors import ConfigError, PacelineError

app = typer.Typer(
    name="paceline",
    help="Lossless speculative decoding on Ray Serve with a drafter that is retrained when that pays for itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(
    help="Measure speed: arms alternate in one run, ratios come with intervals.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")
versions_app = typer.Typer(help="List, pin and roll back drafter versions of a running service.", no_args_is_help=True)
app.add_typer(versions_app, name="versions")

_Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of text data (docs/data_folder.md); default: the bundled prompts."),
]
_Json = Annotated[Optional[Path], typer.Option("--json", help="Write the result as JSON to this file.")]
_DEMO_NOTE = "Ends with a table; exit code 1 if an answer was not the target's own or a request was lost."


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str, kind: type, option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in _split(text))
    except ValueError as e:
        raise ConfigError(f"{option} must be a comma list of numbers, got {text!r}") from e


def _folder(data: Path | None) -> Path | None:
    if data is not None and not data.is_dir():
        raise ConfigError(f"data must be a folder, got {str(data)!r}")
    return data


@app.command(help=f"Run the whole loop on this computer: serve, learn, decide, retrain, swap. {_DEMO_NOTE}")
def demo(
    minutes: Annotated[float, typer.Option(help="Minutes of traffic; start and closing checks add about one.")] = 5.2,
    replicas: Annotated[int, typer.Option(help="Serving replicas.")] = 1,
    policy: Annotated[str, typer.Option(help="never | always | interval | payoff.")] = "payoff",
    drafter: Annotated[str, typer.Option(help="bundled | none | lookup | DIR.")] = "bundled",
    scenario: Annotated[
        str, typer.Option(help="shift: known -> unseen -> known -> unseen traffic; steady: known only.")
    ] = "shift",
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of traffic and sampling.")] = 0,
    data: _Data = None,
    json: _Json = None,
    html: Annotated[Optional[Path], typer.Option(help="Write a self-contained HTML report.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs.")] = False,
) -> None:
    from paceline.infra.demo import DemoOptions, run_demo
    from paceline.infra.log import configure_logging, quiet_libraries

    configure_logging("INFO" if verbose else "ERROR")
    quiet_libraries("INFO" if verbose else "ERROR")
    options = DemoOptions(
        minutes=minutes, replicas=replicas, policy=policy, drafter=drafter, scenario=scenario, concurrency=concurrency,
        seed=seed, data=_folder(data), json=json, html=html,
    )  # fmt: skip
    console = Console() if sys.stdout.isatty() else Console(width=130)  # a log file has no width of its own
    result = run_demo(options, console)
    if result["lossless"]["mismatches"] or result["swaps"]["requests_dropped"]:
        raise typer.Exit(1)


@app.command(help="Serve a model with an OpenAI-compatible API until Ctrl-C.")
def serve(
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[
        str | None,
        typer.Option(help="bundled | none | lookup | DIR; default: bundled for the bundled model, lookup otherwise."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any setting of ServiceConfig; options given here win.")
    ] = None,
    replicas: Annotated[Optional[int], typer.Option(help="Serving replicas.")] = None,
    policy: Annotated[Optional[str], typer.Option(help="never | always | interval | payoff.")] = None,
    host: Annotated[Optional[str], typer.Option(help="Address to listen on.")] = None,
    port: Annotated[Optional[int], typer.Option(help="Port to listen on.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Use this Redis instead of an embedded one.", envvar="PACELINE_REDIS_URL")
    ] = None,
    api_token: Annotated[
        str | None, typer.Option(help="Bearer token that clients must send.", envvar="PACELINE_API_TOKEN")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of trace store, drafter registry, Redis data.")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="auto | float32 | bfloat16 | float16.")] = None,
    device: Annotated[Optional[str], typer.Option(help="auto | cpu | cuda.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs.")] = False,
) -> None:
    import dataclasses

    from paceline.config import ServiceConfig, load_config
    from paceline.infra.log import configure_logging, quiet_libraries
    from paceline.infra.serve_command import serve_forever

    configure_logging("INFO" if verbose else "WARNING")
    quiet_libraries("INFO" if verbose else "WARNING")
    base = load_config(config) if config else ServiceConfig()
    given: dict[str, Any] = {
        "drafter": drafter, "num_replicas": replicas, "host": host, "port": port, "redis_url": redis_url,
        "api_token": api_token, "data_dir": data_dir, "dtype": dtype, "device": device,
    }  # fmt: skip
    if model != "bundled":
        given["model"] = model
        given["drafter"] = drafter or (base.drafter if base.drafter != "bundled" else "lookup")
    if policy is not None:
        given["policy"] = dataclasses.replace(base.policy, policy=policy)
    changes = {k: v for k, v in given.items() if v is not None}
    serve_forever(dataclasses.replace(base, **changes), Console())


@app.command(help="Print the answer to one prompt with accepted draft tokens marked, and its speed.")
def generate(
    prompt: Annotated[str, typer.Argument(help="Text; without chat markers it is sent as a user's turn.")],
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="bundled | none | lookup | DIR.")] = "bundled",
    compare: Annotated[
        bool, typer.Option("--compare", help="Run without the drafter too and print the ratio.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16 | float16.")] = "auto",
) -> None:
    from paceline.bench.generate import run_generate

    run_generate(
        prompt, model=model, drafter=drafter, compare=compare, max_tokens=max_tokens, temperature=temperature, seed=seed,
        dtype=dtype, console=Console(),
    )  # fmt: skip


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
    data: _Data = None,
    json: _Json = None,
) -> None:
    from paceline.bench.drafters import BenchOptions, run_bench_drafters

    options = BenchOptions(
        drafters=_split(drafters), batches=_numbers(batch, int, "batch"),
        temperatures=_numbers(temperature, float, "temperature"), buckets=_split(buckets), num_prompts=num_prompts,
        max_tokens=max_tokens, num_threads=threads, model=model, baseline=baseline, seed=seed, data=_folder(data), json=json,
    )  # fmt: skip
    run_bench_drafters(options, Console())


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
    data: _Data = None,
    json: _Json = None,
) -> None:
    from paceline.infra.feedback_cost import FeedbackCostOptions, run_feedback_cost

    options = FeedbackCostOptions(
        num_prompts=num_prompts, max_tokens=max_tokens, batch=batch, temperature=temperature, buckets=_split(buckets),
        drafter=drafter, share=share, num_threads=threads, model=model, seed=seed, data=_folder(data), json=json,
    )  # fmt: skip
    run_feedback_cost(options, Console())


@app.command("train-target", help="Train a small target from a data folder; resumes where it stopped.")
def train_target(
    data: Annotated[Path, typer.Option(help="Folder of text data (docs/data_folder.md).")],
    out: Annotated[Path, typer.Option(help="Folder for weights, tokenizer, PROVENANCE.md and the checkpoint.")],
    tokens: Annotated[float, typer.Option(help="Training tokens in all.")] = 5.4e6,
    width: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers.")] = 32,
    domains: Annotated[str, typer.Option(help="Comma list of domains.")] = "tools,code,math,facts",
    seed: Annotated[int, typer.Option(help="Seed of weights and windows.")] = 1,
    threads: Annotated[Optional[int], typer.Option(help="torch threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the layers: about 15% faster on a CPU.")] = False,
) -> None:
    import torch

    from paceline.adapt.train_target import TargetRecipe
    from paceline.adapt.train_target import train_target as train

    if threads:
        torch.set_num_threads(threads)
    recipe = TargetRecipe(num_tokens=int(tokens), hidden_size=width, num_layers=layers, intermediate_size=3 * width, domains=_split(domains), seed=seed)  # fmt: skip
    command = f"paceline train-target --data DIR --out DIR --tokens {tokens:g} --width {width} --layers {layers} --domains {domains} --seed {seed}"
    _folder(data)
    with _training_bar("target") as report:
        losses = train(data, out, recipe, device=device, compile_layers=compile, progress=report, command=command + (" --compile" if compile else ""))  # fmt: skip
    Console().print("held-out loss, nats per token:", {d: round(v, 3) for d, v in losses.items()})


@app.command(
    "train-drafter", help="Train a SpecBlock drafter for a target on text that the target itself writes; resumes."
)
def train_drafter(
    target: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder for weights, config, PROVENANCE.md, shards and the checkpoint.")],
    domains: Annotated[str, typer.Option(help="Comma list of domains whose prompts are continued.")] = "tools,code",
    data: _Data = None,
    tokens: Annotated[float, typer.Option(help="Tokens that the target writes as training text.")] = 4e5,
    epochs: Annotated[float, typer.Option(help="Passes over that text.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and weights.")] = 1,
    threads: Annotated[Optional[int], typer.Option(help="torch threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda.")] = "cpu",
) -> None:
    import dataclasses

    import torch

    from paceline.adapt.train_drafter import DrafterRecipe
    from paceline.adapt.train_drafter import train_drafter as train
    from paceline.paths import resolve_model

    if threads:
        torch.set_num_threads(threads)
    recipe = DrafterRecipe(domains=_split(domains), epochs=epochs, seed=seed)
    recipe = dataclasses.replace(recipe, text=dataclasses.replace(recipe.text, num_tokens=int(tokens)))
    command = f"paceline train-drafter --target {target if target == 'bundled' else 'DIR'} --out DIR --domains '{domains}' --data DIR --tokens {tokens:g} --epochs {epochs:g} --seed {seed}"
    source, data = resolve_model(target), _folder(data)
    with _training_bar("drafter") as report:
        scores = train(source, data, out, recipe, device=device, progress=report, command=command)
    Console().print("held-out:", scores)


def _training_bar(what: str):
    """A progress bar that a recipe's `progress(done, total, info)` drives."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def bar():
        with Progress(TextColumn(f"training {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[info]}")) as p:  # fmt: skip
            task = p.add_task("", total=None, info="")

            def report(done: int, total: int, info: dict) -> None:
                text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())
                p.update(task, completed=done, total=total, info=text)

            yield report

    return bar()


_Url = Annotated[str, typer.Option(help="Address of the running service.", envvar="PACELINE_URL")]
_Token = Annotated[Optional[str], typer.Option(help="Bearer token of the service.", envvar="PACELINE_API_TOKEN")]


@versions_app.command("list", help="Drafter versions with parent, arm, scores and what serves now.")
def versions_list(url: _Url = "http://127.0.0.1:8000", token: _Token = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:  # fmt: skip
    from paceline.infra.versions import print_versions

    print_versions(url, token, Console(), as_json=json)


@versions_app.command("pin", help="Serve this version to new requests until 'versions unpin'; the policy pauses.")
def versions_pin(version: str, url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    from paceline.infra.versions import change_version

    change_version(url, token, "pin", Console(), version=version)


@versions_app.command("unpin", help="Let the policy decide again.")
def versions_unpin(url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    from paceline.infra.versions import change_version

    change_version(url, token, "unpin", Console())


@versions_app.command("rollback", help="Go back to the version before the one that serves now (as a new generation).")
def versions_rollback(url: _Url = "http://127.0.0.1:8000", token: _Token = None) -> None:
    from paceline.infra.versions import change_version

    change_version(url, token, "rollback", Console())


def main() -> None:
    """Run the command line; an error made on purpose becomes one sentence and exit code 2."""
    try:
        app()
    except PacelineError as e:
        Console(stderr=True).print("[red]error:[/red]", escape(str(e)), highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
