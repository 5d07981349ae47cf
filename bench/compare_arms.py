"""Which arm of one result is faster than another arm of it? Cell by cell and over all cells, as ratios with intervals.

Arms of one result ran the same groups in turn, so a group's measurements of both are resampled together. The mean over cells
is geometric. Cells of one bucket ran the same prompts at other temperatures or batches: their groups are drawn with one seed, so
that cells with as many groups draw the same ones and are no independent evidence. Buckets are drawn apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from paceline.bench.compare import length_ratio, log_ratio, ratio_of_logs, read_result
from paceline.bench.engine_cells import PLAIN
from paceline.bench.engine_table import interval_text, new_table
from paceline.errors import ConfigError

COLUMNS = ("bucket", "batch", "T", "arm", "tokens/s over", "95%", "acceptance length over", "95%")


def arms_over(document: dict[str, Any], over: str) -> list[dict[str, Any]]:
    """Every arm of every cell over the arm `over`, then every arm over all cells (bucket "all").

    Raises: ConfigError when no cell has such an arm.
    """
    cells = [c for c in document["cells"] if over in c["arms"]]
    names = dict.fromkeys(n for c in cells for n in c["arms"] if n != over)
    if not names:
        known = dict.fromkeys(n for c in document["cells"] for n in c["arms"])
        raise ConfigError(f"over must be an arm of the result, beside others: {', '.join(known)}; got {over!r}")
    rows: list[dict[str, Any]] = []
    logs: dict[str, list[tuple[float, np.ndarray, int]]] = {n: [] for n in names}
    seeds = {bucket: i for i, bucket in enumerate(dict.fromkeys(c["bucket"] for c in cells))}
    for cell in cells:
        for arm in (n for n in names if n in cell["arms"]):
            value, values = log_ratio([cell["arms"][arm], cell["arms"][over]], [1, -1], seeds[cell["bucket"]])
            num_groups = len(cell["arms"][arm]["group_tokens"])
            logs[arm].append((value, values, num_groups))
            lengths = None if PLAIN in (arm, over) else length_ratio((cell, over), (cell, arm))
            where = {"bucket": cell["bucket"], "batch": cell["batch"], "temperature": cell["temperature"], "arm": arm}
            rows.append(
                {**where, "tokens_per_s": ratio_of_logs(value, values, num_groups), "acceptance_length": lengths}
            )
    for arm, found in logs.items():
        mean = float(np.mean([value for value, _, _ in found]))
        means = np.mean([values for _, values, _ in found], axis=0)
        ratio = ratio_of_logs(mean, means, min(n for _, _, n in found))
        rows.append({"bucket": "all", "batch": None, "temperature": None, "arm": arm, "tokens_per_s": ratio, "acceptance_length": None, "num_cells": len(found)})  # fmt: skip
    return rows


def run_compare_arms(path: Path, over: str, console: Console, json_path: Path | None = None) -> dict[str, Any]:
    """Print and return every arm over one arm. Raises: ConfigError (no result, no such arm, json is the result)."""
    if json_path is not None and json_path.resolve() == path.resolve():
        raise ConfigError(f"json must be another file than the result, got {json_path}")
    rows = arms_over(read_result(path), over)
    result = {"first": str(path), "over": over, "rows": rows}
    table = new_table(f"Arms over {over}, same prompts in turn", COLUMNS, 1)
    for row in rows:
        speed, length = row["tokens_per_s"], row["acceptance_length"]
        is_all = row["batch"] is None
        where = (f"all {row['num_cells']}", "", "") if is_all else (row["bucket"], str(row["batch"]), f"{row['temperature']:g}")  # fmt: skip
        texts = [f"{speed['ratio']:.3f}", interval_text(speed["interval"], 3)]
        texts += ["", ""] if length is None else [f"{length['ratio']:.3f}", interval_text(length["interval"], 3)]
        table.add_row(*where, row["arm"], *texts, style="bold" if is_all else None)
    console.print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
