"""Learning: what a learner gains per device-second, against a job that trains by epochs and then scores, on the same text.

Text: continuations of a class's prompts by the target, decoded plainly; the newest requests are kept to judge everybody. The
job is the usual recipe of fine-tuning: its text shuffled into batches, two epochs, a cosine, then one score of held-out
requests by exact replay. The learner reads the same requests once, in order, each scored before it is learned. Arms alternate;
seconds are those of this process on the processor, which other processes do not change.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated as A
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.adapt.data.trace_store import MAX_TRACE_ROWS, TraceStore, count_rows
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.families.training import TrainingRun, training_family, warmup_cosine
from paceline.adapt.gate.gate import pooled_acceptance_length
from paceline.adapt.gate.shadow import shadow_scores
from paceline.adapt.online.burst import Burst
from paceline.adapt.online.learner import Learner, max_rate, select_parameters
from paceline.adapt.online.trainer import ShadowConfig
from paceline.bench.common.engine_run import encode, load_target, set_threads
from paceline.bench.common.result_file import keep_settings, plain_values, write_json
from paceline.bench.common.terminal import number_text, say_file
from paceline.bench.common.workloads import Question, read_questions
from paceline.bench.engine.arms import BenchGroup
from paceline.bench.shadow.decode import decode
from paceline.contracts import ArmSpec
from paceline.errors import ConfigError
from paceline.paths import resolve_drafter
from paceline.records import DataFolder, JsonFile, Model, Setting, Threads, record
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.loading.families import build_drafter, build_model, read_drafter_files
from paceline.serving.sampling.request import RequestTrace, SamplingParams
from paceline.serving.target_model.model import TargetModel

MIN_PROMPTS = 16
"""Least requests of a class, learned or rehearsed."""
JOB_EPOCHS, JOB_WARMUP, JOB_HELD_OUT, JOB_RATE = 2, 0.1, 0.25, 2e-3
_MAX_PROMPT_TOKENS, _BATCH = 192, 8


@record("bench learner.")
class LearnerOptions:
    """Classes that the drafter does not know show most.

    Example: paceline bench learner --buckets math,dialogue --data DATA --json learner.json.
    """

    buckets: A[tuple[str, ...], Setting("Classes to learn, as the prompts' files name them.")] = ("math",)
    known: A[str, Setting("Class that the drafter knows: rehearsed, and judged for what is forgotten.")] = "tools"
    rates: A[
        tuple[float, ...], Setting("Learning rates of the learner; what learns leaves out those that it may not have.")
    ] = (1e-3,)
    rehearsal: A[
        tuple[float, ...],
        Setting("Shares of the learner's steps that go over the known class; every rate runs with each."),
    ] = (0.125,)
    parameters: A[tuple[str, ...], Setting("What learns: full, head, calibration or lora; every choice runs.")] = (
        "full",
    )
    rank: A[int, Setting("Rank of the factors that lora learns.", ge=1)] = 32
    num_prompts: A[int, Setting("Requests of a class that are learned.", ge=MIN_PROMPTS)] = 96
    num_judged: A[int, Setting("Newest requests of a class that judge and are not learned.", ge=8)] = 32
    max_tokens: A[int, Setting("Output tokens of a request.", ge=8)] = 64
    repeats: A[int, Setting("Times that every arm runs.", ge=1)] = 2
    points: A[
        int,
        Setting("Points of a learner's curve: it is judged after all of the text, a half, a quarter, and so on.", ge=1),
    ] = 1
    model: Model = "bundled"
    drafter: A[str, Setting("A bundled drafter's name, or a folder.")] = "bundled"
    num_threads: Threads = 1
    seed: A[int, Setting("Seed of sampling and training.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None
    work: A[Path | None, Setting("Folder that keeps the traces; a second run decodes nothing.")] = None

    def settings(self, target: TargetModel) -> dict[str, Any]:
        """What the kept traces depend on, beside their class."""
        names = ("num_prompts", "num_judged", "max_tokens", "seed")
        values = {name: getattr(self, name) for name in names}
        return {**values, "data": str(self.data or ""), "target_version": target.version, "dtype": target.dtype_name}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bench:
    """Target, first drafter and what every arm is given."""

    target: TargetModel
    values: dict[str, Any]
    state: dict[str, torch.Tensor]
    options: LearnerOptions
    known: list[RequestTrace]

    def drafter(self, state: dict[str, torch.Tensor]) -> TrainedDrafter:
        return build_drafter(self.values, state, self.target)

    def lengths(self, state: dict[str, torch.Tensor], judged: Sequence[RequestTrace]) -> float:
        """Acceptance length by exact replay."""
        scores = shadow_scores({"": self.drafter(state)}, judged, **ShadowConfig().tree, device=self.target.device)
        return pooled_acceptance_length(scores[""])

    def model(self) -> Any:
        model = build_model(self.values, self.state)
        return model.to(self.target.device)

    @property
    def tables(self) -> TargetTables:
        return TargetTables.of(self.target, torch.device(self.target.device))


def _text(question: Question) -> str:
    if question.messages:
        return "\n".join(f"{role.capitalize()}: {text}" for role, text in question.messages) + "\nAssistant:"
    return question.turns[0]


def _traces(
    target: TargetModel, store: TraceStore, bucket: str, questions: Sequence[Question], options: LearnerOptions
) -> list[RequestTrace]:
    """The target's continuations, half of them greedy; read back where they were decoded before."""
    if shards := store.list_shards(bucket):
        return [t for s in shards for t in store.read_shard(s.shard_id)]
    texts = list(dict.fromkeys(_text(q) for q in questions))[: options.num_prompts + options.num_judged]
    name, least = ("num_prompts", options.num_prompts) if bucket in options.buckets else ("rehearsed", MIN_PROMPTS)
    if len(texts) < least + options.num_judged:
        raise ConfigError(
            f"bucket {bucket!r} must have {name} + num_judged = {least + options.num_judged} different prompts, got "
            f"{len(texts)}; ask for fewer"
        )
    params = tuple(
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=options.max_tokens, seed=options.seed + i)
        for i in range(len(texts))
    )
    prompts = tuple(tuple(encode(target, text))[:_MAX_PROMPT_TOKENS] for text in texts)
    traces = decode(
        target, None, BenchGroup(tag=bucket, bucket=bucket, prompts=prompts, params=params, batch=_BATCH)
    ).traces
    store.write_shard(traces, bucket)
    return traces


