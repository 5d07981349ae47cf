"""Replay of a service: policies on the traffic that its decision log holds, with real training on the text that it captured.

Traffic, round times, slow-down and swap costs are those of a log's replay (bandit/replay/logged.py); a policy's jobs read the
captured text of their class, as far as it had been served, and acceptance is exact: versions are replayed on shards of each
class, spread over its time, that nobody trains on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console

from paceline.adapt.data.trace_store import ShardInfo, TraceStore
from paceline.adapt.families.target_handle import TargetHandle, load_target_handle
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.controller.decision_log import read_log
from paceline.bandit.replay.logged import LoggedService, logged_settings, prepare
from paceline.bandit.replay.scenario import Traffic
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import World
from paceline.bench.replay.live import LiveOutcomes, LiveTexts, Say, run_trained
from paceline.bench.replay.plan import Variant
from paceline.bench.replay.run import Row
from paceline.contracts import DrafterManifest
from paceline.errors import ConfigError
from paceline.paths import DECISIONS, REGISTRY, TRACES, resolve_model
from paceline.serving.loading.families import build_drafter, read_drafter_files
from paceline.serving.target_model.int8 import served_version

MAX_SCORED = 48
"""Shards of a class, spread over its time, that say a version's acceptance length there."""
MIN_SCORED = 4
"""Fewest of them; a class with less than twice as many shards is left out, with its tokens."""


def run_served(
    chosen: Sequence[Variant], folder: Path, *, model: str, num_seeds: int, cache: Path | None, console: Console,
    drafter: Path | None = None,
) -> tuple[list[Row], list[dict[str, Any]], list[str]]:  # fmt: skip
    """(rows, scenarios, notes), as `run_live`; a seed draws noise and a policy's choices, traffic and text are the same.

    folder: of the service (DATA_DIR/services/NAME). model: its target. drafter: folder of the first drafter, if it is to be
    another than the service's.
    Raises: ConfigError for a folder without log, or without captured text of its target; DrafterMismatchError for a drafter
    that the target cannot run.
    """
    if not (folder / DECISIONS).is_file():
        raise ConfigError(
            f"--service must be a service's folder, DATA_DIR/services/NAME, with a {DECISIONS}; got {folder}"
        )
    log = prepare(read_log(folder / DECISIONS), folder.name)
    scenario = dataclasses.replace(log.scenario, name="served")
    rows, notes = run_trained(
        chosen,
        scenario,
        num_seeds,
        cache,
        console,
        lambda own, say: ServedService(log, folder, model, own, say, drafter),
    )
    described = {"name": "served", "model": model, "duration_s": scenario.duration_s, "step_s": scenario.step_s}
    described |= {} if drafter is None else {"drafter": str(drafter)}
    return rows, [described], notes


