"""Comparisons of benchmark results, cell by cell, as ratios with intervals: a second run over a first one.

Speeds and speedups resample groups, both runs' measurements of a group together where both ran the same prompts. The
ratio of acceptance lengths comes from the two runs' own intervals, as of independent runs, which is cautious.

Arms of one result ran the same groups in turn, so a group's measurements of both are resampled together. The mean over cells
is geometric. Cells of one bucket ran the same prompts at other temperatures or batches: their groups are drawn with one seed, so
that cells with as many groups draw the same ones and are no independent evidence. Buckets are drawn apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

import numpy as np
from rich.console import Console
from scipy import stats

from paceline.bench.common.result_file import FORMAT, read_json, write_json
from paceline.bench.common.terminal import interval_text, new_table
from paceline.bench.engine.cells import PLAIN
from paceline.bootstrap import interval, resampled
from paceline.errors import ConfigError
from paceline.records import JsonFile, Setting, record, require

METRICS = ("speedup", "tokens_per_s", "acceptance_length")
COMMANDS = ("bench drafters", "bench engine")
_DECISIVE = ("max_tokens", "ignore_eos", "seed", "waves", "model", "data", "warmup_groups")
"""Options that change what is measured; the others change how surely, or on what machine."""
_OWN = ("json", "html", "batches", "temperatures", "buckets", "drafters", "policies", "nodes", "arms", "num_check")
"""Options that only say which cells there are, or where results go."""


@record()
class CompareOptions:
    """Cell by cell with 95% intervals. Runs of different configurations are refused.

    Exit code 1 where --fail-below finds a regression. With --over instead of a second result: the arms of one result over
    one of them, such as paceline bench compare d.json --over eagle3/fixed8.
    """

    first: A[Path, Setting("Result to compare with.", is_argument=True)]
    second: A[Path | None, Setting("Result that may be better or worse.", is_argument=True)] = None
    over: A[
        str | None,
        Setting("Without a second result: an arm of the first, such as eagle3/fixed8, to hold its other arms against."),
    ] = None
    fail_below: A[float | None, Setting("Exit code 1 where a ratio is surely below this, such as 0.95.", gt=0)] = None
    metric: A[
        str,
        Setting("What --fail-below is held against: speedup, tokens_per_s or acceptance_length.", choices=METRICS),
    ] = "speedup"
    is_forced: A[bool, Setting("Compare runs of different configurations, with warnings.", flag="force")] = False
    json: JsonFile = None

    def __post_init__(self) -> None:
        if (self.second is None) == (self.over is None):
            raise ConfigError("compare takes a second result or --over ARM, one of them")
        if self.over is not None and (self.fail_below is not None or self.is_forced or self.metric != "speedup"):
            raise ConfigError("--fail-below, --metric and --force need a second result, got --over")
        taken = {p.resolve() for p in (self.first, self.second) if p is not None}
        is_free = self.json is None or self.json.resolve() not in taken
        require(is_free, "json must be another file than the two results", str(self.json))


def read_result(path: Path, needed: Sequence[str] = ("cells",)) -> dict[str, Any]:
    """A document of one of COMMANDS with the needed keys; raises ConfigError when it is none."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("command") not in COMMANDS or document.get("format") != FORMAT:
        raise ConfigError(f"{path} must be a result of {' or '.join(COMMANDS)} in format {FORMAT}")
    if document.get("is_summary"):
        raise ConfigError(
            f"{path} must be a whole result, got a summary, which has no groups; use the file that --json wrote"
        )
    if missing := [key for key in needed if key not in document]:
        raise ConfigError(f"{path} must be a result as --json writes it, got one without {', '.join(missing)}")
    return document


def differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(what makes the runs incomparable, what a reader should know), one sentence each."""
    grave: list[str] = []
    mild: list[str] = []

    def look(name: str, x: Any, y: Any, found: list[str]) -> None:
        if x != y:
            found.append(f"{name} differs: {x} and {y}")

    look("command", a["command"], b["command"], grave)
    for key in ("version", "dtype"):
        look(f"target {key}", a.get("target", {}).get(key), b.get("target", {}).get(key), grave)
    look("device", a.get("device"), b.get("device"), grave)
    for key in dict.fromkeys((*a["options"], *b["options"])):
        if key not in _OWN:
            look(f"option {key}", a["options"].get(key), b["options"].get(key), grave if key in _DECISIVE else mild)
    trees = [{s["name"]: s["tree"] for s in d.get("drafting_arms", ())} for d in (a, b)]
    for name in trees[0].keys() & trees[1].keys():
        look(f"tree of {name}", trees[0][name], trees[1][name], mild)
    for key in ("system", "num_cpus", "num_threads", "cuda", "packages"):
        look(f"machine {key}", a["machine"].get(key), b["machine"].get(key), mild)
    mild += [f"{name} run is not complete" for name, d in (("first", a), ("second", b)) if not d["is_complete"]]
    texts = [{name: w["ids"] for name, w in d.get("workloads", {}).items()} for d in (a, b)]
    grave += [f"prompts of {n} differ" for n in sorted(texts[0].keys() & texts[1].keys()) if texts[0][n] != texts[1][n]]
    return grave, mild


def compare_cells(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Second over first for every arm of every cell that both runs have."""
    out = []
    seconds = {_key(c): c for c in b["cells"]}
    for cell in a["cells"]:
        other = seconds.get(_key(cell))
        if other is None:
            continue
        for arm in [n for n in cell["arms"] if n in other["arms"]]:
            speeds, plain = ((other["arms"][n], cell["arms"][n]) for n in (arm, PLAIN))
            speedup = None if arm == PLAIN else _ratio([speeds, plain])
            length = None if arm == PLAIN else length_ratio((cell, arm), (other, arm))
            out.append(
                {**_where(cell, arm), "speedup": speedup, "tokens_per_s": _ratio([speeds]), "acceptance_length": length}
            )
    return out


def _key(cell: dict[str, Any]) -> tuple[str, int, float]:
    return cell["bucket"], cell["batch"], cell["temperature"]


def _where(cell: dict[str, Any], arm: str) -> dict[str, Any]:
    return {"bucket": cell["bucket"], "batch": cell["batch"], "temperature": cell["temperature"], "arm": arm}


def log_ratio(own: list[dict[str, Any]], signs: list[int], seed: int) -> tuple[float, np.ndarray]:
    """Sum of sign x log(tokens per second) of arms with equal groups, and over resamples of the groups."""
    columns = np.array([c for row in own for c in (row["group_tokens"], row["group_seconds"])])

    def statistic(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sum(s * np.log(sums[2 * i] / sums[2 * i + 1]) for i, s in enumerate(signs)))

    return resampled(columns, statistic, seed=seed)


def ratio_of_logs(value: float, values: np.ndarray, num_groups: int) -> dict[str, Any]:
    """A ratio and its interval from its logarithm, over all groups and over resamples."""
    return {
        "ratio": math.exp(value),
        "interval": interval(math.exp(value), np.exp(values), num_groups, is_positive=True),
    }


def _ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """exp of the sum over (second, first) pairs with alternating sign: one pair gives a ratio, two a ratio of ratios."""
    rows = [row for pair in pairs for row in pair]
    signs = [s for i in range(len(pairs)) for s in ((1, -1) if i == 0 else (-1, 1))]
    counts = {len(row["group_tokens"]) for row in rows}
    if len(counts) == 1:
        value, values = log_ratio(rows, signs, 0)
    else:  # the runs have different numbers of groups: each is resampled by itself
        second = log_ratio(rows[0::2], signs[0::2], 0)
        first = log_ratio(rows[1::2], signs[1::2], 1)
        value, values = second[0] + first[0], second[1] + first[1]
    return ratio_of_logs(value, values, min(counts))


