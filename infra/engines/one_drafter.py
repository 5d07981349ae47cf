"""One drafter: the driver of engines that hold a single drafter, which changes with the windows of time (windows.py)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from paceline.adapt.versions.export_drafter import ExportDrafterOptions, export_drafter
from paceline.contracts import DesiredState, EngineFacts, Group, TrafficClasses, window_name
from paceline.errors import ConfigError, DrafterMismatchError, EngineAwayError, PacelineError
from paceline.infra.engines.windows import served_now
from paceline.infra.state.redis_clients import Breaker
from paceline.machine import Clock

log = logging.getLogger(__name__)

_TICK_S, _MOST_AWAY_S = 0.5, 60.0
_KEPT_FOLDERS = 8
"""Exported versions that stay on the disk, so that a recall need not export again."""
_HELD = "held"
"""File of a replica's folder that it holds a lock on: one that starts again may have another name."""
_TRY_S = 2.0
"""How long a folder that is held is tried: one that begins beside this one looks whether anybody is there."""


class Staged(NamedTuple):
    """A version as the engine loads it."""

    file: Path
    """model.safetensors in a folder of `paceline export-drafter`."""
    sha256: str
    """Of the file, when it was written."""


class Looked(NamedTuple):
    """What an engine says of itself."""

    rows: Mapping[str, float]
    """Class -> its rounds of late, which fade."""
    label: tuple[str, str]
    """Group and version that later requests count as; ('', '') where nothing was published since it started."""


class OneDrafterEngine(Protocol):
    """What an engine with one drafter does; `publish` and `look` are called by one thread at a time."""

    def check(self, folder: Path) -> None:
        """Look whether an exported version can be loaded at all. Raises: DrafterMismatchError with the reason."""

    def publish(self, staged: Staged | None, version: str, group: str) -> float:
        """Load a version, where `staged` names one, and count later requests as those of `group` and `version`.

        Returns: ms without a step.
        Raises: DrafterMismatchError, when the engine refuses it and goes on with what it had; EngineAwayError.
        """

    def look(self) -> Looked:
        """What it serves and did of late; asked for every half a second. Raises: EngineAwayError."""

    def tell_training(self, is_training: bool) -> None:
        """Whether the service trains beside this engine."""


