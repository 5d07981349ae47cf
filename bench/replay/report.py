"""Replay report: tables for the terminal, one JSON document, acceptance checks, and the settings that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bandit.replay.simulate import HINDSIGHT, ORACLE
from paceline.bench.common.terminal import new_table
from paceline.bootstrap import mean_interval
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.paths import write_atomic
from paceline.records import build

Row = dict[str, Any]
WORTH_PERCENT = 3.0
"""Oracle gain from which a cell counts for the share of the oracle that a policy reaches."""


def net_percent(row: Row) -> float:
    """True net device-seconds of a run, percent of what serving costs without any training."""
    return _percent(row["net_s"], row["never_s"])


def _percent(part_s: float, never_s: float) -> float:
    """0 where nothing was served: there was nothing to save."""
    return 100.0 * part_s / never_s if never_s > 0 else 0.0


def _share(runs: Sequence[Row], seconds: Callable[[Row], float]) -> float:
    """The mean of the runs' percents, as the net is, so that the net is what was saved less what was spent."""
    return round(float(np.mean([_percent(seconds(r), r["never_s"]) for r in runs])), 3)


def _figure(values: Sequence[float]) -> dict[str, Any]:
    """Mean, worst, and the ends of the 95% interval, which are None for a single seed: it says nothing about chance."""
    mean, ends = mean_interval(values)
    low, high = (None, None) if ends is None else (round(v, 3) for v in ends)
    return {"mean": round(mean, 3), "low": low, "high": high, "worst": round(min(values), 3)}


def cell_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a cell and variant; net, spend and saving in percent of the cell's serving cost."""
    out = []
    for cell in _unique(r["cell"] for r in rows):
        mine = [r for r in rows if r["cell"] == cell]
        for label in _unique(r["label"] for r in mine):
            runs = [r for r in mine if r["label"] == label]
            bound = _mean(net_percent(r) for r in _oracle_runs(mine, runs[0]["settings"]))
            net = _figure([net_percent(r) for r in runs])
            out.append(
                {
                    "cell": cell,
                    "family": runs[0]["family"],
                    "label": label,
                    "policy": runs[0]["policy"],
                    "settings": runs[0]["settings"],
                    "net_percent": net,
                    "of_oracle": round(net["mean"] / bound, 3) if bound is not None and bound >= WORTH_PERCENT else None,
                    "spent_percent": _share(runs, lambda r: sum(r["spent"].values())),
                    "booked_saving_percent": _share(runs, lambda r: r["ledger"].get("saved_s", 0.0)),
                    "true_saving_percent": _share(runs, lambda r: r["never_s"] - r["serving_s"]),
                    "num_jobs": round(float(np.mean([r["num_jobs"] for r in runs])), 2),
                    "num_swaps": round(float(np.mean([r["num_swaps"] for r in runs])), 2),
                    "num_seeds": len(runs),
                }
            )  # fmt: skip
    return out


def _oracle_runs(rows: Sequence[Row], settings: Mapping[str, Any]) -> list[Row]:
    """Runs of the oracle under the same settings as far as it reads them."""
    return [
        r for r in rows
        if r["policy"] == ORACLE and all(settings.get(k, v) == v for k, v in r["settings"].items())
    ]  # fmt: skip


