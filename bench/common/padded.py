"""Padded target: the bundled target with more neurons, all of weight zero, and the drafters that were trained for it.

It says the same tokens, and its rounds read what those of a model of its size read. In its own the bundled target fits the caches of
a CPU and is so fast that nothing is worth learning within minutes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from paceline.errors import ConfigError
from paceline.paths import BUNDLED_TARGET, bundled, model_version, open_folder, resolve_drafter

NUM_NEURONS = 1792
"""Of every layer: 24 M parameters. A round of one row reads 97 MB, more than most caches hold: 6 to 10 ms at 10 to 15 GB/s."""
TARGET_NAME = "bundled, padded to 24 M parameters"
_PADDED_DIM = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def pad_target(folder: Path) -> Path:
    """Write the padded target in float32, whose products need no instructions that some CPUs lack; returns its folder.

    Raises: ConfigError when there is no room for it.
    """
    own = bundled(BUNDLED_TARGET)
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    weights = {name: _padded(name, weight.float()) for name, weight in load_file(own / "model.safetensors").items()}
    with _new_folder(folder) as part:
        for file in (f for f in own.iterdir() if f.suffix in (".json", ".jinja")):
            shutil.copyfile(file, part / file.name)
        _write_config(part, config | {"intermediate_size": NUM_NEURONS, "dtype": "float32"})
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    return folder


def _padded(name: str, weight: torch.Tensor) -> torch.Tensor:
    dim = _PADDED_DIM.get(name.split(".")[-2])
    if dim is None:
        return weight
    more = NUM_NEURONS - weight.shape[dim]
    return pad(weight, (0, more) if dim == 1 else (0, 0, 0, more))


def copy_drafter(drafter: str, target: Path, folder: Path) -> str:
    """Copy a drafter of the bundled target for a padded one; returns the folder, or the name of a drafter without weights.

    Any other folder stays as it is, for whoever loads it to take or refuse. Raises: ConfigError.
    """
    own = resolve_drafter(drafter)
    if own is None:
        return drafter
    try:
        config = json.loads((own / "config.json").read_text(encoding="utf-8"))
        is_ours = config.get("target_version") == model_version(bundled(BUNDLED_TARGET))
    except (OSError, ValueError, AttributeError):
        return str(own)
    if not is_ours:
        return str(own)
    with _new_folder(folder) as part:
        for file in own.glob("*.safetensors"):
            shutil.copyfile(file, part / file.name)
        _write_config(part, config | {"target_version": model_version(target)})
    return str(folder)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """`open_folder` for what may find no room. Raises: ConfigError."""
    try:
        with open_folder(folder) as part:
            yield part
    except (OSError, SafetensorError) as e:
        raise ConfigError(
            f"the padded models take 100 MB, which could not be written to {folder} ({e}); make room, or let TMPDIR name "
            "another place"
        ) from e


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
