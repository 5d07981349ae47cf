"""Import: a released drafter taken over into our own layout, once and for all.

The result is a drafter folder like every other: it needs no release beside it, and says which target layers it reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated as A
from typing import Any

from paceline.adapt.families.target_handle import load_target_handle
from paceline.paths import open_folder, write_atomic
from paceline.records import MODELS, Setting, record
from paceline.serving.loading.families import build_model, save_drafter
from paceline.serving.loading.released import read_released


@record()
class ImportOptions:
    """Of the EAGLE-3, DFlash, JetSpec or SpecBlock layout. A released folder also works as --drafter directly."""

    folder: A[Path, Setting("Folder with config.json and model.safetensors or its shards.", is_argument=True)]
    target: A[str, Setting(f"The target it was trained for: {MODELS}")]
    out: A[Path, Setting("New folder for drafter.safetensors, config.json and PROVENANCE.md.")]
    taps: A[
        tuple[int, ...] | None,
        Setting("Comma list of target layers that it reads (0 = the first); default: as its config.json says.", ge=0),
    ] = None


def import_drafter(
    folder: str | Path, out: str | Path, target_dir: str | Path, *, tap_layers: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Write config.json, drafter.safetensors and PROVENANCE.md of a released drafter; returns the config.json mapping.

    Args:
        folder: the release, with config.json and model.safetensors or its shards.
        out: new or empty folder.
        target_dir: checkpoint folder of the target it was trained for.
        tap_layers: target layers that it reads, where its config.json says nothing or something else.
    Raises: DrafterMismatchError when it does not fit the target or cannot be expressed; ConfigError on unusable folders.
    """
    source = Path(folder).expanduser().resolve()
    with open_folder(out) as part:
        target = load_target_handle(target_dir)
        config, state = read_released(source, target, tap_layers)
        model = build_model(config, state)
        taps = config.get("tap_layers")
        save_drafter(part, model, target.version, tap_layers=taps)
        count = sum(p.numel() for p in model.parameters())
        write_atomic(
            part / "PROVENANCE.md",
            f"# Provenance of the drafter\n\nImported from the released files in the folder `{source.name}`; nothing was "
            f"trained. The licence is the release's.\n\nTarget: the folder `{Path(target_dir).resolve().name}`, version "
            f"`{target.version}`; that the release was trained for exactly this target cannot be seen in its files: sizes, "
            "vocabulary and copied tensors were compared. It reads the outputs of target layers "
            f"{taps}. {count:,} parameters."
            f"\n\n## Architecture\n\n```json\n{json.dumps(config, indent=1)}\n```\n",
        )
    return config
