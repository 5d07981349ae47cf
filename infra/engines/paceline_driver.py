"""Paceline driver: this project's own engine, whose slots hold several drafters at once."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

from paceline.adapt.versions.registry import DrafterRegistry
from paceline.contracts import DesiredState, EngineFacts, TrafficClasses
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PacelineDriver:
    """The replica's slots, filled from the registry and switched between rounds of its engine."""

    slots: DrafterSlots
    registry: DrafterRegistry
    engine: Engine
    target_version: str
    holdback_percent: int
    """Share of requests that keep the first drafter, as the newest desired record has it."""

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            kind="paceline", draft_shape="tree", max_draft_tokens=self.engine.config.tree.max_draft_tokens, group_unit="request",
            timing="round", has_features=True,
        )  # fmt: skip

    # ---- drafters
    @property
    def live_version(self) -> str:
        return self.slots.live_version

    def versions(self) -> dict[str, str]:
        return self.slots.versions()

    def stage(self, version: str) -> bool:
        slots = self.slots
        if slots.waiting_version == version:
            return slots.stage_waiting()
        return slots.stage(version, {} if slots.is_resident(version) else self._read(version))

    def load(self, version: str) -> bool:
        slots, first = self.slots, self.slots.first_version
        if slots.takes_delta(first) and self.registry.get_manifest(version).delta_of == first:
            try:
                return slots.load_delta(version, lambda: self._read(version, is_whole=False))
            except DrafterMismatchError as e:  # such as of a larger rank than there is room for
                logger.warning("drafter %s is loaded as whole weights: %s", version, e)
        return slots.load(version, lambda: self._read(version))

    def _read(self, version: str, *, is_whole: bool = True) -> dict[str, Any]:
        """Weights of a version, or what it adds to its base's; the engine is told its acceptance length first."""
        manifest = self.registry.get_manifest(version)
        length = manifest.metrics.get("acceptance_length")
        if manifest.bucket is not None and length:
            tell = functools.partial(self.engine.policy.budget.foretell, version, manifest.bucket, float(length))
            self.engine.call_between_rounds(tell)
        read = self.registry.load_state if is_whole else self.registry.load_own
        return read(version, target_version=self.target_version)

    def publish(self, version: str) -> float:
        return self.engine.call_between_rounds(lambda: self.slots.publish(version)).result(timeout=30.0)

    def set_canary(self, version: str, percent: int, bucket: str) -> None:
        self.slots.set_canary(version, percent, bucket)

    def route(self, class_versions: dict[str, str]) -> None:
        self.slots.route(class_versions)

    def missing(self) -> list[str]:
        return self.slots.missing()

    def served(self) -> dict[str, str]:
        return self.slots.served()

    def failures(self) -> dict[str, str]:
        return self.slots.failures()

    def num_errors(self) -> dict[str, int]:
        return dict(self.engine.output.num_errors)

    # ---- what the engine is told
    def desired_changed(self, desired: DesiredState) -> None:
        self.holdback_percent = desired.holdback_percent

    def training_changed(self, is_training: bool) -> None:
        self.engine.output.is_training = is_training

    def classes_changed(self, classes: TrafficClasses) -> None:
        if self.engine.classes is not None:
            self.engine.classes.install(classes)