def length_ratio(first: tuple[dict[str, Any], str], second: tuple[dict[str, Any], str]) -> dict[str, Any] | None:
    """Acceptance length of the second (cell, arm) over the first's, from the logs of both intervals, taken as normal and
    independent; None where one has none."""
    lengths = [cell.get("drafting", {}).get(arm, {}).get("acceptance_length") for cell, arm in (first, second)]
    if None in lengths:
        return None
    ratio = lengths[1]["pooled"] / lengths[0]["pooled"]
    if any(length["interval"] is None for length in lengths):
        return {"ratio": ratio, "interval": None}
    z = float(stats.norm.ppf(0.975))
    errors = [math.log(length["interval"][1] / length["interval"][0]) / (2 * z) for length in lengths]
    width = z * math.hypot(*errors)
    return {"ratio": ratio, "interval": [ratio * math.exp(-width), ratio * math.exp(width)]}


def regressions(rows: list[dict[str, Any]], metric: str, fail_below: float) -> list[dict[str, Any]]:
    """Rows that are surely below: their whole interval, or the ratio itself where there is none."""
    known = [(r, r[metric]) for r in rows if r[metric] is not None]
    return [r for r, v in known if (v["ratio"] if v["interval"] is None else v["interval"][1]) < fail_below]


def run_compare(options: CompareOptions, console: Console) -> dict[str, Any]:
    """Print and return the comparison, of arms where there is no second result; `failed` lists rows below the threshold.

    Raises: ConfigError when a file is no result, the runs cannot be compared, have no cell in common, or not the metric that
    --fail-below asks for.
    """
    if options.second is None:
        assert options.over is not None
        return run_compare_arms(options.first, options.over, console, options.json)
    needed = ("cells", "options", "machine", "is_complete")
    a, b = read_result(options.first, needed), read_result(options.second, needed)
    grave, mild = differences(a, b)
    if grave and not options.is_forced:
        raise ConfigError(f"the runs must have one configuration (or use --force): {'; '.join(grave)}")
    for sentence in (*grave, *mild):
        console.print(f"[yellow]warning[/yellow] {sentence}", soft_wrap=True)
    rows = compare_cells(a, b)
    if not rows:
        raise ConfigError("the runs must have a bucket, batch, temperature and arm in common, got none")
    if options.fail_below is not None and all(row[options.metric] is None for row in rows):
        raise ConfigError(
            f"metric must be one that the runs have to be held against --fail-below, got {options.metric}: results of "
            f"{a['command']} have none"
        )
    failed = [] if options.fail_below is None else regressions(rows, options.metric, options.fail_below)
    result = {"first": str(options.first), "second": str(options.second), "warnings": [*grave, *mild], "rows": rows, "failed": failed}  # fmt: skip
    _print(result, "Second run over first run", {m: m for m in METRICS}, console)
    if options.fail_below is not None:
        console.print(f"{len(failed)} of {len(rows)} rows have a {options.metric} surely below {options.fail_below:g} of the first run's")  # fmt: skip
    if options.json is not None:
        write_json(options.json, result)
    return result


def has_failed(document: dict[str, Any]) -> bool:
    """Whether --fail-below found a regression."""
    return bool(document["failed"])


def _print(result: dict[str, Any], title: str, heads: dict[str, str], console: Console) -> None:
    """The table of the rows. heads: metric -> heading of its ratio."""
    table = new_table(title, ("bucket", "batch", "T", "arm", *(c for head in heads.values() for c in (head, "95%"))))
    for row in result["rows"]:
        found = [row[m] for m in heads]
        texts = [t for r in found for t in (("", "") if r is None else (f"{r['ratio']:.3f}", interval_text(r["interval"], 3)))]  # fmt: skip
        is_all = row["batch"] is None
        where = (f"all {row['num_cells']}", "", "") if is_all else (row["bucket"], str(row["batch"]), f"{row['temperature']:g}")  # fmt: skip
        table.add_row(
            *where, row["arm"], *texts, style="red" if row in result["failed"] else "bold" if is_all else None
        )
    console.print(table)


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
            speed = ratio_of_logs(value, values, num_groups)
            rows.append({**_where(cell, arm), "tokens_per_s": speed, "acceptance_length": lengths})
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
    result = {"first": str(path), "over": over, "rows": rows, "failed": []}
    heads = {"tokens_per_s": "tokens/s over", "acceptance_length": "acceptance length over"}
    _print(result, f"Arms over {over}, same prompts in turn", heads, console)
    if json_path is not None:
        write_json(json_path, result)
    return result
