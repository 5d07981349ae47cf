"""Summary: a result as tables of estimates, small enough to be kept beside the page that quotes it.

It keeps options, machine, one row a cell and arm with estimates, intervals and counts, and what was checked for losslessness.
It drops rows of single groups, requests, prompts, moments and depths, so `paceline bench compare` needs the result itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated as A
from typing import Any

from rich.console import Console

from paceline.bench.common.result_file import read_json
from paceline.errors import ConfigError
from paceline.paths import write_atomic
from paceline.records import Setting, record, require

RAW = frozenset(
    (
        *("group_tokens", "group_seconds", "histogram", "samples", "tokens_over_time", "over_time", "examples"),
        *("depths", "drafted", "full_batch_rounds", "part_ms", "calls", "ids", "ledger_entries", "outcomes"),
    )
)
"""Keys, at any depth, whose values are rows of single groups, depths, moments, requests or faults."""
RAW_BELOW = {
    "arms": frozenset({"ttft_ms", "prefill_s", "num_full_batch_rounds", "full_batch_round_share"}),
    "drafting": frozenset(
        {"ttft_ms", "gap_ms", "round_ms", "user_tokens_per_s", "prediction", "of_round_with_build", "in_domain"}
    ),
    "decisions": frozenset({"context"}),
}
"""Key -> keys left out below it: what the ratios, shares and reasons beside them say already."""
_BY_NAME = frozenset(("workloads", "by_bucket"))
"""Keys whose values are by bucket, which may be called as anything."""
_EPOCH_S = 1e9
"""From here on a number is a time since the epoch, which is kept whole."""
NUM_DIGITS = 4
"""Significant digits of a number: more than the intervals of a benchmark bear."""
LINE_LENGTH = 300
"""A value whose text fits stays on one line; a longer one has a line for each of its parts."""


def summary_of(document: dict[str, Any]) -> dict[str, Any]:
    """A result without raw rows, with rounded fractions, and lists of records as {"same": values that all share, "columns", "rows"}."""
    kept: dict[str, Any] = _without_raw(document, RAW)
    if isinstance(kept.get("decisions"), dict):  # of a replay: what the first run of each policy did
        del kept["decisions"]
    if isinstance(kept.get("options"), dict):  # where a computer had its files says nothing to others
        paths = {k for k, v in kept["options"].items() if isinstance(v, str) and v.startswith("/")}
        kept["options"] = {k: None if k in paths else v for k, v in kept["options"].items()}
    if isinstance(kept.get("cells"), list) and all(isinstance(c, dict) and "arms" in c for c in kept["cells"]):
        kept["cells"] = [row for cell in kept["cells"] for row in _arm_rows(cell)]
    return {**_tables(kept), "is_summary": True}


def _without_raw(value: Any, raw: frozenset[str], *, is_by_name: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            k: _without_raw(v, raw | RAW_BELOW.get(k, frozenset()), is_by_name=k in _BY_NAME and not is_by_name)
            for k, v in value.items() if is_by_name or k not in raw
        }  # fmt: skip
    if isinstance(value, list):
        return [_without_raw(part, raw) for part in value]
    if isinstance(value, float) and abs(value) < _EPOCH_S:
        return float(f"{value:.{NUM_DIGITS}g}")
    return value


def _arm_rows(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A record for each arm of a cell: what the cell says of itself, then what it says of that arm."""
    arms = cell["arms"]
    of_arm = [key for key, value in cell.items() if isinstance(value, dict) and value and value.keys() <= arms.keys()]
    own = {key: value for key, value in cell.items() if key not in of_arm}
    return [{**own, "arm": arm, **{k: cell[k][arm] for k in of_arm if arm in cell[k]}} for arm in arms]


def _tables(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tables(part) for key, part in value.items()}
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(part, dict) for part in value):
        return value
    flat = [_flat(part) for part in value]
    names = list(dict.fromkeys(name for row in flat for name in row))
    same = {name: flat[0].get(name) for name in names if all(row.get(name) == flat[0].get(name) for row in flat)}
    columns = [name for name in names if name not in same]
    return {"same": same, "columns": columns, "rows": [[row.get(name) for name in columns] for row in flat]}


def _flat(record: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Leaves of a record by dotted names."""
    out: dict[str, Any] = {}
    for key, value in record.items():
        out |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out


def lines_of(value: Any, indent: int = 0) -> str:
    """JSON of few and short lines; a row of a table is one line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ": "))
    if not isinstance(value, dict | list) or not value or (indent > 0 and len(text) <= LINE_LENGTH):
        return text
    if isinstance(value, list) and not any(isinstance(part, dict | list) for part in value):
        return text
    names = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    parts = value.values() if isinstance(value, dict) else value
    margin = "\n" + " " * (indent + 1)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines = ",".join(margin + name + lines_of(part, indent + 1) for name, part in zip(names, parts, strict=True))
    return begin + lines + margin[:-1] + end


@record()
class SummaryOptions:
    """Estimates with intervals, counts and options: small enough to be kept beside the page that quotes it.

    Example: paceline bench summary engine.json docs/results/bench_engine.json.
    """

    result: A[Path, Setting("Result that --json wrote.", is_argument=True)]
    out: A[Path, Setting("The summary's file.", is_argument=True, is_output=True)]

    def __post_init__(self) -> None:
        require(self.result.resolve() != self.out.resolve(), "out must be another file than the result", str(self.out))


def run_summary(options: SummaryOptions, console: Console) -> dict[str, Any]:
    """Write the summary of a result file and return it. Raises: ConfigError when it is no JSON document of a benchmark."""
    document = read_json(options.result)
    if not isinstance(document, dict) or document.get("is_summary"):
        raise ConfigError(
            f"{options.result} must be a whole JSON document of a benchmark, not a part or a summary of one"
        )
    summary = summary_of(document)
    text = lines_of(summary) + "\n"
    write_atomic(options.out, text)
    console.print(f"{options.out}: {len(text.encode()):,} bytes of {options.result.stat().st_size:,}", soft_wrap=True)
    return summary