class ServedService:
    """Traffic, text and prices of a service, and who trains on it."""

    def __init__(
        self, log: LoggedService, folder: Path, model: str, cache: Path, say: Say, drafter: Path | None = None
    ) -> None:
        say("reading the service's text")
        store, registry = TraceStore(folder / TRACES), DrafterRegistry(folder / REGISTRY)
        first = registry.get_manifest(log.log.epochs[0].first_version)
        if first.target_version != (target := _target(model, first)).version:
            raise ConfigError(
                f"--model must be the service's target, {first.target_version}, got {model!r}, which is {target.version}"
            )
        shards: dict[str, list[ShardInfo]] = {}
        for info in store.list_shards():
            if info.target_version == target.version and info.bucket in log.traffic.labels:
                shards.setdefault(info.bucket, []).append(info)
        parts = {b: split(infos) for b, infos in sorted(shards.items()) if len(infos) >= 2 * MIN_SCORED}
        if not parts:
            raise ConfigError(
                f"{folder / TRACES} must hold {2 * MIN_SCORED} or more shards of a class; let the service keep more text"
            )
        own = DrafterRegistry(cache / "registry")
        kind, config, state = first.drafter_type, dict(first.config), registry.load_state(first.version)
        if drafter is not None:
            config, state = read_drafter_files(drafter, target)
            build_drafter(config, state, target)  # refuses what does not fit
            kind = str(config["drafter_type"])
        first = own.put(state, drafter_type=kind, config=config, target_version=target.version)
        names = sorted(s.shard_id for infos in shards.values() for s in infos)
        self.log = log
        self.texts = LiveTexts(
            labels=tuple(parts), store=store, train_shards={b: p[0] for b, p in parts.items()},
            score_shards={b: p[1] for b, p in parts.items()}, target=target, registry=own, first=first.version, learned={},
            text_id=hashlib.sha256(json.dumps([log.log.digest, names, *([] if drafter is None else [first.version])]).encode()).hexdigest()[:12], cache=cache, say=say,
        )  # fmt: skip
        self.traffic, self.served = self._traffic()
        self._drafter = drafter

    def replay(self, variant: Variant, order: int) -> dict[str, Any]:
        """One policy with one seed, as plain values of a RunResult."""
        policy = policy_config(variant.policy, logged_settings(self.log, dict(variant.settings)), order)
        outcomes = LiveOutcomes(self.texts, self.served, self.log.staging_s)
        return msgspec.to_builtins(World(self.traffic, outcomes, policy, seed=order, slowdown=self.log.slowdown).run())

    def _traffic(self) -> tuple[Traffic, np.ndarray]:
        """The log's traffic of the classes that have text, and the rows of those that may be trained on, up to each step (T, D)."""
        whole, labels = self.log.traffic, self.texts.labels
        tokens = whole.tokens[:, [whole.labels.index(b) for b in labels]]
        rows = np.zeros_like(tokens)
        for d, label in enumerate(labels):
            for shard in self.texts.train_shards[label]:
                rows[self.log.step_of(shard.created), d] += shard.num_rows
        share = np.minimum(rows.sum(0) / np.maximum(tokens.sum(0), 1.0), 1.0)
        traffic = dataclasses.replace(whole, labels=labels, tokens=tokens, rows_share=share, rows_before=())
        return traffic, np.cumsum(rows, axis=0)

    def notes(self) -> list[str]:
        """What a reader must know about the result."""
        t, whole = self.traffic, self.log.traffic.tokens.sum()
        other = [
            f"first drafter: {self._drafter}, which the service did not have; a round is priced as the service's own"
        ]
        return [
            *(other if self._drafter is not None else ()),
            f"{100 * t.tokens.sum() / whole:.0f}% of the log's tokens are replayed: those of {len(t.labels)} classes with captured text; "
            "a class whose number another kind of text took over counts as one",
            f"round time {1000 * t.drafted_s:.2f} ms with a draft, {1000 * t.plain_s:.2f} ms without: the log's; acceptance by exact "
            "replay on shards that nobody trains on",
            "training and scoring are booked with the seconds that they take here; seeds share traffic, text and jobs",
        ]


def _target(model: str, first: DrafterManifest) -> TargetHandle:
    """The target as that drafter reads it, in 8 bits if that is the one that it was trained for."""
    device, taps = "cuda" if torch.cuda.is_available() else "cpu", first.config.get("tap_layers")
    target = load_target_handle(resolve_model(model), device=device, tap_layers=taps)
    rounded = served_version(target.version, "int8")
    return dataclasses.replace(target, version=rounded) if first.target_version == rounded else target


def split(infos: Sequence[ShardInfo]) -> tuple[list[ShardInfo], list[ShardInfo]]:
    """(shards to train on, shards to score on) of a class, both in their order: a quarter scores, at most MAX_SCORED, evenly spread."""
    num = max(MIN_SCORED, min(MAX_SCORED, len(infos) // 4))
    scored = {int((i + 0.5) * len(infos) / num) for i in range(num)}
    return [s for i, s in enumerate(infos) if i not in scored], [s for i, s in enumerate(infos) if i in scored]
