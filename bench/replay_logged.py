"""How are replays of a decision log run task by task?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from paceline.bandit.replay_log import ServiceLog
from paceline.bandit.replay_logged import LoggedService, prepare, replay_logged
from paceline.bandit.replay_scenario import Scenario
from paceline.bench.replay_plan import Task
from paceline.bench.replay_run import Row, RunOne, row_of


def run_logged(task: Task, service: LoggedService) -> Row:
    """One run as plain values."""
    result = replay_logged(service, task.variant.policy, dict(task.variant.settings), task.seed)
    return row_of(task, msgspec.to_builtins(result))


def logged_runner(log: ServiceLog, source: str) -> tuple[RunOne, Scenario, list[str]]:
    """(function of a task, the log as one cell, notes). Raises ConfigError for a log without what a replay needs."""
    service = prepare(log, Path(source).stem)
    return partial(run_logged, service=service), service.scenario, service.notes()
