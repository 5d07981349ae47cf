"""Target handle: what a training job needs of the target, without loading the whole model.

Its version hash, its sizes, its token embedding and its output head (frozen, shared with the drafter); no other weights
are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.target_model.int8 import served_version
from paceline.serving.target_model.model import default_tap_layers


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
    path: str | Path,
    *,
    device: str = "cpu",
    version: str | None = None,
    tap_layers: Sequence[int] | None = None,
    dtype: str = "auto",
) -> TargetHandle:
    """Read a checkpoint's version, sizes, token embedding and output head.

    Args:
        version: known hash; None hashes the files.
        tap_layers: layers whose outputs the drafter reads; None = SpecBlock's three.
        dtype: of the target where it serves; int8 is a target of its own.
    Raises: ConfigError when there is no usable checkpoint or torch has no such device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "training must run on a GPU but torch finds none here; install a CUDA build of torch on the nodes that train, "
            "or set trainer_resources.num_gpus to 0"
        )
    checkpoint = open_checkpoint(path)
    config = checkpoint.config().get_text_config()
    embed, head = checkpoint.embeddings()
    taps = default_tap_layers(config.num_hidden_layers) if tap_layers is None else tuple(tap_layers)
    return TargetHandle(
        version=served_version(version or checkpoint.version(), dtype),
        vocab_size=config.vocab_size,
        feature_size=len(taps) * config.hidden_size,
        device=torch.device(device),
        embed_weight=embed.to(device),
        untied_head=None if head is None else head.to(device),
        num_layers=config.num_hidden_layers,
        tap_layers=taps,
    )
