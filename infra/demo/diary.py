"""Diary: what a run of the demo has asked and got, in a folder where a run that was stopped goes on."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.contracts import Group
from paceline.errors import ConfigError
from paceline.paths import held_folder, write_atomic

Starts = Sequence[tuple[float, float]]
"""(seconds of the run before it, its begin in seconds since the epoch) of every part."""
_RUN, _ANSWERS, _FAILURES = "run.json", "answers.jsonl", "failures.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One finished request as the client saw it."""

    phase: str
    place: int
    """Of its bucket's requests: 0, 1, 2, ..."""
    bucket: str
    """What kind of text the client asked for; the service is not told."""
    traffic_class: str
    """What the service counted it under."""
    group: Group
    temperature: float
    num_tokens: int
    num_rounds: int
    num_accepted_tokens: int
    device_s: float
    """Sum of the request's shares of its rounds: what the engine spent on it."""
    latency_s: float
    ended: float
    """Seconds since the demo began."""
    drafter_version: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Diary:
    """The files of a run: its settings and when its parts began, a line for every answer, a line for every failure."""

    folder: Path
    settings: dict[str, Any]
    model_name: str
    """Of the run's service: its own, wherever its state lies."""
    starts: list[tuple[float, float]] = field(default_factory=list)
    """As `Starts`."""
    answers: list[Answer] = field(default_factory=list)
    """Of the parts before this one."""
    failures: list[str] = field(default_factory=list)
    """The same."""

    @property
    def elapsed_s(self) -> float:
        """Where the run goes on: the end of its latest answer, in seconds since it began."""
        return max((a.ended for a in self.answers), default=0.0)

    @property
    def asked_s(self) -> float:
        """When its latest request was sent, in seconds since it began."""
        return max((a.ended - a.latency_s for a in self.answers), default=0.0)

    def places(self) -> dict[str, set[int]]:
        """Bucket -> the places that were answered."""
        out: dict[str, set[int]] = {}
        for a in self.answers:
            out.setdefault(a.bucket, set()).add(a.place)
        return out

    def begin(self, epoch_s: float) -> None:
        """Note that a part begins now; a line that the last one did not write to its end is cut off."""
        for name in (_ANSWERS, _FAILURES):
            if (path := self.folder / name).is_file():
                with path.open("r+b") as file:
                    file.truncate(file.read().rfind(b"\n") + 1)
        self.starts.append((self.elapsed_s, epoch_s))
        self._write()

    def note(self, item: Answer | Exception) -> None:
        """Write down what was got."""
        name, line = (_FAILURES, str(item)) if isinstance(item, Exception) else (_ANSWERS, item)
        with (self.folder / name).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _write(self) -> None:
        run = {"settings": self.settings, "model_name": self.model_name, "starts": self.starts}
        write_atomic(self.folder / _RUN, json.dumps(run, indent=1) + "\n")


def run_seconds(starts: Starts, ts: float) -> float:
    """Seconds since a run began of a moment in seconds since the epoch; all between two parts is the later one's begin."""
    part = next((i for i, (_, began) in reversed([*enumerate(starts)]) if began <= ts), 0)
    before_s, began = starts[part]
    at_s = before_s + ts - began
    return at_s if part + 1 == len(starts) else min(at_s, starts[part + 1][0])


@contextmanager
def open_diary(folder: Path, settings: dict[str, Any]) -> Iterator[Diary]:
    """The diary of a new run, or of one that goes on; the folder is this process' as long.

    settings: JSON values, equal in all parts of a run.
    Raises: ConfigError for a folder of something else, of a run with other settings, or of one that another process goes on with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with held_folder(folder, f"--data-dir must not be that of a run that goes on now, got {folder}; wait for its end"):
        if (folder / _RUN).is_file():
            diary = _read(folder, settings)
        elif any(folder.iterdir()):
            raise ConfigError(f"--data-dir must be a new or empty folder, or one of a run to go on with, got {folder}")
        else:
            diary = Diary(folder, settings, f"paceline-demo-{uuid.uuid4().hex[:8]}")
            diary._write()
        yield diary


def _read(folder: Path, settings: dict[str, Any]) -> Diary:
    try:
        run = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        known, starts = dict(run["settings"]), [(float(before), float(began)) for before, began in run["starts"]]
        diary = Diary(folder, settings, str(run["model_name"]), starts)
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"--data-dir must be the folder of a run, got {folder}, whose {_RUN} cannot be read: {e}"
        ) from e
    for name, value in settings.items():
        if known.get(name) != value:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be that of the run in {folder}, {known.get(name)!r}, got {value!r}; give "
                "--data-dir another folder for another run"
            )
    diary.answers, diary.failures = _lines(folder / _ANSWERS, Answer), _lines(folder / _FAILURES, str)
    return diary


def _lines(path: Path, kind: Any) -> list[Any]:
    """The whole lines of a file. Raises: ConfigError for one that is broken."""
    raw = path.read_bytes() if path.is_file() else b""
    whole, out = raw[: raw.rfind(b"\n") + 1], []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            out.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{path} line {number} must be as the run wrote it: {e}; remove the line") from e
    return out
