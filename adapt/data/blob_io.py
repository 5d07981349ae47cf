"""Blob files: written so that no reader ever sees half of one.

Stores are fsspec locations: a plain path is this machine's disk, `s3://...` an object store. On a local disk a file
is written beside its place, synced and renamed; object stores publish a whole object at once by themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from safetensors import SafetensorError

from paceline import paths

if TYPE_CHECKING:  # a controller writes files and handles no tensor
    import torch

_LOCAL = ("file", "local")


def open_store(root: str | Path) -> tuple[Any, str]:
    """Return (fsspec file system, root path inside it) of a local path or URL."""
    fs, path = fsspec.core.url_to_fs(str(Path(root).expanduser()) if "://" not in str(root) else str(root))
    return fs, path.rstrip("/")


def write_atomic(fs: Any, path: str, data: bytes) -> None:
    """Write `data` at `path`: complete and durable, or not at all. Raises OSError when the store refuses."""
    if fs.protocol not in _LOCAL and not set(_LOCAL) & set(fs.protocol if isinstance(fs.protocol, tuple) else ()):
        fs.pipe_file(path, data)
        return
    paths.write_atomic(path, data)


def pack_tensors(tensors: dict[str, torch.Tensor], info: dict) -> bytes:
    """Encode CPU tensors and one JSON record as safetensors; equal inputs give equal bytes."""
    import safetensors.torch

    ready = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    return safetensors.torch.save(ready, metadata={"paceline": json.dumps(info, sort_keys=True)})


def unpack_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], dict]:
    """Inverse of pack_tensors. Raises ValueError on anything else; nothing is unpickled."""
    import safetensors.torch

    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        info = json.loads(header.get("__metadata__", {}).get("paceline", "{}"))
        return safetensors.torch.load(data), info
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError) as e:
        raise ValueError(f"not a complete safetensors file: {e}") from e
