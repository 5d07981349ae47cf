"""Day replay: policies on the stream that a day's service captured: its traffic, its text, its prices; training is real.

A step's tokens are those that the service answered in it, by the class that it gave them; a policy's jobs read the captured text
of these classes, as far as it had been served. Acceptance is exact: versions are replayed on requests of each class, spread over
the day, that nobody trains on. Source of the folder: `paceline demo --scenario day --data-dir` (docs/api/demo.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from paceline.adapt.data.trace_store import ShardInfo, TraceStore
from paceline.adapt.families.target_handle import load_target_handle
from paceline.bandit.replay.scenario import Scenario, Traffic
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import World
from paceline.bench.common.diary import Diary, read_diary, run_seconds
from paceline.bench.replay.live import LiveOutcomes, Say, open_ground, run_really
from paceline.bench.replay.plan import Variant
from paceline.bench.replay.run import Row
from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import TRACES, resolve_model, service_home

NUM_SCORED = 48
"""Requests of a class, spread over the day, that say a version's acceptance length there."""
LEAST_SCORED = 4
"""A class with fewer shards than twice as many is told with the class that has most: nothing could be learned of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DayConfig:
    """How a day is cut."""

    step_s: float = 10.0
    epoch_s: float = 10.0


def run_day(
    chosen: Sequence[Variant],
    folder: Path,
    *,
    num_seeds: int,
    cache: Path | None,
    console: Console,
    config: DayConfig | None = None,
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:
    """(rows, scenarios, notes), as `run_live`; a seed draws noise and a policy's choices, the traffic is the same.

    Raises: ConfigError for a folder that holds no day with captured text.
    """
    config, diary = config or DayConfig(), read_diary(folder)
    scenario = Scenario(
        name="day", family="day", duration_s=diary.elapsed_s, step_s=config.step_s, regime_s=diary.elapsed_s, load=1.0, batch_size=1
    )  # fmt: skip
    rows, notes = run_really(
        chosen, scenario, num_seeds, cache, console, lambda own, say: DayService(config, diary, own, say)
    )
    return rows, [{"name": "day", **dataclasses.asdict(config), "settings": diary.settings}], notes


class DayService:
    """Traffic, text and prices of a day, and who trains on it."""

    def __init__(self, config: DayConfig, diary: Diary, cache: Path, say: Say) -> None:
        say("reading the day")
        if not diary.answers:
            raise ConfigError(f"the day in {diary.folder} must have answers; run it first")
        self.config, self.diary = config, diary
        home, settings = service_home(diary.folder, diary.model_name), diary.settings
        store = TraceStore(home / TRACES)
        shards: dict[str, list[ShardInfo]] = {}
        for info in sorted(store.list_shards(), key=lambda s: s.created):
            shards.setdefault(info.bucket, []).append(info)
        parts = {b: split(infos) for b, infos in shards.items() if len(infos) >= 2 * LEAST_SCORED}
        if not parts:
            raise ConfigError(
                f"the day in {diary.folder} must have captured text of some class ({home / TRACES}); run it longer"
            )
        self.labels = tuple(parts)
        model = settings["model"]
        path = diary.folder / "target" if model == "bundled" else resolve_model(model)
        names = sorted(s.shard_id for infos in shards.values() for s in infos)
        self.text_id = hashlib.sha256(json.dumps([model, names]).encode()).hexdigest()[:12]
        self.ground = open_ground(
            self.labels, store, parts, load_target_handle(path),
            str(diary.folder / "drafter") if model == "bundled" else settings["drafter"], model,
            text_id=self.text_id, cache=cache, say=say,
        )  # fmt: skip
        self.traffic, self.served = self._traffic()

    def replay(self, variant: Variant, order: int) -> dict[str, Any]:
        """One policy with one seed, as plain values of a RunResult."""
        given = {
            "epoch_s": self.config.epoch_s,
            "trainer_price": self.diary.settings["trainer_price"],
            **dict(variant.settings),
        }
        policy = policy_config(variant.policy, given, order)
        world = World(self.traffic, LiveOutcomes(self.ground, self.served), policy, seed=order)
        return msgspec.to_builtins(world.run())

    def _traffic(self) -> tuple[Traffic, np.ndarray]:
        """The tokens of every step and class, and the rows captured up to each step (T, D), of those that may be trained on."""
        step_s, answers = self.config.step_s, self.diary.answers
        place = {label: d for d, label in enumerate(self.labels)}
        most = max(self.labels, key=lambda b: sum(s.num_rows for s in self.ground.train_shards[b]))
        num_steps = int(self.diary.elapsed_s // step_s) + 1
        tokens, rows = (np.zeros((num_steps, len(self.labels))) for _ in range(2))
        for a in answers:
            tokens[int(a.ended // step_s), place.get(a.traffic_class, place[most])] += a.num_tokens
        for label, infos in self.ground.train_shards.items():
            for info in infos:
                at = int(min(max(run_seconds(self.diary.starts, info.created), 0.0) // step_s, num_steps - 1))
                rows[at, place[label]] += info.num_rows
        plain_s, drafted_s = (self._round_s(group) for group in (Group.PLAIN, Group.STATIC))
        traffic = Traffic(
            step_s=step_s, labels=self.labels, tokens=tokens, drafted_s=drafted_s, plain_s=plain_s, batch_size=1,
            tokens_per_request=sum(a.num_tokens for a in answers) / len(answers), num_replicas=self.diary.settings["replicas"],
            rows_share=min(1.0, float(rows.sum() / max(tokens.sum(), 1.0))),
        )  # fmt: skip
        return traffic, np.cumsum(rows, axis=0)

    def _round_s(self, group: Group) -> float:
        """Device seconds of a group's round."""
        mine = [a for a in self.diary.answers if a.group == group and a.num_rounds]
        if not mine:
            raise ConfigError(
                f"the day in {self.diary.folder} must have answers of the group {group.value}; run it longer"
            )
        return sum(a.device_s for a in mine) / sum(a.num_rounds for a in mine)

    def notes(self) -> list[str]:
        """What a reader must know about the result."""
        t = self.traffic
        return [
            "tokens, classes and captured text are those of the day's own service, whatever another policy would have made of its speed",
            "device time per token = the day's time of a round / acceptance length by exact replay on requests that nobody trains on",
            f"round time: {1000 * t.drafted_s:.2f} ms in the static group, {1000 * t.plain_s:.2f} ms in the plain one",
            "training and scoring are booked with the seconds that they took here; its slow-down of serving is taken as 5%",
        ]


def split(infos: Sequence[ShardInfo]) -> tuple[list[ShardInfo], list[ShardInfo]]:
    """(shards to train on, shards to score on) of a class, in the order of their age: the latter evenly spread."""
    num = max(LEAST_SCORED, min(NUM_SCORED, len(infos) // 4))
    scored = {int((i + 0.5) * len(infos) / num) for i in range(num)}
    return [s for i, s in enumerate(infos) if i not in scored], [s for i, s in enumerate(infos) if i in scored]