Weights = dict[str, torch.Tensor]
Arm = Callable[[_Bench, Sequence[RequestTrace]], tuple[float, list[tuple[int, Weights]]]]
"""(bench, requests to learn) -> (device-seconds, rows learned with the weights behind them, rising up to all rows)."""


def _job(bench: _Bench, text: Sequence[RequestTrace]) -> tuple[float, list[tuple[int, Weights]]]:
    began = time.process_time()
    num_held_out = int(len(text) * JOB_HELD_OUT)
    held_out, fresh = text[:num_held_out], text[num_held_out:]
    model = bench.model()
    select_parameters(model, ArmSpec(name="", parameters="full", num_rows=1))
    loss = training_family(model.drafter_type).update_loss(model, True)
    run = TrainingRun(model, bench.tables, loss, beta_factor=40.0, max_rows=MAX_TRACE_ROWS)
    rehearsal = list(itertools.islice(itertools.cycle(bench.known), len(fresh) // 2))
    mixed = [*fresh, *rehearsal]
    wanted = min(max(count_rows(mixed) // 32, 96), 1024)
    generator = torch.Generator().manual_seed(bench.options.seed)
    plan: list[list[RequestTrace]] = []
    for _ in range(JOB_EPOCHS):
        batch: list[RequestTrace] = []
        for i in torch.randperm(len(mixed), generator=generator).tolist():
            batch.append(mixed[i])
            if count_rows(batch) >= wanted:
                plan.append(batch)
                batch = []
        plan += [batch] if batch else []

    def rate_of(step: int) -> float:
        share = (step + 0.5) / len(plan)
        return JOB_RATE * warmup_cosine(share / JOB_WARMUP, (share - JOB_WARMUP) / (1 - JOB_WARMUP))

    for _ in run.train(plan, rate_of=rate_of, generator_of=lambda step: generator):
        pass
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    drafters = {"new": bench.drafter(state), "old": bench.drafter(bench.state)}
    shadow_scores(drafters, held_out, **ShadowConfig().tree, device=bench.target.device)
    return time.process_time() - began, [(count_rows(text), state)]


def _learner(parameters: str, rate: float, share: float, marks: list[tuple[float, float]]) -> Arm:
    def run(bench: _Bench, text: Sequence[RequestTrace]) -> tuple[float, list[tuple[int, Weights]]]:
        began = time.process_time()
        options = bench.options
        arm = ArmSpec(
            name="", parameters=parameters, num_rows=count_rows(text), learning_rate=rate, rehearsal_share=share,
            rank=options.rank,
        )  # fmt: skip
        learner = Learner(bench.model(), bench.tables, arm, seed=options.seed)
        burst = Burst(
            learner, bench.drafter(bench.state), bench.drafter(bench.state), **ShadowConfig().tree, min_gain=0.0,
            device=bench.target.device, clock=time.process_time, should_stop=lambda: False, save=lambda: None,
        )  # fmt: skip
        weights: list[tuple[int, Weights]] = []
        for num in sorted({len(text) >> i for i in range(options.points)} - {0}):
            left = text[:num]
            while left := [t for t in left if not learner.has_read(t)]:
                for _ in burst.run(left, bench.known):
                    pass  # sure or not, it goes on: what all of the text brings is the question
            learned = {name: t.detach().clone() for name, t in learner.snapshot().items()}
            weights.append((count_rows(text[:num]), learned))
        marks.append((burst.train_s, burst.shadow_s))
        return time.process_time() - began, weights

    return run


def run_learner_bench(options: LearnerOptions, console: Console) -> dict[str, Any]:
    """Run every arm on every class, print the table, write the JSON."""
    with tempfile.TemporaryDirectory(prefix="paceline-learner-") as spare:
        rows = _compare(options, options.work or Path(spare))
    result = {"options": {k: v for k, v in plain_values(options).items() if k not in ("work", "json")}, "rows": rows}
    _print(rows, options.known, console)
    if options.json:
        write_json(options.json, result)
    say_file(console, "JSON", options.json)
    return result


def _compare(options: LearnerOptions, work: Path) -> list[dict[str, Any]]:
    """A row for every class and arm. Raises: ConfigError where the work folder holds the traces of other options."""
    set_threads(options.num_threads)
    folder = resolve_drafter(options.drafter, options.model)
    if folder is None:
        raise ConfigError(f"drafter must have weights to be trained further, got {options.drafter!r}")
    target = load_target(options.model, "auto", drafters=[options.drafter])
    values, state = read_drafter_files(folder, target)
    found = read_questions(options.data) | ({} if options.data is None else read_questions(None))
    missing = [b for b in (*options.buckets, options.known) if b not in found]
    if missing:
        raise ConfigError(f"buckets must be among {', '.join(sorted(found))}, got {missing[0]!r}")
    keep_settings(work / "traces.json", options.settings(target))
    store = TraceStore(work / "traces")
    known = _traces(target, store, options.known, found[options.known], options)
    judged_known = known[-options.num_judged :]
    bench = _Bench(target=target, values=values, state=state, options=options, known=known[: -options.num_judged])
    rows: list[dict[str, Any]] = []
    for bucket in options.buckets:
        traces = _traces(target, store, bucket, found[bucket], options)
        text, judged = traces[: -options.num_judged], traces[-options.num_judged :]
        marks: dict[str, list[tuple[float, float]]] = {}
        arms: dict[str, Arm] = {"job": _job}
        for parameters, rate, share in itertools.product(options.parameters, options.rates, options.rehearsal):
            if rate > max_rate(parameters):
                continue
            name = f"learner {parameters} {rate:g}, rehearsal {share:g}"
            marks[name] = []
            arms[name] = _learner(parameters, rate, share, marks[name])
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        weights: dict[str, list[tuple[int, Weights]]] = {}
        for _ in range(options.repeats):
            for name, arm in arms.items():
                spent, weights[name] = arm(bench, text)
                seconds[name].append(spent)
        before, before_known = bench.lengths(state, judged), bench.lengths(state, judged_known)
        for name in arms:
            curve = [(num_rows, bench.lengths(learned, judged)) for num_rows, learned in weights[name]]
            (num_rows, after), (_, last) = curve[-1], weights[name][-1]
            spent = sum(seconds[name]) / options.repeats
            shadow = sum(s for _, s in marks.get(name, [])) / options.repeats
            rows.append(
                {
                    "bucket": bucket, "arm": name, "rows": num_rows, "before": before, "after": after, "curve": curve,
                    "known_before": before_known, "known_after": bench.lengths(last, judged_known),
                    "seconds": spent, "scoring_s": shadow, "gain_per_s": (after - before) / spent,
                }
            )  # fmt: skip
    return over_jobs(rows)


def over_jobs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its gain per second (None where the job gained nothing) and its seconds over its class's job's."""
    job = {r["bucket"]: r for r in rows if r["arm"] == "job"}
    for row in rows:
        own = job[row["bucket"]]
        row["over_job"] = row["gain_per_s"] / own["gain_per_s"] if own["gain_per_s"] else None
        row["seconds_over_job"] = row["seconds"] / own["seconds"]
    return rows


def _print(rows: Sequence[dict[str, Any]], known: str, console: Console) -> None:
    table = Table(title="acceptance length on requests that nobody learned, and device-seconds")
    for name in ("class", "arm", "rows", "length", known, "seconds", "gain / s", "gain / s over the job's"):
        table.add_column(name, justify="left" if name in ("class", "arm") else "right")
    for r in rows:
        table.add_row(
            r["bucket"], r["arm"], ", ".join(f"{num_rows:,}" for num_rows, _ in r["curve"]),
            " -> ".join(f"{length:.2f}" for length in (r["before"], *(length for _, length in r["curve"]))),
            f"{r['known_before']:.2f} -> {r['known_after']:.2f}", f"{r['seconds']:.1f}", f"{r['gain_per_s']:.3f}",
            number_text(r["over_job"], 2),
        )  # fmt: skip
    console.print(table)
