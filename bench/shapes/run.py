"""Drafter shapes: what drafting costs at real size, against verifying, and SpecBlock's against EAGLE-3's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field, replace
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.common.engine_run import set_threads
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import new_table, progress, say_file
from paceline.bench.shapes.costs import DRAFTERS, MAX_DEPTH, DraftPlan, Forward, Part, num_params, total, verify_forward
from paceline.bench.shapes.kernel_shapes import MODELS, Models, Shape
from paceline.bench.shapes.timing import estimate_on_cpu, time_on_gpu
from paceline.records import Device, JsonFile, Setting, Threads, record, require

LIMIT = 0.52
"""Upper end of what the SpecBlock paper claims: 44 to 52% of EAGLE-3's drafting cost."""
OURS, THEIRS = "specblock", "eagle3"


@record()
class DrafterShapesOptions:
    """Bytes and operations counted from the published layouts of SpecBlock, EAGLE-3, JetSpec and DFlash, against verifying,
    at equal depth and node budget; times with random weights: whole rounds as CUDA graphs where there is a GPU, otherwise
    one layer on the CPU multiplied, which is an estimate.

    Example: paceline bench shapes --contexts 1024,8192 --json shapes.json. docs/benchmarks.md.
    """

    models: Models = tuple(MODELS)
    contexts: A[
        tuple[int, ...],
        Setting("Comma list of tokens per request; times are taken at the first.", ge=1, non_empty=True),
    ] = (1024, 8192, 32768)
    batches: A[
        tuple[int, ...],
        Setting("Comma list of requests; times are taken at the first.", flag="batch", ge=1, non_empty=True),
    ] = (1, 8)
    nodes: A[int, Setting("Draft nodes verified per request, the same for every drafter.", ge=1)] = 60
    plan: DraftPlan = field(default_factory=DraftPlan)
    is_timing: A[bool, Setting("Take times; otherwise only count.", flag="time/--no-time")] = True
    repeats: A[int, Setting("Timed runs, of which the best (CPU) or the median (GPU) counts.", ge=1)] = 5
    device: Device = "auto"
    num_threads: Threads = None
    json: JsonFile = None

    def __post_init__(self) -> None:
        usable = self.device != "cuda" or torch.cuda.is_available()
        require(usable, "device must be auto or cpu without a GPU that torch can use", self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())


def run_drafter_shapes(options: DrafterShapesOptions, console: Console) -> dict[str, Any]:
    """Count every cell, time the first one of each model; prints tables, returns (and keeps on disk) the document."""
    set_threads(options.num_threads)
    extra: dict[str, Any] = {"device": "cuda" if options.is_cuda else "cpu", "limit": LIMIT, "models": {}}
    result = ResultFile(options.json, command="bench shapes", options=options, extra=extra)
    models: dict[str, Any] = {}
    with progress(console, "shapes", len(options.models)) as bar:
        for name in options.models:
            models[name] = counted_model(MODELS[name], options)
            result.update(models=models)
            if options.is_timing:
                shape = replace(MODELS[name], context=options.contexts[0], requests=options.batches[0], nodes=options.nodes)  # fmt: skip
                models[name]["time"] = timed_model(shape, options, lambda part, name=name: bar.name(f"{name}: {part}"))  # fmt: skip
                result.update(models=models)
            bar.step()
    document = result.close()
    print_shapes(document, console)
    return document


