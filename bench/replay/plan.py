"""Replay plan: the runs of a replay, from cells, policies with their settings, and seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.bandit.policies.table import POLICIES, SELF_FUNDED, make_policy
from paceline.bandit.replay.grid import GRIDS, grid, named_cells
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import HINDSIGHT, HINDSIGHT_SETTINGS, Cell, policy_config
from paceline.bandit.replay.table import read_table
from paceline.config import PolicyConfig, policy_entry_points, read_yaml
from paceline.errors import ConfigError
from paceline.records import build

CONCERNS = {
    **dict.fromkeys(("bank_s", "bank_income", "hysteresis", "horizon_s"), SELF_FUNDED),
    "interval_s": ("interval",),
    "ema_fast": ("dual_ema",), "ema_slow": ("dual_ema",), "ema_margin": ("dual_ema",),
    "cara_factor": ("cara",), "thompson_draws": ("thompson",),
    "hedge_rate": ("hedge",), "hedge_share": ("hedge",),
}  # fmt: skip
"""Settings that only some of our policies read: a sweep over them leaves the others alone. One of another's may read any."""
FIXED = ("policy", "seed", "ends_at")
"""Fields of PolicyConfig that a sweep may not set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A policy with settings that differ from the defaults of PolicyConfig."""

    policy: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """Name in tables: the policy and what was set; settings that differ have labels that differ."""
        return " ".join([self.policy, *(f"{k}={_short(v)}" for k, v in self.settings)])


def _short(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One run."""

    scenario: Cell
    variant: Variant
    seed: int

    @property
    def key(self) -> str:
        """Identity in a --resume folder: everything that the result depends on but the code."""
        variant = [self.variant.policy, dict(self.variant.settings)]
        text = json.dumps([describe(self.scenario), variant, self.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def describe(cell: Cell) -> dict[str, Any]:
    """What makes a cell, as plain values: its settings, or its tables."""
    return dataclasses.asdict(cell)  # type: ignore[arg-type]


def read_scenarios(source: str) -> list[Cell]:
    """Cells of a grid, of a named cell, of a JSON file with tables or a folder of them, or of a YAML file with one cell or a
    list under `cells`.

    Raises: ConfigError for an unknown name or key, or a file that cannot be read.
    """
    path = Path(source)
    if path.suffix == ".json":
        return [read_table(path)]
    if path.is_dir() and source not in (*GRIDS, *named_cells()):
        found = [read_table(file) for file in sorted(path.glob("*.json")) if not file.name.endswith(".schema.json")]
        if not found:
            raise ConfigError(f"scenario folder {path} must hold worlds as *.json, got none")
        if len({w.name for w in found}) < len(found):
            raise ConfigError(f"scenario folder {path}: worlds must have names of their own")
        return [*found]
    if path.suffix not in (".yaml", ".yml"):
        return grid(source)
    values = read_yaml(path, "scenario")
    if not isinstance(values, dict):
        raise ConfigError(f"scenario {path} must be a mapping of settings, got {type(values).__name__}")
    if "cells" not in values:
        return [build(Scenario, {"name": path.stem, **values}, "scenario.")]
    shared = {k: v for k, v in values.items() if k != "cells"}
    if not isinstance(values["cells"], list) or not values["cells"]:
        raise ConfigError(f"scenario {path}: cells must be a list with one mapping for each cell")
    cells: list[Cell] = []
    for i, cell in enumerate(values["cells"]):
        if not isinstance(cell, dict):
            raise ConfigError(f"scenario {path}: cells[{i}] must be a mapping, got {type(cell).__name__}")
        cells.append(build(Scenario, {"name": f"{path.stem}-{i}", **shared, **cell}, f"cells[{i}]."))
    if len({c.name for c in cells}) < len(cells):
        raise ConfigError(f"scenario {path}: cells must have names of their own")
    return cells


def policy_names(text: str) -> tuple[str, ...]:
    """The comma list of policies; 'all' stands for every policy of ours and both hindsight plans.

    Raises: ConfigError with the known names, or with what is wrong with a policy of another's.
    """
    known = (*POLICIES, *HINDSIGHT)
    names = known if text.strip() == "all" else tuple(p.strip() for p in text.split(",") if p.strip())
    foreign = [n for n in names if n not in known and (":" in n or n in policy_entry_points())]
    wrong = [n for n in names if n not in (*known, *foreign)]
    if wrong or not names:
        known += tuple(policy_entry_points())
        raise ConfigError(f"policies must be among {', '.join(known)}, MODULE:CLASS of your own, or 'all'; got {wrong[0] if wrong else text!r}")  # fmt: skip
    for name in foreign:
        make_policy(name)
    return tuple(dict.fromkeys(names))


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """'key=a,b,c' -> key -> values of the key's type, each once; a key that comes again has the values of both.

    Raises: ConfigError for an unknown key or a value of another type.
    """
    fields = {f.name: f.default for f in dataclasses.fields(PolicyConfig) if f.name not in FIXED}
    out: dict[str, list[Any]] = {}
    for text in texts:
        key, _, given = text.partition("=")
        values = [v.strip() for v in given.split(",") if v.strip()]
        if key not in fields or not values:
            raise ConfigError(f"sweep must be KEY=VALUE,VALUE,... with KEY among {', '.join(fields)}; got {text!r}")
        typed = (_value(type(fields[key]), v, key) for v in values)
        out[key] = list(dict.fromkeys([*out.get(key, []), *typed]))
    return out


def _value(kind: type, text: str, key: str) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"sweep {key} must be {kind.__name__}, got {text!r}") from e


def variants(policies: Sequence[str], sweep: dict[str, list[Any]]) -> list[Variant]:
    """Every policy and hindsight plan with every combination of the swept settings that it reads; 'never' reads none.

    Raises: ConfigError for a combination that is not allowed, or a setting that concerns none of the policies.
    """
    out, unread = [], set(sweep)
    for policy in policies:
        keys = [k for k in sweep if _reads(policy, k)]
        unread.difference_update(keys)
        for combination in itertools.product(*(sweep[k] for k in keys)):
            settings = dict(zip(keys, combination, strict=True))
            policy_config("never" if policy in HINDSIGHT else policy, settings, 0)
            out.append(Variant(policy=policy, settings=tuple(settings.items())))
    if unread:
        raise ConfigError(f"sweep must name settings that one of the policies reads, got {min(unread)} with {', '.join(policies)}")  # fmt: skip
    return out


def _reads(policy: str, key: str) -> bool:
    if policy in HINDSIGHT:
        return key in HINDSIGHT_SETTINGS
    return policy not in POLICIES or (policy != "never" and policy in CONCERNS.get(key, POLICIES))


def plan(scenarios: Sequence[Cell], chosen: Sequence[Variant], num_seeds: int, first_seed: int = 0) -> list[Task]:
    """All runs, seed by seed, so that a part of them already covers every cell."""
    seeds = range(first_seed, first_seed + num_seeds)
    return [Task(scenario=s, variant=v, seed=seed) for seed in seeds for s in scenarios for v in chosen]
