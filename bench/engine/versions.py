"""Version benchmark: rounds of a batch whose requests each draft with a version of their own, against rounds with one version.

Arms: one version for all; as many deltas of it, drafted in one pass; as many whole versions, each of which drafts alone. All
versions draft what the first one drafts, by factors that are nearly nothing, so that rounds differ in nothing but what
versions cost. Arms share the target and take turns, group by group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console

from paceline.bench.common.engine_run import encode, load_target, set_threads, target_facts
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.arms import BenchGroup, EngineArm, GroupTiming, make_groups, run_alternating
from paceline.bench.engine.cells import paired_ratio, split_of_rounds
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group
from paceline.errors import ConfigError, PacelineError
from paceline.paths import resolve_drafter
from paceline.records import DataFolder, Device, Dtype, JsonFile, Model, Setting, Threads, record
from paceline.serving.drafters.deltas import DOWN, UP, merge
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.drafters.slots import MAX_CLASS_SLOTS, DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import build_drafter, build_model, read_drafter_files
from paceline.serving.loading.target import pick_device
from paceline.serving.target_model.model import TargetModel

ONE, DELTAS, WHOLE = "one version", "deltas", "whole versions"
_FAINT = 1e-6


@record("bench versions.")
class VersionBenchOptions:
    """What to measure.

    Example: paceline bench versions --model smollm2 --versions 16 --rank 32 --json versions.json.
    """

    num_versions: A[
        int, Setting("Versions, and requests that run together.", flag="versions", ge=2, le=MAX_CLASS_SLOTS)
    ] = 16
    rank: A[int, Setting("Rank of the deltas.", ge=1, le=128)] = 32
    num_groups: A[int, Setting("Counted groups, each one wave of requests.", flag="groups", ge=2)] = 12
    max_tokens: A[int, Setting("New tokens per request.", ge=2)] = 64
    has_whole: A[bool, Setting("Also whole versions, each with its own pass.", flag="whole")] = True
    model: Model = "bundled"
    drafter: A[str, Setting("A drafter with weights: its name or folder.")] = "bundled"
    dtype: Dtype = "auto"
    device: Device = "auto"
    num_threads: Threads = None
    seed: A[int, Setting("Seed of prompts and factors.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None


def run_version_bench(options: VersionBenchOptions, console: Console) -> dict[str, Any]:
    """Run every group once per arm, in rotating order; prints a table, returns the document.

    Raises: ConfigError (unknown model or drafter), PacelineError where the arms' texts differ.
    """
    set_threads(options.num_threads)
    result = ResultFile(options.json, command="bench versions", options=options, extra={"rows": []})
    device = pick_device(options.device)
    target = load_target(options.model, options.dtype, device, drafters=[options.drafter])
    result.update(target=target_facts(target))
    folder = resolve_drafter(options.drafter, options.model, version=target.version)
    if folder is None:
        raise ConfigError(f"drafter must have weights, got {options.drafter!r}")
    values, state = read_drafter_files(folder, target)
    names = (ONE, DELTAS, WHOLE) if options.has_whole else (ONE, DELTAS)
    model = build_model(values, state)
    arms = [EngineArm(name, _engine(name, options, target, values, model), Group.ADAPTIVE) for name in names]
    groups = _groups(options, target)
    with progress(console, "versions", len(groups)) as bar:
        timings = run_alternating(arms, groups, num_warmup=1, on_group=bar.step)
    texts = {name: [t.token_ids for t in own] for name, own in timings.items()}
    if target.dtype == torch.float32 and any(found != texts[ONE] for found in texts.values()):
        raise PacelineError("greedy texts of the arms differ; they must not")
    rows = [_row(name, own, timings[ONE]) for name, own in timings.items()]
    base = sum(t.numel() for t in state.values() if t.is_floating_point())
    added = options.num_versions * sum(t.numel() for t in random_factors(model, options.rank, 0, _FAINT).values())
    for row in rows:
        weights = {ONE: base, DELTAS: base + added, WHOLE: base * (options.num_versions + 1)}[row["arm"]]
        row["weights_over_one"] = round(weights / base, 3)
    document = result.close(rows=rows)
    cells = [
        (r["arm"], number_text(r["round_ms"], 2), number_text(r["draft_ms"], 2), _text(r["round_over_one"]), f"{r['weights_over_one']:.2f}")
        for r in rows
    ]  # fmt: skip
    caption = f"{options.num_versions} requests at once, rank {options.rank}, greedy; weights: numbers of the first version and of all"
    columns = ("arm", "round ms", "of it drafting", "over one version", "weights over one's")
    console.print(new_table("Rounds of many versions", columns, left=1, rows=cells, caption=caption))
    say_file(console, "JSON", options.json)
    return document


def _text(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['ratio']:.3f} ({interval_text(ratio['interval'])})"


def _row(name: str, timings: Sequence[GroupTiming], one: Sequence[GroupTiming]) -> dict[str, Any]:
    """Figures of the rounds in which all requests ran."""
    full, base = ([t.full_batch for t in own if t.full_batch and t.full_batch.num_rounds] for own in (timings, one))
    if len(full) < len(timings) or len(base) < len(one):
        raise PacelineError("in some group no round had all requests running; ask for more --max-tokens")
    # seconds per round over those of one version: rates of "rounds" whose roles are changed
    ratio = paired_ratio(*([(t.seconds, float(t.num_rounds)) for t in own] for own in (full, base)))
    split = split_of_rounds(full)
    return {
        "arm": name, **split, "draft_ms": split["part_ms"]["draft"], "round_over_one": None if name == ONE else ratio,
    }  # fmt: skip


def random_factors(model: DrafterModel, rank: int, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """A delta of a model that adds about `scale` times what it reads."""
    g, found = torch.Generator().manual_seed(seed), {}
    for name in model.config.delta_linears:
        num_out, num_in = model.get_parameter(name + ".weight").shape
        found[name + DOWN] = torch.randn(rank, num_in, generator=g) * num_in**-0.5
        found[name + UP] = torch.randn(num_out, rank, generator=g) * scale
    return found


def _engine(
    name: str, options: VersionBenchOptions, target: TargetModel, values: dict[str, Any], model: DrafterModel
) -> Engine:
    """A warmed-up engine whose classes have a version each, but for the arm of one; always drafting the same trees."""

    state = model.state_dict()

    def build() -> TrainedDrafter:
        return build_drafter(values, state, target)

    n, config = options.num_versions, EngineConfig(
        max_running=options.num_versions, prefix_caching=False, tree=TreeConfig(policy="fixed")
    )  # fmt: skip
    if name == ONE:
        slots = DrafterSlots(build(), "v")
    else:
        first = build()
        if name == DELTAS:
            first.hold_deltas(n, options.rank)
        slots = DrafterSlots(
            build(), "v", first=first, spawn=build, num_class_slots=n if name == WHOLE else 0, timer=lambda: 0.0
        )  # fmt: skip
        slots.route({f"class {i}": f"v{i}" for i in range(n)})
    engine = Engine(target, slots, config)
    for i in range(n if name != ONE else 0):
        factors = functools.partial(random_factors, model, options.rank, options.seed + i, _FAINT)
        if name == DELTAS:
            slots.load_delta(f"v{i}", factors)
        else:
            slots.load(f"v{i}", lambda: merge(state, factors()))  # noqa: B023 - called before the next one is made
    engine.warm_up()
    if len(slots.served()) != (n if name != ONE else 0):
        raise PacelineError(f"only {len(slots.served())} of {n} versions are resident")
    return engine


def _groups(options: VersionBenchOptions, target: TargetModel) -> list[BenchGroup]:
    """One wave of requests each, kinds of prompts mixed, every request of a class of its own."""
    n, num_groups = options.num_versions, options.num_groups + 1
    each = -(-n * num_groups // len(BUNDLED_BUCKETS))
    found = [load_prompts(b, options.data, each, options.seed) for b in BUNDLED_BUCKETS]
    mixed = [tuple(encode(target, prompt.text)) for together in zip(*found, strict=True) for prompt in together]
    groups = make_groups(
        mixed, bucket="mixed", batch=n, group_size=n, temperature=0.0, max_tokens=options.max_tokens, seed=options.seed,
        ignore_eos=True,
    )  # fmt: skip
    buckets = tuple(f"class {i}" for i in range(n))
    return [dataclasses.replace(group, buckets=buckets) for group in groups[:num_groups]]