def counted_model(base: Shape, options: DrafterShapesOptions) -> dict[str, Any]:
    """Parameters, and bytes and operations of a round for every drafter, context and batch."""
    plan = options.plan
    cells = []
    for batch in options.batches:
        for context in options.contexts:
            shape = replace(base, context=context, requests=batch, nodes=options.nodes)
            verify = total([verify_forward(shape)])
            drafters = {}
            for name, forwards_of in DRAFTERS.items():
                forwards = forwards_of(shape, plan)
                draft = total(forwards)
                drafters[name] = {
                    "num_calls": len(forwards), "draft": draft, "share_of_round_bytes": round(draft["bytes"] / (draft["bytes"] + verify["bytes"]), 4),
                    "over_verify": {k: round(draft[k] / verify[k], 4) for k in ("bytes", "flops")},
                    "calls": [{"name": f.name, "bytes": f.num_bytes, "flops": f.flops} for f in forwards],
                }  # fmt: skip
            plain = total([verify_forward(replace(shape, nodes=0))])
            cells.append({"context": context, "batch": batch, "plain": plain, "verify": verify, "drafters": drafters, "specblock_over_eagle3": specblock_over_eagle3(shape, plan)})  # fmt: skip
    first = replace(base, context=options.contexts[0], requests=options.batches[0], nodes=options.nodes)
    by_depth = {str(d): specblock_over_eagle3(first, replace(plan, depth=d)) for d in range(1, MAX_DEPTH + 1)}
    params = {name: num_params(forwards_of(base, plan)) for name, forwards_of in DRAFTERS.items()}
    limits = {str(b): context_at_limit(replace(base, requests=b), plan) for b in options.batches}
    return {"shape": asdict(base), "num_params": params, "cells": cells, "specblock_over_eagle3_by_depth": by_depth, "context_at_limit": limits}  # fmt: skip


def specblock_over_eagle3(shape: Shape, plan: DraftPlan) -> dict[str, float]:
    """Ratios of drafting at equal depth and node budget."""
    ours, theirs = (total(DRAFTERS[n](shape, plan)) for n in (OURS, THEIRS))
    return {k: round(ours[k] / theirs[k], 4) for k in ("weight_bytes", "bytes", "flops")}


def context_at_limit(shape: Shape, plan: DraftPlan, limit: float = LIMIT) -> int | None:
    """Committed rows from which SpecBlock's drafting moves more than `limit` x EAGLE-3's bytes; None: from the first on.

    Both are straight lines in the context; SpecBlock's is the steeper one, because it keeps K slots a row.
    """

    def excess(context: int) -> float:
        at = replace(shape, context=context)
        ours, theirs = (total(DRAFTERS[n](at, plan))["bytes"] for n in (OURS, THEIRS))
        return ours - limit * theirs

    start, slope = excess(0), excess(1) - excess(0)
    return None if start > 0 else int(-start / slope)


def timed_model(shape: Shape, options: DrafterShapesOptions, on_part: Any) -> dict[str, Any]:
    """Seconds of drafting, verify and whole rounds: measured on a GPU, an estimate on a CPU."""
    verify, plain = verify_forward(shape), verify_forward(replace(shape, nodes=0))
    drafts = {name: forwards_of(shape, options.plan) for name, forwards_of in DRAFTERS.items()}
    if options.is_cuda:
        on_part("rounds on the GPU")

        def ms(forwards: Sequence[Forward]) -> float:
            return 1e3 * time_on_gpu(forwards, options.repeats)

    else:
        every = [f for forwards in drafts.values() for f in forwards] + [verify, plain]
        seconds: dict[Part, float] = estimate_on_cpu(every, options.repeats, on_part)

        def ms(forwards: Sequence[Forward]) -> float:
            return 1e3 * sum(seconds[p] for f in forwards for p in f.parts)

    rounds = {name: ms([*f, verify]) for name, f in drafts.items()}
    draft_ms = {name: ms(f) for name, f in drafts.items()}
    return {
        "kind": "measured" if options.is_cuda else "estimate: CPU time in float32, one layer timed and multiplied",
        "context": shape.context, "batch": shape.requests, "plain_ms": round(ms([plain]), 3), "verify_ms": round(ms([verify]), 3),
        "draft_ms": {n: round(v, 3) for n, v in draft_ms.items()}, "round_ms": {n: round(v, 3) for n, v in rounds.items()},
        "specblock_over_eagle3": round(draft_ms[OURS] / draft_ms[THEIRS], 4),
    }  # fmt: skip


