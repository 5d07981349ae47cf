"""Claims of bench/drafters/compare.py on results made up for them."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline.bench.drafters.compare import CompareOptions, compare_cells, read_result, regressions, run_compare
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def result(arms, lengths=None, batch=1):
    """A document with one cell. arms: name -> (tokens, seconds) lists; lengths: name -> (pooled, interval)."""
    drafting = {n: {"acceptance_length": {"pooled": v, "interval": i}} for n, (v, i) in (lengths or {}).items()}
    rows = {n: {"group_tokens": list(t), "group_seconds": list(s)} for n, (t, s) in arms.items()}
    return {"cells": [{"bucket": "b", "batch": batch, "temperature": 0.0, "arms": rows, "drafting": drafting}]}


def measured(rng, rate, num_groups=8, noise=0.05):
    """Groups of unlike length; the noise is of the machine, so that both runs of a group do not share it."""
    tokens = rng.integers(50, 400, num_groups)
    return tokens.tolist(), (tokens / rate * np.exp(rng.normal(0, noise, num_groups))).tolist()


def test_a_slower_machine_leaves_speedups_as_they_are():
    rng = np.random.default_rng(0)
    a = result({"plain": measured(rng, 100), "x": measured(rng, 200)})
    b = result({n: (r["group_tokens"], [3 * s for s in r["group_seconds"]]) for n, r in a["cells"][0]["arms"].items()})
    plain, x = compare_cells(a, b)
    assert plain["speedup"] is None and x["tokens_per_s"]["ratio"] == pytest.approx(1 / 3)
    assert x["speedup"]["ratio"] == pytest.approx(1) and x["speedup"]["interval"] == pytest.approx([1, 1])


@pytest.mark.parametrize("num_groups", [8, 12])
def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says(num_groups):
    """With as many groups in both runs (paired), and with more in the second one (each by itself)."""
    hits = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        a = result({"plain": measured(rng, 100), "x": measured(rng, 200)})
        b = result({"plain": measured(rng, 100, num_groups), "x": measured(rng, 170, num_groups)})
        low, high = compare_cells(a, b)[1]["speedup"]["interval"]
        hits += low <= 0.85 <= high
    assert 52 <= hits <= 60


def test_one_group_gives_a_ratio_without_an_interval_and_it_decides():
    rows = compare_cells(*(result({"plain": ([9], [1.0]), "x": ([9], [s])}) for s in (0.5, 0.6)))
    assert rows[1]["speedup"] == {"ratio": pytest.approx(0.5 / 0.6), "interval": None}
    assert regressions(rows, "speedup", 0.9) == [rows[1]] and not regressions(rows, "speedup", 0.8)


def test_only_a_whole_interval_below_is_a_regression():
    rows = [{"speedup": {"ratio": 0.9, "interval": [0.8, high]}} for high in (0.94, 0.96)] + [{"speedup": None}]
    assert regressions(rows, "speedup", 0.95) == rows[:1]


def test_acceptance_lengths_are_compared_as_of_independent_runs():
    arms = {"plain": ([1, 1], [1, 1]), "x": ([1, 1], [1, 1])}
    a, b = result(arms, {"x": (2.0, [1.8, 2.2])}), result(arms, {"x": (3.0, [2.7, 3.3])})
    got = compare_cells(a, b)[1]["acceptance_length"]
    low, high = got["interval"]
    assert got["ratio"] == 1.5 and low < 1.5 * 0.9 and high > 1.5 * 1.1
    assert np.log(high / 1.5) == pytest.approx(np.log(2.2 / 1.8) / 2 * np.sqrt(2), rel=0.01)


def test_cells_that_only_one_run_has_are_left_out():
    arms = {"plain": ([1], [1]), "x": ([1], [1])}
    assert compare_cells(result(arms), result(arms, batch=8)) == []


def test_a_metric_that_the_runs_do_not_have_finds_no_regression_and_is_refused(tmp_path):
    """Results of `bench engine` have no intervals of acceptance lengths: a check of them would pass whatever happened."""
    document = result({"plain": ([9], [1.0]), "speculative": ([9], [0.5])})
    facts = {"command": "bench engine", "format": 1, "options": {}, "machine": {}, "is_complete": True}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**document, **facts}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"metric must be one that the runs have .* got acceptance_length"):
        run_compare(
            CompareOptions(first=path, second=path, fail_below=0.95, metric="acceptance_length"), Console(quiet=True)
        )
    kept = run_compare(CompareOptions(first=path, second=path, fail_below=0.95), Console(quiet=True))
    assert kept["failed"] == []


def test_a_comparison_never_overwrites_what_it_compares(tmp_path):
    with pytest.raises(ConfigError, match="json must be another file"):
        CompareOptions(first=tmp_path / "a.json", second=tmp_path / "b.json", json=tmp_path / "x" / ".." / "b.json")


def test_a_summary_is_refused_because_it_has_no_groups():
    with pytest.raises(ConfigError, match="must be a whole result, got a summary"):
        read_result(ROOT / "docs" / "results" / "bench_drafters.json")
