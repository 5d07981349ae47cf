"""Versions in a registry, and the folder that an SGLang is started with."""

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.adapt.families.target_handle import load_target_handle
from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.paths import REGISTRY, bundled, service_home
from paceline.serving.loading.families import build_model, read_drafter_files, save_drafter
from paceline.serving.loading.released import wanted_tap_layers


def without_edges(name: str, out: Path) -> Path:
    """A folder with a bundled parallel head less its edge correction, for which engines of others have no tensors."""
    config, state = read_drafter_files(bundled(name))
    kept = {k: v for k, v in state.items() if not k.startswith("edge_")}
    save_drafter(out, build_model({**config, "edge_rank": 0}, kept), config["target_version"])
    return out


@dataclass(kw_only=True)
class Drafters:
    """Drafters of the bundled target: `first`, which SGLang was started with, `other` of the same network, and a broken one."""

    registry: str
    home: Path
    target: Path
    target_version: str
    served: Path
    """Folder of the first one, as exported."""
    first: str
    other: str
    broken: str
    """With a value that is finite in float32 alone."""


def make_drafters(root: Path, service: str) -> Drafters:
    """They are the bundled EAGLE-3, as the registry of a service with the data folder `root` has them."""
    home = service_home(root, service)
    target = load_target_handle(bundled("target"), tap_layers=wanted_tap_layers(bundled("eagle3")))
    settings, state = read_drafter_files(bundled("eagle3"), target)
    registry = DrafterRegistry(home / REGISTRY)
    about = {"drafter_type": settings["drafter_type"], "config": settings, "target_version": target.version}
    head = state["lm_head.weight"]
    bad = head.to(torch.float32, copy=True)
    bad[0, 0] = 3.4e38
    first, other, broken = (
        registry.put({**state, "lm_head.weight": rows}, **about).version for rows in (head, torch.roll(head, 7, 0), bad)
    )
    served = root / "served"
    export_drafter(ExportDrafterOptions(version=first, format="sglang", out=served, data_dir=root))
    return Drafters(
        registry=str(home / REGISTRY), home=home, target=bundled("target"), target_version=target.version, served=served, first=first,
        other=other, broken=broken,
    )  # fmt: skip
