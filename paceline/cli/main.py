"""The command line: every command parses its options, then calls one function of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape

from paceline.cli.bench import bench_app
from paceline.cli.bench_serve import SERVE_HELP, SHAPES_HELP
from paceline.cli.bench_serve import serve as bench_serve
from paceline.cli.bench_serve import shapes as bench_shapes
from paceline.cli.options import DRAFTERS, Data, Html, Json, data_folder, split
from paceline.cli.replay import REPLAY_HELP, replay
from paceline.cli.versions import versions_app
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Lossless speculative decoding on Ray Serve with a drafter that is retrained when that pays for itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app.command("serve", help=SERVE_HELP)(bench_serve)
bench_app.command("shapes", help=SHAPES_HELP)(bench_shapes)
app.add_typer(bench_app, name="bench")
app.add_typer(versions_app, name="versions")

app.command("replay", help=REPLAY_HELP)(replay)

_DEMO_NOTE = "Ends with a table; exit code 1 if an answer was not the target's own or a request was lost."


@app.command(help=f"Run the whole loop on this computer: serve, learn, decide, retrain, swap. {_DEMO_NOTE}")
def demo(
    minutes: Annotated[float, typer.Option(help="Minutes of traffic; start and closing checks add about one.")] = 5.2,
    replicas: Annotated[int, typer.Option(help="Serving replicas.")] = 1,
    policy: Annotated[
        str, typer.Option(help="payoff | never | always | interval | dual_ema | cara | thompson | hedge.")
    ] = "payoff",
    drafter: Annotated[str, typer.Option(help=f"none | {DRAFTERS}.")] = "bundled",
    scenario: Annotated[
        str, typer.Option(help="shift: known -> unseen -> known -> unseen traffic; steady: known only.")
    ] = "shift",
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of traffic and sampling.")] = 0,
    data: Data = None,
    json: Json = None,
    html: Html = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs.")] = False,
) -> None:
    from paceline.infra.demo.run import DemoOptions, run_demo
    from paceline.infra.state.log import configure_logging, quiet_libraries

    configure_logging("INFO" if verbose else "ERROR")
    quiet_libraries("INFO" if verbose else "ERROR")
    options = DemoOptions(
        minutes=minutes, replicas=replicas, policy=policy, drafter=drafter, scenario=scenario, concurrency=concurrency,
        seed=seed, data=data_folder(data), json=json, html=html,
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
        typer.Option(
            help=f"none | {DRAFTERS}; suffix-recent counts other requests' answers too; default: bundled for the bundled "
            "model, lookup otherwise."
        ),
    ] = None,
    tree_policy: Annotated[
        Optional[str],
        typer.Option(
            help="adaptive (drafts when it pays) or, always drafting: bastion (nodes by rate) | ddtree | bundle (always "
            "--max-draft-tokens nodes)."
        ),
    ] = None,
    max_draft_tokens: Annotated[
        Optional[int], typer.Option(help="Draft nodes per request and round, at most; default 16.")
    ] = None,
    mix: Annotated[
        Optional[str],
        typer.Option(
            help="none | lookup | suffix | suffix-recent: its candidates compete with the drafter's own; not with --drafter none."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any setting of ServiceConfig; options given here win.")
    ] = None,
    replicas: Annotated[Optional[int], typer.Option(help="Serving replicas.")] = None,
    policy: Annotated[
        Optional[str], typer.Option(help="payoff | never | always | interval | dual_ema | cara | thompson | hedge.")
    ] = None,
    host: Annotated[Optional[str], typer.Option(help="Address to listen on.")] = None,
    port: Annotated[Optional[int], typer.Option(help="Port to listen on.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Use this Redis instead of an embedded one.", envvar="PACELINE_REDIS_URL")
    ] = None,
    api_token: Annotated[
        str | None, typer.Option(help="Bearer token that clients must send.", envvar="PACELINE_API_TOKEN")
    ] = None,
    admin_token: Annotated[
        str | None,
        typer.Option(help="Bearer token of operators: controls of the dashboard.", envvar="PACELINE_ADMIN_TOKEN"),
    ] = None,
    metrics_public: Annotated[
        Optional[bool],
        typer.Option(
            "--metrics-public/--metrics-private",
            help="Let anybody scrape /metrics. Private (default): with the API or admin token as bearer, or from this "
            "computer where the service listens on loopback and has no API token.",
        ),
    ] = None,
    resume: Annotated[
        Optional[bool],
        typer.Option(
            "--resume/--no-resume",
            help="Answers outlive the replica that writes them; costs a second hop (docs/serve.md).",
        ),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of trace store, drafter registry, Redis data.")] = None,
    dtype: Annotated[Optional[str], typer.Option(help="auto | float32 | bfloat16 | float16.")] = None,
    device: Annotated[Optional[str], typer.Option(help="auto | cpu | cuda.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs.")] = False,
) -> None:
    import dataclasses

    from paceline.config import ServiceConfig, load_config, with_tree_options
    from paceline.infra.serve import serve_forever
    from paceline.infra.state.log import configure_logging, quiet_libraries

    configure_logging("INFO" if verbose else "WARNING")
    quiet_libraries("INFO" if verbose else "WARNING")
    base = load_config(config) if config else ServiceConfig()
    given: dict[str, Any] = {
        "drafter": drafter, "num_replicas": replicas, "host": host, "port": port, "redis_url": redis_url,
        "api_token": api_token, "admin_token": admin_token, "metrics_public": metrics_public, "resume": resume, "data_dir": data_dir, "dtype": dtype, "device": device,
    }  # fmt: skip
    if model != "bundled":
        given["model"] = model
        given["drafter"] = drafter or (base.drafter if base.drafter != "bundled" else "lookup")
    if policy is not None:
        given["policy"] = dataclasses.replace(base.policy, policy=policy)
    tree = with_tree_options(base.engine.tree, policy=tree_policy, max_draft_tokens=max_draft_tokens, mix=mix)
    if tree != base.engine.tree:
        given["engine"] = dataclasses.replace(base.engine, tree=tree)
    changes = {k: v for k, v in given.items() if v is not None}
    serve_forever(dataclasses.replace(base, **changes), Console())


@app.command(help="Print the answer to one prompt with accepted draft tokens marked, and its speed.")
def generate(
    prompt: Annotated[str, typer.Argument(help="Text; without chat markers it is sent as a user's turn.")],
    model: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")] = "bundled",
    drafter: Annotated[str, typer.Option(help=f"none | {DRAFTERS}.")] = "bundled",
    compare: Annotated[
        bool, typer.Option("--compare", help="Run without the drafter too and print the ratio.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16 | float16.")] = "auto",
) -> None:
    from paceline.bench.engine.generate import run_generate

    run_generate(
        prompt, model=model, drafter=drafter, compare=compare, max_tokens=max_tokens, temperature=temperature, seed=seed,
        dtype=dtype, console=Console(),
    )  # fmt: skip


@app.command("train-target", help="Train a small target from a data folder; resumes where it stopped.")
def train_target(
    data: Annotated[Path, typer.Option(help="Folder of text data (docs/drafters.md).")],
    out: Annotated[Path, typer.Option(help="Folder for weights, tokenizer, PROVENANCE.md and the checkpoint.")],
    tokens: Annotated[float, typer.Option(help="Training tokens in all.")] = 5.4e6,
    width: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers.")] = 32,
    domains: Annotated[str, typer.Option(help="Comma list of domains.")] = "tools,code,math,facts",
    seed: Annotated[int, typer.Option(help="Seed of weights and windows.")] = 1,
    threads: Annotated[Optional[int], typer.Option(help="torch threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda.")] = "cpu",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the layers: faster on a CPU.")] = False,
) -> None:
    import torch

    from paceline.adapt.recipes.target import TargetRecipe
    from paceline.adapt.recipes.target import train_target as train

    if threads:
        torch.set_num_threads(threads)
    recipe = TargetRecipe(num_tokens=int(tokens), hidden_size=width, num_layers=layers, intermediate_size=3 * width, domains=split(domains), seed=seed)  # fmt: skip
    command = f"paceline train-target --data DIR --out DIR --tokens {tokens:g} --width {width} --layers {layers} --domains {domains} --seed {seed}"
    data_folder(data)
    with _training_bar("target") as report:
        losses = train(data, out, recipe, device=device, compile_layers=compile, progress=report, command=command + (" --compile" if compile else ""))  # fmt: skip
    Console().print("held-out loss, nats per token:", {d: round(v, 3) for d, v in losses.items()})


@app.command("train-drafter", help="Train a drafter for a target on text that the target itself writes; resumes.")
def train_drafter(
    target: Annotated[str, typer.Option(help="'bundled' or the folder of a local transformers checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder for weights, config, PROVENANCE.md, shards and the checkpoint.")],
    drafter: Annotated[str, typer.Option(help="Kind of drafter: specblock | eagle3 | jetspec | dflash.")] = "specblock",
    draft_vocab: Annotated[
        Optional[int],
        typer.Option(help="Draft only the tokens that the target writes most often, so many of them; default: all."),
    ] = None,
    edge_rank: Annotated[
        Optional[int],
        typer.Option(
            help="Rank of the previous-token correction of jetspec and dflash scores; default: no correction."
        ),
    ] = None,
    without: Annotated[
        str,
        typer.Option(
            help="Comma list of SpecBlock's parts to leave out (ablations): shift, inheritance, valid-prefix, rank-head."
        ),
    ] = "",
    learning_rate: Annotated[
        Optional[float], typer.Option(help="Peak of the learning rate; default: the kind's own.", min=1e-8, max=1.0)
    ] = None,
    domains: Annotated[str, typer.Option(help="Comma list of domains whose prompts are continued.")] = "tools,code",
    data: Annotated[
        Optional[Path], typer.Option(help="Folder of text data (docs/drafters.md); needed by every domain but code.")
    ] = None,
    tokens: Annotated[
        float,
        typer.Option(help="Tokens that the target writes as training text, at least; 128 requests at a time.", min=1),
    ] = 4e5,
    epochs: Annotated[float, typer.Option(help="Passes over that text.", min=0.01)] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and weights.", min=0)] = 1,
    threads: Annotated[Optional[int], typer.Option(help="torch threads.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda.")] = "cpu",
) -> None:
    import dataclasses

    import torch

    from paceline.adapt.recipes.drafter import DrafterRecipe
    from paceline.adapt.recipes.drafter import train_drafter as train
    from paceline.paths import resolve_model

    if threads:
        torch.set_num_threads(threads)
    recipe = DrafterRecipe(
        drafter=drafter,
        draft_vocab_size=draft_vocab,
        edge_rank=edge_rank,
        without=split(without),
        learning_rate=learning_rate,
        domains=split(domains),
        epochs=epochs,
        seed=seed,
    )
    recipe = dataclasses.replace(recipe, text=dataclasses.replace(recipe.text, num_tokens=int(tokens)))
    given = {
        "--drafter": drafter, "--draft-vocab": draft_vocab, "--edge-rank": edge_rank, "--without": ",".join(split(without)),
        "--learning-rate": learning_rate, "--domains": f"'{domains}'", "--data": data and "DIR", "--tokens": f"{tokens:g}",
        "--epochs": f"{epochs:g}", "--seed": seed,
    }  # fmt: skip
    command = f"paceline train-drafter --target {target if target == 'bundled' else 'DIR'} --out DIR"
    command += "".join(f" {name} {value}" for name, value in given.items() if value not in (None, ""))
    source, data = resolve_model(target), data_folder(data)
    with _training_bar("drafter") as report:
        scores = train(source, data, out, recipe, device=device, progress=report, command=command)
    Console().print("held-out:", scores)


@app.command(
    "import-drafter",
    help="Convert released weights (EAGLE-3, DFlash, JetSpec or SpecBlock layout) to a drafter folder of Paceline's own. "
    "A released folder also works as --drafter directly.",
)
def import_drafter(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and model.safetensors or its shards.")],
    target: Annotated[str, typer.Option(help="'bundled' or the folder of the target it was trained for.")],
    out: Annotated[Path, typer.Option(help="New folder for drafter.safetensors, config.json and PROVENANCE.md.")],
    taps: Annotated[
        Optional[str],
        typer.Option(
            help="Comma list of target layers that it reads (0 = the first); default: as its config.json says."
        ),
    ] = None,
) -> None:
    from paceline.adapt.versions.import_drafter import import_drafter as run
    from paceline.cli.options import numbers
    from paceline.paths import resolve_model

    layers = None if taps is None else numbers(taps, int, "--taps")
    config = run(folder, out, resolve_model(target), tap_layers=layers)
    Console().print(f"{config['drafter_type']} written to {out}; target layers {config.get('tap_layers')}")


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


@app.command(
    help="Copy decisions, ledger, feature traces and round feedback of a service to a folder (docs/exports.md): JSON "
    "lines and safetensors. Nothing is changed; requests that opted out were never stored.",
)
def export(
    data_dir: Annotated[Path, typer.Option(help="Data folder of the service (paceline serve --data-dir).")],
    out: Annotated[Path, typer.Option(help="New or empty folder.")],
    what: Annotated[
        str, typer.Option(help="Comma list of decisions, ledger, traces, feedback.")
    ] = "decisions,ledger,traces,feedback",
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="Redis of the service, for feedback; default: the embedded one, once the service has stopped.",
            envvar="PACELINE_REDIS_URL",
        ),
    ] = None,
    model_name: Annotated[str, typer.Option(help="Name of the service in /v1/models, for feedback.")] = "paceline",
) -> None:
    from paceline.infra.state.export import ExportOptions, run_export

    options = ExportOptions(
        data_dir=data_dir.expanduser(),
        out=out.expanduser(),
        what=split(what),
        redis_url=redis_url,
        model_name=model_name,
    )
    run_export(options, Console())


@app.command("purge-traces", help="Delete captured traces of a tenant (or all) from a data folder. List the tenant under trace.opt_out_tenants first, or a running service goes on capturing.")  # fmt: skip
def purge_traces(data_dir: Annotated[Path, typer.Option(help="Data folder of the service.")] = Path("~/.cache/paceline"), tenant: Annotated[Optional[str], typer.Option(help="Tenant as in x-paceline-tenant: every shard with a trace of it goes.")] = None, everything: Annotated[bool, typer.Option("--all", help="Delete every trace.")] = False) -> None:  # fmt: skip
    from paceline.infra.state.purge import purge

    Console().print(f"deleted {purge(data_dir, tenant=tenant, everything=everything)} shards")


def main() -> None:
    """Run the command line; an error made on purpose becomes one sentence and exit code 2."""
    try:
        app()
    except PacelineError as e:
        Console(stderr=True).print("[red]error:[/red]", escape(str(e)), highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