def _lock(folder: Path) -> IO[bytes] | None:
    """The folder's file, locked; None where another process holds it, or has deleted it meanwhile for nobody's."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = (folder / _HELD).open("ab")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(held.fileno()), (folder / _HELD).stat())
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    except OSError:  # a file system without locks, where nothing is deleted
        is_there = True
    if not is_there:
        held.close()
        return None
    return held


def hold(folder: Path) -> IO[bytes]:
    """Hold a replica's folder for this process until what is returned is closed, and delete those of replicas that are gone.

    Raises: ConfigError where another process holds it: two would take turns at one engine.
    """
    held, until = None, time.monotonic() + _TRY_S
    while held is None:
        held = _lock(folder)
        if held is None and time.monotonic() > until:
            raise ConfigError(
                f"{folder} must be one process's: another one drives {folder.name} (a second `paceline attach`, or a further "
                "API server of one vLLM)"
            )
        if held is None:
            time.sleep(0.05)
    for other in folder.parent.glob(f"*/{_HELD}"):
        if other.parent != folder:
            with contextlib.suppress(OSError), other.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other.parent)
    return held


@dataclass(kw_only=True)
class OneDrafterDriver:
    """EngineDriver of one such engine; `start` follows the windows of time in a thread of its own."""

    engine: OneDrafterEngine
    facts: EngineFacts
    """`kind` is the format of export, too."""
    replica_id: str
    folder: Path
    """Where exported versions lie; this replica's own."""
    target: str
    """Folder of the target."""
    registry: str
    """Where the service's versions are: a folder or a store's URL."""
    clock: Clock
    held: IO[bytes]
    """What `hold` gave for the folder; `stop` closes it."""
    on_pause: Callable[[float], None] = lambda ms: None
    """Is told of every exchange between two windows: ms without a step."""
    _desired: DesiredState | None = None
    _live: str = ""
    _loaded: str = ""
    _label: tuple[str, str] = ("", "")
    _routes: dict[str, str] = field(default_factory=dict)
    _canary: tuple[str, int, str] = ("", 0, "")
    _staged: dict[str, Staged] = field(default_factory=dict)
    _failures: dict[str, str] = field(default_factory=dict)
    _failed_in: str = ""
    """Window of the latest one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what is served; held while the engine is spoken to, not while a version is written."""
    _staging: threading.Lock = field(default_factory=threading.Lock)
    _is_away: bool = False
    """The engine did not answer the latest look."""
    _breaker: Breaker = field(default_factory=lambda: Breaker(base_s=4 * _TICK_S, cap_s=_MOST_AWAY_S))
    _retry_at: float = 0.0
    """When a window's exchange is tried again behind one that the engine did not end (each stops its steps), s, steady."""
    _is_over: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def _serve(self, group: str, version: str) -> float:
        """Let later requests count as `group` with a version that is staged; ms without a step."""
        with self._lock:
            if (group, version) == self._label:
                return 0.0
            if self._is_over:
                raise EngineAwayError(f"{self.replica_id} is not spoken to any more: its agent ends")
            staged = None if version == self._loaded else self._staged[version]
            self._loaded, self._label = "", ("", "")  # what a call that fails or takes too long leaves is not known
            try:
                pause_ms = self.engine.publish(staged, version, group)
            except DrafterMismatchError as e:
                self._failures[version] = str(e)
                self._failed_in = window_name(self.replica_id, self.clock.now(), self.facts.window_s)
                raise
            except FileNotFoundError:  # somebody tidied up: it is written again
                self._staged.pop(version, None)
                raise
            except (EngineAwayError, ConfigError) as e:  # another key or release than when it was attached
                self._retry_at = time.monotonic() + self._breaker.failed()
                raise EngineAwayError(str(e)) from e
            self._breaker.succeeded()
            self._loaded, self._label = version, (group, version)
            self._failures.pop(version, None)
            return pause_ms

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"windows-{self.replica_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the windows: the live version serves on, not what this window tried or held back.

        A publication that has begun is waited for, and none begins after it.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._live in self._staged and self._label not in (("", ""), (Group.ADAPTIVE, self._live)):
            try:
                self._serve(Group.ADAPTIVE, self._live)
            except (PacelineError, OSError) as e:
                log.warning("%s goes on with what this window served: %s", self.replica_id, e)
        with self._lock:  # an engine whose agent goes in the midst of one stays paused
            self._is_over = True
        self.held.close()

    def _run(self) -> None:
        window_s, said = self.facts.window_s, ""
        while not self._stop.wait(min(_TICK_S, window_s - self.clock.now() % window_s + 0.001)):
            try:
                self.follow_window()
                said = ""
            except (PacelineError, OSError) as e:
                if str(e) != said:
                    log.warning("the drafter of this window is not served: %s", said := str(e))
            except Exception:  # a thread that ends would leave one drafter for ever
                log.exception("windows failed; trying again")

    def follow_window(self) -> None:
        """Serve what this moment's window asks for, as far as it is staged."""
        with self._lock:
            try:
                rows, label = self.engine.look()
            except EngineAwayError:
                self._is_away = True
                raise
            self._is_away = False
            if label != self._label:  # the engine was started again, or another one spoke to it
                self._loaded, self._label = "", ("", "")
        desired = self._desired
        if desired is None or not self._live:
            return
        name = window_name(self.replica_id, self.clock.now(), self.facts.window_s)
        group, version = served_now(desired, rows, name)
        if version not in self._staged | self._failures and version == desired.first_version:
            try:
                self.stage(version)
            except DrafterMismatchError as e:  # the engine was started with another one
                self._failures[version] = str(e)
                log.error("the first drafter cannot be compared with: %s", e)
        if version == desired.first_version != self._live and version in self._staged and name != self._failed_in:
            self._failures.pop(version, None)  # one refusal must not end the comparison
        if version not in self._staged or version in self._failures:  # the class's own is not here yet, or was refused
            group, version = Group.ADAPTIVE, self._live
        if version in self._failures and name == self._failed_in:  # reported; tried again in the next window
            return
        if time.monotonic() < self._retry_at or (version not in self._staged and not self.stage(version)):
            return
        if self._stop.is_set():  # the end leaves the live version; this may have come from a long `stage`
            return
        if pause_ms := self._serve(group, version):
            self.on_pause(pause_ms)

    # ---- EngineDriver
    @property
    def live_version(self) -> str:
        return self._live

    def versions(self) -> dict[str, str]:
        return {"draft": self._loaded} if self._loaded else {}

    def stage(self, version: str) -> bool:
        if self._is_away:
            return False
        with self._staging:
            if version in self._staged:
                return True
            folder = self.folder / version
            if folder.is_dir():
                shutil.rmtree(folder)
            export_drafter(
                ExportDrafterOptions(version=version, format=self.facts.kind, out=folder, target=self.target),
                registry=self.registry,
            )
            self.engine.check(folder)
            file = folder / "model.safetensors"
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            with self._lock:
                self._staged[version] = Staged(file, sha256)
                self._tidy()
            return True

    def _tidy(self) -> None:
        """Delete the oldest exported versions that nobody serves, what was refused, and what an earlier process left."""
        kept = {self._live, self._loaded, self._canary[0], *self._routes.values()}
        if self._desired is not None:
            kept |= {self._desired.version, self._desired.first_version, self._desired.canary_version}
        for version in list(self._staged)[:-_KEPT_FOLDERS]:
            if version not in kept:
                del self._staged[version]
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder.name not in self._staged:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, version: str) -> float:
        self._failures.pop(version, None)
        pause_ms = self._serve(Group.ADAPTIVE, version)  # the next look at the windows says what it counts as
        self._live = version
        return pause_ms

    def set_canary(self, version: str, percent: int, bucket: str) -> None:
        if version != self._canary[0]:
            self._failures.pop(version, None)  # of an earlier trial
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
        self.engine.tell_training(is_training)

    def classes_changed(self, classes: TrafficClasses) -> None:
        """Nothing: prompts without a class are not told apart here."""
