"""Claims of bench/common/summary.py; every file of docs/results is a summary."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from paceline.bench.common.summary import LINE_LENGTH, RAW, SummaryOptions, lines_of, run_summary, summary_of
from paceline.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def cell(bucket):
    plain = {
        "group_tokens": [3, 4],
        "group_seconds": [0.1, 0.2],
        "tokens_per_s": 23.333333,
        "rounds": {"part_ms": {"host": 1.0}},
    }
    other = {**plain, "tokens_per_s": 46.666666}
    return {
        "bucket": bucket,
        "batch": 1,
        "arms": {"plain": plain, "x": other},
        "ratios": {"x": {"whole": {"ratio": 2.0, "interval": [1.5, 2.5]}}},
        "lossless": {"num_compared": 4, "num_mismatches": 0},
    }


DOCUMENT = {
    "command": "bench engine",
    "options": {"seed": 0},
    "machine": {"num_cpus": 2},
    "began_at": 1795350935.2498937,
    "cells": [cell("code"), cell("tools")],
    "decisions": [{"action": "hold", "context": {"epoch": 1}}, {"action": "train", "context": {"epoch": 2}}],
}


def records(table):
    """The rows of a table as mappings."""
    return [table["same"] | dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def keys(value):
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_a_summary_keeps_estimates_intervals_counts_and_where_they_come_from():
    summary = summary_of(DOCUMENT)
    assert {key: summary[key] for key in ("command", "options", "machine")} == {
        key: DOCUMENT[key] for key in ("command", "options", "machine")
    }
    assert summary["began_at"] == DOCUMENT["began_at"], "a time stays whole"
    at_home = summary_of({**DOCUMENT, "options": {"json": "/home/me/x.json", "model": "bundled"}})
    assert at_home["options"] == {"json": None, "model": "bundled"}, "no path of a computer"
    plain, x, *others = records(summary["cells"])
    assert [(r["bucket"], r["arm"]) for r in (plain, x, *others)] == [
        (bucket, arm) for bucket in ("code", "tools") for arm in ("plain", "x")
    ]
    assert plain["arms.tokens_per_s"] == 23.33 and plain["ratios.whole.ratio"] is None
    assert x["ratios.whole.ratio"] == 2.0 and x["ratios.whole.interval"] == [1.5, 2.5]
    assert x["lossless.num_compared"] == 4 and x["lossless.num_mismatches"] == 0


def test_rows_of_groups_and_moments_are_dropped_and_what_all_rows_share_is_written_once():
    summary = summary_of(DOCUMENT)
    assert not keys(summary) & RAW
    assert not [name for name in summary["cells"]["columns"] if name.split(".")[-1] in RAW]
    assert summary["cells"]["same"]["batch"] == 1 and "batch" not in summary["cells"]["columns"]
    assert [r["action"] for r in records(summary["decisions"])] == ["hold", "train"]
    assert "context.epoch" not in summary["decisions"]["columns"]


def test_each_row_of_a_long_table_is_one_line():
    summary = summary_of(DOCUMENT | {"cells": [cell(f"bucket {i}") for i in range(20)]})
    text = lines_of(summary)
    assert json.loads(text) == summary
    assert len([line for line in text.splitlines() if line.strip().startswith('["bucket ')]) == 20 * 2
    deep = {"a": {f"key{i}": "x" * 20 for i in range(40)}}
    assert max(map(len, lines_of(deep).splitlines())) < LINE_LENGTH and json.loads(lines_of(deep)) == deep


def test_the_command_writes_beside_the_result_and_never_over_it(tmp_path):
    result, out = tmp_path / "r.json", tmp_path / "new" / "s.json"
    result.write_text(json.dumps(DOCUMENT))
    console = Console(quiet=True)
    options = SummaryOptions(result=result, out=out)
    assert run_summary(options, console) == json.loads(out.read_text()) == summary_of(DOCUMENT)
    with pytest.raises(ConfigError, match="out must be another file"):
        SummaryOptions(result=result, out=result)
    with pytest.raises(ConfigError, match="not a part or a summary"):
        run_summary(SummaryOptions(result=out, out=tmp_path / "again.json"), console)
    for text in ('{"cells": [', "[" * 200_000):
        (tmp_path / "torn.json").write_text(text)
        with pytest.raises(ConfigError, match="must be a JSON document"):
            run_summary(SummaryOptions(result=tmp_path / "torn.json", out=out), console)


def test_a_bucket_may_be_called_as_raw_rows_are():
    """As one of a file examples.jsonl is."""
    facts = {"num_prompts": 3, "ids": ["a", "b", "c"]}
    found = summary_of({"workloads": {"examples": facts, "tools": facts}, "examples": ["x"]})
    assert found == {"workloads": {"examples": {"num_prompts": 3}, "tools": {"num_prompts": 3}}, "is_summary": True}


def test_the_kept_results_are_summaries_and_small():
    files = sorted(RESULTS.glob("*.json"))
    assert files and all(json.loads(f.read_text(encoding="utf-8"))["is_summary"] for f in files)
    assert sum(f.stat().st_size for f in files) <= 10_000 * len(files)
