"""Engine benchmark: the engine's speed, and what speculation costs or gains, arms alternating group by group in one process."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads, target_facts
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.arms import Arm, EngineArm, TransformersArm, new_engine
from paceline.bench.engine.cells import FLOOR, PLAIN, SPECULATIVE, cell_row, crossovers, lossless_row, overall_verdict
from paceline.bench.engine.groups import make_groups, random_prompts, run_alternating
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import resolve_model
from paceline.serving.target_model.model import TargetModel

GENERATE, LOOKUP = "transformers", "transformers_lookup"
ARMS = (PLAIN, SPECULATIVE, GENERATE, LOOKUP)
RANDOM = "random"
"""Bucket of random token ids: an upper or lower bound that real text never reaches, shown next to real text."""
RANDOM_PROMPT_TOKENS = 24
_OPTION_NAMES = {"num_prompts": "prompts", "min_groups": "groups", "warmup_groups": "warmup", "num_check": "check", "prefill_chunk_tokens": "prefill_chunk"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBenchOptions:
    """What to measure; see `paceline bench engine --help`."""

    batches: tuple[int, ...] = (1, 4, 16, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8)
    buckets: tuple[str, ...] = ("tools", "code")
    arms: tuple[str, ...] = ARMS
    num_prompts: int = 24
    """Least counted requests of a cell."""
    min_groups: int = 6
    """Least counted groups of a cell: they are what the interval rests on."""
    waves: int = 3
    """Requests of a group over the batch: while some are left, one that ends is followed by the next one."""
    warmup_groups: int = 3
    """Groups before them that are not counted: the budget controller learns, caches and pages are touched."""
    max_tokens: int = 128
    ignore_eos: bool = False
    num_check: int = 8
    """Greedy answers of a cell and arm that are checked against the fp32 target."""
    prefill_chunk_tokens: int = 256
    model: str = "bundled"
    drafter: str = "specblock"
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    data: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        unknown = [a for a in self.arms if a not in ARMS]
        if unknown or PLAIN not in self.arms or len(set(self.arms)) < 2:
            raise ConfigError(
                f"arms must be 'plain' and at least one more of {', '.join(ARMS[1:])}, got {','.join(self.arms)!r}"
            )
        if not self.batches or min(self.batches) < 1 or max(self.batches) > 1024:
            raise ConfigError(f"batch must be a comma list of sizes in [1, 1024], got {self.batches}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperature must be a comma list of numbers >= 0, got {self.temperatures}")
        known = (*BUNDLED_BUCKETS, RANDOM)
        strange = [b for b in self.buckets if b not in known and self.data is None]
        if not self.buckets or strange:
            raise ConfigError(f"buckets must be among {', '.join(known)}, or domains of --data, got {self.buckets}")
        least = {
            "num_prompts": 1,
            "min_groups": 1,
            "waves": 1,
            "warmup_groups": 0,
            "max_tokens": 2,
            "num_check": 0,
            "prefill_chunk_tokens": 1,
        }
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ConfigError(f"{_OPTION_NAMES.get(name, name)} must be >= {limit}, got {getattr(self, name)}")

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
    total = sum(options.num_groups(n) + options.warmup_groups for _, n, _ in keys)
    with progress(console, "groups", total) as bar:
        for bucket, batch, temperature in keys:
            bar.name(f"{bucket} batch {batch} T={temperature:g}")
            groups = make_groups(
                prompts[bucket][: (options.warmup_groups + options.num_groups(batch)) * options.group_size(batch)],
                bucket=bucket, batch=batch, group_size=options.group_size(batch), temperature=temperature,
                max_tokens=options.max_tokens, seed=options.seed, ignore_eos=options.ignore_eos,
            )  # fmt: skip
            usable = [a for a in arms if a.supports(batch)]
            timings = run_alternating(usable, groups, num_warmup=options.warmup_groups, on_group=bar.step)
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
            f"max_tokens must be at most {target.context_tokens - longest} for prompts of up to {longest} tokens in this "
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
    say_file(console, "JSON", document["options"]["json"])
