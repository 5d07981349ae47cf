"""Live replay: policies where training is real: real texts, real jobs and exact acceptance in one process, no Ray.

Device time per token of a version = measured time of a round of the padded target / its acceptance length by exact replay;
training and scoring are booked with the seconds that they really took. Rounds and jobs have one thread, as a replica and a
trainer that share two cores. Traffic goes A -> B -> A -> C in up to three orders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from rich.console import Console

from paceline.adapt.data.learning_text import ShardReader
from paceline.adapt.data.regenerate import Regenerator
from paceline.adapt.data.trace_store import ShardInfo, TraceStore, handed_over
from paceline.adapt.families.target_handle import TargetHandle
from paceline.adapt.gate.shadow import shadow_scores
from paceline.adapt.online.learner_store import LearnerStore
from paceline.adapt.online.trainer import ShadowConfig, held_threads, load_version, run_training_job
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.job_cost import STAGING_PRIOR_S
from paceline.bandit.replay.outcomes import FIRST, TrainOrder, TrainTruth, real_truth
from paceline.bandit.replay.scenario import Scenario, Traffic
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import World
from paceline.bench.common.engine_run import build_engine, encode, load_named_drafter, load_target
from paceline.bench.common.padded import copy_drafter, pad_target
from paceline.bench.common.result_file import kept_json
from paceline.bench.common.terminal import progress
from paceline.bench.common.workloads import load_prompts
from paceline.bench.engine.arms import run_group
from paceline.bench.replay.plan import Task, Variant
from paceline.bench.replay.run import RUNS_FILE, Row, read_finished, row_of
from paceline.config import EngineConfig, TreeConfig
from paceline.contracts import Group, TrainJob, TrainResult, decode
from paceline.contracts import encode as encode_record
from paceline.paths import resolve_drafter, write_atomic
from paceline.serving.loading.families import read_drafter_files
from paceline.serving.sampling.request import SamplingParams
from paceline.serving.target_model.model import TargetModel

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveConfig:
    """Size of a live replay."""

    buckets: tuple[str, ...] = ("tools", "math", "facts")
    """A, B and C; the bundled drafter knows the first."""
    num_requests: int = 640
    """Texts per bucket."""
    max_new_tokens: int = 96
    num_scored: int = 64
    """Texts per bucket, never trained on, that say a version's acceptance length."""
    shard_requests: int = 8
    temperature: float = 0.8
    phase_s: float = 180.0
    load: float = 1.0
    """Devices that a phase keeps busy with the first drafter."""
    batch_size: int = 1
    step_s: float = 5.0
    epoch_s: float = 10.0
    seed: int = 0

    def text_key(self, source: str) -> str:
        """Identity of the captured texts."""
        names = ("num_requests", "max_new_tokens", "shard_requests", "temperature", "seed")
        text = json.dumps([source, {k: v for k, v in asdict(self).items() if k in names}], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


SMALL = LiveConfig(num_requests=48, max_new_tokens=48, num_scored=8, phase_s=60.0)
"""A replay of minutes on two slow cores."""


def capture(
    target: TargetModel, bucket: str, config: LiveConfig, folder: Path, text_id: str, data: Path | None, say: Say
) -> TraceStore:
    """Texts of a bucket as shards with the target's features; written by the target, resumed shard by shard."""
    store = TraceStore(folder / f"{bucket}-{text_id}")
    done = sum(1 for _ in store.list_shards(bucket))
    prompts = load_prompts(bucket, data, config.num_requests, config.seed)
    room = max(target.context_tokens - config.max_new_tokens - 2, 8)
    encoded = [encode(target, p.text)[-room:] for p in prompts]
    writer: Regenerator | None = None
    for number, at in enumerate(range(0, len(encoded), config.shard_requests)):
        if number < done:
            continue
        say(f"writing {bucket} texts, {at} of {len(encoded)}")
        if writer is None:
            writer = Regenerator(
                target,
                batch_requests=config.shard_requests,
                max_request_tokens=max(map(len, encoded)) + config.max_new_tokens,
                topk=8,
            )
        batch = encoded[at : at + config.shard_requests]
        traces = writer.run(
            batch,
            [config.temperature] * len(batch),
            max_new_tokens=config.max_new_tokens,
            seed=config.seed * 1_000_003 + number,
            bucket=bucket,
            name=f"{bucket}-{config.seed}-{number}",
        )
        store.write_shard(traces, bucket)
    return store


def split_shards(store: TraceStore, config: LiveConfig) -> tuple[list[ShardInfo], list[ShardInfo]]:
    """(shards to train on, shards to score on): the newest ones are scored only."""
    shards = store.list_shards()
    count = max(1, -(-config.num_scored // config.shard_requests))
    return shards[:-count], shards[-count:]


def round_seconds(config: LiveConfig, path: Path, say: Say) -> dict[str, float]:
    """Device seconds of a round per request with ('drafted_s') and without ('plain_s') a draft, measured in the engine.

    The value is kept in `path`: later runs of a replay must price versions alike.
    """
    return kept_json(path, lambda: _measure_rounds(config, say))


def _measure_rounds(config: LiveConfig, say: Say) -> dict[str, float]:
    """Of the padded target, which says the same tokens: what it makes of the bundled one fits a CPU's caches."""
    say("measuring round times")
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as room, held_threads(1):
        folder = pad_target(Path(room, "target"))
        target = load_target(str(folder))
        drafter = load_named_drafter(copy_drafter("bundled", folder, Path(room, "drafter")), target)
        # Drafts in every round, whether it pays or not.
        tree = TreeConfig(policy="fixed", max_draft_tokens=NUM_NODES)
        engine = build_engine(target, drafter, EngineConfig(tree=tree), "bundled")
        texts = load_prompts(config.buckets[0], None, config.batch_size, config.seed)
        prompts = [encode(target, p.text) for p in texts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=config.max_new_tokens, seed=i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        out = {}
        for name, group in (("drafted_s", Group.ADAPTIVE), ("plain_s", Group.PLAIN)):
            runs = [
                run_group(engine, prompts, params, group=group, bucket="measure", tag=f"{name}-{i}").full_batch
                for i in range(_NUM_MEASURED + 1)
            ]
            kept = [run for run in runs[1:] if run is not None]
            out[name] = sum(run.seconds for run in kept) / sum(run.num_rounds for run in kept) / len(prompts)
    return out


_NUM_MEASURED = 4
"""Groups of requests whose rounds are timed, behind one that warms up."""
NUM_NODES = 4
"""Draft nodes of every tree, near what engines choose where drafting pays little."""


class MergedStore:
    """Shards of several stores under their own ids."""

    def __init__(self, stores: dict[str, TraceStore]) -> None:
        self._owner = {info.shard_id: store for store in stores.values() for info in store.list_shards()}

    def read_shard(self, shard_id: str) -> list:
        return self._owner[shard_id].read_shard(shard_id)


@dataclass(kw_only=True, slots=True)
class LiveTexts:
    """What policies train on and are scored by, and where results that all of them share are kept."""

    labels: tuple[str, ...]
    store: ShardReader
    train_shards: Mapping[str, Sequence[ShardInfo]]
    """Bucket -> shards that may be trained on, the oldest first."""
    score_shards: Mapping[str, Sequence[ShardInfo]]
    """Bucket -> shards that say a version's acceptance length, and are never trained on."""
    target: TargetHandle
    registry: DrafterRegistry
    first: str
    """The first drafter's version."""
    learned: Mapping[str, int]
    """Bucket -> rows that the first drafter has learned."""
    text_id: str
    """Identity of the texts."""
    cache: Path
    say: Say


class LiveOutcomes:
    """Trains with adapt/online/trainer.py on the texts that the replay has served so far; scores by exact replay."""

    def __init__(self, texts: LiveTexts, served: np.ndarray, staging_s: float = STAGING_PRIOR_S) -> None:
        """served: (T, D) rows traced up to the end of each step. staging_s: device seconds of making another version live."""
        self.texts, self.served = texts, served
        self.labels = texts.labels
        self.names = {FIRST: texts.first}
        """Version of the replay -> version of the registry."""
        self.learned = {FIRST: {b: n for b, n in texts.learned.items() if b in self.labels}}
        self.arms, self.staging_s = default_arms(), staging_s
        self._lengths: dict[str, np.ndarray] = {}
        self._chains: dict[tuple[str, str, str], str] = {}
        """(base, bucket, parameters) -> newest burst of that learner."""
        self._makers: dict[str, str] = {}
        """Version -> the burst that made it."""

    def lengths(self, version: str) -> np.ndarray:
        """(D,) pooled acceptance length on each bucket's scored texts."""
        real = self.names[version]
        if real not in self._lengths:
            self._lengths[real] = np.array([self._length(real, bucket) for bucket in self.labels])
        return self._lengths[real]

    def _length(self, version: str, bucket: str) -> float:
        path = self.texts.cache / "scores" / f"{version}-{bucket}-{self.texts.text_id}.json"
        return float(kept_json(path, lambda: self._score(version, bucket))["acceptance_length"])

    def _score(self, version: str, bucket: str) -> dict[str, float]:
        self.texts.say(f"scoring {version} on {bucket}")
        drafter = load_version(self.texts.registry, version, self.texts.target)
        traces = [t for s in self.texts.score_shards[bucket] for t in self.texts.store.read_shard(s.shard_id)]
        found = shadow_scores({version: drafter}, traces, num_nodes=NUM_NODES, device=self.texts.target.device)
        scores = found[version]
        length = sum(s.num_tokens for s in scores) / max(sum(s.num_rounds for s in scores), 1)
        return {"acceptance_length": length, "num_requests": len(scores)}

    def _seen(self, bucket: str, step: int) -> list[ShardInfo]:
        """Shards of a bucket whose rows were served up to a step; a bucket that came round again has them all."""
        rows = float(self.served[step, self.labels.index(bucket)])
        out: list[ShardInfo] = []
        total = 0
        for shard in self.texts.train_shards[bucket]:
            total += shard.num_rows
            if total > rows:
                break
            out.append(shard)
        return out

    def train(self, order: TrainOrder) -> TrainTruth:
        base = self.names[order.base]
        others = [self._seen(b, order.step) for b in self.labels if b != order.bucket]
        handed = handed_over(order.arm, self._seen(order.bucket, order.step), others)
        shards, rehearsal = ([s.shard_id for s in part] for part in handed)
        chain = (base, order.bucket, order.arm.parameters)
        previous = self._chains.get(chain) or self._makers.get(base, "")
        facts = [base, order.bucket, msgspec.to_builtins(order.arm), len(shards), len(rehearsal), round(order.time_limit_s), round(order.min_gain, 3), msgspec.to_builtins(order.plan), previous, self.texts.text_id]  # fmt: skip
        job_id = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        result = self._result(job_id, order, base, shards, rehearsal, previous)
        self._chains[chain] = job_id
        ours = {base: order.base}
        if result.status == "accepted" and result.version is not None:
            self._makers.setdefault(result.version, job_id)
            version = result.version if order.base == FIRST else f"{result.version}-{order.decision_id}"
            self.names[version], ours[result.version] = result.version, version
        return real_truth(result, ours)

    def _result(
        self, job_id: str, order: TrainOrder, base: str, shards: list[str], rehearsal: list[str], previous: str
    ) -> TrainResult:
        """The burst `job_id`, which goes on from the learner as `previous` left it; computed once for all policies."""
        path = self.texts.cache / "jobs" / f"{job_id}.msgpack"  # JSON has no -inf, the bound of one request
        if path.is_file():
            return decode(path.read_bytes(), TrainResult)
        self.texts.say(f"training {order.arm.name} on {order.arm.num_rows} rows of {order.bucket}")
        job = TrainJob(
            job_id=job_id,
            bucket=order.bucket,
            arm=order.arm,
            base_version=base,
            first_version=self.texts.first,
            shard_ids=shards,
            rehearsal_shard_ids=rehearsal,
            seed=int(job_id[:6], 16),
            time_limit_s=order.time_limit_s,
            min_gain=order.min_gain,
            plan=order.plan,
        )
        states = self.texts.cache / "learners"
        shutil.rmtree(states / job_id, ignore_errors=True)  # of a replay that was killed
        if previous and (states / previous).is_dir():
            shutil.copytree(states / previous, states / job_id, copy_function=_link)
        result = run_training_job(
            job,
            self.texts.store,
            self.texts.registry,
            self.texts.target,
            shadow=ShadowConfig(num_nodes=NUM_NODES),
            learners=LearnerStore(states / job_id),
        )
        write_atomic(path, encode_record(result))
        return result


def _link(source: str, target: str) -> None:
    """A copy of a learner state without its bytes: one is written once, under the hash of its content."""
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


ORDERS = ((0, 1, 0, 2), (1, 2, 1, 0), (2, 0, 2, 1))
"""Positions in LiveConfig.buckets, phase by phase."""


def run_live(
    chosen: Sequence[Variant],
    *,
    num_orders: int,
    data: Path | None,
    cache: Path | None,
    console: Console,
    load: float | None = None,
    config: LiveConfig | None = None,
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    """(rows, scenarios, notes); seed i stands for order i. Everything slow is kept in `cache` (the --resume folder).

    config: size of the replay. load: devices that the traffic keeps busy with the first drafter; None = that of the configuration.
    Raises: ConfigError when a bucket has no prompts.
    """
    config = config or LiveConfig()
    if load is not None:
        config = dataclasses.replace(config, load=load)
    num_orders = min(num_orders, len(ORDERS))
    scenario = Scenario(
        name="live", family="live", duration_s=len(ORDERS[0]) * config.phase_s, step_s=config.step_s,
        regime_s=config.phase_s, load=config.load, batch_size=config.batch_size,
    )  # fmt: skip
    orders = [[config.buckets[i] for i in o] for o in ORDERS[:num_orders]]
    found = {"name": "live", **dataclasses.asdict(config), "orders": orders}
    rows, notes = run_trained(
        chosen, scenario, num_orders, cache, console, lambda folder, say: LiveService(config, data, folder, say)
    )
    return rows, [found], notes


class TrainingService(Protocol):
    """A service on which policies really train."""

    texts: LiveTexts

    def replay(self, variant: Variant, order: int) -> dict[str, Any]:
        """One policy on one order (or seed), as plain values of a RunResult."""
        ...

    def notes(self) -> list[str]:
        """What a reader must know about the result."""
        ...


def run_trained(
    chosen: Sequence[Variant], scenario: Scenario, num_seeds: int, cache: Path | None, console: Console,
    open_service: Callable[[Path, Say], TrainingService],
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """(rows, notes) of every policy and seed, one run after the other.

    cache: keeps finished runs, jobs and scores; None = a folder that is removed at the end.
    """
    with contextlib.ExitStack() as stack:
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-replay-")))
        folder.mkdir(parents=True, exist_ok=True)
        done, rows = read_finished(folder), []
        with progress(console, "live replay", num_seeds * len(chosen)) as bar:
            service = open_service(folder, bar.say)
            named = dataclasses.replace(scenario, name=f"{scenario.name}-{service.texts.text_id}")
            for seed in range(num_seeds):
                for variant in chosen:
                    task = Task(scenario=named, variant=variant, seed=seed)
                    if task.key not in done:
                        row = {**row_of(task, service.replay(variant, seed)), "cell": scenario.name}
                        with (folder / RUNS_FILE).open("a", encoding="utf-8") as f:
                            f.write(json.dumps(row) + "\n")
                        done[task.key] = row
                    rows.append(done[task.key])
                    bar.step()
        return rows, service.notes()


class LiveService:
    """Target, texts, drafter registry and round times of a live replay."""

    def __init__(self, config: LiveConfig, data: Path | None, cache: Path, say: Say) -> None:
        self.config = config
        say("loading the target")
        target = load_target("bundled")
        handle = TargetHandle(
            version=target.version, vocab_size=target.vocab_size, feature_size=target.feature_size,
            device=target.device, embed_weight=target.embed_weight,
        )  # fmt: skip
        text_id = config.text_key(f"{target.version}|{data or 'bundled'}")
        stores = {b: capture(target, b, config, cache / "texts", text_id, data, say) for b in config.buckets}
        parts = {b: split_shards(store, config) for b, store in stores.items()}
        folder = resolve_drafter("bundled")
        assert folder is not None  # 'bundled' has weights
        settings, state = read_drafter_files(folder)
        registry = DrafterRegistry(cache / "registry")
        first = registry.put(
            state, drafter_type=str(settings["drafter_type"]), config=settings, target_version=target.version
        )
        self.texts = LiveTexts(
            labels=config.buckets, store=MergedStore(stores), train_shards={b: p[0] for b, p in parts.items()},
            score_shards={b: p[1] for b, p in parts.items()}, target=handle, registry=registry, first=first.version,
            learned={str(k): int(v) for k, v in dict(settings.get("learned_rows", {})).items()}, text_id=text_id, cache=cache,
            say=say,
        )  # fmt: skip
        self.seconds = round_seconds(config, cache / f"round-{config.batch_size}.json", say)

    def replay(self, variant: Variant, order: int) -> dict[str, Any]:
        """One policy on one order of the phases, as plain values of a RunResult."""
        return msgspec.to_builtins(self.world(variant, order).run())

    def world(self, variant: Variant, order: int, seed: int | None = None) -> World:
        """The service that one policy would run; `seed` (default: the order) draws noise and the policy's choices."""
        seed = order if seed is None else seed
        config = self.config
        traffic, served = self._traffic(order)
        settings = {"epoch_s": config.epoch_s, **dict(variant.settings)}
        policy = policy_config(variant.policy, settings, seed)
        return World(traffic, LiveOutcomes(self.texts, served), policy, seed=seed)

    def _traffic(self, order: int) -> tuple[Traffic, np.ndarray]:
        """Phases of equal device time under the first drafter, and the rows traced up to each step (T, D)."""
        config = self.config
        labels = config.buckets
        per_phase = int(config.phase_s / config.step_s)
        tokens = np.zeros((per_phase * len(ORDERS[order]), len(labels)))
        traffic = Traffic(
            step_s=config.step_s, labels=labels, tokens=tokens, drafted_s=self.seconds["drafted_s"],
            plain_s=self.seconds["plain_s"], batch_size=config.batch_size, tokens_per_request=float(config.max_new_tokens),
            num_replicas=max(1, math.ceil(config.load)),
        )  # fmt: skip
        first = LiveOutcomes(self.texts, np.zeros((1, len(labels)))).lengths(FIRST)
        for phase, d in enumerate(ORDERS[order]):
            rate = config.load / float(traffic.token_s(first)[d])
            tokens[phase * per_phase : (phase + 1) * per_phase, d] = rate * config.step_s
        rows = min(sum(s.num_rows for s in shards) for shards in self.texts.train_shards.values())
        share = min(rows / max(float(tokens[:per_phase].sum()), 1.0), 1.0)
        traffic = dataclasses.replace(traffic, rows_share=share)
        return traffic, np.cumsum(tokens * share, axis=0)

    def notes(self) -> list[str]:
        """What a reader must know about the result."""
        s = self.seconds
        return [
            "device time per token = measured time of a round / acceptance length by exact replay on texts never trained on",
            f"round time per request at batch {self.config.batch_size}: {1000 * s['drafted_s']:.2f} ms drafted, {1000 * s['plain_s']:.2f} ms plain, measured on this machine",
            "training and scoring are booked with the seconds that they took on this machine; its slow-down of serving is taken as 5%",
        ]
