"""Blob files: written so that no reader ever sees half of one.

Stores are fsspec locations: a plain path is this machine's disk, `s3://...` an object store. On a local disk a file
is written beside its place, synced and renamed; object stores publish a whole object at once by themselves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from safetensors import SafetensorError

from paceline import paths
from paceline.errors import ConfigError

if TYPE_CHECKING:  # a controller writes files and handles no tensor
    import torch

_LOCAL = ("file", "local")
MAX_UNFINISHED_S = 3600.0
"""Age at which what a killed writer left half written goes."""


class _Remote:
    """A file system elsewhere: whatever its client raises for a store that is away or refuses is an OSError that says where."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, fn: Any, *args: Any, **options: Any) -> Any:
        try:
            return fn(*args, **options)
        except FileNotFoundError:
            raise
        except Exception as e:  # clients have kinds of their own, which are known to nobody else
            if isinstance(e, OSError) and e.filename is not None:
                raise
            number = (e.errno if isinstance(e, OSError) else None) or errno.EIO
            raise OSError(number, f"the store failed: {type(e).__name__}: {e}", str(args[0]) if args else "") from e


def open_store(root: str | Path) -> tuple[Any, str]:
    """Return (fsspec file system, root path inside it) of a local path or URL."""
    if "://" not in str(root):
        fs, path = fsspec.core.url_to_fs(str(Path(root).expanduser()))
    else:  # what other nodes write is to be seen: a listing that was kept would hide it
        fs, path = fsspec.core.url_to_fs(str(root), use_listings_cache=False)
        fs = _Remote(fs)
    return fs, path.rstrip("/")


def service_places(url: str, part: str) -> list[str]:
    """`part` of every service in an object store, as URLs; [] where there is no service. Raises OSError."""
    fs, root = open_store(url)
    try:
        entries = fs.ls(f"{root}/services", detail=False)
    except FileNotFoundError:
        return []
    return [f"{url.split('://')[0]}://{entry}/{part}" for entry in entries]


def check_store(url: str | None) -> None:
    """Raise ConfigError when `store_url` names no store that this process can open; nothing is asked of the store."""
    if url is None:
        return
    try:
        if "://" not in url:
            raise ValueError("it has no ://")
        open_store(url)
    except (ImportError, ValueError) as e:
        raise ConfigError(
            f"store_url must be a URL such as s3://BUCKET/PREFIX whose fsspec implementation is installed, got {url!r}: {e}; "
            "pip install 'paceline[s3]' for s3://"
        ) from e


def write_atomic(fs: Any, path: str, data: bytes) -> None:
    """Write `data` at `path`: complete and durable, or not at all. Raises OSError when the store refuses.

    On a disk nobody but its owner may read it, whoever writes: a process of ours, an engine that others run, a command.
    """
    if fs.protocol not in _LOCAL and not set(_LOCAL) & set(fs.protocol if isinstance(fs.protocol, tuple) else ()):
        fs.pipe_file(path, data)
        return
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with paths.open_atomic(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def delete_unfinished(fs: Any, folder: str, now: float, max_age_s: float = MAX_UNFINISHED_S) -> None:
    """Delete what writers that were killed left half written; object stores keep no such files. Raises OSError."""
    try:
        entries = fs.ls(folder, detail=True)
    except FileNotFoundError:
        return
    for entry in entries:
        mtime = entry.get("mtime")
        if entry["name"].endswith(".tmp") and isinstance(mtime, int | float) and now - mtime > max_age_s:
            with contextlib.suppress(FileNotFoundError):  # gone already
                fs.rm_file(entry["name"])


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
