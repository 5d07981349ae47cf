"""How are the files of a released drafter read: config.json and safetensors, in one file or in shards?

Only safetensors are read: other weight files can run code when they are opened. Tensor names are brought to one form, so
that what follows knows one name for each tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import DrafterMismatchError

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_RENAMED = (("model.", ""), ("midlayer.", "layers.0."))
"""Prefixes of tensor names and what stands for them here; applied in this order."""


def read_released_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a folder. Raises: DrafterMismatchError when it is not a readable JSON object."""
    path = Path(folder) / _CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise DrafterMismatchError(f"drafter folder {folder} must hold a readable {_CONFIG}: {e}") from e
    if not isinstance(values, dict):
        raise DrafterMismatchError(f"{_CONFIG} of a drafter must be a JSON object, got {type(values).__name__}")
    return values


def read_released_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors or of its shards, on the CPU, by their name without `model.` before it; the one
    layer of EAGLE-3 is `layers.0` whatever its release calls it, and rotary tables, which hold nothing, are left out.

    Raises: DrafterMismatchError when the weights are absent, unreadable or not safetensors.
    """
    found: dict[str, torch.Tensor] = {}
    for path in _weight_files(Path(folder)):
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as e:
            raise DrafterMismatchError(f"{path.name} must be a readable safetensors file: {e}") from e
        for name, tensor in tensors.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            for prefix, instead in _RENAMED:
                if name.startswith(prefix):
                    name = instead + name.removeprefix(prefix)
            if name in found:
                raise DrafterMismatchError(f"weights must hold every tensor once, {name} appears twice in {folder}")
            found[name] = tensor
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise DrafterMismatchError(f"{_INDEX} must map tensor names to files under 'weight_map': {e!r}") from e
        bad = [s for s in shards if not isinstance(s, str) or Path(s).name != s or not (folder / s).is_file()]
        if bad:
            raise DrafterMismatchError(f"every shard of {_INDEX} must lie in the folder, missing {bad}; fetch it again")
        return [folder / s for s in shards]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED) if folder.is_dir() else []
    if pickled:
        raise DrafterMismatchError(
            f"drafter weights must be safetensors, got {', '.join(pickled)}, which can run code when opened; if you trust "
            "the file, convert it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )
    raise DrafterMismatchError(f"drafter folder {folder} must hold {_SINGLE} or {_INDEX} with its shards")
