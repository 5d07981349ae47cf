"""vLLM driver: one drafter in a running vLLM, exchanged between two steps."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.contracts import DesiredState, EngineFacts, Group, TrafficClasses, window_name
from paceline.errors import DrafterMismatchError, PacelineError
from paceline.infra.engines.windows import served_now
from paceline.machine import Clock
from paceline.serving.drafters.released_fields import MASK_FILE
from paceline_vllm.settings import Settings

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
_TICK_S = 0.5
_KEPT_FOLDERS = 8
"""Exported versions that stay on the disk, so that a recall need not export again."""

Call = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(kw_only=True)
class VllmDriver:
    """EngineDriver of one vLLM; `start` follows the windows of time in a thread of its own."""

    settings: Settings
    facts: EngineFacts
    target: str
    """Folder of the target."""
    served_folder: Path
    """The drafter's folder that vLLM was started with."""
    call: Call
    """(method, *arguments) -> what the engine's call returns; runs in `loop`."""
    loop: asyncio.AbstractEventLoop
    clock: Clock
    last: dict[str, Any] = field(default_factory=dict)
    """What the engine told last, by `paceline_state`."""
    _desired: DesiredState | None = None
    _live: str = ""
    _loaded: str = ""
    _label: tuple[str, str] = ("", "")
    _routes: dict[str, str] = field(default_factory=dict)
    _canary: tuple[str, int, str] = ("", 0, "")
    _staged: dict[str, tuple[Path, str]] = field(default_factory=dict)
    _failures: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what is served; held while it changes, not while a version is written."""
    _staging: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    # ---- the engine
    def ask(self, method: str, *args: Any) -> Any:
        """The answer of a call between two steps. Raises: PacelineError with the engine's reason."""
        future = asyncio.run_coroutine_threadsafe(self.call(method, *args), self.loop)
        try:
            return future.result(CALL_TIMEOUT_S)
        except FutureTimeoutError as e:
            future.cancel()
            raise PacelineError(f"vLLM did not answer {method} within {CALL_TIMEOUT_S:g} s") from e
        except Exception as e:  # vLLM's own kinds, and what its engine's process raised
            raise DrafterMismatchError(f"vLLM refused {method}: {e}") from e

    def _serve(self, group: str, version: str) -> float:
        """Let later requests count as `group` with a version that is staged; ms without a step."""
        with self._lock:
            if (group, version) == self._label:
                return 0.0
            path, sha256 = ("", "") if version == self._loaded else map(str, self._staged[version])
            self._loaded, self._label = "", ("", "")  # what a call that fails or takes too long leaves is not known
            pause_ms = self.ask("paceline_publish", path, sha256, version, group)
            self._loaded, self._label = version, (group, version)
            return pause_ms

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paceline-windows", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stop.wait(
            min(_TICK_S, self.settings.window_s - self.clock.now() % self.settings.window_s + 0.001)
        ):
            try:
                self.follow_window()
            except PacelineError as e:
                log.warning("the drafter of this window is not served: %s", e)
            except Exception:  # a thread that ends would leave one drafter for ever
                log.exception("windows failed; trying again")

    def follow_window(self) -> None:
        """Serve what this moment's window asks for, as far as it is staged."""
        self.last = self.ask("paceline_state")
        desired = self._desired
        if desired is None or not self._live:
            return
        name = window_name(self.settings.replica_id, self.clock.now(), self.settings.window_s)
        group, version = served_now(desired, self.last["rows"], name)
        if version not in self._staged and version == desired.first_version:
            self.stage(version)
        if version not in self._staged or version in self._failures:  # the class's own is not here yet, or was refused
            group, version = Group.ADAPTIVE, self._live
        try:
            self._serve(group, version)
        except DrafterMismatchError as e:
            self._failures[version] = str(e)
            raise

    # ---- EngineDriver
    @property
    def live_version(self) -> str:
        return self._live

    def versions(self) -> dict[str, str]:
        return {"draft": self._loaded} if self._loaded else {}

    def stage(self, version: str) -> bool:
        with self._staging:
            if version in self._staged:
                return True
            folder = self.settings.home / "vllm" / self.settings.replica_id / version
            if folder.is_dir():
                shutil.rmtree(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            export_drafter(
                ExportDrafterOptions(
                    version=version,
                    format="vllm",
                    out=folder,
                    target=self.target,
                    data_dir=Path(self.settings.data_dir),
                )
            )
            if not _same_mask(self.served_folder / MASK_FILE, folder / MASK_FILE):
                raise DrafterMismatchError(
                    f"drafter {version} must have the mask vector that vLLM was started with: it reads that at its start"
                )
            file = folder / "model.safetensors"
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            with self._lock:
                self._staged[version] = (file, sha256)
                self._tidy()
            return True

    def _tidy(self) -> None:
        """Delete the oldest exported versions that nobody serves."""
        kept = {self._live, self._loaded, self._canary[0], *self._routes.values()}
        if self._desired is not None:
            kept |= {self._desired.version, self._desired.first_version, self._desired.canary_version}
        for version in list(self._staged)[:-_KEPT_FOLDERS]:
            if version not in kept:
                shutil.rmtree(self._staged.pop(version)[0].parent, ignore_errors=True)

    def publish(self, version: str) -> float:
        self._failures.pop(version, None)
        pause_ms = self._serve(Group.ADAPTIVE, version)  # the next look at the windows says what it counts as
        self._live = version
        return pause_ms

    def set_canary(self, version: str, percent: int, bucket: str) -> None:
        self._canary = (version, percent, bucket)

    def route(self, class_versions: dict[str, str]) -> None:
        self._routes = dict(class_versions)

    def missing(self) -> list[str]:
        return sorted({v for v in self._routes.values() if v not in self._staged or v in self._failures})

    def load(self, version: str) -> bool:
        self._failures.pop(version, None)
        return self.stage(version)

    def served(self) -> dict[str, str]:
        return {b: v for b, v in self._routes.items() if v in self._staged and v not in self._failures}

    def failures(self) -> dict[str, str]:
        return dict(self._failures)

    def num_errors(self) -> dict[str, int]:
        return {}

    # ---- Followers
    def desired_changed(self, desired: DesiredState) -> None:
        self._desired = desired

    def training_changed(self, is_training: bool) -> None:
        self.ask("paceline_control", is_training, None)

    def classes_changed(self, classes: TrafficClasses) -> None:
        """Nothing: prompts without a class are not told apart here."""

    def counters(self) -> dict[str, Any]:
        """Feedback rows, as the engine's process counts them."""
        return self.last.get("feedback", {})


def _same_mask(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file()):
        return one.is_file() == other.is_file()
    a, b = (torch.load(path, weights_only=True)["embedding"] for path in (one, other))
    return torch.equal(a, b)
