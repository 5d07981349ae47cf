"""Replay report: tables for the terminal, one JSON document, acceptance checks, and the settings that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bandit.replay.simulate import HINDSIGHT
from paceline.bench.common.terminal import new_table
from paceline.bench.replay.stats import Row, advice, cell_rows, overall, regret
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.paths import write_atomic
from paceline.records import build

FORMAT = 1
MAX_EVENTS = 200


def build_report(
    rows: Sequence[Row], *, kind: str, source: str, scenarios: Sequence[dict[str, Any]], notes: Sequence[str] = (),
    off_policy: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of docs/policies.md; `off_policy` = rows of bench/replay/command.py, None but for a decision log."""
    cells = cell_rows(rows)
    return {
        "format": FORMAT,
        "kind": kind,
        "source": source,
        "num_seeds": len({r["seed"] for r in rows}),
        "notes": list(notes),
        "scenarios": list(scenarios),
        "overall": overall(rows, cells),
        "advice": advice(rows),
        "cells": cells,
        "checks": checks(cells),
        "over_time": regret(rows),
        "decisions": _decisions(rows),
        "off_policy": None if off_policy is None else list(off_policy),
    }


def checks(cells: Sequence[dict[str, Any]], policy: str = "payoff") -> list[dict[str, Any]]:
    """Where the pay-off rule falls short: a loss above 1%, less than 70% of the bound, a better fixed interval."""
    mine = [c for c in cells if c["policy"] == policy]
    if not mine:
        return []
    losses = [c for c in mine if c["net_percent"]["mean"] < -1.0]
    short = [c for c in mine if c["of_oracle"] is not None and c["of_oracle"] < 0.7]
    out = [
        _check(f"{policy}: mean net of every cell is at least -1%", losses, "net_percent"),
        _check(f"{policy}: at least 70% of the oracle where the oracle gains 3% or more", short, "of_oracle"),
    ]
    fixed: dict[str, list[float]] = {}
    for c in cells:
        if c["policy"] == "interval":
            fixed.setdefault(c["label"], []).append(c["net_percent"]["mean"])
    if fixed:
        best = max(fixed, key=lambda label: sum(fixed[label]) / len(fixed[label]))
        level, own = (sum(v) / len(v) for v in (fixed[best], [c["net_percent"]["mean"] for c in mine]))
        out.append(
            {
                "claim": f"{policy}: not worse over all cells than the best single fixed interval",
                "holds": own >= level,
                "numbers": [f"{policy} {own:+.2f}%, {best} {level:+.2f}%"],
            }
        )
    return out


def _check(claim: str, failing: Sequence[dict[str, Any]], field: str) -> dict[str, Any]:
    def number(c: dict[str, Any]) -> str:
        return f"{c['net_percent']['mean']:+.2f}%" if field == "net_percent" else f"{100 * c['of_oracle']:.0f}%"

    return {"claim": claim, "holds": not failing, "numbers": [f"{c['cell']} ({c['label']}): {number(c)}" for c in failing]}  # fmt: skip


def _decisions(rows: Sequence[Row]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """cell -> variant -> what was done in the run of the lowest seed."""
    out: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        if r["policy"] not in HINDSIGHT:
            out.setdefault(r["cell"], {}).setdefault(r["label"], r["events"][:MAX_EVENTS])
    return out


def print_report(report: dict[str, Any], console: Console, *, is_sweep: bool = False) -> None:
    """Tables: over all cells, per cell, which policy to run, checks."""
    console.print(_overall_table(report))
    if len(report["scenarios"]) > 1:
        console.print(_cell_table(report))
    console.print(_advice_table(report))
    if report["off_policy"]:
        console.print(_off_policy_table(report["off_policy"]))
        for o in report["off_policy"]:
            console.print(f"{o['label']}: {o['verdict']}; {o['why']}", highlight=False)
    for check in report["checks"]:
        state = "[green]yes[/green]" if check["holds"] else "[red]no[/red]"
        console.print(f"{state}  {check['claim']}" + (": " + "; ".join(check["numbers"]) if check["numbers"] else ""), highlight=False)  # fmt: skip
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False, style="dim")


def _overall_table(report: dict[str, Any]) -> Table:
    title = f"Net device-seconds, % of serving cost without training ({report['num_seeds']} seeds, {len(report['scenarios'])} cells)"
    columns = ("policy", "net %", "95% interval", "worst cell", "worst run", "of oracle,\nleast / mean", "spent %")
    table = new_table(title, columns, ("policy", "worst cell"))
    for o in report["overall"]:
        net = o["net_percent"]
        share = (
            "-"
            if o["of_oracle_mean"] is None
            else f"{100 * o['of_oracle_least']:.0f}% / {100 * o['of_oracle_mean']:.0f}%"
        )
        table.add_row(o["label"], f"{net['mean']:+.2f}", f"{net['low']:+.2f} .. {net['high']:+.2f}", f"{o['worst_cell_percent']:+.2f} {o['worst_cell']}", f"{o['worst_run_percent']:+.2f}", share, f"{o['spent_percent']:.2f}")  # fmt: skip
    return table


