"""Claims of bench/drafters/compare.py on results made up for them."""

import json
import math

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.bench.common.result_file import FORMAT
from paceline.bench.drafters.compare import arms_over, run_compare_arms
from paceline.cli.main import app
from paceline.errors import ConfigError


def cell(bucket, seconds, lengths=None):
    """Arms on equal groups of 100 tokens. seconds: arm -> seconds of each group."""
    arms = {n: {"group_tokens": [100] * len(s), "group_seconds": list(s)} for n, s in seconds.items()}
    drafting = {n: {"acceptance_length": {"pooled": v, "interval": i}} for n, (v, i) in (lengths or {}).items()}
    return {"bucket": bucket, "batch": 1, "temperature": 0.0, "arms": arms, "drafting": drafting}


def rows_of(document, over):
    return {(r["bucket"], r["arm"]): r for r in arms_over(document, over)}


def test_arms_that_share_every_hiccup_have_an_exact_ratio():
    """Groups are resampled together: a hard prompt counts on both sides or on neither."""
    hard = np.exp(np.random.default_rng(0).normal(0, 1, 12))
    found = rows_of({"cells": [cell("a", {"x": 0.8 * hard, "y": hard, "plain": 2 * hard})]}, "y")
    assert found["a", "x"]["tokens_per_s"] == {"ratio": pytest.approx(1.25), "interval": [1.25, 1.25]}
    assert found["a", "plain"]["tokens_per_s"]["ratio"] == pytest.approx(0.5)


def test_the_mean_over_cells_is_geometric_and_surer_than_a_cell():
    rng = np.random.default_rng(1)
    cells = [cell(b, {"x": f * np.exp(rng.normal(0, 0.2, 8)), "y": np.ones(8)}) for b, f in (("a", 0.5), ("b", 1.0))]
    found = rows_of({"cells": cells}, "y")
    a, b, both = (found[k, "x"]["tokens_per_s"] for k in ("a", "b", "all"))
    assert both["ratio"] == pytest.approx(math.sqrt(a["ratio"] * b["ratio"]))
    low, high = both["interval"]
    assert math.log(high / low) < max(math.log(i["interval"][1] / i["interval"][0]) for i in (a, b))
    assert found["all", "x"]["num_cells"] == 2


def test_a_bucket_that_ran_twice_is_no_more_evidence_than_once():
    """Two temperatures ask the same prompts; another bucket's prompts are others."""
    hard = np.exp(np.random.default_rng(2).normal(0, 0.3, 10))
    seconds = {"x": hard, "y": np.ones(10)}
    once = rows_of({"cells": [cell("a", seconds)]}, "y")["all", "x"]["tokens_per_s"]
    twice = rows_of({"cells": [cell("a", seconds), cell("a", seconds)]}, "y")["all", "x"]["tokens_per_s"]
    other = rows_of({"cells": [cell("a", seconds), cell("b", seconds)]}, "y")["all", "x"]["tokens_per_s"]
    assert twice == once
    assert other["interval"][0] > once["interval"][0] and other["interval"][1] < once["interval"][1]


def test_cells_without_the_arm_are_left_out_and_plain_has_no_acceptance_length():
    lengths = {"x": (3.0, [2.8, 3.2]), "y": (2.0, [1.9, 2.1])}
    cells = [cell("a", {"plain": [1, 1], "x": [1, 1], "y": [1, 1]}, lengths), cell("b", {"plain": [1], "x": [1]})]
    found = rows_of({"cells": cells}, "y")
    assert {b for b, _ in found} == {"a", "all"}
    assert found["a", "plain"]["acceptance_length"] is None
    assert found["a", "x"]["acceptance_length"]["ratio"] == 1.5


def test_an_arm_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    document = {"command": "bench drafters", "format": FORMAT, "cells": [cell("a", {"plain": [1], "x/fixed8": [1]})]}
    with pytest.raises(ConfigError, match="plain, x/fixed8; got 'y'"):
        arms_over(document, "y")
    path = tmp_path / "d.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="another file"):
        run_compare_arms(path, "plain", Console(), path)
    result = run_compare_arms(path, "plain", Console(quiet=True), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == result and len(result["rows"]) == 2


@pytest.mark.parametrize("option", [["--metric", "tokens_per_s"], ["--fail-below", "0.9"], ["--force"]])
def test_options_of_a_comparison_with_a_second_result_are_refused_with_over(tmp_path, option):
    path = tmp_path / "d.json"
    path.write_text("{}")
    result = CliRunner().invoke(app, ["bench", "compare", str(path), "--over", "x", *option])
    assert result.exit_code != 0 and "need a second result" in str(result.exception) + result.output
