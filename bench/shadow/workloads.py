"""Workloads of the shadow check: options, the gate's tree, and which prompts serve which use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

from paceline.adapt.online.trainer import ShadowConfig
from paceline.bench.common.engine_run import encode
from paceline.bench.common.workloads import load_prompts
from paceline.bench.shadow.decode import Workload
from paceline.config import TreeConfig
from paceline.errors import ConfigError
from paceline.records import DTYPES, DataFolder, JsonFile, Model, Setting, Threads, record, require
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.model import TargetModel

TRAIN_TEMPERATURES = (0.0, 0.8)


@record()
class ShadowCheckOptions:
    """Replay on logged texts, which decides what may serve, against real decoding, for several drafter versions: error of
    acceptance length with intervals.

    Exit code 1 if a paired error exceeds 2%.
    """

    num_versions: A[
        int, Setting("Drafter versions: the bundled one and trained ones.", flag="versions", ge=1)
    ] = 6  # fmt: skip
    buckets: A[tuple[str, ...], Setting("Comma list of traffic classes.", non_empty=True)] = (
        "tools", "code", "math", "facts",
    )  # fmt: skip
    temperatures: A[
        tuple[float, ...], Setting("Comma list of temperatures.", flag="temperature", ge=0, non_empty=True)
    ] = (0.0, 0.8)
    num_prompts: A[int, Setting("Requests per row.", ge=2)] = 24
    max_tokens: A[int, Setting("New tokens per request at most.", ge=3)] = 96
    num_train_prompts: A[
        int, Setting("Requests per bucket whose traces the versions learn from.", flag="train-prompts", ge=8)
    ] = 48
    num_adaptive_prompts: A[
        int,
        Setting(
            "Requests per row that are also decoded with the adaptive budget, for information; 0 = none.",
            flag="adaptive-prompts", ge=0,
        ),
    ] = 4  # fmt: skip
    batch: A[int, Setting("Requests decoded together.", ge=1)] = 8
    model: Model = "bundled"
    drafter: A[str, Setting("The first version: a bundled drafter's name, or a folder.")] = "bundled"
    dtype: A[
        str,
        Setting(
            "auto (as the service) | float32 (text does not depend on rounding) | bfloat16 | float16.", choices=DTYPES
        ),
    ] = "auto"
    num_threads: Threads = 1
    seed: A[int, Setting("Seed of prompts, sampling and training.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    work: A[
        Path | None, Setting("Folder that keeps traces, versions and rows; a second run goes on there.")
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        fits = self.num_adaptive_prompts <= self.num_prompts
        require(fits, f"adaptive-prompts must be in [0, num-prompts={self.num_prompts}]", self.num_adaptive_prompts)

    def settings(self, target: TargetModel) -> dict[str, Any]:
        """What the kept results of a work folder depend on, beyond version, bucket and temperature."""
        left_out = ("num_versions", "num_adaptive_prompts", "buckets", "temperatures", "num_threads", "work", "json")
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return {**values, "data": str(self.data or ""), "target_version": target.version, **tree_settings()}


def tree_settings() -> dict[str, int]:
    """The tree that the gate replays."""
    gate = ShadowConfig()
    return {"num_nodes": gate.num_nodes, "max_frontier": gate.max_frontier}


def fixed_tree() -> TreeConfig:
    """The engine's setting of that tree."""
    gate = ShadowConfig()
    return TreeConfig(max_draft_tokens=gate.num_nodes, max_frontier=gate.max_frontier, policy="fixed")


def make_workloads(options: ShadowCheckOptions, target: TargetModel, bucket: str) -> dict[str, Workload]:
    """Requests of one bucket by use, no prompt in two of them: 'train', and 'scored <T>', 'other <T>' per temperature.

    Raises: ConfigError when the bucket has too few prompts.
    """
    sizes = (options.num_prompts, options.num_prompts, options.num_train_prompts)
    texts = list(dict.fromkeys(p.text for p in load_prompts(bucket, options.data, sum(sizes), options.seed)))
    if len(texts) < sum(sizes):
        raise ConfigError(
            f"bucket {bucket!r} must have 2 x num_prompts + train_prompts = {sum(sizes)} different prompts, "
            f"got {len(texts)}; ask for fewer"
        )
    prompts = [tuple(encode(target, text)) for text in texts]
    scored, other, train = (prompts[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(3))

    def make(name: str, chosen: list[tuple[int, ...]], temperatures: Sequence[float], first_seed: int) -> Workload:
        params = tuple(
            SamplingParams(
                temperature=temperatures[i % len(temperatures)],
                max_tokens=options.max_tokens,
                seed=options.seed * 1_000_000 + first_seed + i,
            )
            for i in range(len(chosen))
        )
        return Workload(name=f"{bucket}-{name}", bucket=bucket, prompts=tuple(chosen), params=params)

    out = {"train": make("train", train, TRAIN_TEMPERATURES, 200_000)}
    for t in options.temperatures:
        out[f"scored {t:g}"] = make(f"scored-{t:g}", scored, (t,), 0)
        out[f"other {t:g}"] = make(f"other-{t:g}", other, (t,), 100_000)
    return out
