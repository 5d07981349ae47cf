"""Engine runs: targets, drafters and engines in this process, and prompts run through one, timed by request group."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError, PacelineError
from paceline.paths import TEXT_DRAFTERS, resolve_drafter, resolve_model
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, RequestStats, RoundEvent, SamplingParams
from paceline.serving.target_model.model import TargetModel, default_tap_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What one request produced."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    """Per token: whether it was a draft token."""
    stats: RequestStats
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRun:
    """One group of requests that ran together."""

    outputs: tuple[Output, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.outputs)


def load_target(model: str, dtype: str = "auto", device: str = "cpu", *, drafters: Sequence[str] = ()) -> TargetModel:
    """Load 'bundled' or a local checkpoint, with the taps that these drafters read; raises ConfigError."""
    path = resolve_model(model)
    return TargetModel.load(path, dtype=dtype, device=device, tap_layers=_common_taps(path, drafters))


def target_facts(target: TargetModel) -> dict[str, Any]:
    """What a result says of the target that it measured."""
    return {
        "dtype": str(target.dtype), "version": target.version, "fast_path": target.is_fast_path,
        "has_rope_kernel": target.has_rope_kernel,
    }  # fmt: skip


def _common_taps(model: Path, drafters: Sequence[str]) -> tuple[int, ...] | None:
    """Target layers that all drafters read; None = the usual three, which drafters without weights also get."""
    from paceline.serving.loading.released import wanted_tap_layers

    folders = {name: resolve_drafter(name) for name in drafters}
    wanted = {name: wanted_tap_layers(folder) for name, folder in folders.items() if folder is not None}
    if len(set(wanted.values())) > 1:
        depth = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().num_hidden_layers
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

    path = resolve_drafter(name)
    if path is None:
        raise ConfigError(f"drafter must be a bundled drafter's name or a folder with weights, got {name!r}")
    return load_drafter(path, target)


def trained_domains(name: str) -> tuple[str, ...]:
    """Domains that a drafter was trained on, as its config says; () for drafters without weights."""
    path = resolve_drafter(name)
    if path is None:
        return ()
    return tuple(json.loads((path / "config.json").read_text()).get("domains") or ())


def build_engine(target: TargetModel, drafter: Drafter | None, config: EngineConfig, version: str = "bench") -> Engine:
    """An engine with one drafter; Group.PLAIN requests decode without it."""
    slots = DrafterSlots(drafter, version) if drafter is not None else DrafterSlots()
    engine = Engine(target, slots, config)
    engine.warm_up()  # the budget starts from measured verify costs
    return engine


def run_group(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    group: Group,
    bucket: str,
    tag: str,
) -> GroupRun:
    """Submit the prompts together, step the engine until all have finished, return outputs and seconds.

    Raises: PacelineError when a request ends in an error.
    """
    tokens: dict[str, list[int]] = {}
    accepted: dict[str, list[bool]] = {}
    last: dict[str, RoundEvent] = {}

    def on_event(event: RoundEvent) -> None:
        tokens[event.request_id].extend(event.token_ids)
        accepted[event.request_id].extend(i < event.num_accepted_tokens for i in range(len(event.token_ids)))
        last[event.request_id] = event

    began = time.perf_counter()
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        request_id = f"{tag}-{i}"
        tokens[request_id], accepted[request_id] = [], []
        request = GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=p, bucket=bucket, group=group)  # fmt: skip
        engine.submit(request, on_event)
    while engine.step():
        pass
    seconds = time.perf_counter() - began
    outputs = []
    for i, prompt in enumerate(prompts):
        event = last.get(f"{tag}-{i}")
        if event is None or event.finish_reason in (None, "error", "abort"):
            raise PacelineError(f"request {tag}-{i} did not finish: {event.error if event else 'no event'}")
        outputs.append(
            Output(
                prompt_token_ids=tuple(prompt),
                token_ids=tuple(tokens[f"{tag}-{i}"]),
                accepted=tuple(accepted[f"{tag}-{i}"]),
                stats=event.stats,
                finish_reason=str(event.finish_reason),
            )
        )
    return GroupRun(outputs=tuple(outputs), seconds=seconds)


def encode(target: TargetModel, text: str) -> list[int]:
    """Token ids of a raw prompt."""
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def greedy_or_sampled(temperature: float, max_tokens: int, seed: int) -> SamplingParams:
    """Sampling parameters of a benchmark request."""
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)


def set_threads(num_threads: int | None) -> None:
    """Set torch's threads for this process; None leaves them."""
    if num_threads:
        torch.set_num_threads(num_threads)
