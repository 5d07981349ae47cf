"""Estimates from randomised logs agree with what the policies net when they are run."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from paceline.bench.replay import off_policy
from paceline.bench.replay.off_policy import (
    CELL,
    KEEP,
    Variant,
    check_one,
    explore,
    run_check,
    simulated_world,
    summarise,
)  # fmt: skip
from paceline.bench.replay.plan import Task
from paceline.cli.main import app
from paceline.errors import PacelineError

QUIET = Console(quiet=True)
SHORT = replace(CELL, duration_s=900.0)
PAYOFF = Variant(policy="payoff")


def is_consistent(hits: int, tries: int, level: float = 0.95, alpha: float = 0.01) -> bool:
    """Whether `hits` of `tries` may come from intervals that cover at `level`: not too few, by a binomial test."""
    return tries == 0 or float(stats.binom.cdf(hits, tries, level)) >= alpha


def test_the_logging_policy_acts_as_often_as_it_says():
    worlds = [explore(simulated_world(CELL, PAYOFF, seed)) for seed in range(8)]
    drawn = []
    for world in worlds:
        for k in range(world.traffic.num_steps):
            world.step(k)
        drawn += [d for d in world.controller.drain()[0] if d.propensity < 1.0]
    odds = [d.context["probabilities"] for d in drawn]
    assert len(drawn) > 20 and all(sum(p.values()) == pytest.approx(1.0) for p in odds)
    share = np.mean([d.action != "hold" for d in drawn])
    expected = np.mean([1.0 - p.get("hold", 0.0) for p in odds])
    assert share == pytest.approx(expected, abs=3 * np.sqrt(KEEP * (1 - KEEP) / len(drawn)))


def test_a_check_repeats_by_seed():
    task = Task(scenario=replace(CELL, duration_s=600.0), variant=PAYOFF, seed=1)
    assert check_one(task, draws=2) == check_one(task, draws=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_doubly_robust_estimates_cover_the_truth_and_err_no_more_than_importance_sampling(monkeypatch):
    monkeypatch.setattr(off_policy, "CELL", SHORT)
    (found,) = run_check([PAYOFF], 12, workers=1, console=QUIET, draws=2, study=6)
    assert found["doubly robust"]["rmse"] <= found["IPS"]["rmse"]
    assert is_consistent(*found["covers_log"]) and is_consistent(*found["covers_told"])
    assert abs(found["doubly robust"]["bias"]) <= 3.0 * found["doubly robust"]["bias_error"]


def _row(truth, dr, low, high, verdict="estimated"):
    return {"truth_s": truth, "total_s": dr, "ips_s": dr + 5.0, "direct_s": dr, "low_s": low, "high_s": high, "never_s": 100.0, "verdict": verdict}  # fmt: skip


def test_a_summary_counts_what_intervals_hold():
    rows = [_row(10.0, 9.0, 8.0, 11.0), _row(10.0, 15.0, 14.0, 16.0, "cannot tell"), _row(12.0, 12.0, 11.0, 13.0)]
    found = summarise("payoff", rows, study=3)
    assert found["covers_log"] == [2, 3] and found["covers_told"] == [2, 2]
    assert found["doubly robust"]["bias"] == pytest.approx(4 / 3) and found["IPS"]["bias"] == pytest.approx(4 / 3 + 5)
    assert found["doubly robust"]["covers_pooled"] == [1, 1] and json.loads(json.dumps(found)) == found


def test_too_few_hits_are_found_out():
    assert is_consistent(18, 20) and is_consistent(0, 0) and not is_consistent(14, 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "seeds must be >= 2"),
        (["--policies", "oracle"], "policies must not name 'oracle'"),
        (["--policies", "payoff", "--html", "x.html"], "html and suggest"),
    ],
)
def test_bad_arguments_are_answered_in_one_sentence(arguments, message):
    names = [] if "--policies" in arguments else ["--policies", "payoff"]
    result = CliRunner().invoke(app, ["replay", "off-policy", *names, *arguments])
    assert isinstance(result.exception, PacelineError) and message in str(result.exception)


def test_the_command_prints_and_writes_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(off_policy, "CELL", replace(CELL, duration_s=600.0))
    out = tmp_path / "check.json"
    result = CliRunner().invoke(
        app, ["replay", "off-policy", "--policies", "never,interval", "--seeds", "2", "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "doubly robust" in result.output
    never = json.loads(out.read_text())["policies"][0]
    assert never["covers_log"] == [2, 2] and never["doubly robust"]["rmse"] == pytest.approx(0.0, abs=1e-9)
