"""Where do bundled and local models lie, and can a result be written where it shall?"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from paceline.errors import ConfigError

BUNDLED_TARGET = "target"
BUNDLED_DRAFTER = "specblock"
TEXT_DRAFTERS = ("lookup", "suffix", "suffix-recent")
"""Drafters without weights, by the names that `--drafter` takes."""


def bundled(name: str) -> Path:
    """Return the folder of a bundled model; raises ConfigError when the installation lacks it."""
    path = Path(str(files("paceline") / "models" / name))
    if not path.is_dir():
        raise ConfigError(f"the bundled model {name!r} is missing at {path}; reinstall paceline")
    return path


def resolve_model(model: str) -> Path:
    """Return the folder of the target: 'bundled' or a local transformers checkpoint."""
    if model == "bundled":
        return bundled(BUNDLED_TARGET)
    path = Path(model).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(f"model must be 'bundled' or a folder with config.json, got {model!r}")
    return path


def resolve_drafter(drafter: str) -> Path | None:
    """Return the folder of drafter weights; None for 'none' and the drafters without weights."""
    if drafter == "none" or drafter in TEXT_DRAFTERS:
        return None
    if drafter == "bundled":
        return bundled(BUNDLED_DRAFTER)
    path = Path(drafter).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"drafter must be 'bundled', 'none', {', '.join(map(repr, TEXT_DRAFTERS))} or a folder with config.json and "
            f"drafter.safetensors or released weights, got {drafter!r}"
        )
    return path


def check_output(path: Path | None, option: str) -> Path | None:
    """The path, once it is sure that a file can be written there; makes its folder and leaves what the file holds.

    option: the name that the error says. Raises: ConfigError.
    """
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as e:
        raise ConfigError(f"{option} must name a file that can be written, got {path}: {e.strerror}") from e
    return path
