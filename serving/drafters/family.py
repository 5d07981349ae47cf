"""What does one kind of drafter have to say so that its weights can be built, checked, saved and served?

A family is the code behind a `drafter_type`: its settings, its network and its drafter. `drafter_families.py` holds the
table of all of them. Shape legend: V target vocabulary, Dm target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter


class TargetHandles(Protocol):
    """What a drafter needs to know of its target."""

    @property
    def version(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def device(self) -> torch.device | str: ...

    @property
    def embed_weight(self) -> torch.Tensor: ...

    @property
    def head_weight(self) -> torch.Tensor: ...


class DrafterSettings(Protocol):
    """What every family's configuration tells; the rest of config.json is the family's own."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def feature_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...


class DrafterModel(nn.Module):
    """All trainable parameters of a drafter. Nothing of the target is stored in it."""

    drafter_type: str
    """The family's name, as in config.json."""
    config: DrafterSettings


class TrainedDrafter(Drafter, Protocol):
    """A drafter with weights, which can be replaced in place."""

    version: str

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. Raises: DrafterMismatchError when they do not fit; nothing is changed then."""


class MakeDrafter(Protocol):
    """Makes the serving form of a model; None for a number type = as it is served on the target's device."""

    def __call__(
        self,
        model: Any,
        target: TargetHandles,
        *,
        dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        num_candidates: int = 8,
        version: str = "",
    ) -> TrainedDrafter: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterFamily:
    """One kind of drafter."""

    name: str
    """`drafter_type` in config.json and in manifests."""
    read_config: Callable[[Mapping[str, Any]], DrafterSettings]
    """Settings from a config.json mapping, foreign keys ignored; raises ConfigError."""
    make_model: Callable[[Any], DrafterModel]
    """A model with random weights from its settings."""
    make_drafter: MakeDrafter


def serving_dtype(device: torch.device | str) -> torch.dtype:
    """A drafter's number type: float32 on the CPU, where drafting cost is operators, and bfloat16 elsewhere."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def check_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DrafterMismatchError unless `state` has exactly these tensors, all finite."""
    missing, surplus = sorted(set(shapes) - set(state)), sorted(set(state) - set(shapes))
    if missing or surplus:
        raise DrafterMismatchError(f"drafter weights must match their config: missing {missing}, surplus {surplus}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise DrafterMismatchError(f"drafter tensor {name} must be {shapes[name]}, got {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DrafterMismatchError(f"drafter tensor {name} must be finite")
