"""Result files: JSON documents of measurements that survive a run that is killed half-way.

The document is on disk before the first measurement (options and machine) and is replaced whole after every part, so
that a reader always finds valid JSON: `is_complete` says whether the run came to its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.paths import write_atomic

FORMAT = 1
_PACKAGES = ("paceline", "torch", "transformers", "triton", "numpy")


class ResultFile:
    """A JSON document that grows; without a path it lives in memory only."""

    def __init__(self, path: Path | None, *, command: str, options: Any, extra: dict[str, Any] | None = None) -> None:
        """options: a dataclass, written as it is. Writes the document at once; raises ConfigError when it cannot."""
        self.path = path
        self.document: dict[str, Any] = {
            "format": FORMAT,
            "command": command,
            "options": plain_values(options),
            "machine": machine_facts(),
            "began": utc_now(),
            "is_complete": False,
            **(extra or {}),
        }
        self.save()

    def update(self, **values: Any) -> None:
        """Set keys and write the document."""
        self.document.update(values)
        self.save()

    def close(self, **values: Any) -> dict[str, Any]:
        """Set the last keys, mark the document complete, write and return it."""
        self.update(**values, ended=utc_now(), is_complete=True)
        return self.document

    def save(self) -> None:
        """Replace the file in one step; a crash leaves the one before."""
        if self.path is None:
            return
        write_json(self.path, self.document)


def write_json(path: Path, values: Any) -> None:
    """Replace the file by the values in one step; a crash leaves the one before. Raises: ConfigError."""
    try:
        write_atomic(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
    except OSError as e:
        raise ConfigError(f"json must name a file that can be written, got {path}: {e.strerror}") from e


def read_json(path: Path) -> Any:
    """The document of a file. Raises: ConfigError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path} must be a readable file: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} must be a JSON document of a benchmark: {e}") from e


def keep_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write what the kept results beside this file depend on. Raises: ConfigError where they are of other settings."""
    if path.is_file() and read_json(path) != json.loads(json.dumps(settings)):
        raise ConfigError(f"work folder {path.parent} holds results of other options; use another or delete it")
    write_json(path, settings)


def kept_json(path: Path, make: Callable[[], Any]) -> Any:
    """The JSON values of a file, which are made and written where there is none."""
    if not path.is_file():
        write_atomic(path, json.dumps(make()))
    return json.loads(path.read_text(encoding="utf-8"))


def plain_values(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine_facts() -> dict[str, Any]:
    """What a reader must know to compare figures; nothing that names the computer or its user."""
    import torch  # a replay writes results without it

    device = None
    if torch.cuda.is_available():
        device = {
            "name": torch.cuda.get_device_name(0),
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        }
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "cuda": device,
        "packages": {**{name: _version(name) for name in _PACKAGES}, "torch": torch.__version__},  # with its build
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # an optional one, or a checkout that is not installed
        return None
