"""Engine driver: what the control plane asks of the engine of one replica, whichever it is."""

from __future__ import annotations

from typing import Protocol

from paceline.contracts import EngineFacts
from paceline.infra.replica.watcher import Drafters, Followers


class EngineDriver(Drafters, Followers, Protocol):
    """Drafter versions in and out of an engine, and what it is told of the service; called in the watcher's thread."""

    @property
    def facts(self) -> EngineFacts:
        """What this engine can do; constant."""
