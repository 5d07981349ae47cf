"""Weight transfer: a drafter from a file, read, checked and loaded in one call between two steps.

vLLM's order of a weight update is start, update, finish; here all work is in `update`, so that a file which is refused has
touched nothing. On a CPU layers are packed when they are loaded, so vLLM's own layerwise reload does the loading: it is
right on every device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Tensor name -> (shape, type)."""


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A file of `paceline export-drafter --format vllm`."""

    path: str
    sha256: str
    """Of its bytes, hexadecimal."""


class FileTransferEngine(WeightTransferEngine):
    """Loads drafters that have the tensors of the folder that vLLM was started with."""

    init_info_cls, update_info_cls = FileInit, FileUpdate
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        speculation = vllm_config.speculative_config
        self._folder = None if speculation is None else Path(str(speculation.model))
        self._loaded: Path | None = None
        """File that was loaded last; None = the folder's own."""

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing is connected."""

    def start_weight_update(self) -> None:
        """Nothing: see `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Nothing: see `receive_weights`."""

    def shutdown(self) -> None:
        """Nothing is open."""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file's tensors.

        Raises: ValueError, and the drafter that was there goes on, when the file is another one, when its tensors are not
        those of the folder that vLLM was started with, or when a value is not finite.
        """
        path = Path(update_info.path)
        tensors = self._read(path, update_info.sha256)
        try:
            self._load(tensors)
        except Exception:
            if self._loaded is not None:
                self._load(load(self._loaded.read_bytes()))
            elif self._folder is not None:
                for file in sorted(self._folder.glob("*.safetensors")):
                    self._load(load(file.read_bytes()))
            raise
        self._loaded = path

    def _read(self, path: Path, sha256: str) -> dict[str, torch.Tensor]:
        data = path.read_bytes()
        got = hashlib.sha256(data).hexdigest()
        if got != sha256:
            raise ValueError(f"{path} must have sha256 {sha256}, got {got}; export the drafter again")
        tensors = load(data)
        if self._folder is None or not self._folder.is_dir():
            raise ValueError(f"the speculative model must be a folder of `paceline export-drafter`, got {self._folder}")
        found = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        wanted = _shapes_of(self._folder)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"tensor {name} must be {wanted.get(name)}, as in {self._folder}, got {found.get(name)}"
                )
        bad = next((n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())), None)
        if bad is not None:
            raise ValueError(f"tensor {bad} must be finite; train the drafter again")
        return tensors

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)


def _shapes_of(folder: Path) -> Shapes:
    """Tensors of a folder, without reading them."""
    out: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                out[name] = (tuple(part.get_shape()), _TYPES.get(part.get_dtype(), part.get_dtype()))
    return out


_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64", "I32": "int32", "BOOL": "bool"}
"""As safetensors calls them -> as torch does."""
