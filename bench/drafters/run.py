"""Drafter benchmark: drafter x policy arms alternate group by group with plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

from rich.console import Console

from paceline.bench.common.engine_run import load_target, set_threads, target_facts
from paceline.bench.common.lossless import LosslessChecker
from paceline.bench.common.result_file import ResultFile, plain_values
from paceline.bench.common.terminal import say_file
from paceline.bench.common.workloads import read_questions
from paceline.bench.drafters.arms import ArmSpec, arm_specs, build_arms, check_policies
from paceline.bench.drafters.cells import drafting_row, random_gaps, speed_prediction, summarise
from paceline.bench.drafters.table import acceptance_table, lossless_counts, print_end, summary_table
from paceline.bench.drafters.workload_split import (
    EMBEDDINGS,
    Workload,
    domain_workload,
    load_workloads,
    random_workload,
)
from paceline.bench.engine.arms import GENERATE, LOOKUP, Arm, BenchGroup, EngineArm, GroupTiming, transformers_arms
from paceline.bench.engine.cells import PLAIN, cell_row, lossless_row
from paceline.bench.engine.run import (
    CELLS,
    RANDOM,
    RANDOM_PROMPT_TOKENS,
    SIZE,
    Temperatures,
    TurnOptions,
    run_cells,
)
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PacelineError
from paceline.paths import resolve_model
from paceline.records import DRAFTER_NAMES, HtmlFile, Setting, record, require
from paceline.serving.loading.target import pick_device
from paceline.serving.target_model.model import TargetModel

ALL = "all"
"""Stands for every bucket of the data, and random."""


@record()
class BenchOptions(TurnOptions):
    """What to compare."""

    drafters: A[
        tuple[str, ...],
        Setting(
            f"Comma list of {', '.join(DRAFTER_NAMES)}, or folders; NAME+suffix: both in turns, as --mix serves them.",
            panel=CELLS,
            non_empty=True,
        ),
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
    temperatures: Temperatures = (0.0, 0.8, 1.0)
    buckets: A[
        tuple[str, ...],
        Setting("Comma list of domains (tools, code, math, facts, or those in --data), random, all, or ''.", panel=CELLS),
    ] = (ALL,)  # fmt: skip
    input_tokens: A[
        tuple[int, ...],
        Setting("Comma list of input lengths: adds load buckets low-N, mixed-N, high-N, random-N.", flag="isl", panel=CELLS, ge=2),
    ] = ()  # fmt: skip
    num_prompts: A[int, Setting("Counted requests of a cell, at least.", panel=SIZE, ge=1)] = 24
    embedding: A[
        str,
        Setting("What unlike prompts are chosen by: tfidf, or hidden (states of the target).", choices=EMBEDDINGS),
    ] = "tfidf"
    baseline: A[
        str | None, Setting("'transformers' adds generate() and prompt lookup.", panel=CELLS, choices=("transformers",))
    ] = None
    html: HtmlFile = None

    def __post_init__(self) -> None:
        require("none" not in self.drafters, "drafters must be drafters (plain always runs)", ",".join(self.drafters))
        check_policies(self.policies, self.nodes)
        has_cells = bool(self.buckets or self.input_tokens)
        require(has_cells, "buckets must name at least one bucket where there is no --isl", "")

    def num_counted(self, batch: int) -> int:
        """Counted requests of a cell."""
        size = self.group_size(batch)
        return max(self.min_groups, -(-self.num_prompts // size)) * size


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
        if not self.is_quick:
            return self.options
        return self.options.shortened(
            temperatures=(0.0,), buckets=("tools", RANDOM) if self.options.data is None else self.options.buckets,
            num_prompts=4, min_groups=2, waves=1, warmup_groups=1, max_tokens=48, num_check=1,
        )  # fmt: skip


def run_command(command: DraftersCommand, console: Console) -> dict[str, Any]:
    """See run_bench_drafters."""
    return run_bench_drafters(command.chosen(), console)


def has_failed(document: dict[str, Any]) -> bool:
    """Whether an answer was not the target's own."""
    return bool(lossless_counts(document)["num_mismatches"])


