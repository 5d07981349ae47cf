"""Options and parsers that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from paceline.errors import ConfigError
from paceline.paths import BUNDLED_DRAFTER, BUNDLED_DRAFTERS, TEXT_DRAFTERS, check_output

DRAFTER_NAMES = (*BUNDLED_DRAFTERS, *TEXT_DRAFTERS)
"""Drafters that a command line may name; besides them folders, and where it makes sense 'none'."""
DRAFTERS = f"{' | '.join(DRAFTER_NAMES)} | DIR; 'bundled' is {BUNDLED_DRAFTER}"

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of text data (docs/drafters.md); default: the bundled prompts."),
]


def _output(context: typer.Context, option: typer.CallbackParam, path: Optional[Path]) -> Optional[Path]:
    """Refuse a file that cannot be written before the work that it is to hold."""
    return path if context.resilient_parsing else check_output(path, str(option.name))


Json = Annotated[
    Optional[Path], typer.Option("--json", help="Write the result as JSON to this file.", callback=_output)
]
Html = Annotated[
    Optional[Path],
    typer.Option("--html", help="Write plots and tables to this file, which needs no network.", callback=_output),
]
Suggest = Annotated[
    Optional[Path],
    typer.Option(help="Write the best policy settings as YAML for 'paceline serve --config'.", callback=_output),
]


def split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, kind: type, option: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in split(text))
    except ValueError as e:
        raise ConfigError(f"{option} must be a comma list of numbers, got {text!r}") from e


def data_folder(data: Path | None) -> Path | None:
    if data is not None and not data.is_dir():
        raise ConfigError(f"data must be a folder, got {str(data)!r}")
    return data