def overall(rows: Sequence[Row], cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a variant over all cells; every cell weighs the same, the interval resamples seeds."""
    out = []
    for label in _unique(r["label"] for r in rows):
        mine = [c for c in cells if c["label"] == label]
        by_seed = [
            float(np.mean([net_percent(r) for r in rows if r["label"] == label and r["seed"] == seed]))
            for seed in sorted({r["seed"] for r in rows if r["label"] == label})
        ]
        worst = min(mine, key=lambda c: c["net_percent"]["mean"])
        shares = [c["of_oracle"] for c in mine if c["of_oracle"] is not None]
        out.append(
            {
                "label": label,
                "policy": mine[0]["policy"],
                "settings": mine[0]["settings"],
                "net_percent": _figure(by_seed),
                "worst_cell": worst["cell"],
                "worst_cell_percent": worst["net_percent"]["mean"],
                "worst_run_percent": min(c["net_percent"]["worst"] for c in mine),
                "of_oracle_mean": round(float(np.mean(shares)), 3) if shares else None,
                "of_oracle_least": min(shares) if shares else None,
                "spent_percent": round(float(np.mean([c["spent_percent"] for c in mine])), 3),
                "num_cells": len(mine),
            }
        )
    return sorted(out, key=lambda o: -o["net_percent"]["mean"])


def advice(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a family of cells: the variant with the highest mean net, and those that cannot be told from it.

    A variant is as good when the 95% interval of its paired difference to the best, over seeds, contains zero. Among
    these, `safest` has the best worst run.
    """
    out = []
    for family in _unique(r["family"] for r in rows):
        nets: dict[str, dict[tuple[int, str], float]] = {}
        for r in rows:
            if r["family"] == family and r["policy"] not in HINDSIGHT:
                nets.setdefault(r["label"], {})[(r["seed"], r["cell"])] = net_percent(r)
        if not nets:
            continue
        best = max(nets, key=lambda label: float(np.mean(list(nets[label].values()))))
        equal = [label for label in nets if label != best and _is_as_good(nets[label], nets[best])]
        safest = max([best, *equal], key=lambda label: min(nets[label].values()))
        mine = [r for r in rows if r["family"] == family]
        settings = next(r["settings"] for r in mine if r["label"] == best)
        bound = _mean(net_percent(r) for r in _oracle_runs(mine, settings))
        out.append(
            {
                "family": family,
                "best": best,
                "net_percent": round(float(np.mean(list(nets[best].values()))), 3),
                "oracle_percent": None if bound is None else round(bound, 3),
                "as_good": equal,
                "safest": safest,
                "safest_worst_percent": round(min(nets[safest].values()), 3),
            }
        )
    return out


def _is_as_good(other: dict[tuple[int, str], float], best: dict[tuple[int, str], float]) -> bool:
    by_seed: dict[int, list[float]] = {}
    for key in sorted(best.keys() & other.keys()):  # of a set any order, and the bootstrap draws by places
        by_seed.setdefault(key[0], []).append(best[key] - other[key])
    _, ends = mean_interval([float(np.mean(v)) for v in by_seed.values()])
    return ends is None or ends[0] <= 0  # one seed tells nothing apart


def regret(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """cell -> variant -> {times_s, net_percent, regret_percent}: means over seeds of the cumulated net, and of the bound less it.

    regret_percent is [] when the oracle was not run.
    """
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in _unique(r["cell"] for r in rows):
        mine = [r for r in rows if r["cell"] == cell]
        times = mine[0]["times"]

        def line(runs: list[Row], times: list[float] = times) -> np.ndarray:
            return np.mean(
                [_percent(1.0, r["never_s"]) * np.interp(times, r["times"], r["curve"]) for r in runs], axis=0
            )

        out[cell] = {}
        for label in _unique(r["label"] for r in mine):
            runs = [r for r in mine if r["label"] == label]
            net, best = line(runs), _oracle_runs(mine, runs[0]["settings"])
            out[cell][label] = {
                "times_s": list(times),
                "net_percent": [round(float(v), 4) for v in net],
                "regret_percent": [round(float(v), 4) for v in line(best) - net] if best else [],
            }
    return out


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def _mean(values: Any) -> float | None:
    data = list(values)
    return float(np.mean(data)) if data else None


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
    out = [_check(f"{policy}: mean net of every cell is at least -1%", losses, "net_percent")]
    measured = [c for c in mine if c["of_oracle"] is not None]
    if measured:  # a share of an oracle that did not run, or had nothing to gain, is no claim
        claim = f"{policy}: at least 70% of the oracle where the oracle gains 3% or more ({len(measured)} cells)"
        out.append(_check(claim, [c for c in measured if c["of_oracle"] < 0.7], "of_oracle"))
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


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables: over all cells, per cell, which policy to run, checks."""
    show = partial(console.print, markup=False)  # names of cells and buckets are the user's, and may look like markup
    show(_overall_table(report))
    if len(report["scenarios"]) > 1:
        show(_cell_table(report))
    show(_advice_table(report))
    if report["off_policy"]:
        show(_off_policy_table(report["off_policy"]))
        for o in report["off_policy"]:
            show(f"{o['label']}: {o['verdict']}; {o['why']}", highlight=False)
    for check in report["checks"]:
        state = ("yes", "green") if check["holds"] else ("no", "red")
        numbers = ": " + "; ".join(check["numbers"]) if check["numbers"] else ""
        show(Text.assemble(state, f"  {check['claim']}{numbers}"))
    for note in report["notes"]:
        show(f"note: {note}", highlight=False, style="dim")


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
        table.add_row(o["label"], f"{net['mean']:+.2f}", ends(net), f"{o['worst_cell_percent']:+.2f} {o['worst_cell']}", f"{o['worst_run_percent']:+.2f}", share, f"{o['spent_percent']:.2f}")  # fmt: skip
    return table


def ends(net: dict[str, Any], unit: str = "") -> str:
    """The interval of a figure in a table; '-' for a single seed."""
    return "-" if net["low"] is None else f"{net['low']:+.2f}{unit} .. {net['high']:+.2f}{unit}"


def _cell_table(report: dict[str, Any]) -> Table:
    labels = list(dict.fromkeys(c["label"] for c in report["cells"]))
    table = new_table("Net % by cell (means)", ("cell", *(label.replace(" ", "\n") for label in labels)))
    for cell in dict.fromkeys(c["cell"] for c in report["cells"]):
        found = {c["label"]: c["net_percent"]["mean"] for c in report["cells"] if c["cell"] == cell}
        best = max((v for k, v in found.items() if k not in HINDSIGHT), default=None)
        table.add_row(cell, *(Text(f"{found[x]:+.1f}" if x in found else "-", "bold" if found.get(x) == best else "") for x in labels))  # fmt: skip
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
    *("policy", "net s", "95% interval", "per decision", "model alone"),
    *("IPS", "SNIPS", "effective acts", "agreement", "verdict"),
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
    return new_table(title, OFF_POLICY, ("policy", "95% interval", "verdict"), rows=map(off_policy_cells, rows))


SUGGEST_SEEDS = 6
"""Fewest seeds behind a suggestion: that all of fewer agree in sign happens by chance more than once in twenty (2 x 0.5^5 = 6%)."""
MAX_LOSS_PERCENT = 1.0
"""A setting that loses more than this in any cell is suggested only when all of them do."""


def check_seeds(num_seeds: int, *, is_live: bool = False) -> None:
    """Raise ConfigError when so few seeds can suggest nothing; says how many are needed."""
    if is_live:
        raise ConfigError(f"suggest must be left out of live replays: it needs {SUGGEST_SEEDS} seeds, and their traffic is one stream or 3 orders of it; replay the service's decision log instead")  # fmt: skip
    if num_seeds < SUGGEST_SEEDS:
        raise ConfigError(f"seeds must be >= {SUGGEST_SEEDS} to suggest settings, got {num_seeds}; give --seeds {SUGGEST_SEEDS} or more")  # fmt: skip


def check_ranked(policies: Iterable[str]) -> None:
    """Raise ConfigError when none of the policies could be suggested."""
    if all(p in HINDSIGHT for p in policies):
        raise ConfigError("suggest needs at least one policy besides the oracle; name some in --policies")


def seeds_needed(net: dict[str, Any], num_seeds: int) -> int | None:
    """Seeds after which an interval as wide as this one would have shrunk past zero; None where it does not hold zero."""
    if net["low"] is None or not net["low"] <= 0 <= net["high"]:
        return None
    half = (net["high"] - net["low"]) / 2
    return num_seeds * math.ceil((half / abs(net["mean"])) ** 2) if net["mean"] else None


def suggest(report: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(values of a service configuration, sentences that say why). Raises ConfigError when nothing can be suggested."""
    check_seeds(report["num_seeds"], is_live=report["kind"] == "live")
    check_ranked(o["policy"] for o in report["overall"])
    ranked = [o for o in report["overall"] if o["policy"] not in HINDSIGHT]
    safe = [o for o in ranked if o["worst_cell_percent"] >= -MAX_LOSS_PERCENT]
    chosen = (safe or ranked)[0]
    net = chosen["net_percent"]
    why = [
        f"{chosen['label']}: net {net['mean']:+.2f}% of serving cost over {chosen['num_cells']} cells and "
        f"{report['num_seeds']} seeds (95% interval {ends(net)}), worst cell "
        f"{chosen['worst_cell_percent']:+.2f}% ({chosen['worst_cell']}).",
    ]
    needed = seeds_needed(net, report["num_seeds"])
    if needed is not None:
        why.append(f"The interval holds 0: these seeds do not say that it pays; about {needed} would.")
    elif net["high"] < 0:
        why.append("It surely loses on this traffic; 'never' would not.")
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
    # a name may hold line breaks and other characters that YAML has no place for
    comments = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in line)}\n" for line in why)
    write_atomic(path, comments + yaml.safe_dump(values, sort_keys=False))
    return why
