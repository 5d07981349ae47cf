"""Training commands: `train-target`, `train-drafter`, `import-drafter` and `export-drafter`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline.cli.options import command, given_words

if TYPE_CHECKING:
    from paceline.adapt.recipes.drafter import TrainDrafterOptions
    from paceline.adapt.recipes.target import TrainTargetOptions
    from paceline.adapt.versions.export_drafter import ExportDrafterOptions
    from paceline.adapt.versions.import_drafter import ImportOptions

_MACHINE = ("num_threads", "device")
"""Options that do not change what is trained, and are not recorded with it; a GPU is: it trains in bfloat16."""
_GPU = " --device cuda"
_LINE_S = 20.0


def add_training(app: typer.Typer) -> None:
    """Make the commands."""
    command(app, "train-target", "paceline.adapt.recipes.target:TrainTargetOptions")(train_target)
    command(app, "train-drafter", "paceline.adapt.recipes.drafter:TrainDrafterOptions")(train_drafter)
    command(app, "import-drafter", "paceline.adapt.versions.import_drafter:ImportOptions")(import_drafter)
    command(app, "export-drafter", "paceline.adapt.versions.export_drafter:ExportDrafterOptions")(export_drafter)


def train_target(options: TrainTargetOptions, console: Console) -> None:
    """Train a small target from a data folder; resumes where it stopped."""
    from paceline.adapt.recipes.target import train_target as train
    from paceline.bench.common.engine_run import set_threads
    from paceline.serving.loading.target import pick_device

    set_threads(options.num_threads)
    recipe = dataclasses.replace(options.recipe, intermediate_size=3 * options.recipe.hidden_size)
    device = pick_device(options.device)
    words = f"paceline train-target {given_words(options, hidden=_MACHINE)}{_GPU if device == 'cuda' else ''}"
    with _training_bar("target", console) as report:
        losses = train(
            options.data, options.out, recipe, device=device, compile_layers=options.compile, progress=report,
            command=words,
        )  # fmt: skip
    console.print("held-out loss, nats per token:", {d: round(v, 3) for d, v in losses.items()})


def train_drafter(options: TrainDrafterOptions, console: Console) -> None:
    """Train a drafter for a target on text that the target itself writes; resumes."""
    from paceline.adapt.recipes.drafter import train_drafter as train
    from paceline.bench.common.engine_run import set_threads
    from paceline.paths import MODEL_NAMES, resolve_model
    from paceline.serving.loading.target import pick_device

    set_threads(options.num_threads)
    shown = options if options.target in MODEL_NAMES else dataclasses.replace(options, target="DIR")
    device = pick_device(options.device)
    words = f"paceline train-drafter {given_words(shown, hidden=_MACHINE)}{_GPU if device == 'cuda' else ''}"
    source = resolve_model(options.target)
    with _training_bar("drafter", console) as report:
        scores = train(
            source,
            options.data,
            options.out,
            options.recipe,
            device=device,
            progress=report,
            command=words,
        )
    console.print("held-out:", scores)


def import_drafter(options: ImportOptions, console: Console) -> None:
    """Convert released weights to a drafter folder of Paceline's own."""
    from paceline.adapt.versions.import_drafter import import_drafter as run
    from paceline.paths import resolve_model

    config = run(options.folder, options.out, resolve_model(options.target), tap_layers=options.taps)
    console.print(f"{config['drafter_type']} written to {options.out}; target layers {config.get('tap_layers')}")


def export_drafter(options: ExportDrafterOptions, console: Console) -> None:
    """Write a drafter as vLLM, speculators or SGLang load it."""
    from paceline.adapt.versions.export_drafter import export_drafter as run

    done = run(options)
    console.print(
        f"{done.drafter_type} written to {options.out}; target layers {list(done.tap_layers)}", soft_wrap=True
    )
    console.print(done.command, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _training_bar(what: str, console: Console) -> Iterator[Callable[[int, int, dict], None]]:
    """A progress bar that a recipe's `progress(done, total, info)` drives; without a terminal a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    info = TextColumn("{task.fields[info]}")
    columns = (TextColumn(f"training {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), info)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task, said = bar.add_task("", total=None, info=""), float("-inf")

        def report(done: int, total: int, info: dict) -> None:
            nonlocal said
            text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in info.items())
            bar.update(task, completed=done, total=total, info=text)
            if not console.is_terminal and (time.monotonic() >= said + _LINE_S or done >= total):
                said = time.monotonic()
                console.print(f"training {what}: {done:,} of {total:,}  {text}", highlight=False, soft_wrap=True)

        yield report
