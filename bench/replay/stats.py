"""Replay statistics: means with intervals, against the hindsight bound, and worst cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.bandit.replay.simulate import HINDSIGHT, ORACLE
from paceline.bootstrap import mean_interval

Row = dict[str, Any]
WORTH_PERCENT = 3.0
"""Oracle gain from which a cell counts for the share of the oracle that a policy reaches."""


def net_percent(row: Row) -> float:
    """True net device-seconds of a run, percent of what serving costs without any training."""
    return 100.0 * row["net_s"] / row["never_s"] if row["never_s"] > 0 else 0.0


def _figure(values: Sequence[float]) -> dict[str, Any]:
    mean, ends = mean_interval(values)
    low, high = ends or (mean, mean)
    return {"mean": round(mean, 3), "low": round(low, 3), "high": round(high, 3), "worst": round(min(values), 3)}


def cell_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a cell and variant; net, spend and saving in percent of the cell's serving cost."""
    out = []
    for cell in _unique(r["cell"] for r in rows):
        mine = [r for r in rows if r["cell"] == cell]
        bound = _mean(net_percent(r) for r in mine if r["policy"] == ORACLE)
        for label in _unique(r["label"] for r in mine):
            runs = [r for r in mine if r["label"] == label]
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
                    "spent_percent": round(100 * sum(sum(r["spent"].values()) for r in runs) / sum(r["never_s"] for r in runs), 3),
                    "booked_saving_percent": round(100 * sum(r["ledger"].get("saved_s", 0.0) for r in runs) / sum(r["never_s"] for r in runs), 3),
                    "true_saving_percent": round(100 * sum(r["never_s"] - r["serving_s"] for r in runs) / sum(r["never_s"] for r in runs), 3),
                    "num_jobs": round(float(np.mean([r["num_jobs"] for r in runs])), 2),
                    "num_swaps": round(float(np.mean([r["num_swaps"] for r in runs])), 2),
                    "num_seeds": len(runs),
                }
            )  # fmt: skip
    return out


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
        bound = _mean(net_percent(r) for r in rows if r["family"] == family and r["policy"] == ORACLE)
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
    for key in best.keys() & other.keys():
        by_seed.setdefault(key[0], []).append(best[key] - other[key])
    mean, ends = mean_interval([float(np.mean(v)) for v in by_seed.values()])
    return not (ends[0] if ends else mean) > 0


def regret(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """cell -> variant -> {times_s, net_percent, regret_percent}: means over seeds of the cumulated net, and of the bound less it.

    regret_percent is [] when the oracle was not run.
    """
    out: dict[str, dict[str, dict[str, list[float]]]] = {}
    for cell in _unique(r["cell"] for r in rows):
        mine = [r for r in rows if r["cell"] == cell]
        times = mine[0]["times"]

        def line(label: str, mine: list[Row] = mine, times: list[float] = times) -> np.ndarray:
            runs = [r for r in mine if r["label"] == label]
            return np.mean([100 * np.interp(times, r["times"], r["curve"]) / r["never_s"] for r in runs], axis=0)

        bound = line(ORACLE) if any(r["label"] == ORACLE for r in mine) else None
        out[cell] = {
            label: {
                "times_s": list(times),
                "net_percent": [round(float(v), 4) for v in line(label)],
                "regret_percent": [] if bound is None else [round(float(v), 4) for v in bound - line(label)],
            }
            for label in _unique(r["label"] for r in mine)
        }
    return out


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(values))


def _mean(values: Any) -> float | None:
    data = list(values)
    return float(np.mean(data)) if data else None
