"""Which drafter gains most, under which policy? Drafter x policy arms alternate group by group with plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.bench.draft_arms import ArmSpec, arm_specs, build_arms, check_policies
from paceline.bench.draft_cells import drafting_row, random_gaps, speed_prediction, summarise
from paceline.bench.drafters_table import acceptance_table, print_end, summary_table
from paceline.bench.engine_arms import Arm, BenchGroup, EngineArm, GroupTiming, TransformersArm
from paceline.bench.engine_bench import GENERATE, LOOKUP, RANDOM, RANDOM_PROMPT_TOKENS, pick_device
from paceline.bench.engine_cells import PLAIN, cell_row
from paceline.bench.engine_run import load_target, set_threads
from paceline.bench.group_runs import make_groups, run_alternating
from paceline.bench.lossless import LosslessChecker
from paceline.bench.lossless_row import lossless_row
from paceline.bench.result_file import ResultFile, plain_values
from paceline.bench.workload_sources import read_questions
from paceline.bench.workload_split import EMBEDDINGS, Workload, domain_workload, load_workloads, random_workload
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PacelineError
from paceline.paths import resolve_model
from paceline.serving.target import TargetModel

ALL = "all"


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
        if not self.temperatures or min(self.temperatures) < 0:
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


def run_bench_drafters(options: BenchOptions, console: Console) -> dict[str, Any]:
    """Measure every (bucket, batch, temperature) cell; prints tables, returns (and keeps on disk) the document.

    Raises: ConfigError (unknown model, drafter, bucket or policy; no CUDA device), PacelineError (a request failed).
    """
    set_threads(options.num_threads)
    device = pick_device(options.device)
    specs = arm_specs(options.drafters, options.policies, options.nodes)
    result = ResultFile(
        options.json, command="bench drafters", options=options,
        extra={"device": device, "drafting_arms": [plain_values(s) for s in specs], "cells": []},
    )  # fmt: skip
    target = load_target(options.model, options.dtype, device)
    workloads, skipped = build_workloads(options, target)
    result.update(
        target={
            "dtype": str(target.dtype), "version": target.version, "fast_path": target.is_fast_path,
            "num_weights": sum(p.numel() for p in target.model.parameters()),
        },
        workloads={w.name: w.as_dict() for w in workloads}, skipped_buckets=skipped,
    )  # fmt: skip
    arms = _arms(options, specs, target, device, workloads)
    checker = LosslessChecker(resolve_model(options.model)) if options.num_check else None
    keys = [(w, n, t) for w in workloads for n in sorted(set(options.batches)) for t in options.temperatures]
    cells: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console) as bar:
        num_groups = {n: options.num_counted(n) // options.group_size(n) + options.warmup_groups for n in options.batches}  # fmt: skip
        task = bar.add_task("groups", total=sum(num_groups[n] for _, n, _ in keys))
        for workload, batch, temperature in keys:
            bar.update(task, description=f"{workload.name} batch {batch} T={temperature:g}")
            groups = _groups(options, workload, batch, temperature)
            usable = [a for a in arms if a.supports(batch)]
            timings = run_alternating(
                usable, groups, num_warmup=options.warmup_groups, on_group=lambda: bar.advance(task)
            )
            _check_drafters(arms)
            cells.append(_cell(options, specs, workload.name, groups[options.warmup_groups :], timings, checker))
            result.update(cells=cells)
    kinds = {w.name: w.kind for w in workloads}
    document = result.close(
        summary=summarise(cells, specs, kinds), random_gaps=random_gaps(cells, kinds, _twins(workloads))
    )
    console.print(acceptance_table(document))
    console.print(summary_table(document))
    print_end(document, console)
    if options.html is not None:
        from paceline.bench.drafters_html import write_html

        write_html(document, options.html)
        console.print(f"HTML: {options.html}", soft_wrap=True)
    return document


def build_workloads(options: BenchOptions, target: TargetModel) -> tuple[list[Workload], dict[str, str]]:
    """The workloads of all buckets, and why buckets that were not asked for by name were left out."""
    questions = read_questions(options.data)
    wants_all = ALL in options.buckets
    names = [*questions, RANDOM] if wants_all else list(options.buckets)
    strange = [n for n in names if n not in questions and n != RANDOM]
    if strange:
        raise ConfigError(f"buckets must be among {', '.join(questions)}, {RANDOM}, {ALL}, got {strange[0]!r}")
    count, room = max(map(options.num_counted, options.batches)), target.context_tokens - options.max_tokens
    if room < max((*options.input_tokens, RANDOM_PROMPT_TOKENS)):
        raise ConfigError(f"max_tokens and isl must fit the model's context of {target.context_tokens}, got {options.max_tokens} and {options.input_tokens}")  # fmt: skip
    out: list[Workload] = []
    skipped: dict[str, str] = {}
    for name in names:
        if name == RANDOM:
            continue
        try:
            out.append(
                domain_workload(
                    target, name, questions[name], count=count, max_prompt_tokens=room, seed=options.seed,
                    embedding=options.embedding,
                )
            )  # fmt: skip
        except ConfigError as e:
            if not wants_all:
                raise
            skipped[name] = str(e)
    if RANDOM in names:
        lengths = sorted(len(p) for w in out for p in w.prompts)
        middle = lengths[len(lengths) // 2] if lengths else RANDOM_PROMPT_TOKENS
        out.append(random_workload(target, RANDOM, num_tokens=middle, count=count, seed=options.seed))
    for num_tokens in options.input_tokens:
        out += load_workloads(target, questions, num_tokens=num_tokens, count=count, seed=options.seed)
        out.append(random_workload(target, f"{RANDOM}-{num_tokens}", num_tokens=num_tokens, count=count, seed=options.seed))  # fmt: skip
    if not out:
        raise ConfigError(f"data must have prompts that fit the model, got: {'; '.join(skipped.values())}")
    return out, skipped


def _twins(workloads: Sequence[Workload]) -> dict[str, str]:
    """Real bucket -> its random bucket, where there is one."""
    names = {w.name for w in workloads if w.kind == "random"}
    pairs = {w.name: RANDOM if w.kind == "domain" else f"{RANDOM}-{w.facts['isl']}" for w in workloads if w.kind != "random"}  # fmt: skip
    return {real: twin for real, twin in pairs.items() if twin in names}


def _groups(options: BenchOptions, workload: Workload, batch: int, temperature: float) -> list[BenchGroup]:
    """Groups that are not counted, then the counted ones, whose prompts are the selected ones."""
    size = options.group_size(batch)
    lists = {"w": workload.take_spare(options.warmup_groups * size), "": workload.take(options.num_counted(batch))}
    return [
        group
        for label, prompts in lists.items()
        for group in make_groups(
            prompts, bucket=workload.name, batch=batch, group_size=size, temperature=temperature,
            max_tokens=options.max_tokens, seed=options.seed, ignore_eos=options.ignore_eos, label=label,
        )
    ]  # fmt: skip


def _arms(
    options: BenchOptions, specs: Sequence[ArmSpec], target: TargetModel, device: str, workloads: Sequence[Workload]
) -> list[Arm]:
    batch = max(options.batches)
    longest = max(len(p) for w in workloads for p in (*w.prompts, *w.spare))
    config = EngineConfig(max_running=batch, max_waiting=max(256, batch), prefix_caching=False)
    out: list[Arm] = [*build_arms(specs, target, config, context_tokens=longest + options.max_tokens)]
    if options.baseline is not None:
        from paceline.bench.transformers_baseline import TransformersBaseline

        pad = target.tokenizer.pad_token_id or 0
        model = TransformersBaseline(str(resolve_model(options.model)), target.dtype, pad, device)
        out += [TransformersArm(n, model, lookup=n == LOOKUP) for n in (GENERATE, LOOKUP)]
    return out


def _check_drafters(arms: Sequence[Arm]) -> None:
    """Raises PacelineError when a drafter has failed: its arm would decode plainly from then on and look slow."""
    for arm in arms:
        failures = arm.engine.stats()["drafter_failures"] if isinstance(arm, EngineArm) else {}
        if failures:
            raise PacelineError(f"drafter of arm {arm.name} failed: {'; '.join(map(str, failures.values()))}")


def _cell(
    options: BenchOptions,
    specs: Sequence[ArmSpec],
    bucket: str,
    groups: Sequence[BenchGroup],
    timings: dict[str, list[GroupTiming]],
    checker: LosslessChecker | None,
) -> dict[str, Any]:
    batch, temperature = groups[0].batch, groups[0].params[0].temperature
    row = cell_row(bucket, batch, temperature, timings)
    drafting, lossless = {PLAIN: drafting_row(None, groups, timings[PLAIN])}, {}
    for spec in specs:
        own = drafting_row(spec, groups, timings[spec.name])
        length = own["acceptance_length"]
        own["prediction"] = None if length is None else speed_prediction(row, spec.name, length["pooled"])
        own["in_domain"] = bucket in spec.domains
        drafting[spec.name] = own
        lossless[spec.name] = lossless_row(groups, timings, checker, options.num_check, spec.name)
    return {**row, "drafting": drafting, "lossless": lossless}
