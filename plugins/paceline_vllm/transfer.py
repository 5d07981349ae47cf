"""Weight transfer: a drafter from a file, read, checked and loaded in one call between two steps.

vLLM's order of a weight update is start, update, finish; here all work is in `update`, so that a file which is refused has
touched nothing. On a CPU layers are packed when they are loaded, so vLLM's own layerwise reload does the loading: it is
right on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from paceline.infra.engines.weights import read_checked


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
        tensors = read_checked(path, update_info.sha256, self._folder)
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

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
