"""Simulated runs: one policy on one cell with one seed."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.bandit.replay.hindsight import best_plan
from paceline.bandit.replay.oracle import hindsight
from paceline.bandit.replay.outcomes import FIRST, SimulatedOutcomes
from paceline.bandit.replay.scenario import Scenario, Traffic, draw_traffic, num_domains
from paceline.bandit.replay.world import RunResult, World
from paceline.config import PolicyConfig

ORACLE = "oracle"
"""The best plan found with hindsight (bandit/replay/hindsight.py)."""
BOUND = "bound"
"""More than any plan can save (bandit/replay/oracle.py)."""
HINDSIGHT = (ORACLE, BOUND)
KNOWN_ROWS = 200_000
"""Rows of a known domain that the first drafter's manifest names."""


def draw_world(scenario: Scenario, seed: int) -> tuple[Traffic, SimulatedOutcomes]:
    """Traffic and truth of a cell and seed, the same for every policy and independent of the cell's training cost."""
    key = zlib.crc32(f"{scenario.recurrence}|{scenario.regime_s:g}".encode())
    count = num_domains(scenario, np.random.default_rng([seed, key, 1]))
    outcomes = SimulatedOutcomes.draw(scenario, count, np.random.default_rng([seed, key, 2]))
    traffic = draw_traffic(scenario, outcomes.first, np.random.default_rng([seed, key, 1]))
    return traffic, outcomes


def learned_rows(scenario: Scenario, traffic: Traffic) -> dict[str, dict[str, int]]:
    """What the first drafter's manifest says: rows of the domains that it knows."""
    known = traffic.labels if scenario.recurrence == "steady" else traffic.labels[:1]
    return {FIRST: dict.fromkeys(known, KNOWN_ROWS)}


def policy_config(policy: str, settings: Mapping[str, Any], seed: int) -> PolicyConfig:
    """The configuration of one run; raises ConfigError for a setting that is not allowed."""
    return dataclasses.replace(PolicyConfig(), policy=policy, **{"seed": seed, **settings})


def simulate(scenario: Scenario, policy: str, settings: Mapping[str, Any], seed: int) -> RunResult:
    """Run a policy, or with hindsight 'oracle' or 'bound'. `settings` overrides fields of PolicyConfig."""
    traffic, outcomes = draw_world(scenario, seed)
    return run_policy(traffic, outcomes, policy, settings, seed, learned_rows(scenario, traffic))


def run_policy(
    traffic: Traffic,
    outcomes: SimulatedOutcomes,
    policy: str,
    settings: Mapping[str, Any],
    seed: int,
    learned: dict[str, dict[str, int]],
) -> RunResult:
    """Run a policy, 'oracle' or 'bound' on a drawn or logged service; `learned` as World takes it."""
    slowdown = outcomes.scenario.slowdown
    if policy in HINDSIGHT:
        best = best_plan if policy == ORACLE else hindsight
        return best(traffic, outcomes, policy_config("never", settings, seed), slowdown=slowdown)
    config = policy_config(policy, settings, seed)
    return World(traffic, outcomes, config, seed=seed, slowdown=slowdown, learned=learned).run()
