"""Feedback cost: one engine serves every prompt with and without feedback and traces, alternating, in one process."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated as A

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.data.trace_writer import TraceWriter
from paceline.bench.common.engine_run import encode, load_named_drafter, load_target, set_threads
from paceline.bench.common.workloads import load_prompts
from paceline.bench.engine.arms import run_group
from paceline.bootstrap import rate_ratio
from paceline.config import EngineConfig, TraceConfig, TreeConfig
from paceline.contracts import Group
from paceline.infra.replica.feedback import FeedbackPublisher
from paceline.infra.state.redis_clients import Keys
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.records import DRAFTERS, DataFolder, JsonFile, Model, Setting, record, require
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine
from paceline.serving.sampling.request import RequestTrace, SamplingParams

ARMS = ("none", "feedback", "feedback+traces")
_SECONDS = {"wall_s": "wall time", "engine_cpu_s": "engine-thread CPU", "process_cpu_s": "process CPU"}
_DRAIN_S = 30.0
NUM_DRAFT_TOKENS = 8
"""Fixed size of the draft trees: every arm runs the same rounds, so that the ratio holds nothing but the difference."""


@record()
class FeedbackCostOptions:
    """Feedback goes to an embedded Redis. The same engine runs with and without both, prompt by prompt."""

    num_prompts: A[int, Setting("Prompts in all, the buckets in turn.", ge=1)] = 32
    max_tokens: A[int, Setting("New tokens per prompt at most.", ge=1)] = 96
    batch: A[int, Setting("Requests in flight.", ge=1)] = 1
    temperature: A[float, Setting("0 = greedy.", ge=0)] = 0.0
    buckets: A[tuple[str, ...], Setting("Comma list of buckets.", non_empty=True)] = (
        "tools", "code", "math", "facts",
    )  # fmt: skip
    drafter: A[
        str, Setting(f"none | {DRAFTERS}; those without weights have no traces: feedback only.")
    ] = "specblock"  # fmt: skip
    share: A[float, Setting("Share of requests traced (trace.share).", ge=0, le=1)] = 1.0
    num_threads: A[
        int | None, Setting("torch threads; with 1 the engine's CPU time is one thread's.", flag="threads", ge=1)
    ] = 1
    model: Model = "bundled"
    seed: A[int, Setting("Seed of prompts and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None

    def __post_init__(self) -> None:
        require(self.num_prompts >= self.batch, f"num-prompts must be >= batch={self.batch}", self.num_prompts)


class SwitchableTraces:
    """A TraceSink in front of the trace writer that can be switched off between prompts."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self.is_on = False

    def wants(self, request_id: str, bucket: str) -> bool:
        return self.is_on and self._writer.wants(request_id, bucket)

    def record_trace(self, trace: RequestTrace) -> None:
        self._writer.record_trace(trace)


@dataclass(slots=True)
class _Arm:
    tokens: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    engine_cpu_s: list[float] = field(default_factory=list)
    process_cpu_s: list[float] = field(default_factory=list)


