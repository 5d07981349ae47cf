"""Version benchmark: rounds of a batch whose requests each draft with a version of their own, against rounds with one version.

Arms: one version for all; as many deltas of it, drafted in one pass; as many whole versions, each of which drafts alone. All
versions draft what the first one drafts, by factors that are nearly nothing, so that rounds differ in nothing but what
versions cost. Arms share the target and take turns, group by group.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console

from paceline.bench.common.engine_run import encode, load_target, set_threads, target_facts
from paceline.bench.common.result_file import ResultFile
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.cells import paired_ratio
from paceline.config import EngineConfig, TreeConfig
from paceline.errors import ConfigError, PacelineError
from paceline.paths import resolve_drafter
from paceline.records import DataFolder, Device, Dtype, JsonFile, Model, Setting, Threads, record
from paceline.serving.drafters.deltas import DOWN, UP, merge
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.drafters.network import DrafterModel
from paceline.serving.drafters.slots import MAX_CLASS_SLOTS, DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.families import build_drafter, build_model, read_drafter_files
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
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


@dataclasses.dataclass(slots=True)
class _Arm:
    engine: Engine
    groups: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(rounds, seconds) of each group."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    texts: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


def run_version_bench(options: VersionBenchOptions, console: Console) -> dict[str, Any]:
    """Run every group once per arm, in rotating order; prints a table, returns the document.

    Raises: ConfigError (unknown model or drafter), PacelineError where the arms' texts differ.
    """
    set_threads(options.num_threads)
    result = ResultFile(options.json, command="bench versions", options=options, extra={"rows": []})
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    target = load_target(
        options.model, options.dtype, "cpu" if device == "auto" else device, drafters=[options.drafter]
    )
    result.update(target=target_facts(target))
    folder = resolve_drafter(options.drafter, options.model, version=target.version)
    if folder is None:
        raise ConfigError(f"drafter must have weights, got {options.drafter!r}")
    values, state = read_drafter_files(folder, target)
    names = (ONE, DELTAS, WHOLE) if options.has_whole else (ONE, DELTAS)
    model = build_model(values, state)
    arms = {name: _Arm(_engine(name, options, target, values, model)) for name in names}
    groups = _groups(options, target)
    with progress(console, "versions", len(groups)) as bar:
        for at, group in enumerate(groups):
            turn = at % len(names)
            for name in names[turn:] + names[:turn]:
                _serve(arms[name], options, group, at, is_counted=at > 0)
            if any(arm.texts != arms[ONE].texts for arm in arms.values()) and target.dtype == torch.float32:
                raise PacelineError(f"greedy texts of the arms differ in group {at}; they must not")
            bar.step()
    rows = [_row(name, arm, arms[ONE]) for name, arm in arms.items()]
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


def _row(name: str, arm: _Arm, one: _Arm) -> dict[str, Any]:
    rounds = sum(n for n, _ in arm.groups)
    if not all(n for n, _ in arm.groups):
        raise PacelineError("in some group no round had all requests running; ask for more --max-tokens")
    # seconds per round over those of one version: rates of "rounds" whose roles are changed
    ratio = paired_ratio([(s, n) for n, s in arm.groups], [(s, n) for n, s in one.groups])
    return {
        "arm": name,
        "num_rounds": int(rounds),
        "round_ms": round(1e3 * sum(s for _, s in arm.groups) / rounds, 4),
        "draft_ms": round(1e3 * arm.parts["draft"] / rounds, 4),
        "part_ms": {part: round(1e3 * s / rounds, 4) for part, s in arm.parts.items()},
        "round_over_one": None if name == ONE else ratio,
    }


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


def _groups(options: VersionBenchOptions, target: TargetModel) -> list[list[tuple[int, ...]]]:
    """Prompts of each group, kinds mixed; the first group is not counted."""
    n, count = options.num_versions, options.num_versions * (options.num_groups + 1)
    buckets = BUNDLED_BUCKETS
    each = -(-count // len(buckets))
    found = [load_prompts(b, options.data, each, options.seed) for b in buckets]
    mixed = [tuple(encode(target, prompt.text)) for together in zip(*found, strict=True) for prompt in together]
    return [mixed[i * n : (i + 1) * n] for i in range(options.num_groups + 1)]


def _serve(
    arm: _Arm, options: VersionBenchOptions, group: Sequence[tuple[int, ...]], at: int, *, is_counted: bool
) -> None:
    """Serve one group; only rounds in which all requests run are timed."""
    events: list[list[RoundEvent]] = [[] for _ in group]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    engine = arm.engine
    for i, prompt in enumerate(group):
        request = GenerationRequest(request_id=f"{at}-{i}", prompt_token_ids=prompt, params=params, bucket=f"class {i}")
        engine.submit(request, events[i].append)

    def are_all(test: Any) -> bool:
        return all(map(test, events))

    while not are_all(len) and engine.step():  # until every request has its first token
        continue
    before, start = engine.stats(), time.perf_counter()
    while not any(own[-1].finish_reason for own in events) and engine.step():
        continue
    seconds, after = time.perf_counter() - start, engine.stats()
    while engine.step():
        continue
    arm.texts = [tuple(t for e in own for t in e.token_ids) for own in events]
    if is_counted:
        arm.groups.append((after["num_rounds"] - before["num_rounds"], seconds))
        for part, s in after["round_part_s"].items():
            arm.parts[part] = arm.parts.get(part, 0.0) + s - before["round_part_s"][part]
