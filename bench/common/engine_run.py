"""Engine parts: the targets, drafters and engines that a measurement runs in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.common.workloads import has_template
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS, resolve_drafter, resolve_model
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.checkpoint import open_checkpoint
from paceline.serving.loading.target import read_target
from paceline.serving.target_model.model import TargetModel, default_tap_layers


def load_target(model: str, dtype: str = "auto", device: str = "cpu", *, drafters: Sequence[str] = ()) -> TargetModel:
    """Load a model by name or path, with the taps that these drafters read; raises ConfigError."""
    path = resolve_model(model)
    return read_target(path, dtype=dtype, device=device, tap_layers=_common_taps(model, path, drafters))


def target_facts(target: TargetModel) -> dict[str, Any]:
    """What a result says of the target that it measured."""
    return {
        "dtype": "int8" if target.is_int8 else str(target.dtype), "version": target.version, "forward": target.forward_name,
    }  # fmt: skip


def _common_taps(model: str, path: Path, drafters: Sequence[str]) -> tuple[int, ...] | None:
    """Target layers that all drafters read; None = the usual three, which drafters without weights also get."""
    from paceline.serving.loading.released import wanted_tap_layers

    folders = {name: resolve_drafter(name, model) for name in drafters}
    wanted = {name: wanted_tap_layers(folder) for name, folder in folders.items() if folder is not None}
    if len(set(wanted.values())) > 1:
        depth = open_checkpoint(path).config().get_text_config().num_hidden_layers
        wanted = {name: taps or default_tap_layers(depth) for name, taps in wanted.items()}
    if len(set(wanted.values())) > 1:
        raise ConfigError(f"drafters must read the same target layers, got {wanted}; run them one after the other")
    return next(iter(wanted.values()), None)


def load_named_drafter(name: str, target: TargetModel) -> Drafter | None:
    """Return a drafter by name or folder; None for 'none'."""
    if name == "none":
        return None
    if name in TEXT_DRAFTERS:
        from paceline.serving.drafters.text import make_text_drafter

        return make_text_drafter(name)
    from paceline.serving.loading.families import load_drafter

    path = resolve_drafter(name, version=target.version)
    if path is None:
        raise ConfigError(f"drafter must be a bundled drafter's name or a folder with weights, got {name!r}")
    return load_drafter(path, target)


def trained_domains(name: str, model: str = "bundled") -> tuple[str, ...]:
    """Domains that a drafter was trained on, as its config says; () for drafters without weights."""
    path = resolve_drafter(name, model)
    if path is None:
        return ()
    return tuple(json.loads((path / "config.json").read_text()).get("domains") or ())


def build_engine(target: TargetModel, drafter: Drafter | None, config: EngineConfig, version: str = "bench") -> Engine:
    """An engine with one drafter, warmed up; Group.PLAIN requests decode without it."""
    slots = DrafterSlots(drafter, version) if drafter is not None else DrafterSlots()
    engine = Engine(target, slots, config)
    engine.warm_up()  # the budget starts from measured verify costs
    return engine


def encode(target: TargetModel, text: str) -> list[int]:
    """Token ids of a prompt, with the tokens that the tokenizer puts around a text where no chat template has written them."""
    return list(target.tokenizer(text, add_special_tokens=not has_template(target.tokenizer))["input_ids"])


def set_threads(num_threads: int | None) -> None:
    """Set torch's threads for this process; None leaves them."""
    if num_threads:
        torch.set_num_threads(num_threads)
