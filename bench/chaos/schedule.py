"""Schedule: which fault comes when, drawn from a seed, and the journal by which a run that was cut off goes on."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Turn:
    """Faults of one moment."""

    number: int
    """Place of the first in the schedule, from 0."""
    names: list[str]


def schedule(
    seed: int, names: Sequence[str], count: int, *, at_once: int = 1, together: Collection[str] = ()
) -> list[Turn]:
    """Turns of so many faults: all of them in a random order, then all in another one, and so on.

    Args:
        count: turns begin before this number of faults.
        at_once: most faults of one turn.
        together: those that may share one.
    """
    found: list[Turn] = []
    for start in range(0, count, len(names)):
        order = random.Random(f"{seed}:{start // len(names)}").sample(list(names), len(names))
        turns, shared = list[Turn](), Turn(0, ["-"] * at_once)
        for number, name in enumerate(order, start):
            if name in together and len(shared.names) < at_once:
                shared.names.append(name)
                continue
            turns.append(Turn(number, [name]))
            if name in together:
                shared = turns[-1]
        found += [turn for turn in turns if turn.number < count]
    return found


def fault_rng(seed: int, number: int, beside: str = "") -> random.Random:
    """What one fault draws from: the same whichever faults came before. beside: its name where it is not the one whose turn it is."""
    return random.Random(f"{seed}/{number}{beside and '/' + beside}")


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """What one fault came to."""

    number: int
    """Its place in the schedule, from 0."""
    name: str
    beside: list[str] = []
    """Faults that happened at the same time."""
    status: str
    """ok | failed | skipped."""
    held_s: float = 0.0
    """How long it lasted."""
    recovery_s: float | None = None
    """From its end until the service was whole; None: it was not, or there was no fault."""
    num_answers: int = 0
    num_broken: int = 0
    """Answers that ended early by an explicit error."""
    num_refusals: int = 0
    """429 answers, after which clients asked again."""
    num_tokens: int = 0
    pauses_ms: list[float] = []
    """How long each swap kept an engine from its rounds, where the fault was swaps."""
    round_ms: float | None = None
    """Mean over the answers: a request's share of a round, which is at most the round."""
    problems: list[str] = []
    note: str = ""
    command: str = ""
    """How to have it again by itself."""


def all_names(outcome: Outcome) -> list[str]:
    """The fault and those that happened at the same time."""
    return [outcome.name, *outcome.beside]


class Journal:
    """One line for each fault that is over, in the folder of a run; without a folder it lives in memory only.

    The first line has the settings that a run must share with the one that it goes on with.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        """Raises: ConfigError when the folder belongs to a run of other settings or cannot be read."""
        self.done: list[Outcome] = []
        self._path = None if folder is None else folder / JOURNAL
        if self._path is None:
            return
        if not self._path.is_file():
            self._append(settings)
            return
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the run ended while it wrote a line
            os.truncate(self._path, len(whole))
        try:
            first, *rest = [json.loads(line) for line in whole.splitlines()]
            self.done = [msgspec.convert(line, Outcome) for line in rest]
        except (ValueError, msgspec.ValidationError) as e:
            raise ConfigError(f"resume must be the folder of a run, but {self._path} is damaged: {e}; give another folder") from e  # fmt: skip
        for name, value in settings.items():
            if first.get(name) != value:
                raise ConfigError(
                    f"resume must be the folder of a run with the same options, but {name.replace('_', '-')} was "
                    f"{first.get(name)!r} there and is {value!r} now; give that value, or another folder"
                )

    def add(self, outcome: Outcome) -> None:
        """Note a fault that is over."""
        self.done.append(outcome)
        if self._path is not None:
            self._append(msgspec.to_builtins(outcome))

    def _append(self, values: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())
