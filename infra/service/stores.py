"""Stores: where a service keeps what outlives its processes, and whether its drafter can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import ServiceConfig
from paceline.paths import LEARNERS, REGISTRY, TRACES, configured_home, resolve_drafter, service_home


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePaths:
    """Where a service keeps what outlives its processes."""

    home: Path
    """Folder of this service below data_dir: state, decision log, log files."""
    traces: str
    registry: str
    learners: str
    snapshots: str
    """Of the controller's state."""

    @classmethod
    def of(cls, config: ServiceConfig) -> StorePaths:
        """On this computer."""
        return cls._below(service_home(config.data_dir, config.model_name), config)

    @classmethod
    def configured(cls, config: ServiceConfig) -> StorePaths:
        """What any computer of the service opens for itself: equal on all of them, wherever their `~` is."""
        return cls._below(configured_home(config.data_dir, config.model_name), config)

    @classmethod
    def _below(cls, home: Path, config: ServiceConfig) -> StorePaths:
        base = str(home) if config.store_url is None else f"{config.store_url.rstrip('/')}/services/{home.name}"
        return cls(
            home=home,
            traces=f"{base}/{TRACES}",
            registry=f"{base}/{REGISTRY}",
            learners=f"{base}/{LEARNERS}",
            snapshots=base,
        )


def is_adaptive(config: ServiceConfig) -> bool:
    """Whether the configured drafter has weights that can be trained."""
    return resolve_drafter(config.drafter, config.model) is not None