def _cell_table(report: dict[str, Any]) -> Table:
    labels = list(dict.fromkeys(c["label"] for c in report["cells"]))
    table = new_table("Net % by cell (means)", ("cell", *(label.replace(" ", "\n") for label in labels)))
    for cell in dict.fromkeys(c["cell"] for c in report["cells"]):
        found = {c["label"]: c["net_percent"]["mean"] for c in report["cells"] if c["cell"] == cell}
        best = max((v for k, v in found.items() if k not in HINDSIGHT), default=None)
        table.add_row(cell, *(f"[bold]{found[x]:+.1f}[/bold]" if found.get(x) == best else f"{found[x]:+.1f}" if x in found else "-" for x in labels))  # fmt: skip
    return table


def _advice_table(report: dict[str, Any]) -> Table:
    columns = ("traffic", "best", "net %", "oracle %", "cannot be told from it", "safest of these (worst run)")
    table = new_table(
        "Which policy to run for your traffic", columns, [name for name in columns if not name.endswith("%")]
    )
    for a in report["advice"]:
        bound = "-" if a["oracle_percent"] is None else f"{a['oracle_percent']:+.2f}"
        table.add_row(a["family"], a["best"], f"{a['net_percent']:+.2f}", bound, ", ".join(a["as_good"]) or "-", f"{a['safest']} ({a['safest_worst_percent']:+.2f})")  # fmt: skip
    return table


OFF_POLICY = (
    "policy",
    "net s",
    "95% interval",
    "per decision",
    "model alone",
    "IPS",
    "SNIPS",
    "effective acts",
    "agreement",
    "verdict",
)
"""Columns of the off-policy table."""


def off_policy_cells(o: dict[str, Any]) -> list[str]:
    """One policy's row of the off-policy table."""
    snips = "-" if o["snips_s"] is None else f"{o['snips_s']:+.1f}"
    interval = f"{o['low_s']:+.1f} .. {o['high_s']:+.1f}"
    effective = f"{o['effective_decisions']:.0f} of {o['num_acts']}"
    return [o["label"], f"{o['total_s']:+.1f}", interval, f"{o['mean_s']:+.3f}", f"{o['direct_s']:+.1f}", f"{o['ips_s']:+.1f}", snips, effective, f"{100 * o['agreement']:.0f}%", o["verdict"]]  # fmt: skip


def _off_policy_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = f"What the log says: doubly robust net, device-seconds (the log itself: {rows[0]['logged_s']:+.1f})"
    table = new_table(title, OFF_POLICY, ("policy", "95% interval", "verdict"))
    for o in rows:
        table.add_row(*off_policy_cells(o))
    return table


MAX_LOSS_PERCENT = 1.0
"""A setting that loses more than this in any cell is suggested only when all of them do."""


def suggest(report: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(values of a service configuration, sentences that say why). Raises ConfigError when nothing can be suggested."""
    ranked = [o for o in report["overall"] if o["policy"] not in HINDSIGHT]
    if not ranked:
        raise ConfigError("suggest needs at least one policy besides the oracle; name some in --policies")
    safe = [o for o in ranked if o["worst_cell_percent"] >= -MAX_LOSS_PERCENT]
    chosen = (safe or ranked)[0]
    net = chosen["net_percent"]
    why = [
        f"{chosen['label']}: net {net['mean']:+.2f}% of serving cost over {chosen['num_cells']} cells and "
        f"{report['num_seeds']} seeds (95% interval {net['low']:+.2f} .. {net['high']:+.2f}), worst cell "
        f"{chosen['worst_cell_percent']:+.2f}% ({chosen['worst_cell']}).",
    ]
    if not safe:
        why.append(f"Every policy lost more than {MAX_LOSS_PERCENT:g}% in some cell; 'never' would not.")
    others = [o for o in ranked if o is not chosen]
    if others:
        other = others[0]
        relation = "higher net, but a worse worst cell" if other["net_percent"]["mean"] > net["mean"] else "next best"
        why.append(f"{other['label']} ({relation}): {other['net_percent']['mean']:+.2f}%, worst cell {other['worst_cell_percent']:+.2f}% ({other['worst_cell']}).")  # fmt: skip
    why.append(f"From a {report['kind']} replay of {report['source']}.")
    values = {"policy": {"policy": chosen["policy"], **chosen["settings"]}}
    build(ServiceConfig, values)
    return values, why


def write_suggestion(report: dict[str, Any], path: Path) -> list[str]:
    """Write the YAML file, the reasons as comments; returns the reasons."""
    import yaml

    values, why = suggest(report)
    comments = "".join(f"# {line}\n" for line in why)
    write_atomic(path, comments + yaml.safe_dump(values, sort_keys=False))
    return why
