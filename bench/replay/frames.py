"""Frames: a replay as columns that `pandas.DataFrame(...)` takes, as Parquet files and TensorBoard logs; behind `paceline.replay`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from rich.console import Console

from paceline.bandit.policies.view import Policy
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import Cell
from paceline.bandit.replay.table import table_of
from paceline.bench.replay.plan import parse_sweep, policy_names, read_scenarios, variants
from paceline.bench.replay.report import Row, net_percent
from paceline.errors import ConfigError
from paceline.paths import check_folder

Columns = dict[str, list[Any]]
"""Name -> one value a row; all of one length."""
FRAMES = ("runs", "cells", "curves", "decisions")
EXPORTS = {
    "parquet": ("pyarrow", "frames", f"{FRAMES[0]}.parquet"),
    "tensorboard": ("tensorboard", "tensorboard", "events"),
}
"""Kind -> the library that it needs, the extra that brings it, and a file that is written."""
_NAMES = ("cell", "family", "policy", "label", "seed")
_ACT = ("t_s", "action", "bucket", "what", "reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """One replay."""

    runs: Columns
    """A row for each cell, variant and seed: device-seconds never_s, serving_s, spent_*, booked_*, net_s, and net_percent."""
    cells: Columns
    """A row for each cell and variant: means over seeds, with the 95% interval; NaN where there is none."""
    curves: Columns
    """A row for each point of a run's cumulated net: t_s, net_s."""
    decisions: Columns
    """A row for each act of a run: t_s, action, bucket, what, reason."""
    report: dict[str, Any]
    """The JSON document of `paceline replay --json`."""

    def frame(self, name: str = "runs") -> Any:
        """A pandas.DataFrame of one of FRAMES. Raises: ConfigError without pandas (extra 'frames') or for another name."""
        columns = self._columns(name)
        if importlib.util.find_spec("pandas") is None:
            raise ConfigError("frame needs pandas; pip install 'paceline[frames]', or take the columns as they are")
        import pandas

        return pandas.DataFrame(columns)

    def write_parquet(self, folder: Path) -> list[Path]:
        """Write FRAMES as FOLDER/NAME.parquet; returns the files. Raises: ConfigError without pyarrow (extra 'frames')."""
        check_export("parquet", folder)
        import pyarrow
        import pyarrow.parquet

        files = [folder / f"{name}.parquet" for name in FRAMES]
        for name, file in zip(FRAMES, files, strict=True):
            pyarrow.parquet.write_table(pyarrow.table(self._columns(name)), file)
        return files

    def write_tensorboard(self, folder: Path) -> None:
        """Write a TensorBoard log for each run, FOLDER/RUN/: its net_s over the seconds of its world, which are the log's wall
        time, and its figures by cell, policy and seed as hyperparameters.

        Raises: ConfigError without tensorboard (extra 'tensorboard').
        """
        check_export("tensorboard", folder)
        from torch.utils.tensorboard import SummaryWriter

        points: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for point in _rows(self.curves):
            points.setdefault(tuple(_names(point).values()), []).append((point["t_s"], point["net_s"]))
        for i, run in enumerate(_rows(self.runs)):
            names = {name: run.pop(name) for name in _NAMES}
            # one folder whatever the cell is called
            name = quote(f"{names['cell']} {names['label']}", safe=" =,()")[:160]
            with SummaryWriter(str(folder / f"{name} seed {names['seed']} run {i}")) as writer:
                for t, net in points.get(tuple(names.values()), ()):
                    writer.add_scalar("net_s", net, round(t), walltime=t)
                writer.add_hparams(names, run, run_name=".")

    def _columns(self, name: str) -> Columns:
        if name not in FRAMES:
            raise ConfigError(f"frame must be one of {', '.join(FRAMES)}, got {name!r}")
        found: Columns = getattr(self, name)
        return found


def check_export(kind: str, folder: Path) -> None:
    """Make the folder; raise ConfigError when an export of EXPORTS cannot be written there, before anything is computed."""
    library, extra, file = EXPORTS[kind]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{kind} needs {library}; pip install 'paceline[{extra}]'")
    check_folder(folder, file, kind)


