"""Off-policy check: estimates from randomised logs beside what the policy really nets when it is run.

A service logs under a policy that does each act only with probability KEEP and else holds; the log is valued for other
policies as `paceline replay FILE.jsonl` does, and each of these is then run on the very same service. Simulated
services are many and cheap; with `live` they really train (bench/replay/live.py).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from paceline.bandit.controller.controller import Controller
from paceline.bandit.controller.decision_log import parse_log
from paceline.bandit.off_policy.log import value_policy
from paceline.bandit.off_policy.sequence import pooled
from paceline.bandit.policies.table import Choice, View
from paceline.bandit.policies.view import hold
from paceline.bandit.replay.logged import prepare
from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import Cell, draw_world, policy_config
from paceline.bandit.replay.world import World, record
from paceline.bench.common.terminal import new_table
from paceline.bench.replay.live import ORDERS, SMALL, LiveConfig, LiveService
from paceline.bench.replay.plan import Task, Variant
from paceline.bench.replay.run import Row, row_of, run_all

KEEP = 0.6
"""Probability with which the logging policy does what it wants to."""
BASE = "payoff"
"""What the logging policy wants."""
STUDY, LIVE_STUDY = 10, 3
"""Logs that one pooled interval is made of."""
CELL = Scenario(name="off-policy", regime_s=600.0, duration_s=1500.0, recurrence="fresh", train_cost=0.3)
_ROUND = 1e-9
"""Rounding of a run's sums, relative to its serving cost."""
METHODS = {"doubly robust": "total_s", "IPS": "ips_s", "model alone": "direct_s"}


class ExploringController(Controller):
    """Does each act of its policy with probability `keep`, else holds; says so in the probabilities."""

    keep = KEEP

    def _choose(self, view: View) -> Choice:
        wanted = super()._choose(view)
        if wanted.probabilities == {"hold": 1.0}:
            return wanted
        odds = {key: self.keep * p for key, p in wanted.probabilities.items()}
        odds["hold"] = odds.get("hold", 0.0) + 1.0 - self.keep
        if self._rng.random() < self.keep:
            return msgspec.structs.replace(wanted, probabilities=odds)
        drawn = hold(view, "explore", "Held by chance, at a probability of {odds:.2f}.", odds=odds["hold"])
        return msgspec.structs.replace(drawn, probabilities=odds)


def explore(world: World) -> World:
    """The same world under the logging policy."""
    world.controller = ExploringController(
        world.config, clock=world.clock, rng=np.random.default_rng([world.config.seed, 31])
    )
    return world


def simulated_world(cell: Cell, variant: Variant, seed: int) -> World:
    """A simulated service of one seed under a policy."""
    traffic, outcomes = draw_world(cell, seed)
    config = policy_config(variant.policy, dict(variant.settings), seed)
    return World(traffic, outcomes, config, seed=seed, slowdown=outcomes.slowdown)


def check_one(task: Task, draws: int = 4) -> Row:
    """One log valued for one policy, and the truth: device-seconds."""
    logged = explore(simulated_world(task.scenario, Variant(policy=BASE), task.seed))
    truth = simulated_world(task.scenario, task.variant, task.seed).run()
    return row_of(task, compare(logged, truth.net_s, truth.never_s, task.variant, draws))


def compare(logging: World, truth_s: float, never_s: float, variant: Variant, draws: int) -> dict[str, Any]:
    """What the log of `logging` says about a policy, beside the truth."""
    service = prepare(parse_log(record(logging), "log"), "log")
    found = value_policy(service, variant.policy, dict(variant.settings), draws=draws)
    return {
        **msgspec.to_builtins(found.net), "verdict": found.verdict, "truth_s": truth_s, "never_s": never_s,
        "logging_s": logging.net_s, "booked_s": found.logged_s,
    }  # fmt: skip


def run_check(
    variants: Sequence[Variant], num_logs: int, *, workers: int, console: Console, first_seed: int = 0, draws: int = 4,
    study: int = STUDY,
) -> list[dict[str, Any]]:  # fmt: skip
    """One summary for every policy over `num_logs` simulated logs."""
    tasks = [Task(scenario=CELL, variant=v, seed=first_seed + s) for s in range(num_logs) for v in variants]
    run_one = partial(check_one, draws=draws)
    rows = run_all(tasks, workers=workers, resume=None, console=console, run_one=run_one, title="off-policy check")
    return [summarise(v.label, [r for r in rows if r["label"] == v.label], study) for v in variants]


