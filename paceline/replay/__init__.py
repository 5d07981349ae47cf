"""Replay: worlds of your own, policies of your own, and what they net, as data frames.

import paceline.replay as replay

found = replay.replay("tables", [MyPolicy, "payoff", "oracle"], seeds=3)
found.frame("runs")  # a pandas.DataFrame with the extra 'frames'; found.runs are its columns without
"""

from paceline.bandit.policies.view import Choice, Policy, View, hold, largest_job, not_now, recall, train
from paceline.bandit.replay.families import FAMILIES, family_worlds
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.table import TableWorld, read_table, table_of, world_schema
from paceline.bench.replay.frames import Columns, Frames, replay

__all__ = (
    "FAMILIES", "Choice", "Columns", "Frames", "Policy", "Scenario", "TableWorld", "View", "family_worlds", "hold",
    "largest_job", "not_now", "read_table", "recall", "replay", "table_of", "train", "world_schema",
)  # fmt: skip
