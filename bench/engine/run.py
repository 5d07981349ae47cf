"""Does speculation ever cost speed, and how fast is the engine? Arms alternate group by group in one process."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated as A
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads, target_facts
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.arms import Arm, EngineArm, TransformersArm, new_engine
from paceline.bench.engine.cells import PLAIN, SPECULATIVE, cell_row, crossovers, overall_verdict
from paceline.bench.engine.groups import make_groups, random_prompts, run_alternating
from paceline.bench.engine.lossless_row import lossless_row
from paceline.bench.engine.shapes import SHAPES, ShapesOptions
from paceline.bench.engine.table import cells_table, print_summary, rounds_table
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import resolve_model
from paceline.records import DRAFTERS, DataFolder, Device, Dtype, JsonFile, Model, Setting, Threads, record, require
from paceline.serving.target_model.model import TargetModel

GENERATE, LOOKUP = "transformers", "transformers_lookup"
ARMS = (PLAIN, SPECULATIVE, GENERATE, LOOKUP)
RANDOM = "random"
"""Bucket of random token ids: an upper or lower bound that real text never reaches, shown next to real text."""
RANDOM_PROMPT_TOKENS = 24
CELLS, SIZE = "Cells", "Size of a cell"
"""Headings of options in --help."""


@record()
class EngineBenchOptions:
    """What to measure."""

    batches: A[
        tuple[int, ...],
        Setting("Comma list: requests that run together.", flag="batch", panel=CELLS, ge=1, le=1024, non_empty=True),
    ] = (1, 4, 16, 64)
    temperatures: A[
        tuple[float, ...],
        Setting(
            "Comma list; 0 = greedy, and is checked to be lossless.",
            flag="temperature",
            panel=CELLS,
            ge=0,
            non_empty=True,
        ),
    ] = (0.0, 0.8)
    buckets: A[
        tuple[str, ...],
        Setting(
            "Comma list of tools, code (the drafter knows them), math, facts (it does not), random (token ids).",
            panel=CELLS, non_empty=True,
        ),
    ] = ("tools", "code")  # fmt: skip
    arms: A[
        tuple[str, ...],
        Setting(
            "plain and any of speculative, transformers, transformers_lookup (only at batch 1).",
            panel=CELLS,
            choices=ARMS,
        ),
    ] = ARMS
    num_prompts: A[
        int, Setting("Counted requests of a cell, at least.", flag="prompts", panel=SIZE, ge=1)
    ] = 24  # fmt: skip
    min_groups: A[
        int,
        Setting(
            "Counted groups of a cell, at least: more of them, narrower intervals.", flag="groups", panel=SIZE, ge=1
        ),
    ] = 6
    warmup_groups: A[
        int,
        Setting(
            "First groups of a cell that are not counted: the budget controller learns, caches and pages are touched.",
            flag="warmup", panel=SIZE, ge=0,
        ),
    ] = 3  # fmt: skip
    waves: A[
        int,
        Setting(
            "Requests of a group over the batch: one that ends is followed by the next, so long as any.",
            panel=SIZE,
            ge=1,
        ),
    ] = 3
    max_tokens: A[int, Setting("New tokens per request at most.", panel=SIZE, ge=2)] = 128
    ignore_eos: A[
        bool, Setting("Always generate max-tokens: more rounds at full batch, less real text.", panel=SIZE)
    ] = False
    num_check: A[
        int, Setting("Greedy answers a cell checked in fp32; 0 = only compare engines.", flag="check", panel=SIZE, ge=0)
    ] = 8
    prefill_chunk_tokens: A[int, Setting("Prompt rows that a round may prefill.", flag="prefill-chunk", ge=1)] = 256
    model: Model = "bundled"
    drafter: A[str, Setting(f"{DRAFTERS}.")] = "specblock"
    dtype: Dtype = "auto"
    device: Device = "auto"
    num_threads: Threads = None
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None

    def __post_init__(self) -> None:
        given = ",".join(self.arms)
        is_comparing = PLAIN in self.arms and len(set(self.arms)) > 1
        require(is_comparing, f"arms must be 'plain' and at least one more of {', '.join(ARMS[1:])}", given)
        known = (*BUNDLED_BUCKETS, RANDOM)
        are_known = self.data is not None or all(b in known for b in self.buckets)
        require(are_known, f"buckets must be among {', '.join(known)}, or domains of --data", ",".join(self.buckets))

    def num_groups(self, batch: int) -> int:
        """Counted groups of a cell."""
        return max(self.min_groups, -(-self.num_prompts // self.group_size(batch)))

    def group_size(self, batch: int) -> int:
        """Requests of a group; alone, a request is a group."""
        return batch if batch == 1 else batch * self.waves


def quick(options: EngineBenchOptions) -> EngineBenchOptions:
    """A run of about a minute on the same code path: too short for conclusions, long enough to see that it works.

    Only options that were left at their defaults change.
    """
    small: dict[str, Any] = {
        "batches": (1, 8), "temperatures": (0.0,), "buckets": options.buckets[:1], "num_prompts": 4, "min_groups": 4,
        "warmup_groups": 2, "max_tokens": 64, "num_check": 2,
    }  # fmt: skip
    default = EngineBenchOptions()
    return dataclasses.replace(
        options, **{k: v for k, v in small.items() if getattr(options, k) == getattr(default, k)}
    )


@record()
class EngineCommand:
    """Plain engine, speculative engine and transformers run the same prompts in turn, group by group; every ratio has a 95%
    interval. Exit code 1 where speculation is surely slower than 0.98x plain, or a greedy answer is not the target's own.
    How to read it: docs/benchmarks.md.

    Example: paceline bench engine --quick --json engine.json.
    """

    options: EngineBenchOptions = field(default_factory=EngineBenchOptions)
    is_quick: A[
        bool, Setting("About a minute: defaults become batch 1 and 8, greedy, few prompts.", flag="quick")
    ] = False  # fmt: skip
    shapes: A[
        tuple[str, ...] | None,
        Setting(
            f"Instead: rounds of random-weight models, comma list of {', '.join(SHAPES)}, against the memory floor. Needs a "
            "GPU.",
            choices=tuple(SHAPES), non_empty=True,
        ),
    ] = None  # fmt: skip
    is_scaled_down: A[
        bool, Setting("With --shapes: small layers, so that a CPU can run it; labelled so.", flag="scale-down")
    ] = False

    def chosen(self) -> EngineBenchOptions:
        """What is measured without --shapes."""
        return quick(self.options) if self.is_quick else self.options

    def shapes_options(self) -> ShapesOptions:
        """What is measured with --shapes."""
        assert self.shapes is not None
        given = self.options
        return ShapesOptions(
            shapes=self.shapes, batches=given.batches, is_scaled_down=self.is_scaled_down, is_quick=self.is_quick,
            device=given.device, num_threads=given.num_threads, seed=given.seed, json=given.json,
        )  # fmt: skip


def run_engine_bench(options: EngineBenchOptions, console: Console) -> dict[str, Any]:
    """Measure every (bucket, batch, temperature) cell; prints tables, returns (and keeps on disk) the document.

    Raises: ConfigError (unknown model, drafter, bucket; no CUDA device), PacelineError (a request failed).
    """
    set_threads(options.num_threads)
    device = pick_device(options.device)
    result = ResultFile(options.json, command="bench engine", options=options, extra={"device": device, "cells": []})
    target = load_target(options.model, options.dtype, device, drafters=[options.drafter])
    prompts = {b: _prompts(options, b, target) for b in options.buckets}
    arms = _arms(options, target, device, longest=max(len(p) for ps in prompts.values() for p in ps))
    checker = None
    if 0.0 in options.temperatures and options.num_check:
        checker = LosslessChecker(resolve_model(options.model))
    result.update(target=target_facts(target))
    keys = [(b, n, t) for b in options.buckets for n in sorted(set(options.batches)) for t in options.temperatures]
    cells: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        total = sum(options.num_groups(n) + options.warmup_groups for _, n, _ in keys)
        task = bar.add_task("groups", total=total)
        for bucket, batch, temperature in keys:
            bar.update(task, description=f"{bucket} batch {batch} T={temperature:g}")
            groups = make_groups(
                prompts[bucket][: (options.warmup_groups + options.num_groups(batch)) * options.group_size(batch)],
                bucket=bucket, batch=batch, group_size=options.group_size(batch), temperature=temperature,
                max_tokens=options.max_tokens, seed=options.seed, ignore_eos=options.ignore_eos,
            )  # fmt: skip
            usable = [a for a in arms if a.supports(batch)]
            timings = run_alternating(
                usable, groups, num_warmup=options.warmup_groups, on_group=lambda: bar.advance(task)
            )
            row = cell_row(bucket, batch, temperature, timings)
            if temperature == 0:
                counted = groups[options.warmup_groups :]
                row["lossless"] = lossless_row(counted, timings, checker, options.num_check)
            row["memory"] = _memory(arms, device)
            cells.append(row)
            result.update(cells=cells)
    document = result.close(crossovers=crossovers(cells), summary=overall_verdict(cells))
    console.print(cells_table(cells))
    console.print(rounds_table(cells))
    print_summary(document, console)
    return document


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda needs a GPU that torch can use; use --device cpu")
    return name


def _prompts(options: EngineBenchOptions, bucket: str, target: TargetModel) -> list[tuple[int, ...]]:
    """Prompts for the largest cell of a bucket; smaller cells take the first ones."""
    count = max((options.num_groups(n) + options.warmup_groups) * options.group_size(n) for n in options.batches)
    if bucket != RANDOM:
        return [tuple(encode(target, p.text)) for p in load_prompts(bucket, options.data, count, options.seed)]
    return random_prompts(target, count, RANDOM_PROMPT_TOKENS, options.seed)


def _arms(options: EngineBenchOptions, target: TargetModel, device: str, *, longest: int) -> list[Arm]:
    batch = max(options.batches)
    context = longest + options.max_tokens
    if context > target.context_tokens:
        raise ConfigError(
            f"max-tokens must be at most {target.context_tokens - longest} for prompts of up to {longest} tokens in this "
            f"model's context of {target.context_tokens}, got {options.max_tokens}"
        )
    # Every engine holds all requests of the largest batch at once; the prefix cache is off, or a prompt's second run,
    # in the next cell, would skip its prefill.
    config = EngineConfig(
        max_running=batch, max_waiting=max(256, batch), prefill_chunk_tokens=options.prefill_chunk_tokens,
        prefix_caching=False,
    )  # fmt: skip
    pages = -(-(context + config.tree.max_draft_tokens + 1) // config.page_tokens)
    num_tokens = (batch + 1) * pages * config.page_tokens
    out: list[Arm] = [EngineArm(PLAIN, new_engine(target, None, version=PLAIN, num_tokens=num_tokens, config=config), Group.PLAIN)]  # fmt: skip
    if SPECULATIVE in options.arms:
        drafter = load_named_drafter(options.drafter, target)
        if drafter is None:
            raise ConfigError(
                f"drafter must be 'bundled', another drafter's name or a folder with weights for the arm {SPECULATIVE!r}, got "
                f"'none'; or leave that arm out"
            )
        engine = new_engine(target, drafter, version=options.drafter, num_tokens=num_tokens, config=config)
        out.append(EngineArm(SPECULATIVE, engine, Group.ADAPTIVE))
    if GENERATE in options.arms or LOOKUP in options.arms:
        from paceline.bench.engine.transformers_baseline import TransformersBaseline

        pad = target.tokenizer.pad_token_id or 0
        model = TransformersBaseline(str(resolve_model(options.model)), target.dtype, pad, device)
        out += [TransformersArm(n, model, lookup=n == LOOKUP) for n in (GENERATE, LOOKUP) if n in options.arms]
    return out


def _memory(arms: Sequence[Arm], device: str) -> dict[str, Any]:
    """Bytes now and at most so far, of the whole process (all arms together), and of each engine's pool."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB except on macOS
    return {
        "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "kv_bytes": {a.name: a.engine.config.kv_bytes for a in arms if isinstance(a, EngineArm)},
        "peak_cuda_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
