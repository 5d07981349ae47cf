"""Target handle: what a training job needs of the target, without loading the whole model.

Its version hash, its sizes, its token embedding and its output head (frozen, shared with the drafter); no other weights
are read. Shape legend: V target vocabulary, Vd draft vocabulary, E target hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.serving.drafters.network import DrafterModel, TargetHandles
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


class TargetTables:
    """What losses read of the target, frozen: float32 copies on one device, of the output head only what is asked for."""

    def __init__(self, embed: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """embed: (V, E) float32 token embedding. head: (V, E) output head, anywhere; None = tied to the embedding."""
        self.embed = embed
        self._head = embed if head is None else head
        self._rows = (torch.empty(0, dtype=torch.int64), torch.empty(0))

    @classmethod
    def of(cls, target: TargetHandles, device: torch.device) -> TargetTables:
        """The tables of a target on this device."""
        is_tied = target.head_weight is target.embed_weight
        embed = target.embed_weight.detach().to(device, torch.float32)
        return cls(embed, None if is_tied else target.head_weight.detach())

    @cached_property
    def _whole_head(self) -> torch.Tensor:
        return self._head.to(self.embed)

    def head_of(self, model: DrafterModel) -> torch.Tensor:
        """(Vd, E) weight of a drafter's output head: its own, or the target's rows of its draft vocabulary."""
        if model.lm_head is not None:
            return model.lm_head.weight
        if model.config.draft_vocab_size is None:
            return self._whole_head
        ids = model.get_buffer("draft_token_ids")
        if not torch.equal(self._rows[0], ids.cpu()):
            self._rows = ids.cpu(), self._head.index_select(0, ids.to(self._head.device)).to(self.embed)
        return self._rows[1]


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
            "or train on the CPU (--device cpu; of a service, trainer_resources.num_gpus 0)"
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