NAMES = {"specblock": "SpecBlock", "eagle3": "EAGLE-3", "dflash": "DFlash, JetSpec"}
"""JetSpec's costs are DFlash's."""


def print_shapes(document: dict[str, Any], console: Console) -> None:
    """One table of counts and one of times a model, then the ratio with its assumptions."""
    options, limit = document["options"], document["limit"]
    plan = options["plan"]
    console.print(
        f"counted: bfloat16, {options['nodes']} nodes verified; SpecBlock and EAGLE-3 draft {plan['depth']} deep (EAGLE-3 continues "
        f"{plan['topk']} nodes a step, SpecBlock's second block {plan['leaves']} leaves), JetSpec and DFlash 15; {plan['accepted']} tokens "
        "were accepted in the round before", soft_wrap=True,
    )  # fmt: skip
    for model, found in document["models"].items():
        console.print(_counts(model, found))
        if "time" in found:
            console.print(_times(model, found["time"]))
        depths = ", ".join(f"{d}: {r['bytes']:.2f}" for d, r in found["specblock_over_eagle3_by_depth"].items())
        console.print(f"{model}, first row: SpecBlock / EAGLE-3 bytes by depth {depths}", soft_wrap=True)
        for batch, context in found["context_at_limit"].items():
            where = "at no context" if context is None else f"up to {context} tokens of context"
            console.print(f"{model}, batch {batch}: SpecBlock drafts within {limit:g} x EAGLE-3's bytes {where}", soft_wrap=True)  # fmt: skip
    say_file(console, "JSON", options["json"])


def _counts(model: str, found: dict[str, Any]) -> Table:
    columns = ("batch x context", "plain GB", "verify GB", *(f"{NAMES[n]} GB" for n in NAMES), "SpecBlock / EAGLE-3 GB", "verify GFLOP", *(f"{NAMES[n]} GFLOP" for n in NAMES), "SpecBlock / EAGLE-3 FLOP")  # fmt: skip
    table = new_table(f"{model}: bytes and operations of a round", columns)
    for c in found["cells"]:
        ratio, drafters = c["specblock_over_eagle3"], c["drafters"]
        table.add_row(
            f"{c['batch']} x {c['context']}", f"{c['plain']['bytes'] / 1e9:.2f}", f"{c['verify']['bytes'] / 1e9:.2f}",
            *(f"{drafters[n]['draft']['bytes'] / 1e9:.2f}" for n in NAMES), f"{ratio['bytes']:.3f}",
            f"{c['verify']['flops'] / 1e9:.0f}", *(f"{drafters[n]['draft']['flops'] / 1e9:.0f}" for n in NAMES), f"{ratio['flops']:.2f}",
        )  # fmt: skip
    first = found["cells"][0]["drafters"]
    table.caption = ", ".join(f"{NAMES[n]}: {first[n]['num_calls']} call{'s' if first[n]['num_calls'] > 1 else ''} a round, {found['num_params'][n] / 1e6:.0f} M parameters" for n in NAMES)  # fmt: skip
    return table


def _times(model: str, time: dict[str, Any]) -> Table:
    title = f"{model}, batch {time['batch']}, context {time['context']}: ms ({time['kind']})"
    caption = f"SpecBlock / EAGLE-3 drafting time: {time['specblock_over_eagle3']:.3f}"
    table = new_table(title, ("", "draft", "draft + verify", "drafting share"), caption=caption)
    table.add_row("plain round", "-", f"{time['plain_ms']:.1f}", "-")
    table.add_row("verify alone", "-", f"{time['verify_ms']:.1f}", "-")
    for n, words in NAMES.items():
        draft, whole = time["draft_ms"][n], time["round_ms"][n]
        table.add_row(words, f"{draft:.1f}", f"{whole:.1f}", f"{draft / whole:.1%}")
    return table