def run_feedback_cost(options: FeedbackCostOptions, console: Console) -> dict:
    """Serve each group of prompts once per arm, in rotating order; prints a table, returns the document.

    Raises: ConfigError (unknown model, drafter, bucket; no Redis binary), PacelineError.
    """
    trace_config = TraceConfig(share=options.share)
    set_threads(options.num_threads)
    target = load_target(options.model)
    drafter = load_named_drafter(options.drafter, target)
    names = (
        ARMS if drafter is not None and drafter.caps.needs_features else ARMS[:2]
    )  # only a trainable drafter is traced
    groups = _prompt_groups(options, lambda text: encode(target, text))
    slots = DrafterSlots(drafter, "bench") if drafter is not None else DrafterSlots()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, EmbeddedRedis(folder) as redis:
        writer = TraceWriter(TraceStore(Path(folder) / "traces"), trace_config)
        publisher = FeedbackPublisher(
            redis.url, Keys("bench"), replica_id="bench", target_version=target.version
        ).start()
        traces = SwitchableTraces(writer)
        tree = TreeConfig(max_draft_tokens=NUM_DRAFT_TOKENS, policy="fixed")
        config = EngineConfig(max_running=options.batch, tree=tree, prefix_caching=False)
        engine = Engine(target, slots, config, traces=traces, trace_topk=trace_config.topk)
        arms = {name: _Arm() for name in names}
        try:
            _serve(options, console, groups, engine, traces, publisher, writer, arms)
            counters = {**publisher.counters(), **writer.counters()}
        finally:
            publisher.close()
            writer.close()
    rows = [_row(name, arms[name], arms["none"]) for name in names]
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
    result = {"options": plain, "dtype": str(target.dtype), "rows": rows, "counters": counters}
    console.print(_table(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        console.print(f"JSON: {options.json}")
    return result


def _prompt_groups(options: FeedbackCostOptions, encode_text) -> list[tuple[str, list[list[int]]]]:
    """(bucket, token ids of `batch` prompts), buckets in turn."""
    num_groups = -(-options.num_prompts // options.batch)
    per_bucket = -(-num_groups // len(options.buckets)) * options.batch
    pools = {
        b: [encode_text(p.text) for p in load_prompts(b, options.data, per_bucket, options.seed)]
        for b in options.buckets
    }
    groups = []
    for i in range(num_groups):
        bucket, at = options.buckets[i % len(options.buckets)], i // len(options.buckets) * options.batch
        groups.append((bucket, pools[bucket][at : at + options.batch]))
    return groups


def _serve(
    options: FeedbackCostOptions, console: Console, groups: Sequence[tuple[str, list[list[int]]]], engine: Engine,
    traces: SwitchableTraces, publisher: FeedbackPublisher, writer: TraceWriter, arms: dict[str, _Arm],
) -> None:  # fmt: skip
    """Fill the arms. This thread is the engine thread; publisher and writer have their own, as in a replica.

    What an arm leaves in the ring and in the queue is drained before the next one starts: outside its wall time, which
    clients would see, but inside its process CPU time.
    """
    names = list(arms)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("feedback cost", total=len(groups))
        for i, (bucket, prompts) in enumerate([groups[0], *groups]):  # the first group warms up
            first_seed = options.seed + i * options.batch
            params = [
                SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=first_seed + j)
                for j in range(len(prompts))
            ]
            turn = i % len(names)
            for name in names[turn:] + names[:turn]:
                engine.output.feedback = None if name == "none" else publisher
                traces.is_on = name == "feedback+traces"
                process_s, thread_s = time.process_time(), time.thread_time()
                run = run_group(engine, prompts, params, group=Group.ADAPTIVE, bucket=bucket, tag=f"{name}-{i}")
                thread_s = time.thread_time() - thread_s
                if name != "none":
                    publisher.flush()
                    writer.flush(_DRAIN_S)
                process_s = time.process_time() - process_s
                if i > 0:
                    arm = arms[name]
                    arm.tokens.append(run.num_tokens)
                    arm.wall_s.append(run.seconds)
                    arm.engine_cpu_s.append(thread_s)
                    arm.process_cpu_s.append(process_s)
            if i > 0:
                bar.advance(task)


def _row(name: str, arm: _Arm, none: _Arm) -> dict:
    row: dict = {"arm": name, "num_groups": len(arm.tokens), "num_tokens": int(sum(arm.tokens))}
    for key in _SECONDS:
        own, base = getattr(arm, key), getattr(none, key)
        row[f"tokens_per_{key}"] = round(sum(arm.tokens) / sum(own), 2)
        if name != "none":
            ratio, interval = rate_ratio((arm.tokens, own), (none.tokens, base))
            row[f"{key}_ratio"] = round(ratio, 4)
            row[f"{key}_ratio_interval"] = interval
    return row


def _table(rows: list[dict]) -> Table:
    table = Table(title="Tokens with feedback and traces over tokens without, per second of ...")
    for i, head in enumerate(("second of", "arm", "tokens", "ratio", "95% interval")):
        table.add_column(head, justify="left" if i < 2 else "right")
    for key, text in _SECONDS.items():
        for r in rows:
            ratio, interval = r.get(f"{key}_ratio"), r.get(f"{key}_ratio_interval")
            cells = (f"{r[f'tokens_per_{key}']:.1f}", "-" if ratio is None else f"{ratio:.3f}")
            table.add_row(text, r["arm"], *cells, f"{interval[0]:.3f}-{interval[1]:.3f}" if interval else "-")
    table.caption = "process CPU: publisher and writer drained after each prompt; Redis not included"
    return table
