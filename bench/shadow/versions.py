"""Versions of the shadow check, and how they are made.

The first version is the bundled drafter; the others are trained from it by the functions of a training job, each on
captured traces of one bucket. Traces, weights and plans lie in a work folder, so that a second run trains nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.adapt.data.learning_text import load_learning_text
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families.target_handle import TargetTables
from paceline.adapt.online.learner import Learner, learn_all
from paceline.adapt.online.trainer import load_version
from paceline.adapt.versions.registry import DrafterRegistry
from paceline.bandit.beliefs.arms import default_arms
from paceline.bench.engine.arms import BenchGroup
from paceline.bench.shadow.decode import decode
from paceline.errors import ConfigError
from paceline.paths import resolve_drafter, write_atomic
from paceline.serving.drafters.family import TrainedDrafter
from paceline.serving.loading.families import build_model, read_drafter_files
from paceline.serving.target_model.model import TargetModel

ARM_ORDER = ("full", "head", "calibration")
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPlan:
    """How one version comes to be."""

    arm: str
    """'initial' for the bundled drafter, otherwise an arm of `default_arms`."""
    trained_on: str | None

    @property
    def name(self) -> str:
        return self.arm if self.trained_on is None else f"{self.arm}-{self.trained_on}"


def plan_versions(num_versions: int, buckets: Sequence[str]) -> list[VersionPlan]:
    """The first drafter and num_versions - 1 trained ones: arms and buckets rotate, the last bucket first.

    Raises: ConfigError when there are not so many different ones.
    """
    pairs: list[tuple[str, str]] = []
    for shift in range(len(buckets)):
        for i, arm in enumerate(ARM_ORDER):
            pairs.append((arm, buckets[-1 - (i + shift * len(ARM_ORDER)) % len(buckets)]))
    pairs = list(dict.fromkeys(pairs))
    pairs += [(a, b) for b in buckets for a in ARM_ORDER if (a, b) not in pairs]
    if not 1 <= num_versions <= len(pairs) + 1:
        raise ConfigError(f"versions must be in [1, {len(pairs) + 1}] for {len(buckets)} buckets, got {num_versions}")
    trained = [VersionPlan(arm=a, trained_on=b) for a, b in pairs[: num_versions - 1]]
    return [VersionPlan(arm="initial", trained_on=None), *trained]


class VersionShop:
    """Makes versions once and finds them again in the work folder."""

    def __init__(self, folder: Path, target: TargetModel, *, drafter: str = "bundled", seed: int = 0) -> None:
        """drafter: name or folder of the first version. Raises: ConfigError when it has no weights."""
        path = resolve_drafter(drafter, version=target.version)
        if path is None:
            raise ConfigError(f"drafter must have weights to be trained further, got {drafter!r}")
        self._target, self._seed, self._first = target, seed, path
        self._registry = DrafterRegistry(folder / "registry")
        self._store = TraceStore(folder / "train_traces")
        self._plans = folder / "versions.json"

    def capture(self, work: BenchGroup) -> None:
        """Decode a training workload plainly and store its traces, unless its bucket has traces already."""
        if not self._store.list_shards(work.bucket):
            self._store.write_shard(decode(self._target, None, work).traces, work.bucket)

    def version(self, plan: VersionPlan, report: Report = lambda text: None) -> str:
        """Make the planned version, or find it; its bucket must have been captured. Returns the version id."""
        known: dict[str, str] = json.loads(self._plans.read_text(encoding="utf-8")) if self._plans.is_file() else {}
        if plan.name not in known:
            known[plan.name] = self._make(plan, report)
            write_atomic(self._plans, json.dumps(known, indent=1) + "\n")
        return known[plan.name]

    def drafter(self, version: str, chain: int | None = None) -> TrainedDrafter:
        """A new drafter with the weights of a version. chain: draft tokens of a chain; None = candidates for trees."""
        return load_version(self._registry, version, self._target, chain=chain)

    def _make(self, plan: VersionPlan, report: Report) -> str:
        values, state = read_drafter_files(self._first, self._target)
        # The same content as the service registers, so that the first version has the same id here and there.
        fields = {"drafter_type": values["drafter_type"], "config": values, "target_version": self._target.version}
        if plan.trained_on is None:
            return self._registry.put(state, **fields).version
        arm = next(a for a in default_arms() if a.name == plan.arm)
        shards = {b: [s.shard_id for s in self._store.list_shards(b)] for b in self._buckets()}
        data = load_learning_text(
            self._store,
            shards.get(plan.trained_on, []),
            [s for b, ids in shards.items() if b != plan.trained_on for s in ids],
            self._target.version,
            num_rows=arm.num_rows,
            rehearsal_share=arm.rehearsal_share,
            rng=np.random.default_rng(self._seed),
        )
        if not data.fresh:
            raise ConfigError(f"bucket {plan.trained_on!r} must be captured before {plan.name} is trained")
        model = build_model(values, state)
        model.to(self._target.device)
        learner = Learner(model, TargetTables.of(self._target, torch.device(self._target.device)), arm, seed=self._seed)
        steps = learn_all(learner, data.fresh, data.rehearsal)
        report(f"train {plan.name} {len(steps)} steps, loss {steps[-1].loss:.3f}")
        trained = {name: t.detach().cpu() for name, t in learner.snapshot().items()}
        first = self.version(VersionPlan(arm="initial", trained_on=None))
        manifest = self._registry.put(
            trained, **fields, parent=first, arm=plan.arm, bucket=plan.trained_on,
            num_train_rows=learner.num_rows + learner.num_rehearsed_rows,
        )  # fmt: skip
        return manifest.version

    def _buckets(self) -> list[str]:
        return sorted({s.bucket for s in self._store.list_shards()})
