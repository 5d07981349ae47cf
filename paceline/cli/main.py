"""Main: the `paceline` command and its subcommands, each a record of options and a function that carries it out."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from paceline import __version__
from paceline.cli.bench import bench_app
from paceline.cli.options import command
from paceline.cli.train import add_training
from paceline.cli.versions import policy_app, versions_app
from paceline.errors import PacelineError
from paceline.machine import spare_loopback

if TYPE_CHECKING:
    from paceline.bench.engine.generate import GenerateOptions
    from paceline.bench.replay.command import ReplayOptions
    from paceline.config import AttachOptions, ServeOptions
    from paceline.infra.demo.run import DemoOptions
    from paceline.infra.state.backup import BackupOptions, RestoreOptions
    from paceline.infra.state.export import ExportOptions
    from paceline.infra.state.purge import PurgeOptions

app = typer.Typer(
    name="paceline",
    help="Lossless speculative decoding on Ray Serve with a drafter that is retrained when that pays for itself.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench")
app.add_typer(versions_app, name="versions")
app.add_typer(policy_app, name="policy")


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def _log(level: str) -> None:
    from paceline.infra.state.log import configure_logging, quiet_libraries

    configure_logging(level)
    quiet_libraries(level)


@command(app, "demo", "paceline.infra.demo.run:DemoOptions")
def demo(options: DemoOptions, console: Console) -> bool:
    """Run the whole loop on this computer: serve, learn, decide, retrain, swap."""
    from paceline.infra.demo.run import run_demo

    _log("INFO" if options.verbose else "ERROR")
    result = run_demo(options, console)
    return bool(result["lossless"]["mismatches"] or result["swaps"]["requests_dropped"])


@command(app, "serve", "paceline.config:ServeOptions")
def serve(options: ServeOptions, console: Console) -> None:
    """Serve a model with an OpenAI-compatible API until Ctrl-C."""
    from paceline.infra.service.preflight import check_early

    config = options.service()
    check_early(config)
    from paceline.infra.app import serve_forever

    _log("INFO" if options.verbose else "WARNING")
    serve_forever(config, console)


@command(app, "attach", "paceline.config:AttachOptions")
def attach(options: AttachOptions, console: Console) -> None:
    """Decide, learn and roll out for engines that others run: vLLM with its plugin, which reports to --redis-url, or SGLang."""
    from paceline.infra.app import attach_forever

    _log("INFO" if options.serve.verbose else "WARNING")
    attach_forever(options.serve.service(), console, options)


@command(app, "generate", "paceline.bench.engine.generate:GenerateOptions")
def generate(options: GenerateOptions, console: Console) -> None:
    """Print the answer to one prompt with accepted draft tokens marked, and its speed."""
    from paceline.bench.engine.generate import run_generate

    run_generate(options, console)


@command(app, "replay", "paceline.bench.replay.command:ReplayOptions")
def replay(options: ReplayOptions, console: Console) -> None:
    """Replay policies on past or simulated traffic and say which one pays."""
    from paceline.bench.replay.command import run_replay
    from paceline.infra.state.log import configure_logging

    configure_logging("ERROR")
    run_replay(options, console)


@command(app, "export", "paceline.infra.state.export:ExportOptions")
def export(options: ExportOptions, console: Console) -> None:
    """Copy decisions, ledger, feature traces and round feedback of a service to a folder."""
    from paceline.infra.state.export import run_export

    run_export(options, console)


@command(app, "backup", "paceline.infra.state.backup:BackupOptions")
def backup(options: BackupOptions, console: Console) -> None:
    """Save what a service knows in one file."""
    from paceline.infra.state.backup import run_backup

    run_backup(options, console)


@command(app, "restore", "paceline.infra.state.backup:RestoreOptions")
def restore(options: RestoreOptions, console: Console) -> None:
    """Put a backup in the place of a stopped service's state."""
    from paceline.infra.state.backup import run_restore

    run_restore(options, console)


@command(app, "purge-traces", "paceline.infra.state.purge:PurgeOptions")
def purge_traces(options: PurgeOptions, console: Console) -> None:
    """Delete captured traces of a tenant (or all) from a data folder."""
    from paceline.infra.state.purge import purge

    console.print(f"deleted {purge(options)} shards")


add_training(app)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of writing, which names no file."""


def main() -> None:
    """Run the command line; an error made on purpose, or of a file, becomes one sentence and exit code 2.

    A file's error with a note is one of code that is not ours, whose file no argument named: it keeps its traceback.
    """
    spare_loopback()
    try:
        app()
    except (PacelineError, OSError) as e:
        words = str(e)
        if isinstance(e, OSError):
            if hasattr(e, "__notes__") or (e.filename is None and e.errno not in _FULL):
                raise
            words = f"{e.filename or 'a file could not be written'}: {e.strerror}"
        Console(stderr=True).print("[red]error:[/red]", escape(words), highlight=False, emoji=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
