"""Weights: what is looked at before a drafter's tensors replace those that another engine serves with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Tensor name -> (shape, type)."""
_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64", "I32": "int32", "BOOL": "bool"}
"""As safetensors calls them -> as torch does."""


def shapes_of(folder: Path) -> Shapes:
    """Tensors of a folder's *.safetensors, without reading them."""
    out: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                out[name] = (tuple(part.get_shape()), _TYPES.get(part.get_dtype(), part.get_dtype()))
    return out


def read_checked(path: Path, sha256: str, like: Path | None) -> dict[str, torch.Tensor]:
    """Tensors of a file of `paceline export-drafter`.

    Args:
        sha256: of its bytes, hexadecimal.
        like: folder that the engine was started with; the tensors must have its names, shapes and types.
    Raises: ValueError when the file is another one, does not fit, or has a value that is not finite.
    """
    data = path.read_bytes()
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise ValueError(f"{path} must have sha256 {sha256}, got {got}; export the drafter again")
    tensors = load(data)
    if like is None or not like.is_dir():
        raise ValueError(f"the speculative model must be a folder of `paceline export-drafter`, got {like}")
    found = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    wanted = shapes_of(like)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"tensor {name} must be {wanted.get(name)}, as in {like}, got {found.get(name)}")
    bad = next((n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)
    if bad is not None:
        raise ValueError(f"tensor {bad} must be finite; train the drafter again")
    return tensors
