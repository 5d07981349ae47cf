"""How is a replay reported: tables for the terminal, one JSON document, acceptance checks?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bandit.replay.simulate import HINDSIGHT
from paceline.bench.replay.stats import Row, advice, cell_rows, overall, regret

FORMAT = 1
MAX_EVENTS = 200


def build_report(
    rows: Sequence[Row], *, kind: str, source: str, scenarios: Sequence[dict[str, Any]], notes: Sequence[str] = (),
    off_policy: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON document of docs/policies.md; `off_policy` = rows of bench/replay/logged.py, None but for a decision log."""
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
    table = Table(title=f"Net device-seconds, % of serving cost without training ({report['num_seeds']} seeds, {len(report['scenarios'])} cells)")  # fmt: skip
    for i, name in enumerate(("policy", "net %", "95% interval", "worst cell", "worst run", "of oracle,\nleast / mean", "spent %")):  # fmt: skip
        table.add_column(name, justify="left" if i in (0, 3) else "right")
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
    table = Table(title="Net % by cell (means)")
    table.add_column("cell")
    for label in labels:
        table.add_column(label.replace(" ", "\n"), justify="right")
    for cell in dict.fromkeys(c["cell"] for c in report["cells"]):
        found = {c["label"]: c["net_percent"]["mean"] for c in report["cells"] if c["cell"] == cell}
        best = max((v for k, v in found.items() if k not in HINDSIGHT), default=None)
        table.add_row(cell, *(f"[bold]{found[x]:+.1f}[/bold]" if found.get(x) == best else f"{found[x]:+.1f}" if x in found else "-" for x in labels))  # fmt: skip
    return table


def _advice_table(report: dict[str, Any]) -> Table:
    table = Table(title="Which policy to run for your traffic")
    for name in ("traffic", "best", "net %", "oracle %", "cannot be told from it", "safest of these (worst run)"):
        table.add_column(name, justify="right" if name.endswith("%") else "left")
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
    table = Table(title=f"What the log says: doubly robust net, device-seconds (the log itself: {rows[0]['logged_s']:+.1f})")  # fmt: skip
    for name in OFF_POLICY:
        table.add_column(name, justify="left" if name in ("policy", "95% interval", "verdict") else "right")
    for o in rows:
        table.add_row(*off_policy_cells(o))
    return table


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the document; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
