"""Texts of a live replay and the cost of a round on this machine, captured once and kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.adapt.data.regenerate import Regenerator
from paceline.adapt.data.trace_store import ShardInfo, TraceStore
from paceline.bench.common.engine_run import build_engine, encode, greedy_or_sampled, load_named_drafter, run_group
from paceline.bench.common.workloads import load_prompts
from paceline.config import EngineConfig
from paceline.contracts import Group
from paceline.paths import write_atomic
from paceline.serving.target_model.model import TargetModel

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveConfig:
    """Size of a live replay."""

    buckets: tuple[str, ...] = ("tools", "math", "facts")
    """A, B and C; the bundled drafter knows the first."""
    num_requests: int = 160
    """Texts per bucket."""
    max_new_tokens: int = 96
    num_scored: int = 32
    """Texts per bucket, never trained on, that say a version's acceptance length."""
    shard_requests: int = 8
    temperature: float = 0.8
    phase_s: float = 180.0
    load: float = 1.0
    """Devices that a phase keeps busy with the first drafter."""
    batch_size: int = 4
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


def round_seconds(target: TargetModel, drafter: str, config: LiveConfig, path: Path, say: Say) -> dict[str, float]:
    """Device seconds of a round per request with ('drafted_s') and without ('plain_s') a draft, measured in the engine.

    The value is kept in `path`: later runs of a replay must price versions alike.
    """
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    say("measuring round times")
    engine = build_engine(target, load_named_drafter(drafter, target), EngineConfig(), drafter)
    out = {}
    prompts = [encode(target, p.text) for p in load_prompts(config.buckets[0], None, config.batch_size, config.seed)]
    params = [greedy_or_sampled(0.0, config.max_new_tokens, i) for i in range(len(prompts))]
    for name, group in (("drafted_s", Group.ADAPTIVE), ("plain_s", Group.PLAIN)):
        runs = [run_group(engine, prompts, params, group=group, bucket="measure", tag=f"{name}-{i}") for i in range(3)]
        outputs = [o for run in runs[1:] for o in run.outputs]
        out[name] = sum(o.stats.round_ms for o in outputs) / 1000.0 / max(sum(o.stats.num_rounds for o in outputs), 1)
    write_atomic(path, json.dumps(out))
    return out
