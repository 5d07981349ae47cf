"""Demo diary: what a run has sent and got, in a folder where a run that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.infra.demo.stats import Answer
from paceline.paths import write_atomic

_RUN, _ANSWERS = "run.json", "answers.jsonl"


@dataclass(slots=True)
class Diary:
    """The folder's files: the run's settings and when its parts began, and a line for every answer."""

    folder: Path
    settings: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    """Of the parts before this one, and what the run adds."""
    _starts: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Diary:
        """The diary of a new run, or of one that goes on. Raises: ConfigError when that one had other settings."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))  # as they are read again
        diary = cls(folder, settings)
        if not (folder / _RUN).is_file():
            return diary
        known = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        for name, value in settings.items():
            if known["settings"].get(name) != value:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be that of the run in {folder}, {known['settings'].get(name)!r}, got "
                    f"{value!r}; give --data-dir another folder for another run"
                )
        diary._starts = [(float(a), float(b)) for a, b in known["starts"]]
        if (folder / _ANSWERS).is_file():
            for line in (folder / _ANSWERS).read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # the last one may be cut where the run was killed
                    diary.answers.append(msgspec.json.decode(line, type=Answer))
        return diary

    def elapsed_s(self) -> float:
        """Where the run goes on: the end of its latest answer, in seconds since it began."""
        return max((a.ended for a in self.answers), default=0.0)

    def begin(self, before_s: float, epoch_s: float) -> list[tuple[float, float]]:
        """Note that a part begins; returns (seconds of the run before it, its begin in seconds since the epoch) of all parts."""
        self._starts.append((before_s, epoch_s))
        write_atomic(
            self.folder / _RUN, json.dumps({"settings": self.settings, "starts": self._starts}, indent=1) + "\n"
        )
        lines = b"".join(msgspec.json.encode(a) + b"\n" for a in self.answers)
        write_atomic(self.folder / _ANSWERS, lines)
        return self._starts

    def note(self, answer: Answer) -> None:
        """Write an answer down."""
        with (self.folder / _ANSWERS).open("ab") as file:
            file.write(msgspec.json.encode(answer) + b"\n")
