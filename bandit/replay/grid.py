"""Grids: the named sets of simulated cells."""

from __future__ import annotations

import dataclasses

from paceline.bandit.replay.families import family_worlds
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import Cell
from paceline.errors import ConfigError

REGIMES = {"short": (300.0, 1800.0), "medium": (1200.0, 4800.0), "long": (3600.0, 7200.0)}
"""Name -> (mean regime length, simulated time), seconds."""
GRIDS = ("synthetic", "core", "small", "tables")
SMALL = ("medium-cheap-cycle", "medium-dear-fresh")
COSTS = {"cheap": 0.3, "normal": 1.0, "dear": 4.0}


def _core() -> list[Scenario]:
    """Regime length x training cost x recurrence, on one busy device with batches of 4."""
    return [
        Scenario(
            name=f"{length}-{cost}-{recurrence}",
            family=f"{length} regimes, {recurrence}",
            regime_s=regime_s,
            duration_s=duration_s,
            train_cost=factor,
            recurrence=recurrence,
        )
        for length, (regime_s, duration_s) in REGIMES.items()
        for recurrence in ("cycle", "fresh")
        for cost, factor in COSTS.items()
    ]


def _special() -> list[Scenario]:
    medium = Scenario(name="", regime_s=1200.0, duration_s=4800.0)
    cells: list[tuple[str, str, dict]] = [
        ("steady", "steady known traffic", {"recurrence": "steady"}),
        ("steady-no-headroom-fleet", "steady known traffic", {"recurrence": "steady", "load": 8.0}),
        ("no-headroom", "new traffic that training cannot help", {"recurrence": "fresh", "headroom": 0.0}),
        ("idle", "low load", {"load": 0.1}),
        ("idle-dear", "low load", {"load": 0.1, "train_cost": 4.0}),
        ("fleet", "fleet of 8 devices", {"load": 8.0}),
        ("fleet-dear", "fleet of 8 devices", {"load": 8.0, "train_cost": 4.0}),
        ("batch-32", "batches of 32", {"batch_size": 32}),
        ("batch-32-dear", "batches of 32", {"batch_size": 32, "train_cost": 4.0}),
        ("diurnal", "daily wave of load", {"diurnal": 0.8, "duration_s": 14_400.0, "regime_s": 3600.0}),
        ("bad-jobs", "training that goes wrong", {"bad_jobs": 0.25}),
        ("bad-jobs-short", "training that goes wrong", {"bad_jobs": 0.25, "regime_s": 300.0, "duration_s": 1800.0}),
        ("forgetting", "training that forgets", {"forgetting": 0.4}),
        ("forgetting-short", "training that forgets", {"forgetting": 0.4, "regime_s": 300.0, "duration_s": 1800.0}),
        ("drift", "text that changes inside one bucket", {"recurrence": "drift"}),
    ]
    return [dataclasses.replace(medium, name=name, family=family, **changes) for name, family, changes in cells]


def named_cells() -> dict[str, Cell]:
    """Every named cell; each can be run alone."""
    cells: list[Cell] = [*_core(), *_special(), *family_worlds()]
    return {cell.name: cell for cell in cells}


def grid(name: str) -> list[Cell]:
    """The cells of 'synthetic' (all formulas), 'core', 'small' or 'tables', or the one named cell.

    Raises ConfigError with what there is.
    """
    cells = named_cells()
    if name == "synthetic":
        return [*_core(), *_special()]
    if name == "core":
        return [*_core()]
    if name == "tables":
        return [*family_worlds()]
    if name == "small":
        return [dataclasses.replace(s, duration_s=1800.0, regime_s=600.0) for s in _core() if s.name in SMALL]
    if name in cells:
        return [cells[name]]
    raise ConfigError(f"scenario must be a file or one of {', '.join((*GRIDS, *cells))}; got {name!r}")
