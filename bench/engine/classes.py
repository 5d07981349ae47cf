"""Class benchmark: mixed traffic without buckets in classes, against the same traffic named and against one bucket for all.

Each arm is an engine with a memory of its own, so that its switch learns from its own buckets only; all share the target
and take turns, group by group, on the same prompts. Classes are learnt on the way, as by a controller between two groups.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np
from rich.console import Console

from paceline.bandit.beliefs.classes import ClassBook
from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads, target_facts
from paceline.bench.common.terminal import interval_text, new_table, number_text, progress, say_file
from paceline.bench.common.workloads import BUNDLED_BUCKETS, load_prompts
from paceline.bench.engine.cells import paired_ratio
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.records import DataFolder, JsonFile, Model, Setting, Threads, record
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.classes import NUM_DIMS
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import GenerationRequest, RoundEvent, SamplingParams
from paceline.serving.target_model.model import TargetModel

ONE, NAMED, CLASSES = "one", "named", "classes"
ARMS = (ONE, NAMED, CLASSES)
_COLUMNS = ("arm", "tok/s", "over named", "over one")


@record()
class ClassBenchOptions:
    """What to measure."""

    batch: A[int, Setting("Requests that run together.", ge=1, le=1024)] = 1
    num_groups: A[
        int, Setting("Groups of two waves; the first third teaches and is not counted.", flag="groups", ge=6)
    ] = 100
    buckets: A[tuple[str, ...], Setting("Comma list of kinds of prompts.", non_empty=True)] = BUNDLED_BUCKETS
    drafter: A[str, Setting("A drafter with weights: its name or folder.")] = "specblock"
    model: Model = "bundled"
    max_tokens: A[int, Setting("New tokens per request at most.", ge=2)] = 96
    max_classes: A[int, Setting("Classes at most.", ge=1, le=64)] = 16
    num_threads: Threads = None
    seed: A[int, Setting("Seed of prompts and of their order.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None


@dataclass(slots=True)
class _Arm:
    """An engine and what its groups took."""

    engine: Engine
    groups: list[tuple[float, float]] = field(default_factory=list)
    """(tokens, seconds) of each group."""
    texts: list[tuple[int, ...]] = field(default_factory=list)
    buckets: dict[str, dict[str, int]] = field(default_factory=dict)
    """Kind of prompt -> bucket -> requests counted under it, of the counted groups."""


class _Learner:
    """A PromptSink that sorts what it was told into classes, and hands them to its engine between two groups."""

    def __init__(self, max_classes: int) -> None:
        self.book, self._max_classes, self._told = ClassBook(), max_classes, list[tuple[str, np.ndarray]]()
        self._now = 0.0

    def record_prompt(self, space: str, vector: np.ndarray, tenant: str) -> None:
        self._told.append((space, vector.copy()))

    def teach(self, engine: Engine) -> None:
        """Learn what came since the last call. A second is one prompt's: the rate that a book takes plays no part."""
        for space, vector in self._told:
            self.book.observe(space, vector.astype("<f4").tobytes(), NUM_DIMS, self._now)
            self._now += 1.0
        self._told.clear()
        if self.book.tidy(self._max_classes, self._now) and engine.classes is not None:
            engine.classes.install(self.book.published)


