"""How are replays of a decision log run task by task, and policies valued by the log's own randomisation?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from paceline.bandit.controller.decision_log import ServiceLog
from paceline.bandit.off_policy.log import value_policy
from paceline.bandit.replay.logged import LoggedService, prepare, replay_logged
from paceline.bandit.replay.simulate import HINDSIGHT
from paceline.bench.replay.plan import Task, Variant
from paceline.bench.replay.run import Row, RunOne, row_of, run_all


def run_logged(task: Task, service: LoggedService) -> Row:
    """One run as plain values."""
    result = replay_logged(service, task.variant.policy, dict(task.variant.settings), task.seed)
    return row_of(task, msgspec.to_builtins(result))


def logged_runner(log: ServiceLog, source: str) -> tuple[RunOne, LoggedService]:
    """(function of a task, the prepared log). Raises ConfigError for a log without what a replay needs."""
    service = prepare(log, Path(source).stem)
    return partial(run_logged, service=service), service


def run_off_policy(task: Task, service: LoggedService) -> Row:
    """One policy's estimate as plain values."""
    found = value_policy(service, task.variant.policy, dict(task.variant.settings), seed=task.seed)
    return row_of(task, msgspec.to_builtins(found))


def off_policy_rows(
    service: LoggedService, chosen: Sequence[Variant], *, workers: int, console: Console, ray_address: str | None
) -> list[dict[str, Any]]:
    """What the report says about each policy without hindsight; docs/policies.md names the fields."""
    tasks = [Task(scenario=service.scenario, variant=v, seed=0) for v in chosen if v.policy not in HINDSIGHT]
    rows = run_all(
        tasks, workers=workers, resume=None, console=console, ray_address=ray_address,
        run_one=partial(run_off_policy, service=service), title="off-policy",
    )  # fmt: skip
    return [
        {
            "label": r["label"], "policy": r["policy"], "settings": r["settings"], "verdict": r["verdict"], "why": r["why"],
            **{k: None if v is None else round(v, 3) for k, v in r["net"].items()},
            "mean_s": round(r["net"]["total_s"] / max(r["num_decisions"], 1), 4),
            "num_decisions": r["num_decisions"], "logged_s": round(r["logged_s"], 3), "num_missed": r["num_missed"],
        }
        for r in rows
    ]  # fmt: skip
