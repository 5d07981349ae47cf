"""Engine benchmark: the engine's speed, and what speculation costs or gains, arms alternating group by group in one process."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Annotated as A
from typing import Any, TypeVar

import psutil
import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads, target_facts
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine import llamacpp
from paceline.bench.engine.arms import (
    GENERATE,
    LOOKUP,
    Arm,
    BenchGroup,
    EngineArm,
    GroupTiming,
    make_groups,
    new_engine,
    random_prompts,
    run_alternating,
    transformers_arms,
)
from paceline.bench.engine.cells import FLOOR, PLAIN, SPECULATIVE, cell_row, crossovers, lossless_row, overall_verdict
from paceline.bench.engine.shapes import SHAPES, ShapesOptions, run_shapes
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import resolve_model
from paceline.records import (
    DRAFTERS,
    DataFolder,
    Device,
    Dtype,
    JsonFile,
    Model,
    Setting,
    Threads,
    changed,
    record,
    require,
    settings,
)
from paceline.serving.loading.target import pick_device
from paceline.serving.target_model.model import TargetModel

DEFAULT_ARMS = (PLAIN, SPECULATIVE, GENERATE, LOOKUP)
LLAMACPP_ARMS = (llamacpp.PLAIN, llamacpp.LOOKUP)
ARMS = (*DEFAULT_ARMS, *LLAMACPP_ARMS)
RANDOM = "random"
"""Bucket of random token ids: an upper or lower bound that real text never reaches, shown next to real text."""
RANDOM_PROMPT_TOKENS = 24
_OF_SHAPES = ("batches", "device", "num_threads", "seed", "json")
"""Options that --shapes heeds, too."""
CELLS, SIZE = "Cells", "Size of a cell"
"""Headings of options in --help."""


Batches = A[
    tuple[int, ...],
    Setting("Comma list: requests that run together.", flag="batch", panel=CELLS, ge=1, le=1024, non_empty=True),
]
Temperatures = A[
    tuple[float, ...], Setting("Comma list; 0 = greedy.", flag="temperature", panel=CELLS, ge=0, non_empty=True)
]
MinGroups = A[int, Setting("Counted groups of a cell, at least.", flag="groups", panel=SIZE, ge=1)]
Waves = A[int, Setting("Requests of a group over the batch; one that ends is followed by the next.", panel=SIZE, ge=1)]
NumCheck = A[int, Setting("Answers a cell and arm checked in fp32, besides those unlike plain's; 0 = compare only.", flag="check", panel=SIZE, ge=0)]  # fmt: skip
Own = TypeVar("Own", bound="TurnOptions")
Bucket = TypeVar("Bucket")


@record()
class TurnOptions:
    """Options of a benchmark whose arms take turns, group by group."""

    batches: Batches = (1, 8)
    temperatures: Temperatures = (0.0, 0.8)
    min_groups: MinGroups = 4
    warmup_groups: A[int, Setting("First groups of a cell, not counted.", flag="warmup", panel=SIZE, ge=0)] = 3
    waves: Waves = 2
    max_tokens: A[int, Setting("New tokens per request at most.", panel=SIZE, ge=2)] = 128
    ignore_eos: A[bool, Setting("Always generate max-tokens: more rounds at full batch.", panel=SIZE)] = False
    num_check: NumCheck = 4
    model: Model = "bundled"
    dtype: Dtype = "auto"
    device: Device = "auto"
    num_threads: Threads = None
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None

    def group_size(self, batch: int) -> int:
        """Requests of a group; alone, a request is a group."""
        return batch if batch == 1 else batch * self.waves

    def groups(
        self, prompts: Sequence[tuple[int, ...]], bucket: str, batch: int, temperature: float, label: str = ""
    ) -> list[BenchGroup]:
        """The prompts of a cell as groups; label: as make_groups."""
        return make_groups(
            prompts, bucket=bucket, batch=batch, group_size=self.group_size(batch), temperature=temperature,
            max_tokens=self.max_tokens, seed=self.seed, ignore_eos=self.ignore_eos, label=label,
        )  # fmt: skip

    def cells(
        self, buckets: Iterable[Bucket], groups_of: Callable[[Bucket, int, float], list[BenchGroup]]
    ) -> list[list[BenchGroup]]:
        """The groups of every (bucket, batch, temperature), each once."""
        places = itertools.product(buckets, sorted(set(self.batches)), dict.fromkeys(self.temperatures))
        return [groups_of(*cell) for cell in places]

    def shortened(self: Own, **small: Any) -> Own:
        """A run on the same code path, too short for conclusions: `small` where options were left at their defaults."""
        given = changed(self)
        return dataclasses.replace(self, **{k: v for k, v in small.items() if k not in given})


@record()
class EngineBenchOptions(TurnOptions):
    """What to measure."""

    batches: Batches = (1, 4, 16, 64)
    buckets: A[
        tuple[str, ...],
        Setting("Comma list of tools, code (the drafter knows them), math, facts (it does not), random (token ids).", panel=CELLS, non_empty=True),
    ] = ("tools", "code")  # fmt: skip
    arms: A[
        tuple[str, ...],
        Setting(
            "plain and any of speculative, transformers, transformers_lookup, llamacpp (greedy, on the CPU; pip install "
            f"{llamacpp.PACKAGE}), llamacpp_lookup; lookups only at batch 1.",
            panel=CELLS, choices=ARMS,
        ),
    ] = DEFAULT_ARMS  # fmt: skip
    num_prompts: A[int, Setting("Counted requests of a cell, at least.", flag="prompts", panel=SIZE, ge=1)] = 24
    min_groups: MinGroups = 6
    waves: Waves = 3
    num_check: NumCheck = 8
    prefill_chunk_tokens: A[int, Setting("Prompt rows that a round may prefill.", flag="prefill-chunk", ge=1)] = 256
    drafter: A[str, Setting(f"{DRAFTERS}.")] = "specblock"

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

    def __post_init__(self) -> None:
        if self.shapes is None:
            require(
                not self.is_scaled_down, "scale-down must be left out without --shapes, which it makes small", "true"
            )
            return
        given = changed(self.options) - set(_OF_SHAPES)
        unused = [f"--{s.name(k)}" for k, (_, s) in settings(EngineBenchOptions).items() if k in given]
        if unused:
            raise ConfigError(f"{', '.join(unused)} must be left out with --shapes, which measures rounds of its own")

    def chosen(self) -> EngineBenchOptions:
        """What is measured without --shapes."""
        if not self.is_quick:
            return self.options
        return self.options.shortened(
            batches=(1, 8), temperatures=(0.0,), buckets=self.options.buckets[:1], num_prompts=4, min_groups=4,
            warmup_groups=2, max_tokens=64, num_check=2,
        )  # fmt: skip

    def shapes_options(self) -> ShapesOptions:
        """What is measured with --shapes."""
        assert self.shapes is not None
        given = self.options
        return ShapesOptions(
            shapes=self.shapes, batches=given.batches, is_scaled_down=self.is_scaled_down, is_quick=self.is_quick,
            device=given.device, num_threads=given.num_threads, seed=given.seed, json=given.json,
        )  # fmt: skip


def run_command(command: EngineCommand, console: Console) -> dict[str, Any]:
    """See run_engine_bench and, with --shapes, run_shapes."""
    if command.shapes is not None:
        return run_shapes(command.shapes_options(), console)
    return run_engine_bench(command.chosen(), console)


def has_failed(document: dict[str, Any]) -> bool:
    """Whether speculation surely costs speed, or an answer was not the target's own."""
    summary = document.get("summary")  # none with --shapes
    return bool(summary and (summary["verdict"] == "violated" or summary["num_mismatches"]))


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
        checker = LosslessChecker(resolve_model(options.model), is_int8=target.is_int8)
    result.update(target=target_facts(target))

    def groups_of(bucket: str, batch: int, temperature: float) -> list[BenchGroup]:
        count = (options.warmup_groups + options.num_groups(batch)) * options.group_size(batch)
        return options.groups(prompts[bucket][:count], bucket, batch, temperature)

    def row_of(groups: Sequence[BenchGroup], timings: dict[str, list[GroupTiming]]) -> dict[str, Any]:
        row = cell_row(*groups[0].cell, timings)
        if row["temperature"] == 0:
            row["lossless"] = lossless_row(groups, timings, checker, options.num_check)
            peers = [name for name in LLAMACPP_ARMS if name in timings]
            row |= {"peers": {n: lossless_row(groups, timings, checker, 0, n) for n in peers}} if peers else {}
        return {**row, "memory": _memory(arms, device)}

    cells = run_cells(options, options.cells(prompts, groups_of), arms, row_of, result, console)
    document = result.close(crossovers=crossovers(cells), summary=overall_verdict(cells))
    console.print(cells_table(cells))
    console.print(rounds_table(cells))
    print_summary(document, console)
    return document


