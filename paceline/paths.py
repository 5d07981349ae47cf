"""Paths: folders of bundled and local models, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ConfigError

BUNDLED_TARGET = "target"
BUNDLED_DRAFTER = "specblock"
"""What the name 'bundled' means for a drafter."""
BUNDLED_DRAFTERS = (BUNDLED_DRAFTER, "eagle3", "jetspec", "dflash")
"""Names of the drafters whose weights an installation may have."""
TEXT_DRAFTERS = ("lookup", "suffix", "suffix-recent")
"""Drafters without weights, by the names that `--drafter` takes."""


def bundled(name: str) -> Path:
    """Return the folder of a bundled model; raises ConfigError when the installation lacks it."""
    path = _bundled_folder(name)
    if not (path / "config.json").is_file():
        if name == BUNDLED_TARGET:
            raise ConfigError(
                f"the bundled target is missing at {path}; reinstall paceline, or give the folder of a transformers checkpoint"
            )
        there = ", ".join(bundled_drafters()) or "none"
        raise ConfigError(
            f"the bundled drafter {name!r} is missing at {path} (bundled drafters here: {there}); reinstall paceline, or name "
            "another one or a folder"
        )
    return path


def bundled_drafters() -> tuple[str, ...]:
    """Names of the drafters whose weights this installation has."""
    return tuple(name for name in BUNDLED_DRAFTERS if (_bundled_folder(name) / "config.json").is_file())


def _bundled_folder(name: str) -> Path:
    return Path(str(files("paceline") / "models" / name))


def resolve_model(model: str) -> Path:
    """Return the folder of the target: 'bundled' or a local transformers checkpoint."""
    if model == "bundled":
        return bundled(BUNDLED_TARGET)
    path = Path(model).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(f"model must be 'bundled' or a folder with config.json, got {model!r}")
    return path


def resolve_drafter(drafter: str) -> Path | None:
    """Return the folder of drafter weights: a bundled drafter's by name, or a folder; None for drafters without weights.

    Raises: ConfigError when there is no such folder.
    """
    if drafter == "none" or drafter in TEXT_DRAFTERS:
        return None
    if drafter in ("bundled", *BUNDLED_DRAFTERS):
        return bundled(BUNDLED_DRAFTER if drafter == "bundled" else drafter)
    path = Path(drafter).expanduser().resolve()
    if not (path / "config.json").is_file():
        names = ", ".join(map(repr, ("bundled", *BUNDLED_DRAFTERS, "none", *TEXT_DRAFTERS)))
        raise ConfigError(
            f"drafter must be {names} or a folder with config.json and drafter.safetensors or released weights, "
            f"got {drafter!r}"
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


@contextlib.contextmanager
def open_atomic(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends without an error: complete and durable, or not at all.

    Makes the folder. Readers and a crash see the file before or the file after, never a part. Raises: OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # the rename itself must survive a power loss
    finally:
        os.close(handle)


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) at `path`: complete and durable, or not at all. Raises: OSError."""
    with open_atomic(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
