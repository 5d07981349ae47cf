"""Learner store: the states of learners between their bursts, bounded, each one file that is whole or not there.

A file's name is `<time>_<key>_<hash>`: a newer state is written beside the old one, which goes then. So a reader, whatever
was killed when, finds the newest state whose content has its hash. A state tells its whole story (weights, evidence and
what was read belong together), so that a worker that outlived its lease can replace a newer state but never mix with it.
No text is stored, only weights, sums and digests of request ids.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.adapt.data.blob_io import delete_unfinished, open_store, pack_tensors, unpack_tensors, write_atomic

if TYPE_CHECKING:  # a controller handles no tensor
    import torch

log = logging.getLogger(__name__)
MAX_STATES, MAX_BYTES, MAX_SMALL, MAX_RECORDS = 24, 2 * 2**30, 256, 1024
"""Learners kept: the newest, and of others as many as all hold so many bytes, MAX_SMALL in all, since classes learn in turn
and one that is forgotten has read its text in vain; a state takes about four times the bytes of the drafter's trained
weights. And versions' records of what they have read, which are small."""
_SUFFIX, _FORMAT = ".safetensors", 1


class LearnerKey(NamedTuple):
    """Whose state it is. Another base, target or choice of parameters is another learner."""

    bucket: str
    drafter_type: str
    base_version: str
    target_version: str
    parameters: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(list(self)).encode()).hexdigest()[:16]


class _File(NamedTuple):
    name: str
    stamp: int
    key: str
    content: str
    num_bytes: int


class LearnerStore:
    """States below one fsspec location, for one worker at a time."""

    def __init__(self, root: str | Path, *, now: Callable[[], float] = time.time) -> None:
        """now: seconds since the epoch."""
        self._fs, self._root = open_store(root)
        self._now = now

    def load(self, key: LearnerKey) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """The newest whole state; None when there is none. Raises: OSError when the store refuses."""
        return self._load(key.digest)

    def save(self, key: LearnerKey, tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        """Replace a learner's state, complete or not at all. Raises: OSError when the store refuses."""
        self._save(key.digest, tensors, record)

    def drop(self, key: LearnerKey) -> None:
        """Forget a learner."""
        self._delete([f for f in self._files() if f.key == key.digest])

    def note_learned(self, version: str, seen: torch.Tensor) -> None:
        """Record what a version's lineage has read: (R,) int64 digests of requests."""
        self._save(_version_key(version), {"seen": seen}, {})

    def learned_by(self, version: str) -> list[int]:
        """Digests of the requests that a version's lineage has read; [] of a version that no learner made."""
        found = self._load(_version_key(version))
        return [] if found is None else found[0]["seen"].tolist()

    def _load(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        for file in sorted((f for f in self._files() if f.key == key), reverse=True, key=lambda f: f.stamp):
            try:
                data = self._fs.cat_file(f"{self._root}/{file.name}")
                if hashlib.sha256(data).hexdigest()[:16] != file.content:
                    raise ValueError("its content is not what its name says")
                tensors, record = unpack_tensors(data)
                if record.get("format") != _FORMAT:
                    raise ValueError(f"format must be {_FORMAT}, got {record.get('format')}")
            except FileNotFoundError:
                continue
            except ValueError as e:
                log.warning("learner state %s is left out: %s", file.name, e)
                continue
            return tensors, record
        return None

    def _save(self, key: str, tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
        data = pack_tensors(tensors, {**record, "format": _FORMAT})
        files = self._files()
        stamp = max([int(self._now() * 1e6), *(f.stamp + 1 for f in files if f.key == key)])  # clocks may go back
        name = f"{stamp:020d}_{key}_{hashlib.sha256(data).hexdigest()[:16]}{_SUFFIX}"
        write_atomic(self._fs, f"{self._root}/{name}", data)
        old = [f for f in files if f.key == key]
        alike = (f for f in files if f.key != key and _is_record(f.key) == _is_record(key))
        others = sorted(alike, key=lambda f: f.stamp, reverse=True)
        if _is_record(key):
            num_kept = MAX_RECORDS - 1
        else:
            sums = itertools.accumulate((f.num_bytes for f in others), initial=len(data))
            num_kept = max(MAX_STATES, min(sum(size <= MAX_BYTES for size in sums), MAX_SMALL)) - 1
        self._delete(old + others[num_kept:])
        delete_unfinished(self._fs, self._root, self._now())

    def _delete(self, files: list[_File]) -> None:
        for file in files:
            try:
                self._fs.rm_file(f"{self._root}/{file.name}")
            except FileNotFoundError:
                log.debug("learner state %s was gone already", file.name)

    def _files(self) -> list[_File]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        sizes = {str(e["name"]).rsplit("/", 1)[-1]: int(e.get("size") or 0) for e in entries}
        parts = [(name, name.removesuffix(_SUFFIX).split("_")) for name in sizes if name.endswith(_SUFFIX)]
        return [_File(name, int(p[0]), p[1], p[2], sizes[name]) for name, p in parts if len(p) == 3 and p[0].isdigit()]


_RECORD = "version-"


def _version_key(version: str) -> str:
    return _RECORD + version


def _is_record(key: str) -> bool:
    """Whether it is of what a version has read, not of a learner."""
    return key.startswith(_RECORD)
