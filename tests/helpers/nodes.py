"""Nodes: raylets that stand for computers, each with a home of its own, so that they share no folder."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from ray._private import services
from ray.cluster_utils import Cluster

from paceline.bench.chaos.load import wait_for
from paceline.infra.app import lean_nodes
from paceline.infra.state.redis_server import EmbeddedRedis
from paceline.machine import free_port

_LOOK = services.get_node


class Nodes:
    """A Ray cluster whose nodes share no folder: `~` is another one on each."""

    def __init__(self, folder: Path, gcs: EmbeddedRedis | None = None, **head: Any) -> None:
        """folder: holds a home a node. gcs: where GCS keeps its state, so that another head goes on from it. head: what the
        first node has, as for `add`."""
        self.folder, self.cluster = folder, Cluster()
        self._nodes: dict[str, Any] = {}
        self._gcs_port = free_port()
        self._gcs = None if gcs is None else urlsplit(gcs.url)
        self.add("head", **head)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def home(self, name: str) -> Path:
        return self.folder / name

    def add(self, name: str, **options: Any) -> None:
        """Start a node, also one that was killed. options: of Ray's Cluster.add_node."""
        self.home(name).mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(self.home(name)))
            patch.setattr(services, "get_node", _get_node)
            if name == "head":
                options["gcs_server_port"] = self._gcs_port
                if self._gcs is not None:
                    patch.setenv("RAY_REDIS_ADDRESS", f"{self._gcs.hostname}:{self._gcs.port}")
                    options["redis_password"] = self._gcs.password
            with lean_nodes():
                self._nodes[name] = self.cluster.add_node(
                    object_store_memory=80 * 2**20, include_dashboard=False, **options
                )

    def kill(self, name: str) -> None:
        """kill -9 of a node's raylet, of the head's GCS, too; what ran on it ends with it. No driver may be at the head then."""
        self.cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on a node."""
        raylets = self._nodes[name].all_processes["raylet"]
        return [p for info in raylets for p in psutil.Process(info.process.pid).children(recursive=True)]

    def commands(self) -> dict[str, Counter[str]]:
        """Node -> what runs on it by its command, which Ray makes of the actor's name and, while one runs, its method."""
        found: dict[str, Counter[str]] = {}
        for name in self._nodes:
            found[name] = Counter()
            for process in self.processes(name):
                with contextlib.suppress(psutil.Error):
                    word = " ".join(process.cmdline()).partition(" ")[0]
                    found[name][word.partition(".")[0] if word.startswith("ray::") else word] += 1
        return found

    def where(self, command: str) -> list[str]:
        """Names of the nodes on which processes of this command run, one a process."""
        return sorted(name for name, counts in self.commands().items() for _ in range(counts[command]))


def _get_node(gcs_address: str, node_id: str) -> Any:
    """Ray's look at a node that starts; on a busy computer that takes longer than the 30 s that Ray waits."""

    def look() -> Any:
        try:
            return _LOOK(gcs_address, node_id)
        except RuntimeError:
            return None

    return wait_for(look, "the raylet", every_s=0.5)
