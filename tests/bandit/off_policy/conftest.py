"""A decision log of the pay-off rule, prepared for off-policy values."""

import pytest

from paceline.bandit.controller.decision_log import parse_log
from paceline.bandit.replay.logged import prepare
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import draw_world, policy_config
from paceline.bandit.replay.world import World, record

CELL = Scenario(name="x", regime_s=600.0, duration_s=1500.0, recurrence="fresh", train_cost=0.3)


@pytest.fixture(scope="module")
def served():
    """(prepared log, world that wrote it) of the pay-off rule."""
    traffic, outcomes = draw_world(CELL, 3)
    world = World(traffic, outcomes, policy_config("payoff", {"epoch_s": 30.0}, 3), seed=3)
    return prepare(parse_log(record(world), "log"), "log"), world