def run_cells(
    options: TurnOptions,
    cells: Sequence[Sequence[BenchGroup]],
    arms: Sequence[Arm],
    row_of: Callable[[Sequence[BenchGroup], dict[str, list[GroupTiming]]], dict[str, Any]],
    result: ResultFile,
    console: Console,
) -> list[dict[str, Any]]:
    """A row for every cell's groups, which the arms run in turn; each row is on disk once it is made.

    row_of: takes the counted groups and what every arm made of them. Raises: PacelineError when a request fails.
    """
    rows: list[dict[str, Any]] = []
    with progress(console, "groups", sum(map(len, cells))) as bar:
        for groups in cells:
            bucket, batch, temperature = groups[0].cell
            bar.name(f"{bucket} batch {batch} T={temperature:g}")
            usable = [a for a in arms if a.supports(batch, temperature)]
            timings = run_alternating(usable, groups, num_warmup=options.warmup_groups, on_group=bar.step)
            rows.append(row_of(groups[options.warmup_groups :], timings))
            result.update(cells=rows)
    return rows


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
        names = [n for n in (GENERATE, LOOKUP) if n in options.arms]
        out += transformers_arms(names, options.model, target, device)
    names = [n for n in LLAMACPP_ARMS if n in options.arms]
    if names:
        out += llamacpp.llamacpp_arms(names, resolve_model(options.model), target, num_context=context)
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


