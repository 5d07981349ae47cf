"""What does the shadow check compare: options, the gate's tree, and which prompts serve which use?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.adapt.online.trainer import ShadowConfig
from paceline.bench.common.engine_run import encode
from paceline.bench.common.workloads import load_prompts
from paceline.bench.shadow.decode import Workload
from paceline.config import TreeConfig
from paceline.errors import ConfigError
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.model import TargetModel

TRAIN_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowCheckOptions:
    """What to compare; see `paceline bench shadow --help`."""

    num_versions: int = 6
    buckets: tuple[str, ...] = ("tools", "code", "math", "facts")
    temperatures: tuple[float, ...] = (0.0, 0.8)
    num_prompts: int = 24
    max_tokens: int = 96
    num_train_prompts: int = 48
    num_adaptive_prompts: int = 4
    """Requests per row that are decoded with the adaptive budget too; 0 = none."""
    batch: int = 8
    model: str = "bundled"
    drafter: str = "bundled"
    dtype: str = "auto"
    num_threads: int | None = 1
    seed: int = 0
    data: Path | None = None
    work: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if not self.buckets or not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError("buckets and temperatures must not be empty, temperatures must be >= 0")
        if self.num_prompts < 2 or self.max_tokens < 3 or self.num_train_prompts < 8 or self.batch < 1:
            raise ConfigError(
                "num_prompts must be >= 2, max_tokens >= 3, train_prompts >= 8 and batch >= 1, got "
                f"{self.num_prompts}, {self.max_tokens}, {self.num_train_prompts}, {self.batch}"
            )
        if not 0 <= self.num_adaptive_prompts <= self.num_prompts:
            raise ConfigError(f"adaptive_prompts must be in [0, {self.num_prompts}], got {self.num_adaptive_prompts}")

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
