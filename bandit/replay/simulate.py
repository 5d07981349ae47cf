"""Simulated runs: one policy on one cell with one seed."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from paceline.bandit.replay.hindsight import best_plan
from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.outcomes import SimulatedOutcomes
from paceline.bandit.replay.scenario import Scenario, Traffic, check_world, draw_traffic, num_domains
from paceline.bandit.replay.world import RunResult, World
from paceline.config import PolicyConfig

ORACLE = "oracle"
"""The best plan found with hindsight (bandit/replay/hindsight.py)."""
BOUND = "bound"
"""More than any plan can save (bandit/replay/oracle.py)."""
HINDSIGHT = (ORACLE, BOUND)
HINDSIGHT_SETTINGS = ("trainer_price", "holdback_percent")
"""Fields of PolicyConfig that these read."""


class Drawn(Protocol):
    """A cell that draws its own world: a table, or a family of tables."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...

    def draw(self, seed: int) -> tuple[Traffic, SimulatedOutcomes]:
        """Traffic and truth of a seed, the same for every policy."""


Cell = Scenario | Drawn


def draw_world(cell: Cell, seed: int) -> tuple[Traffic, SimulatedOutcomes]:
    """Traffic and truth of a cell and seed, the same for every policy.

    Those of a formula world are also independent of its training cost.

    Raises: ConfigError for a world that takes too much memory.
    """
    if not isinstance(cell, Scenario):
        return cell.draw(seed)
    key = zlib.crc32(f"{cell.recurrence}|{cell.regime_s:g}".encode())
    count = num_domains(cell, np.random.default_rng([seed, key, 1]))
    check_world(cell.name, cell.num_steps, count)
    outcomes = SimulatedOutcomes.draw(cell, count, np.random.default_rng([seed, key, 2]))
    traffic = draw_traffic(cell, outcomes.first, np.random.default_rng([seed, key, 1]))
    return traffic, outcomes


def policy_config(policy: str, settings: Mapping[str, Any], seed: int) -> PolicyConfig:
    """The configuration of one run; raises ConfigError for a setting that is not allowed."""
    return dataclasses.replace(PolicyConfig(), policy=policy, **{"seed": seed, **settings})


def simulate(cell: Cell, policy: str, settings: Mapping[str, Any], seed: int) -> RunResult:
    """Run a policy, or with hindsight 'oracle' or 'bound'. `settings` overrides fields of PolicyConfig."""
    traffic, outcomes = draw_world(cell, seed)
    return run_policy(traffic, outcomes, policy, settings, seed)


def run_policy(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    policy: str,
    settings: Mapping[str, Any],
    seed: int,
) -> RunResult:
    """Run a policy, 'oracle' or 'bound' on a drawn or logged service."""
    slowdown = outcomes.slowdown
    if policy in HINDSIGHT:
        best = best_plan if policy == ORACLE else hindsight
        return best(traffic, outcomes, policy_config("never", settings, seed), slowdown=slowdown)
    config = policy_config(policy, settings, seed)
    return World(traffic, outcomes, config, seed=seed, slowdown=slowdown).run()
