"""Options of the drafter benchmark, and its quick run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.drafters.arms import check_policies
from paceline.bench.drafters.workload_split import EMBEDDINGS
from paceline.bench.engine.run import RANDOM
from paceline.errors import ConfigError

ALL = "all"
"""Stands for every bucket of the data, and random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to compare; see `paceline bench drafters --help`."""

    drafters: tuple[str, ...] = ("lookup", "specblock")
    policies: tuple[str, ...] = ("adaptive", "fixed")
    nodes: tuple[int, ...] = (8,)
    """Budgets of policies with a fixed one: draft nodes per request and round, the same for every drafter."""
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    buckets: tuple[str, ...] = (ALL,)
    input_tokens: tuple[int, ...] = ()
    """Input lengths of the load buckets; () = no load buckets."""
    num_prompts: int = 24
    """Least counted requests of a cell."""
    min_groups: int = 4
    waves: int = 2
    warmup_groups: int = 3
    max_tokens: int = 128
    ignore_eos: bool = False
    num_check: int = 4
    """Answers of a cell and arm that are checked against the fp32 target, besides those that differ from plain."""
    embedding: str = "tfidf"
    model: str = "bundled"
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    baseline: str | None = None
    """'transformers' adds generate() and its prompt lookup decoding."""
    seed: int = 0
    data: Path | None = None
    json: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        if not self.drafters or "none" in self.drafters:
            raise ConfigError(f"drafters must be drafters (plain always runs), got {','.join(self.drafters)!r}")
        check_policies(self.policies, self.nodes)
        if not self.batches or min(self.batches) < 1 or max(self.batches) > 1024:
            raise ConfigError(f"batch must be a comma list of sizes in [1, 1024], got {self.batches}")
        if not self.temperatures or not all(0 <= t < math.inf for t in self.temperatures):
            raise ConfigError(f"temperature must be a comma list of numbers >= 0, got {self.temperatures}")
        if not self.buckets and not self.input_tokens:
            raise ConfigError("buckets must name at least one bucket where there is no --isl, got none")
        if any(n < 2 for n in self.input_tokens):
            raise ConfigError(f"isl must be a comma list of lengths >= 2, got {self.input_tokens}")
        if self.embedding not in EMBEDDINGS:
            raise ConfigError(f"embedding must be one of {', '.join(EMBEDDINGS)}, got {self.embedding!r}")
        if self.baseline not in (None, "transformers"):
            raise ConfigError(f"baseline must be 'transformers', got {self.baseline!r}")
        least = {
            "num-prompts": (self.num_prompts, 1), "groups": (self.min_groups, 1), "waves": (self.waves, 1),
            "warmup": (self.warmup_groups, 0), "max-tokens": (self.max_tokens, 2), "check": (self.num_check, 0),
            "seed": (self.seed, 0),
        }  # fmt: skip
        for name, (value, limit) in least.items():
            if value < limit:
                raise ConfigError(f"{name} must be >= {limit}, got {value}")

    def group_size(self, batch: int) -> int:
        """Requests of a group; alone, a request is a group."""
        return batch if batch == 1 else batch * self.waves

    def num_counted(self, batch: int) -> int:
        """Counted requests of a cell."""
        size = self.group_size(batch)
        return max(self.min_groups, -(-self.num_prompts // size)) * size


def quick(options: BenchOptions) -> BenchOptions:
    """A run of about a minute on the same code path, too short for conclusions; only options left at defaults change."""
    small: dict[str, Any] = {
        "temperatures": (0.0,), "buckets": ("tools", RANDOM) if options.data is None else options.buckets,
        "num_prompts": 4, "min_groups": 2, "waves": 1, "warmup_groups": 1, "max_tokens": 48, "num_check": 1,
    }  # fmt: skip
    default = BenchOptions()
    return dataclasses.replace(
        options, **{k: v for k, v in small.items() if getattr(options, k) == getattr(default, k)}
    )