def frames_of(report: dict[str, Any], rows: Sequence[Row]) -> Frames:
    """The frames of a report and the runs that it is made of."""
    kinds = sorted({kind for r in rows for kind in r["spent"]})
    booked = sorted({kind for r in rows for kind, v in r["ledger"].items() if isinstance(v, int | float)})
    runs = [
        {
            **_names(r), "never_s": r["never_s"], "serving_s": r["serving_s"],
            **{f"spent_{k}_s": r["spent"].get(k, 0.0) for k in kinds},
            **{f"booked_{k.removesuffix('_s')}_s": r["ledger"].get(k, 0.0) for k in booked},
            "net_s": r["net_s"], "net_percent": net_percent(r),
            **{k: r.get(k, 0) for k in ("num_jobs", "num_accepted", "num_swaps")},
        }
        for r in rows
    ]  # fmt: skip
    cells = [
        {
            **{k: c[k] for k in ("cell", "family", "policy", "label", "num_seeds")},
            **{f"net_{k}_percent": _number(v) for k, v in c["net_percent"].items()},
            "of_oracle": _number(c["of_oracle"]),
            **{k: c[k] for k in ("spent_percent", "booked_saving_percent", "true_saving_percent", "num_jobs", "num_swaps")},
        }
        for c in report["cells"]
    ]  # fmt: skip
    curves = [{**_names(r), "t_s": t, "net_s": v} for r in rows for t, v in zip(r["times"], r["curve"], strict=True)]
    acts = [
        {**_names(r), "t_s": e["t"], **{k: e[k] for k in _ACT[1:]}}
        for r in rows for e in r["events"]
    ]  # fmt: skip
    decisions = _columns(acts) or {name: [] for name in (*_NAMES, *_ACT)}  # nothing acted
    return Frames(
        runs=_columns(runs), cells=_columns(cells), curves=_columns(curves), decisions=decisions, report=report
    )


def _rows(columns: Columns) -> Iterable[dict[str, Any]]:
    """The rows that columns were made of."""
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _number(value: float | None) -> float:
    """A column of these is one of numbers, whatever is missing."""
    return math.nan if value is None else value


def _names(r: Row) -> dict[str, Any]:
    return {k: r[k] for k in _NAMES}


def _columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    out: Columns = {}
    for row in rows:
        for name, value in row.items():
            out.setdefault(name, []).append(value)
    return out


def replay(
    source: str | Path | Cell | Mapping[str, Any] | Sequence[Cell | Mapping[str, Any]],
    policies: str | type[Policy] | Sequence[str | type[Policy]] = "never,payoff,oracle",
    *,
    seeds: int = 10,
    first_seed: int = 0,
    sweep: Sequence[str] = (),
    workers: int = 1,
    resume: str | Path | None = None,
    console: Console | None = None,
) -> Frames:
    """Run policies on simulated services, as `paceline replay` does.

    Args:
        source: what the command takes ('tables', a cell's name, WORLD.json, a folder, FILE.yaml), or worlds: TableWorld,
            Scenario, or a table as plain values.
        policies: names, or classes with `choose(view, rng)` at module level; a class must be importable by its name where
            workers > 1.
        sweep: 'KEY=V1,V2' each, a policy setting.
        console: where progress is shown; default: nowhere.
    Raises: ConfigError for sources, policies and settings that are not usable.
    """
    from paceline.bench.replay.command import ReplayOptions, replay_cells

    options = ReplayOptions(
        source=str(source) if isinstance(source, str | Path) else "worlds",
        policies=",".join(map(_policy_name, policies if isinstance(policies, list | tuple) else [policies])),
        seeds=seeds, first_seed=first_seed, workers=workers, resume=Path(resume) if isinstance(resume, str) else resume,
        sweep=cast("tuple[str, ...]", tuple(sweep) if isinstance(sweep, list) else sweep),
    )  # fmt: skip
    chosen = variants(policy_names(options.policies), parse_sweep(options.sweep))
    if isinstance(source, str | Path):
        cells, title = read_scenarios(options.source), options.source
    else:
        cells = [_cell(w) for w in (source if isinstance(source, list | tuple) else [source])]
        title = ", ".join(c.name for c in cells)
        if not cells or len({c.name for c in cells}) < len(cells):
            raise ConfigError(f"source must be worlds with names of their own, got {title or 'none'}")
    found, rows = replay_cells(
        cells, chosen, source=title, seeds=range(first_seed, first_seed + seeds), workers=workers, resume=options.resume,
        console=console or Console(quiet=True),
    )  # fmt: skip
    return frames_of(found, rows)


def _policy_name(policy: object) -> str:
    if isinstance(policy, str):
        return policy
    if not isinstance(policy, type) or "." in policy.__qualname__:
        raise ConfigError(f"policies must be names or classes, and classes at module level only, got {policy!r}")
    return f"{policy.__module__}:{policy.__qualname__}"


def _cell(world: object) -> Cell:
    if isinstance(world, Mapping):
        return table_of(world)
    is_record = dataclasses.is_dataclass(world) and not isinstance(world, type)  # a run is known by its values
    if not is_record or not (isinstance(world, Scenario) or callable(getattr(world, "draw", None))):
        raise ConfigError(f"source must be a name or a file, or TableWorld, Scenario or tables as plain values, got {world!r}")  # fmt: skip
    return cast(Cell, world)
