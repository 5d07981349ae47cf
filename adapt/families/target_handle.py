"""Target handle: what a training job needs of the target, without loading the whole model.

Its version hash, its sizes, its token embedding and its output head (frozen, shared with the drafter); one tensor is
read from disk, two where the head is not the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from paceline.errors import ConfigError
from paceline.serving.target_model.int8 import served_version
from paceline.serving.target_model.model import checkpoint_version, default_tap_layers

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHandle:
    """The target as a drafter sees it."""

    version: str
    vocab_size: int
    feature_size: int
    """Width of a fused feature row: tapped layers x hidden size."""
    device: torch.device
    embed_weight: torch.Tensor  # (V, Dm)
    untied_head: torch.Tensor | None = None  # (V, Dm); None = the output head is the token embedding
    num_layers: int | None = None
    tap_layers: tuple[int, ...] | None = None
    """Layers whose outputs make a feature row; None: not known."""

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, Dm) weight of the output head."""
        return self.embed_weight if self.untied_head is None else self.untied_head


def load_target_handle(
    folder: str | Path,
    *,
    device: str = "cpu",
    version: str | None = None,
    tap_layers: Sequence[int] | None = None,
    dtype: str = "auto",
) -> TargetHandle:
    """Read a checkpoint folder's version, sizes, token embedding and output head.

    Args:
        version: known hash; None hashes the files.
        tap_layers: layers whose outputs the drafter reads; None = SpecBlock's three.
        dtype: of the target where it serves; int8 is a target of its own.
    Raises: ConfigError when the folder is not a usable checkpoint or torch has no such device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "training must run on a GPU but torch finds none here; install a CUDA build of torch on the nodes that train, "
            "or set trainer_resources.num_gpus to 0"
        )
    root = Path(folder)
    if not (root / "config.json").is_file():
        raise ConfigError(f"model must be the folder of a transformers checkpoint with a config.json, got {root}")
    config = AutoConfig.from_pretrained(root, local_files_only=True).get_text_config()
    embed = _read_tensor(root, _EMBEDDING)
    if embed is None:
        raise ConfigError(f"weights in {root} must hold a tensor named *.{_EMBEDDING}")
    head = None if getattr(config, "tie_word_embeddings", False) else _read_tensor(root, _HEAD)
    taps = default_tap_layers(config.num_hidden_layers) if tap_layers is None else tuple(tap_layers)
    return TargetHandle(
        version=served_version(version or checkpoint_version(root), dtype),
        vocab_size=config.vocab_size,
        feature_size=len(taps) * config.hidden_size,
        device=torch.device(device),
        embed_weight=embed.to(device),
        untied_head=None if head is None else head.to(device),
        num_layers=config.num_hidden_layers,
        tap_layers=taps,
    )


def _read_tensor(root: Path, ending: str) -> torch.Tensor | None:
    """The tensor whose name ends so, None when there is none."""
    index = root / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [root / file for name, file in names.items() if name.endswith(ending)]
        else:
            files = sorted(root.glob("*.safetensors"))
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith(ending):
                        return tensors.get_tensor(name)
    except (OSError, ValueError, KeyError, SafetensorError) as e:
        raise ConfigError(f"weights in {root} must be readable safetensors: {e}") from e
    return None
