"""Learning curve: how a drafter's loss fell, at most about 200 points in a small file beside its weights.

Beside them, what the drafter was worth on held-out text in the course of the run: the validation curve.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.paths import write_atomic

CURVE_FILE = "learning_curve.json"
FORMAT = 1
MAX_POINTS = 200
COLUMNS = ("step", "rows", "seconds", "loss", "nll")
VALIDATION_COLUMNS = ("step", "rows", "seconds", "nll", "acceptance_length")
_UNIT = {
    "seconds": "s of training, one process",
    "nll": "nats per row, first draft token",
    "loss": "mean of the family's loss",
    "acceptance_length": "tokens per round by exact replay of held-out text",
}


class LearningCurve:
    """Points at equal intervals of steps: where the run stood, and means over the rows since the point before."""

    def __init__(self, num_steps: int) -> None:
        """num_steps: of the whole run."""
        self._every = max(1, -(-num_steps // MAX_POINTS))
        self._points: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._at: tuple[float, ...] = (0, 0, 0.0)  # step, rows, seconds after the newest step
        self._sums = (0.0, 0.0)  # loss and nll times rows, since the newest point
        self._validation: dict[str, list[float]] = {name: [] for name in VALIDATION_COLUMNS}

    def add(self, *, step: int, rows: int, seconds: float, loss: float, nll: float) -> None:
        """One optimizer step. step, rows, seconds: of the run so far; loss, nll: means over the rows of this step."""
        new = rows - self._at[1]
        self._at, self._sums = (step, rows, seconds), (self._sums[0] + loss * new, self._sums[1] + nll * new)
        if step % self._every == 0:
            self._points, self._sums = self._with_newest(), (0.0, 0.0)

    def validate(self, *, nll: float, acceptance_length: float) -> None:
        """What the weights after the newest step are worth on held-out text."""
        for name, value in zip(VALIDATION_COLUMNS, (*self._at, nll, acceptance_length), strict=True):
            self._validation[name].append(value)

    def _with_newest(self) -> dict[str, list[float]]:
        """The points and, where an interval is under way, one more for its part so far."""
        step, rows = ((self._points[name] or [0])[-1] for name in ("step", "rows"))
        if self._at[0] == step:
            return self._points
        point = (*self._at, *(total / (self._at[1] - rows) for total in self._sums))
        return {name: [*self._points[name], value] for name, value in zip(COLUMNS, point, strict=True)}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, plain numbers; `resume` takes it."""
        return {"points": self._points, "at": self._at, "sums": self._sums, "validation": self._validation}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._points, self._at, self._sums = state["points"], state["at"], state["sums"]
        self._validation = state["validation"]

    def write(self, folder: Path) -> None:
        """Replace the folder's learning_curve.json; measured values have 4 significant digits."""
        values = {"format": FORMAT, "unit": _UNIT, **_rounded(self._with_newest())}
        if self._validation["step"]:
            values["validation"] = _rounded(self._validation)
        write_atomic(folder / CURVE_FILE, json.dumps(values, separators=(",", ":")) + "\n")


def _rounded(points: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {n: [v if isinstance(v, int) else float(f"{v:.4g}") for v in column] for n, column in points.items()}


def read_curve(folder: Path) -> dict[str, list[float]]:
    """The columns of a folder's learning_curve.json, lists of one length. Raises: ConfigError when it has none."""
    return _read(folder)[0]


def read_validation(folder: Path) -> dict[str, list[float]]:
    """The columns of its validation curve, empty lists where the drafter was trained without. Raises: as read_curve."""
    return _read(folder)[1]


def _read(folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    path = folder / CURVE_FILE
    if not path.is_file():
        raise ConfigError(f"{path} must be the learning curve of a trained drafter, there is no such file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values["format"]
        curve = {name: [float(v) for v in values[name]] for name in COLUMNS} if found == FORMAT else None
        held_out = values.get("validation", {name: [] for name in VALIDATION_COLUMNS})
        validation = {name: [float(v) for v in held_out[name]] for name in VALIDATION_COLUMNS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path} must be the learning curve of a trained drafter: {e!r}") from e
    if curve is None:
        raise ConfigError(f"format of {path} must be {FORMAT}, got {found!r}")
    lengths = [{len(column) for column in columns.values()} for columns in (curve, validation)]
    if not curve["step"] or max(map(len, lengths)) > 1:
        raise ConfigError(f"{path} must hold lists of one length, at least one point")
    return curve, validation