_COLOURS = {"gain": "green", "holds": "green", "below": "red", "unclear": "yellow"}


def _ratio(row: dict[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (f"{row['ratio']:.3f}", interval_text(row["interval"], 3))


def cells_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Speed of every arm of every cell and its ratio to the plain engine."""
    names = ("bucket", "batch", "T", "arm", "tok/s", "decode", "full batch", "TTFT ms", "accept.", "/ plain", "95%", "full batch", "95%", "verdict")  # fmt: skip
    table = new_table("Tokens per second by arm, and as a ratio to the plain engine", names, 1)
    for cell in cells:
        for i, (name, arm) in enumerate(cell["arms"].items()):
            ratios = cell["ratios"].get(name, {"whole": None, "full_batch": None})
            verdict = cell["verdict"] if name == SPECULATIVE else None
            colour = _COLOURS.get(verdict or "", "")
            where = (cell["bucket"], str(cell["batch"]), f"{cell['temperature']:g}") if i == 0 else ("", "", "")
            table.add_row(
                *where, name, number_text(arm["tokens_per_s"]), number_text(arm["decode_tokens_per_s"]),
                number_text(arm.get("full_batch_tokens_per_s")), number_text(arm["ttft_ms"]["p50"], 1),
                number_text(arm.get("acceptance_length"), 2), *_ratio(ratios["whole"]), *_ratio(ratios["full_batch"]),
                f"[{colour}]{verdict}[/{colour}]" if verdict and colour else verdict or "",
                end_section=i + 1 == len(cell["arms"]),
            )  # fmt: skip
    table.caption = (
        "tok/s: whole groups, prefill and draining tail included; decode: without prefill and first tokens; full batch: "
        "from the last first token to the first end"
    )
    return table


def rounds_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Where the time of a decode round goes."""
    parts = list(dict.fromkeys(p for c in cells for a in c["arms"].values() for p in a.get("rounds", {}).get("part_ms", {})))  # fmt: skip
    columns = ("bucket", "batch", "T", "arm", "rounds", "at full batch", "round ms", *(f"{p} ms" for p in parts), "outside models", "draft/round", "predicted")  # fmt: skip
    table = new_table("Time of a decode round by part (mean over all rounds)", columns, 1)
    for cell in cells:
        for name, arm in cell["arms"].items():
            rounds = arm.get("rounds")
            if rounds is None:
                continue
            share, outside = arm["full_batch_round_share"], rounds["outside_share"]
            table.add_row(
                cell["bucket"], str(cell["batch"]), f"{cell['temperature']:g}", name, str(rounds["num_rounds"]),
                "-" if share is None else f"{share:.0%}", number_text(rounds["round_ms"], 3),
                *(number_text(rounds["part_ms"].get(p), 3) for p in parts),
                "-" if outside is None else f"{outside:.1%}", number_text(arm["draft_tokens_per_round"], 2),
                "" if name == PLAIN else number_text(cell["ratios"][name]["from_parts"], 3),
            )  # fmt: skip
    table.caption = "outside models: everything but draft and verify; predicted: plain round ms x acceptance length / round ms, at full batch"  # fmt: skip
    return table


def print_summary(document: dict[str, Any], console: Console) -> None:
    """The verdict line, the crossovers, the lossless line and where the JSON is."""
    summary = document["summary"]
    if summary["num_cells"]:
        words = {
            "holds": f"[green]holds[/green]: all {summary['num_cells']} intervals lie at or above {FLOOR}",
            "violated": f"[red]violated[/red] in {', '.join(summary['below'])}",
            "unclear": f"[yellow]unclear[/yellow]: the interval of {', '.join(summary['unclear'])} includes {FLOOR}; "
            "more --prompts or --groups narrow it",
        }
        console.print(f"speculative never below {FLOOR}x plain: {words[summary['verdict']]}", soft_wrap=True)
    for row in document["crossovers"]:
        where = f"{row['bucket']} T={row['temperature']:g}"
        if row["gains_up_to"] is None:
            text = "speculation gains at no measured batch"
        elif row["crossover_batch"] is None:
            text = f"speculation gains up to the largest measured batch, {row['gains_up_to']}"
        else:
            text = f"speculation gains up to batch {row['gains_up_to']}, stops at about {row['crossover_batch']:g}"
        console.print(f"crossover, {where}: {text}", soft_wrap=True)
    rows = [c["lossless"] for c in document["cells"] if c.get("lossless")]
    if rows:
        compared, differing, ties = (sum(r[k] for r in rows) for k in ("num_compared", "num_differing", "num_near_ties"))  # fmt: skip
        console.print(
            f"lossless at T=0: {summary['num_mismatches']} mismatches and {ties} near ties among "
            f"{summary['num_checked_tokens']} tokens checked in fp32; {differing} of {compared} answers differ between the engines",
            soft_wrap=True,
        )  # fmt: skip
    peers = [c["peers"] for c in document["cells"] if "peers" in c]
    for name in dict.fromkeys(name for row in peers for name in row):
        compared, differing, off = (sum(row[name][k] for row in peers if name in row) for k in ("num_compared", "num_differing", "num_mismatches"))  # fmt: skip
        console.print(
            f"{name}: {differing} of {compared} answers differ from plain's, {off} tokens of these by more than a near tie",
            soft_wrap=True,
        )
    say_file(console, "JSON", document["options"]["json"])
