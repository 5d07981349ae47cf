"""Drafters: versions that no service should take, or gain anything by, and sound ones between which it may swap."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from paceline.adapt.data.blob_io import pack_tensors
from paceline.adapt.versions.registry import DrafterRegistry, shapes_hash

Weights = dict[str, torch.Tensor]


def shuffled(state: Weights, seed: int) -> Weights:
    """The same numbers under other labels: every matrix with its rows shuffled. Finite, of the right shape, worthless."""
    rng = torch.Generator().manual_seed(seed)
    return {k: v[torch.randperm(v.shape[0], generator=rng)] if v.dim() == 2 else v for k, v in state.items()}


def nudged(state: Weights, seed: int) -> Weights:
    """Weights that draft as well as these and are another version."""
    return {k: v * (1.0 + 1e-4 * (1 + seed)) if v.dim() == 2 else v for k, v in state.items()}


class Publisher:
    """Puts versions made of a first one into the registry of a service, by the front door and behind its back."""

    def __init__(self, root: Path, first: str) -> None:
        """root: the registry's folder. first: the version that the others are made of."""
        self.root, self.registry = root, DrafterRegistry(root)
        self.first, self.manifest = first, self.registry.get_manifest(first)
        self.state = self.registry.load_state(first)

    def put(self, state: Weights) -> str:
        """Publish weights."""
        made = self.manifest
        return self.registry.put(
            state, drafter_type=made.drafter_type, config=made.config, target_version=made.target_version
        ).version

    def poisoned(self, seed: int) -> str:
        """Weights with one NaN under a manifest that fits them."""
        state = {k: v.clone() for k, v in nudged(self.state, seed).items()}
        name = next(k for k, v in sorted(state.items()) if v.is_floating_point() and v.numel() > 4)
        state[name].view(-1)[3] = float("nan")
        info = {"drafter_type": self.manifest.drafter_type, "config": self.manifest.config, "target_version": self.manifest.target_version}  # fmt: skip
        data = pack_tensors(state, info)
        sha = hashlib.sha256(data).hexdigest()
        self.blob_of(sha).write_bytes(data)
        self._write_manifest(sha, len(data), state)
        return sha[:12]

    def of_another_shape(self, seed: int) -> str:
        """Weights of which one matrix lacks a row."""
        state = nudged(self.state, seed)
        name = next(k for k, v in sorted(state.items()) if v.dim() == 2 and v.shape[0] > 1)
        return self.put({**state, name: state[name][:-1].contiguous()})

    def damaged(self, seed: int) -> str:
        """Weights of which one bit fell over after they were published."""
        version = self.put(nudged(self.state, seed))
        blob = self.blob(version)
        if hashlib.sha256(blob.read_bytes()).hexdigest() == blob.stem:  # a run that was cut off has flipped it already
            flip_bit(blob)
        return version

    def blob(self, version: str) -> Path:
        """The file with a version's weights."""
        return self.blob_of(self.registry.get_manifest(version).sha256)

    def blob_of(self, sha: str) -> Path:
        return self.root / "blobs" / f"{sha}.safetensors"

    def manifest_path(self, version: str) -> Path:
        return self.root / "manifests" / f"{version}.json"

    def _write_manifest(self, sha: str, num_bytes: int, state: Weights) -> None:
        """A manifest that `put` would never write."""
        made = msgspec.structs.replace(
            self.manifest,
            version=sha[:12],
            sha256=sha,
            num_bytes=num_bytes,
            shapes_hash=shapes_hash(state),
            created=0.0,
        )
        self.manifest_path(made.version).write_bytes(msgspec.json.encode(made))


def flip_bit(path: Path, at: int = -5) -> None:
    """Let one bit of a file fall over."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
