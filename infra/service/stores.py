"""Stores: where a service keeps what outlives its processes, and whether its drafter can be trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config import ServiceConfig
from paceline.paths import resolve_drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePaths:
    """Where a service keeps what outlives its processes."""

    data_dir: Path
    traces: str
    registry: str

    @classmethod
    def of(cls, config: ServiceConfig) -> StorePaths:
        root = Path(config.data_dir).expanduser().resolve()
        return cls(data_dir=root, traces=str(root / "traces"), registry=str(root / "registry"))


def is_adaptive(config: ServiceConfig) -> bool:
    """Whether the configured drafter has weights that can be trained."""
    return resolve_drafter(config.drafter, config.model) is not None
