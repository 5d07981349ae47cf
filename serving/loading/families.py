"""Registry of drafter families, and the drafters that folders and manifests hold.

The table is the only place that knows all families: a new one adds its folder and one line here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from paceline.errors import ConfigError, DrafterMismatchError
from paceline.paths import write_atomic
from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.network import DrafterModel, TargetHandles, check_state
from paceline.serving.eagle3 import drafter as eagle_drafter
from paceline.serving.loading.released import is_released, read_released
from paceline.serving.parallel_head import drafter as parallel_head_drafter
from paceline.serving.specblock import drafter as specblock_drafter
from paceline.serving.target_model.int8 import fits_version

FAMILIES: dict[str, DrafterFamily] = {
    f.name: f
    for f in (
        specblock_drafter.FAMILY,
        eagle_drafter.FAMILY,
        parallel_head_drafter.JETSPEC,
        parallel_head_drafter.DFLASH,
    )
}
WEIGHTS_FILE, CONFIG_FILE = "drafter.safetensors", "config.json"


def drafter_family(name: object) -> DrafterFamily:
    """The family of a `drafter_type`. Raises: DrafterMismatchError, naming the known ones."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise DrafterMismatchError(f"drafter_type must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def build_model(config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> DrafterModel:
    """The network of a config.json mapping (with its `drafter_type`) and weights, in float32 on the CPU.

    Raises: DrafterMismatchError when the settings are not allowed or the weights do not fit them.
    """
    family = drafter_family(config.get("drafter_type"))
    try:
        model = family.model(family.config.from_dict(config))
    except ConfigError as e:
        raise DrafterMismatchError(str(e)) from e
    check_state(state, {name: tuple(t.shape) for name, t in model.state_dict().items()}, model.config.vocab_size)
    model.load_state_dict(dict(state))
    return model


def build_drafter(
    config: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    target: TargetHandles,
    *,
    version: str = "",
    target_version: str | None = None,
    dtype: torch.dtype | None = None,
    num_candidates: int = 8,
) -> TrainedDrafter:
    """Make a drafter from a config.json mapping and weights, refusing anything that does not fit `target`.

    `target_version`: what the weights were trained for; None takes it from the config (an absent one is refused).
    dtype None: as the family serves on the target's device.
    Raises: DrafterMismatchError.
    """
    family, trained_for = drafter_family(config.get("drafter_type")), target_version or config.get("target_version")
    if not fits_version(trained_for, target.version):
        raise DrafterMismatchError(f"drafter was trained for target {trained_for!r}, not for {target.version!r}")
    _check_taps(config.get("tap_layers"), target)
    model = build_model(config, state)
    settings = model.config
    if (settings.vocab_size, settings.feature_size) != (target.vocab_size, target.feature_size):
        raise DrafterMismatchError(
            f"drafter expects vocabulary {settings.vocab_size} and features {settings.feature_size}, "
            f"the target has {target.vocab_size} and {target.feature_size}"
        )
    return family.drafter.make(model, target, dtype=dtype, num_candidates=num_candidates, version=version)


def load_drafter(path: str | Path, target: TargetHandles, **options: Any) -> TrainedDrafter:
    """Load the drafter in a folder, ours or a release's, for this target; options are build_drafter's.

    Raises: DrafterMismatchError on another target, another shape, non-finite or unreadable weights, and on a release that
        our networks cannot express.
    """
    config, state = read_drafter_files(path, target)
    return build_drafter(config, state, target, **options)


def read_drafter_files(
    path: str | Path, target: TargetHandles | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (config.json, weights) of a drafter folder; with a target also of a released one, as ours.

    Raises: DrafterMismatchError when they are unreadable, and when a release does not fit the target.
    """
    folder = Path(path)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if not (folder / WEIGHTS_FILE).is_file() and isinstance(config, dict) and is_released(config):
            if target is not None:
                return read_released(folder, target)
            raise DrafterMismatchError(
                f"{folder} holds a released drafter; import it first: paceline import-drafter FOLDER --out DIR --target DIR"
            )
        return config, load_file(folder / WEIGHTS_FILE)
    except DrafterMismatchError:
        raise
    except (OSError, ValueError, SafetensorError) as e:
        raise DrafterMismatchError(f"drafter folder {folder} must hold {CONFIG_FILE} and {WEIGHTS_FILE}: {e}") from e


def save_drafter(
    path: str | Path,
    model: DrafterModel,
    target_version: str,
    *,
    tap_layers: Sequence[int] | None = None,
    matrix_dtype: torch.dtype = torch.float32,
) -> None:
    """Write config.json and drafter.safetensors, each whole or not at all.

    tap_layers: target layers that the drafter reads, where they are not the usual three or must be told. matrix_dtype: of
        linear layers' weights; norms, calibrations and corrections stay float32.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    values = {"drafter_type": model.drafter_type, "target_version": target_version, **model.config.to_dict()}
    values |= {} if tap_layers is None else {"tap_layers": list(tap_layers)}
    write_atomic(folder / CONFIG_FILE, json.dumps(values, indent=1) + "\n")
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    kept = {
        k: v.to(matrix_dtype if v.dim() == 2 and k.endswith("weight") else torch.float32)
        if v.is_floating_point()
        else v
        for k, v in state.items()
    }
    write_atomic(folder / WEIGHTS_FILE, save(kept))


def _check_taps(wanted: Sequence[int] | None, target: TargetHandles) -> None:
    loaded = getattr(target, "tap_layers", None)  # not every holder of a target's tensors ran it
    if wanted is not None and loaded is not None and tuple(wanted) != tuple(loaded):
        raise DrafterMismatchError(
            f"drafter reads target layers {tuple(wanted)}, the target was loaded with tap_layers {tuple(loaded)}; load it "
            f"with tap_layers={tuple(wanted)}"
        )
