"""How do policies fare when training is real? Real texts, real jobs and exact acceptance in one process, no Ray.

Device time per token of a version = measured time of a round / its acceptance length by exact replay; training and
scoring are booked with the seconds that they really took. Traffic goes A -> B -> A -> C in up to three orders.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.adapt.families.target_handle import TargetHandle
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.replay.outcomes import FIRST
from paceline.bandit.replay.scenario import Scenario, Traffic
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import World
from paceline.bench.common.engine_run import load_target
from paceline.bench.replay.live_outcomes import LiveOutcomes
from paceline.bench.replay.live_text import SMALL, LiveConfig, Say, capture, round_seconds, split_shards
from paceline.bench.replay.plan import Task, Variant
from paceline.bench.replay.run import RUNS_FILE, Row, read_finished, row_of
from paceline.errors import ConfigError
from paceline.paths import resolve_drafter
from paceline.serving.loading.families import read_drafter_files

ORDERS = ((0, 1, 0, 2), (1, 2, 1, 0), (2, 0, 2, 1))
"""Positions in LiveConfig.buckets, phase by phase."""


def run_live(
    chosen: Sequence[Variant],
    *,
    small: bool,
    num_orders: int,
    data: Path | None,
    cache: Path | None,
    console: Console,
    load: float | None = None,
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    """(rows, scenarios, notes); seed i stands for order i. Everything slow is kept in `cache` (the --resume folder).

    load: devices that the traffic keeps busy with the first drafter; None = that of the configuration.
    Raises: ConfigError when a bucket has no prompts, `num_orders` is below 1 or `load` not above 0.
    """
    if num_orders < 1:
        raise ConfigError(f"seeds must be >= 1, got {num_orders}")
    config = SMALL if small else LiveConfig()
    if load is not None:
        if not 0 < load < float("inf"):
            raise ConfigError(f"load must be > 0 and finite, got {load}")
        config = dataclasses.replace(config, load=load)
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="paceline-replay-") as folder:
            return _run(chosen, config, min(num_orders, len(ORDERS)), data, Path(folder), console)
    cache.mkdir(parents=True, exist_ok=True)
    return _run(chosen, config, min(num_orders, len(ORDERS)), data, cache, console)


def _run(
    chosen: Sequence[Variant], config: LiveConfig, num_orders: int, data: Path | None, cache: Path, console: Console
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    scenario = Scenario(
        name="live", family="live", duration_s=len(ORDERS[0]) * config.phase_s, step_s=config.step_s,
        regime_s=config.phase_s, load=config.load, batch_size=config.batch_size,
    )  # fmt: skip
    done = read_finished(cache)
    rows: list[Row] = []
    with _bar(console, num_orders * len(chosen)) as (advance, say):
        service = LiveService(config, data, cache, say)
        for order in range(num_orders):
            for variant in chosen:
                task = Task(
                    scenario=dataclasses.replace(scenario, name=f"live-{service.text_id}"), variant=variant, seed=order
                )
                if task.key not in done:
                    row = {**row_of(task, service.replay(variant, order)), "cell": "live"}
                    with (cache / RUNS_FILE).open("a", encoding="utf-8") as f:
                        f.write(json.dumps(row) + "\n")
                    done[task.key] = row
                rows.append(done[task.key])
                advance()
    scenarios = [{"name": "live", **dataclasses.asdict(config), "orders": [[config.buckets[i] for i in o] for o in ORDERS[:num_orders]]}]  # fmt: skip
    return rows, scenarios, service.notes()


class LiveService:
    """Target, texts, drafter registry and round times of a live replay."""

    def __init__(self, config: LiveConfig, data: Path | None, cache: Path, say: Say) -> None:
        self.config, self.cache, self.say = config, cache, say
        say("loading the target")
        target = load_target("bundled")
        self.handle = TargetHandle(
            version=target.version, vocab_size=target.vocab_size, feature_size=target.feature_size,
            device=target.device, embed_weight=target.embed_weight,
        )  # fmt: skip
        self.text_id = config.text_key(f"{target.version}|{data or 'bundled'}")
        self.stores = {b: capture(target, b, config, cache / "texts", self.text_id, data, say) for b in config.buckets}
        parts = {b: split_shards(store, config) for b, store in self.stores.items()}
        self.train_shards = {b: p[0] for b, p in parts.items()}
        self.score_shards = {b: p[1] for b, p in parts.items()}
        self.registry = DrafterRegistry(cache / "registry")
        folder = resolve_drafter("bundled")
        assert folder is not None  # 'bundled' has weights
        settings, state = read_drafter_files(folder)
        self.learned = {str(k): int(v) for k, v in dict(settings.get("learned_rows", {})).items()}
        self.first = self.registry.put(
            state, drafter_type=str(settings["drafter_type"]), config=settings, target_version=target.version
        ).version
        self.seconds = round_seconds(target, "bundled", config, cache / f"rounds-{config.batch_size}.json", say)

    def replay(self, variant: Variant, order: int) -> dict[str, Any]:
        """One policy on one order of the phases, as plain values of a RunResult."""
        return msgspec.to_builtins(self.world(variant, order).run())

    def world(self, variant: Variant, order: int, seed: int | None = None) -> World:
        """The service that one policy would run; `seed` (default: the order) draws noise and the policy's choices."""
        seed = order if seed is None else seed
        config = self.config
        traffic, served = self._traffic(order)
        outcomes = LiveOutcomes(
            labels=traffic.labels, stores=self.stores, train_shards=self.train_shards, score_shards=self.score_shards,
            registry=self.registry, first_version=self.first, handle=self.handle, cache=self.cache,
            text_id=self.text_id, say=self.say, served=served,
        )  # fmt: skip
        settings = {"epoch_s": config.epoch_s, **dict(variant.settings)}
        policy = policy_config(variant.policy, settings, seed)
        learned = {FIRST: {b: n for b, n in self.learned.items() if b in traffic.labels}}
        return World(traffic, outcomes, policy, seed=seed, learned=learned)

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
        first = LiveOutcomes(
            labels=labels, stores=self.stores, train_shards=self.train_shards, score_shards=self.score_shards,
            registry=self.registry, first_version=self.first, handle=self.handle, cache=self.cache,
            text_id=self.text_id, say=self.say, served=np.zeros((1, len(labels))),
        ).lengths(FIRST)  # fmt: skip
        for phase, d in enumerate(ORDERS[order]):
            rate = config.load / float(traffic.token_s(first)[d])
            tokens[phase * per_phase : (phase + 1) * per_phase, d] = rate * config.step_s
        rows = min(sum(s.num_rows for s in shards) for shards in self.train_shards.values())
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


@contextmanager
def _bar(console: Console, total: int):
    columns = (TextColumn("live replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[info]}"))  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total, info="")
        yield (lambda: progress.update(bar, advance=1)), (lambda text: progress.update(bar, info=text))