def run_class_bench(options: ClassBenchOptions, console: Console) -> dict[str, Any]:
    """Run every group once per arm, in rotating order; prints a table, returns the document.

    Raises: ConfigError (unknown model, drafter, bucket), PacelineError where the arms' greedy texts differ.
    """
    set_threads(options.num_threads)
    target = load_target(options.model, drafters=[options.drafter])
    learner = _Learner(options.max_classes)
    arms = {name: _Arm(_engine(options, target, learner if name == CLASSES else None)) for name in ARMS}
    groups = _groups(options, target)
    num_taught = len(groups) // 3
    with progress(console, "classes", len(groups)) as bar:
        for at, group in enumerate(groups):
            turn = at % len(ARMS)
            for name in ARMS[turn:] + ARMS[:turn]:
                _serve(arms[name], options, group, at, is_named=name == NAMED, is_counted=at >= num_taught)
            learner.teach(arms[CLASSES].engine)
            if any(arm.texts != arms[ONE].texts for arm in arms.values()):
                raise PacelineError(f"greedy texts of the arms differ in group {at}; they must not")
            bar.step()
    counted = {name: arm.groups[num_taught:] for name, arm in arms.items()}
    rows: list[dict[str, Any]] = [
        {
            "arm": name,
            "tokens_per_s": round(sum(n for n, _ in own) / sum(s for _, s in own), 2),
            "over_named": paired_ratio(own, counted[NAMED]),
            "over_one": paired_ratio(own, counted[ONE]),
            "buckets": arms[name].buckets,
        }
        for name, own in counted.items()
    ]
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
    result = {
        "options": plain, "target": target_facts(target), "rows": rows, "num_classes": len(learner.book.published.names),
    }  # fmt: skip
    cells = [
        (r["arm"], number_text(r["tokens_per_s"]), *(_ratio_text(r[name]) for name in ("over_named", "over_one")))
        for r in rows
    ]
    caption = (
        f"{result['num_classes']} classes of {len(options.buckets)} kinds of prompts; batch {options.batch}, greedy"
    )
    console.print(new_table("Requests without a bucket", _COLUMNS, left=1, rows=cells, caption=caption))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say_file(console, "JSON", options.json)
    return result


def _ratio_text(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['ratio']:.2f} ({interval_text(ratio['interval'])})"


def _engine(options: ClassBenchOptions, target: TargetModel, learner: _Learner | None) -> Engine:
    """A warmed-up engine; prompts are computed anew for each arm."""
    config = EngineConfig(
        max_running=options.batch, prefix_caching=False, max_classes=0 if learner is None else options.max_classes
    )
    slots = DrafterSlots(load_named_drafter(options.drafter, target), "bench")
    engine = Engine(target, slots, config, prompts=learner, num_sharing=len(ARMS))
    engine.warm_up()
    return engine


def _groups(options: ClassBenchOptions, target: TargetModel) -> list[list[tuple[str, tuple[int, ...]]]]:
    """(kind, prompt) of every request, kinds mixed at random, in groups of two waves."""
    size = 2 * options.batch
    each = -(-size * options.num_groups // len(options.buckets))
    mixed = [
        (bucket, tuple(encode(target, prompt.text)))
        for bucket in options.buckets
        for prompt in load_prompts(bucket, options.data, each, options.seed)
    ]
    random.Random(options.seed).shuffle(mixed)
    return [mixed[i * size : (i + 1) * size] for i in range(options.num_groups)]


def _serve(
    arm: _Arm, options: ClassBenchOptions, group: list[tuple[str, tuple[int, ...]]], at: int, *, is_named: bool, is_counted: bool
) -> None:  # fmt: skip
    """Serve one group and note what it took."""
    events: list[list[RoundEvent]] = [[] for _ in group]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    for i, (kind, prompt) in enumerate(group):
        request = GenerationRequest(
            request_id=f"{at}-{i}", prompt_token_ids=prompt, params=params, bucket=kind if is_named else None
        )
        arm.engine.submit(request, events[i].append)
    start = time.perf_counter()
    while arm.engine.step():
        continue
    seconds = time.perf_counter() - start
    arm.texts = [tuple(t for e in own for t in e.token_ids) for own in events]
    arm.groups.append((float(sum(map(len, arm.texts))), seconds))
    for (kind, _), own in zip(group, events, strict=True):
        if is_counted:
            counts = arm.buckets.setdefault(kind, {})
            counts[own[-1].stats.bucket] = counts.get(own[-1].stats.bucket, 0) + 1
