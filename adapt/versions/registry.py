"""Drafter registry: the place of drafter versions, which keeps bad ones out.

Layout below one fsspec location: `blobs/<sha256>.safetensors` (immutable, content addressed) and
`manifests/<version>.json`, written last: a version exists from the moment its manifest does. The weights' metadata
carries drafter type, architecture and target version, so that the same numbers for another target are another version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.adapt.data.blob_io import delete_unfinished, open_store, pack_tensors, unpack_tensors, write_atomic
from paceline.contracts import DrafterManifest
from paceline.errors import DrafterMismatchError, ManifestError
from paceline.machine import Clock, SystemClock

if TYPE_CHECKING:  # a controller handles no tensor
    import torch

log = logging.getLogger(__name__)
_VERSION = re.compile(r"[0-9a-f]{12}")
_SHA = re.compile(r"[0-9a-f]{64}")


def shapes_hash(state: dict[str, torch.Tensor]) -> str:
    """First 16 hex digits of sha256 over the sorted names, types and shapes."""
    rows = [[name, str(t.dtype), list(t.shape)] for name, t in sorted(state.items())]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def check_finite(state: dict[str, torch.Tensor]) -> None:
    """Raise DrafterMismatchError naming the first tensor with a NaN or infinite value."""
    import torch

    for name, tensor in sorted(state.items()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DrafterMismatchError(f"drafter tensor {name} must be finite; train it again or use another version")


def _encode(
    state: dict[str, torch.Tensor], drafter_type: str, config: dict, target_version: str, delta_of: str | None
) -> bytes:
    about = {"drafter_type": drafter_type, "config": config, "target_version": target_version}
    return pack_tensors(state, about if delta_of is None else {**about, "delta_of": delta_of})


class DrafterRegistry:
    """Immutable drafter versions with manifests; safe for any number of readers and writers."""

    def __init__(self, root: str | Path, *, clock: Clock | None = None, max_blob_bytes: int = 8 * 2**30) -> None:
        self._fs, self._root = open_store(root)
        self._clock = clock or SystemClock()
        self._max_blob_bytes = max_blob_bytes
        self._listed: dict[str, DrafterManifest] = {}

    @staticmethod
    def version_of(
        state: dict[str, torch.Tensor],
        *,
        drafter_type: str,
        config: dict,
        target_version: str,
        delta_of: str | None = None,
    ) -> str:
        """The version that `put` would give this content."""
        return hashlib.sha256(_encode(state, drafter_type, config, target_version, delta_of)).hexdigest()[:12]

    def put(
        self,
        state: dict[str, torch.Tensor],
        *,
        drafter_type: str,
        config: dict,
        target_version: str,
        parent: str | None = None,
        arm: str = "initial",
        bucket: str | None = None,
        num_train_rows: int = 0,
        metrics: dict | None = None,
        delta_of: str | None = None,
    ) -> DrafterManifest:
        """Store weights and then their manifest; the same content twice gives the first manifest back.

        delta_of: the whole version that `state`, factors of a delta, adds to.
        Raises: DrafterMismatchError when a value is not finite or the weights exceed the size cap; ManifestError when
        the parent is not in the registry; OSError when the store refuses.
        """
        check_finite(state)
        if parent is not None:
            self.get_manifest(parent)
        if delta_of is not None and self.get_manifest(delta_of).delta_of is not None:
            raise DrafterMismatchError(
                f"a delta must add to whole weights, got drafter {delta_of}, which is a delta itself"
            )
        data = _encode(state, drafter_type, config, target_version, delta_of)
        if len(data) > self._max_blob_bytes:
            raise DrafterMismatchError(f"drafter must be at most {self._max_blob_bytes} bytes, got {len(data)}")
        sha = hashlib.sha256(data).hexdigest()
        version = sha[:12]
        if self._fs.exists(self._manifest_path(version)):
            if not self._fs.exists(self._blob_path(sha)):
                write_atomic(self._fs, self._blob_path(sha), data)
            return self.get_manifest(version)
        manifest = DrafterManifest(
            version=version,
            sha256=sha,
            num_bytes=len(data),
            drafter_type=drafter_type,
            config=config,
            shapes_hash=shapes_hash(state),
            target_version=target_version,
            parent=parent,
            arm=arm,
            bucket=bucket,
            num_train_rows=num_train_rows,
            metrics=metrics or {},
            created=self._clock.now(),
            delta_of=delta_of,
        )
        write_atomic(self._fs, self._blob_path(sha), data)
        write_atomic(self._fs, self._manifest_path(version), msgspec.json.encode(manifest))
        for path in (self._blob_path(sha), self._manifest_path(version)):
            try:
                delete_unfinished(self._fs, path.rpartition("/")[0], self._clock.now())
            except OSError as e:  # the version is there
                log.debug("unfinished files beside %s stay: %s", path, e)
        return manifest

    def get_manifest(self, version: str, *, target_version: str | None = None) -> DrafterManifest:
        """Read a manifest. Raises ManifestError, with what to do, when it is missing or unreadable.

        With target_version: raises DrafterMismatchError when the drafter was trained for another target.
        """
        path = self._manifest_path(version)
        try:
            manifest = msgspec.json.decode(self._fs.cat_file(path), type=DrafterManifest)
        except FileNotFoundError as e:
            raise ManifestError(
                f"drafter {version} is not in the registry {self._root}; choose one that `paceline versions` lists"
            ) from e
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise ManifestError(f"manifest {path} is damaged ({e}); delete it and publish the drafter again") from e
        if manifest.version != version or not _SHA.fullmatch(manifest.sha256) or manifest.sha256[:12] != version:
            raise ManifestError(
                f"manifest {path} belongs to another version ({manifest.version}); "
                "delete it and publish the drafter again"
            )
        if target_version is not None and manifest.target_version != target_version:
            raise DrafterMismatchError(
                f"drafter {version} was trained for target {manifest.target_version}, this target is {target_version}; "
                "use a drafter of this target or train one with `paceline train-drafter`"
            )
        return manifest

    def load_state(self, version: str, *, target_version: str | None = None) -> dict[str, torch.Tensor]:
        """Whole weights of a version, those of a delta added to its base's; raises as `load_own`."""
        manifest = self.get_manifest(version, target_version=target_version)
        own = self._load(manifest)
        if manifest.delta_of is None:
            return own
        from paceline.serving.drafters.deltas import merge

        return merge(self.load_own(manifest.delta_of, target_version=target_version), own)

    def load_own(self, version: str, *, target_version: str | None = None) -> dict[str, torch.Tensor]:
        """Read a version's own weights, of a delta its factors, and check size, sha256, shapes and finite values before anyone
        may use them.

        Raises: DrafterMismatchError when the drafter was trained for another target or holds non-finite values;
        ManifestError when the weights are missing or differ from the manifest.
        """
        return self._load(self.get_manifest(version, target_version=target_version))

    def _load(self, manifest: DrafterManifest) -> dict[str, torch.Tensor]:
        version, path = manifest.version, self._blob_path(manifest.sha256)
        try:
            data = self._fs.cat_file(path)
        except FileNotFoundError as e:
            raise ManifestError(
                f"weights of drafter {version} are missing ({path}); restore the file or publish the drafter again"
            ) from e
        if len(data) != manifest.num_bytes or hashlib.sha256(data).hexdigest() != manifest.sha256:
            raise ManifestError(
                f"weights of drafter {version} differ from their manifest ({path}); "
                "delete both files and publish the drafter again"
            )
        try:
            state, _ = unpack_tensors(data)
        except ValueError as e:
            raise ManifestError(f"weights of drafter {version} are unreadable ({e}); publish the drafter again") from e
        if shapes_hash(state) != manifest.shapes_hash:
            raise ManifestError(
                f"shapes of drafter {version} differ from its manifest; delete both files and publish it again"
            )
        check_finite(state)
        return state

    def has_weights(self, version: str) -> bool:
        """Whether the weights are in the store; False also for a version without manifest."""
        try:
            return bool(self._fs.exists(self._blob_path(self.get_manifest(version).sha256)))
        except ManifestError:
            return False

    def with_weights(self) -> set[str]:
        """The versions of the latest `list` whose weights are in the store, however many, by one listing."""
        try:
            entries = self._fs.ls(f"{self._root}/blobs", detail=False)
        except FileNotFoundError:
            return set()
        stored = {e.rsplit("/", 1)[-1].removesuffix(".safetensors") for e in entries}
        return {version for version, m in self._listed.items() if m.sha256 in stored}

    def delete_weights(self, version: str) -> None:
        """Delete the weights and keep the manifest; `put` of the same content brings them back. No error when gone.

        The caller makes sure that nobody serves, stages or trains from the version.
        """
        try:
            self._fs.rm_file(self._blob_path(self.get_manifest(version).sha256))
        except FileNotFoundError:
            log.debug("weights of drafter %s were gone already", version)

    def list(self) -> list[DrafterManifest]:
        """Readable manifests of every target, oldest first; a damaged one is logged and left out.

        Each is read once: manifests do not change, and stores ask money for every read.
        """
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(f"{self._root}/manifests", detail=False)
        except FileNotFoundError:
            return []
        found = {}
        for name in (e.rsplit("/", 1)[-1].removesuffix(".json") for e in entries):
            if _VERSION.fullmatch(name):
                try:
                    found[name] = self._listed.get(name) or self.get_manifest(name)
                except ManifestError as e:
                    log.warning("%s", e)
        self._listed = found
        return sorted(found.values(), key=lambda m: (m.created, m.version))

    def _manifest_path(self, version: str) -> str:
        if not _VERSION.fullmatch(version):
            raise ManifestError(f"drafter version must be 12 hexadecimal digits, got {version!r}")
        return f"{self._root}/manifests/{version}.json"

    def _blob_path(self, sha: str) -> str:
        return f"{self._root}/blobs/{sha}.safetensors"
