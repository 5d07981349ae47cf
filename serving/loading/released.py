"""Released layouts: the forms in which drafters are published, and their reading as config.json and weights of ours.

A release is recognised by its tensors: configs disagree about names, networks do not. Every family's folder has a
`released.py` that converts; this module is the only place that knows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError, DrafterMismatchError
from paceline.serving.drafters.network import DrafterConfig, TargetHandles
from paceline.serving.drafters.released_fields import read_released_config, read_released_tensors
from paceline.serving.eagle3.model import EagleModel
from paceline.serving.eagle3.released import convert_eagle3, eagle3_tap_layers
from paceline.serving.parallel_head.model import ParallelHeadConfig
from paceline.serving.parallel_head.released import convert_parallel_head, parallel_head_tap_layers
from paceline.serving.specblock.model import SpecBlockModel
from paceline.serving.specblock.released import convert_specblock
from paceline.serving.target_model.model import default_tap_layers

Convert = Callable[
    [Mapping[str, Any], dict[str, torch.Tensor], TargetHandles], tuple[DrafterConfig, dict[str, torch.Tensor]]
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedLayout:
    """One way in which drafters are published."""

    name: str
    """As people call it."""
    drafter_type: str
    """Ours that computes the same; a parallel head's settings tell which of its two it is."""
    signature: frozenset[str]
    """Tensors that only this layout holds together."""
    convert: Convert
    tap_layers: Callable[[Mapping[str, Any]], tuple[int, ...] | None]
    """Target layers that a config.json asks for; None: the usual three."""


LAYOUTS = (
    ReleasedLayout(
        name="SpecBlock",
        drafter_type=SpecBlockModel.drafter_type,
        signature=frozenset({"input_layer.condition_proj.weight", "input_layer.fuse.weight"}),
        convert=convert_specblock,
        tap_layers=lambda values: None,
    ),
    ReleasedLayout(
        name="EAGLE-3",
        drafter_type=EagleModel.drafter_type,
        signature=frozenset({"fc.weight", "layers.0.hidden_norm.weight"}),
        convert=convert_eagle3,
        tap_layers=eagle3_tap_layers,
    ),
    ReleasedLayout(
        name="DFlash or JetSpec",
        drafter_type="dflash",
        signature=frozenset({"fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_norm.weight"}),
        convert=convert_parallel_head,
        tap_layers=parallel_head_tap_layers,
    ),
)


def is_released(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is a release's; ours say their `drafter_type`."""
    return "drafter_type" not in values


def find_layout(names: set[str]) -> ReleasedLayout:
    """The layout with these tensors. Raises: DrafterMismatchError, naming the known ones."""
    for layout in LAYOUTS:
        if layout.signature <= names:
            return layout
    hint = "; it looks like EAGLE-1 or EAGLE-2, which are other networks" if "fc.weight" in names else ""
    raise DrafterMismatchError(
        f"released drafter must have the layout of {', '.join(x.name for x in LAYOUTS)}, got tensors "
        f"{', '.join(sorted(names)[:4])}{hint}"
    )


def read_released(
    folder: str | Path, target: TargetHandles, tap_layers: tuple[int, ...] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read a release for this target: (our config.json mapping, our weights in float32).

    The mapping says `tap_layers`, the target layers whose outputs the drafter reads, where they are known. That a release
    was trained for exactly this target cannot be seen in its files: sizes, vocabulary and copied tensors are compared.

    Args:
        tap_layers: what the target must tap, where the release says nothing or something else.
    Raises: DrafterMismatchError, naming what does not fit the target or cannot be expressed.
    """
    values = read_released_config(folder)
    if not is_released(values):
        raise DrafterMismatchError(f"{folder} holds a drafter of Paceline's own already; name it as the drafter")
    tensors = read_released_tensors(folder)
    layout = find_layout(set(tensors))
    try:
        config, state = layout.convert(values, tensors, target)
    except ConfigError as e:
        raise DrafterMismatchError(f"released drafter has settings that Paceline cannot serve: {e}") from e
    taps = _tap_layers(tap_layers or layout.tap_layers(values), target)
    num_taps = config.feature_size // int(target.embed_weight.shape[1])
    if taps is not None and len(taps) != num_taps:
        raise DrafterMismatchError(
            f"released drafter fuses {num_taps} target layers, tap_layers are {taps}; import it with --taps, as many"
        )
    name = config.drafter_type if isinstance(config, ParallelHeadConfig) else layout.drafter_type
    known = {} if taps is None else {"tap_layers": list(taps)}
    return {"drafter_type": name, "target_version": target.version, **config.to_dict(), **known}, state


def wanted_tap_layers(folder: str | Path) -> tuple[int, ...] | None:
    """Target layers that a drafter's folder asks for, from its config.json alone; None: the usual three.

    Raises: DrafterMismatchError when config.json is not readable.
    """
    values = read_released_config(folder)
    if not is_released(values):
        own = values.get("tap_layers")
        return None if own is None else tuple(int(i) for i in own)
    if "dflash_config" in values or "block_size" in values:  # `speculators` writes the latter
        return parallel_head_tap_layers(values)
    return eagle3_tap_layers(values)


def _tap_layers(taps: tuple[int, ...] | None, target: TargetHandles) -> tuple[int, ...] | None:
    depth = getattr(target, "num_layers", None)
    if taps is None:
        return None if depth is None else default_tap_layers(depth)
    if min(taps) < 0 or (depth is not None and max(taps) >= depth):
        raise DrafterMismatchError(
            f"released drafter reads target layers {taps}, the target has layers 0..{(depth or 1) - 1}; load it with the "
            "target it was trained for, or name the layers with --taps"
        )
    return taps
