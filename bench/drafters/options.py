"""Options of the drafter benchmark, and its quick run."""

from __future__ import annotations

import dataclasses
from typing import Annotated as A
from typing import Any

from paceline.bench.drafters.arms import check_policies
from paceline.bench.drafters.workload_split import EMBEDDINGS
from paceline.bench.engine.run import CELLS, RANDOM, SIZE
from paceline.records import (
    DRAFTER_NAMES,
    DataFolder,
    Device,
    Dtype,
    HtmlFile,
    JsonFile,
    Model,
    Setting,
    Threads,
    record,
    require,
)

ALL = "all"
"""Stands for every bucket of the data, and random."""


@record()
class BenchOptions:
    """What to compare."""

    drafters: A[
        tuple[str, ...],
        Setting(f"Comma list of {', '.join(DRAFTER_NAMES)}, or folders.", panel=CELLS, non_empty=True),
    ] = ("lookup", "specblock")
    policies: A[
        tuple[str, ...],
        Setting(
            "Comma list: adaptive, bastion (each drafter at its own best), fixed, ddtree, bundle (equal budgets, see "
            "--nodes). docs/drafters.md.",
            panel=CELLS,
        ),
    ] = ("adaptive", "fixed")  # fmt: skip
    nodes: A[
        tuple[int, ...],
        Setting("Comma list: draft nodes of policies with a fixed budget, equal for every drafter.", panel=CELLS),
    ] = (8,)
    batches: A[
        tuple[int, ...],
        Setting("Comma list: requests that run together.", flag="batch", panel=CELLS, ge=1, le=1024, non_empty=True),
    ] = (1, 8)
    temperatures: A[
        tuple[float, ...], Setting("Comma list; 0 = greedy.", flag="temperature", panel=CELLS, ge=0, non_empty=True)
    ] = (0.0, 0.8, 1.0)
    buckets: A[
        tuple[str, ...],
        Setting(
            "Comma list of domains (tools, code, math, facts, or those found in --data), random, all, or ''.",
            panel=CELLS,
        ),
    ] = (ALL,)
    input_tokens: A[
        tuple[int, ...],
        Setting(
            "Comma list of input lengths: adds load buckets low-N, mixed-N, high-N, random-N.",
            flag="isl", panel=CELLS, ge=2,
        ),
    ] = ()  # fmt: skip
    num_prompts: A[int, Setting("Counted requests of a cell, at least.", panel=SIZE, ge=1)] = 24
    min_groups: A[int, Setting("Counted groups of a cell, at least.", flag="groups", panel=SIZE, ge=1)] = 4
    waves: A[int, Setting("Requests of a group over the batch; alone, a request is a group.", panel=SIZE, ge=1)] = 2
    warmup_groups: A[
        int, Setting("First groups of a cell that are not counted.", flag="warmup", panel=SIZE, ge=0)
    ] = 3  # fmt: skip
    max_tokens: A[int, Setting("New tokens per request at most.", panel=SIZE, ge=2)] = 128
    ignore_eos: A[bool, Setting("Always generate max-tokens.", panel=SIZE)] = False
    num_check: A[
        int,
        Setting(
            "Answers a cell and arm checked in fp32, besides those unlike plain's; 0 = compare only.",
            flag="check", panel=SIZE, ge=0,
        ),
    ] = 4  # fmt: skip
    embedding: A[
        str,
        Setting(
            "What unlike prompts are chosen by: tfidf, or hidden (states of the target).", choices=tuple(EMBEDDINGS)
        ),
    ] = "tfidf"
    baseline: A[
        str | None, Setting("'transformers' adds generate() and prompt lookup.", panel=CELLS, choices=("transformers",))
    ] = None
    model: Model = "bundled"
    dtype: Dtype = "auto"
    device: Device = "auto"
    num_threads: Threads = None
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    html: HtmlFile = None

    def __post_init__(self) -> None:
        require("none" not in self.drafters, "drafters must be drafters (plain always runs)", ",".join(self.drafters))
        check_policies(self.policies, self.nodes)
        has_cells = bool(self.buckets or self.input_tokens)
        require(has_cells, "buckets must name at least one bucket where there is no --isl", "")

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


@record()
class DraftersCommand:
    """Every drafter under every policy and plain decoding run the same prompts in turn, group by group: acceptance length,
    speedup over plain and drafting cost with 95% intervals. Exit code 1 where an answer is not the target's own. How to
    read it: docs/benchmarks.md.

    Example: paceline bench drafters --quick --drafters specblock,eagle3 --html drafters.html.
    """

    options: BenchOptions = dataclasses.field(default_factory=BenchOptions)
    is_quick: A[
        bool, Setting("About a minute: defaults become few prompts, greedy, tools and random.", flag="quick")
    ] = False

    def chosen(self) -> BenchOptions:
        """What is compared."""
        return quick(self.options) if self.is_quick else self.options