def summarise(label: str, rows: Sequence[Row], study: int = STUDY) -> dict[str, Any]:
    """Errors and coverage, in percent of what serving costs without training.

    `covers_log`: share of logs whose own interval holds that service's truth; `covers_pooled`: share of studies of `study`
    logs whose Student interval holds the mean truth of all services.
    """
    scale = 100.0 / float(np.mean([r["never_s"] for r in rows]))
    truth = np.array([r["truth_s"] for r in rows])
    out: dict[str, Any] = {"label": label, "num_logs": len(rows), "truth_percent": scale * float(truth.mean())}
    for name, field in METHODS.items():
        miss = np.array([r[field] for r in rows]) - truth
        out[name] = {
            "bias": scale * float(miss.mean()),
            "bias_error": scale * float(miss.std(ddof=1)) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan,
            "rmse": scale * float(np.sqrt((miss**2).mean())),
        }
        groups = [rows[i : i + study] for i in range(0, len(rows) - study + 1, study)]
        ranges = [pooled([r[field] for r in g]) for g in groups if len(g) > 1]
        out[name]["covers_pooled"] = [sum(bool(low <= truth.mean() <= high) for _, low, high in ranges), len(ranges)]
    inside = [r["low_s"] - _ROUND * r["never_s"] <= r["truth_s"] <= r["high_s"] + _ROUND * r["never_s"] for r in rows]
    told = [i for i, r in zip(inside, rows, strict=True) if r["verdict"] != "cannot tell"]
    out["covers_log"], out["covers_told"] = [sum(inside), len(inside)], [sum(told), len(told)]
    out["half_width"] = scale * float(np.mean([(r["high_s"] - r["low_s"]) / 2 for r in rows]))
    return out


def print_check(found: Sequence[dict[str, Any]], console: Console) -> None:
    """One line for every policy and method."""
    title = f"Off-policy estimates against the truth ({found[0]['num_logs']} logs of {BASE} kept with {KEEP:g}; % of serving cost)"
    columns = ("policy", "truth", "method", "bias", "rmse", "pooled 95% covers", "one log's 95% covers\n(told / all)")
    table = new_table(title, columns, ("policy", "method"))
    for f in found:
        for name in METHODS:
            m, is_dr = f[name], name == "doubly robust"
            own = "{}/{}, {}/{}".format(*f["covers_told"], *f["covers_log"]) if is_dr else ""
            table.add_row(
                f["label"] if is_dr else "", f"{f['truth_percent']:+.2f}" if is_dr else "", name,
                f"{m['bias']:+.2f} ± {1.96 * m['bias_error']:.2f}", f"{m['rmse']:.2f}",
                "{}/{}".format(*m["covers_pooled"]), own,
            )  # fmt: skip
    console.print(table, markup=False)


def run_live_check(
    variants: Sequence[Variant],
    num_logs: int,
    *,
    cache: Path | None,
    data: Path | None,
    console: Console,
    draws: int = 4,
    config: LiveConfig = SMALL,
) -> list[dict[str, Any]]:
    """One summary for every policy over `num_logs` live logs, which go through the orders of phases in turn.

    Texts, jobs and scores are kept in `cache` (the --resume folder), so that no job is trained twice.
    """
    with (
        tempfile.TemporaryDirectory(prefix="paceline-off-policy-") as own,
        console.status("preparing texts and round times") as status,
    ):
        service = LiveService(config, data, cache or Path(own), status.update)
        rows: list[dict[str, Any]] = []
        for seed in range(num_logs):
            order = seed % len(ORDERS)
            for variant in variants:
                truth = service.world(variant, order).run()
                logging = explore(service.world(Variant(policy=BASE, settings=variant.settings), order, seed))
                rows.append({"label": variant.label, **compare(logging, truth.net_s, truth.never_s, variant, draws)})
                status.update(f"log {seed + 1} of {num_logs}, {variant.label}")
    return [summarise(v.label, [r for r in rows if r["label"] == v.label], LIVE_STUDY) for v in variants]