def run_bench_drafters(options: BenchOptions, console: Console) -> dict[str, Any]:
    """Measure every (bucket, batch, temperature) cell; prints tables, returns (and keeps on disk) the document.

    Raises: ConfigError (unknown model, drafter, bucket or policy; no CUDA device), PacelineError (a request failed).
    """
    set_threads(options.num_threads)
    device = pick_device(options.device)
    specs = arm_specs(options.drafters, options.policies, options.nodes, options.model)
    result = ResultFile(
        options.json, command="bench drafters", options=options,
        extra={"device": device, "drafting_arms": [plain_values(s) for s in specs], "cells": []},
    )  # fmt: skip
    target = load_target(options.model, options.dtype, device, drafters=[s.drafter for s in specs])
    workloads, skipped = build_workloads(options, target)
    result.update(
        target={**target_facts(target), "num_weights": target.num_weights},
        workloads={w.name: w.as_dict() for w in workloads}, skipped_buckets=skipped,
    )  # fmt: skip
    arms = _arms(options, specs, target, device, workloads)
    checker = LosslessChecker(resolve_model(options.model), is_int8=target.is_int8) if options.num_check else None

    def groups_of(workload: Workload, batch: int, temperature: float) -> list[BenchGroup]:
        spare = workload.take_spare(options.warmup_groups * options.group_size(batch))
        counted = workload.take(options.num_counted(batch))
        parts = ((spare, "w"), (counted, ""))
        return [
            g for prompts, label in parts for g in options.groups(prompts, workload.name, batch, temperature, label)
        ]

    def row_of(groups: Sequence[BenchGroup], timings: dict[str, list[GroupTiming]]) -> dict[str, Any]:
        _check_drafters(arms)
        return _cell(options, specs, groups, timings, checker)

    cells = run_cells(options, options.cells(workloads, groups_of), arms, row_of, result, console)
    kinds = {w.name: w.kind for w in workloads}
    document = result.close(
        summary=summarise(cells, specs, kinds), random_gaps=random_gaps(cells, kinds, _twins(workloads))
    )
    console.print(acceptance_table(document))
    console.print(summary_table(document))
    print_end(document, console)
    if options.html is not None:
        from paceline.bench.drafters.html import write_html

        write_html(document, options.html)
        say_file(console, "HTML", options.html)
    return document


def build_workloads(options: BenchOptions, target: TargetModel) -> tuple[list[Workload], dict[str, str]]:
    """The workloads of all buckets, and why buckets that were not asked for by name were left out."""
    questions = read_questions(options.data)
    wants_all = ALL in options.buckets
    names = [*questions, RANDOM] if wants_all else list(dict.fromkeys(options.buckets))
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
                    embedding=options.embedding, answer_tokens=options.max_tokens,
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
    for num_tokens in dict.fromkeys(options.input_tokens):
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


def _arms(
    options: BenchOptions, specs: Sequence[ArmSpec], target: TargetModel, device: str, workloads: Sequence[Workload]
) -> list[Arm]:
    batch = max(options.batches)
    longest = max(len(p) for w in workloads for p in (*w.prompts, *w.spare))
    config = EngineConfig(max_running=batch, max_waiting=max(256, batch), prefix_caching=False)
    out: list[Arm] = [*build_arms(specs, target, config, context_tokens=longest + options.max_tokens)]
    if options.baseline is not None:
        out += transformers_arms((GENERATE, LOOKUP), options.model, target, device)
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
    groups: Sequence[BenchGroup],
    timings: dict[str, list[GroupTiming]],
    checker: LosslessChecker | None,
) -> dict[str, Any]:
    row = cell_row(*groups[0].cell, timings)
    drafting, lossless = {PLAIN: drafting_row(None, groups, timings[PLAIN])}, {}
    for spec in specs:
        own = drafting_row(spec, groups, timings[spec.name])
        length = own["acceptance_length"]
        own["prediction"] = None if length is None else speed_prediction(row, spec.name, length["pooled"])
        own["in_domain"] = row["bucket"] in spec.domains
        drafting[spec.name] = own
        lossless[spec.name] = lossless_row(groups, timings, checker, options.num_check, spec.name)
    return {**row, "drafting": drafting, "lossless": lossless}
