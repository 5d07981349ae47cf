"""Stores: where a service keeps what outlives its processes, and whether its drafter can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import ServiceConfig
from paceline.paths import REGISTRY, TRACES, resolve_drafter, service_home


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePaths:
    """Where a service keeps what outlives its processes."""

    home: Path
    """Folder of this service below data_dir: state, decision log, log files."""
    traces: str
    registry: str
    learners: str

    @classmethod
    def of(cls, config: ServiceConfig) -> StorePaths:
        home = service_home(config.data_dir, config.model_name)
        return cls(
            home=home,
            traces=str(home / TRACES),
            registry=str(home / REGISTRY),
            learners=str(home / "learners"),
        )


def is_adaptive(config: ServiceConfig) -> bool:
    """Whether the configured drafter has weights that can be trained."""
    return resolve_drafter(config.drafter, config.model) is not None
