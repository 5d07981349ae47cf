"""The learner and the job learn the same text, and both are judged on requests that neither learned."""

import json

import pytest
from rich.console import Console

from paceline.bench.shadow.learning import LearnerOptions, run_learner_bench
from paceline.errors import ConfigError


def test_every_arm_has_a_row_with_its_gain_per_second(tmp_path):
    options = LearnerOptions(
        num_prompts=16,
        num_judged=8,
        max_tokens=12,
        repeats=1,
        points=2,
        rates=(1e-3,),
        json=tmp_path / "r.json",
        work=tmp_path,
    )
    rows = run_learner_bench(options, Console(quiet=True))["rows"]
    assert [r["arm"] for r in rows] == ["job", "learner full 0.001, rehearsal 0.125"] and rows[0]["over_job"] == 1.0
    for row in rows:
        assert row["seconds"] > 0 and row["rows"] > 100 and row["before"] == rows[0]["before"]
        assert row["gain_per_s"] == pytest.approx((row["after"] - row["before"]) / row["seconds"])
    job, learner = rows
    assert [job["rows"]] == [num for num, _ in job["curve"]] and learner["curve"][-1][1] == learner["after"]
    half, whole = (num for num, _ in learner["curve"])
    assert 0 < half < whole == learner["rows"] == job["rows"]
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == [
        {**r, "curve": [[*p] for p in r["curve"]]} for r in rows
    ]


def test_a_class_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="buckets must be among"):
        run_learner_bench(LearnerOptions(buckets=("nothing",)), Console(quiet=True))


def test_only_a_class_that_nobody_learns_may_have_fewer_prompts():
    with pytest.raises(ConfigError, match="'tools' must have num_prompts"):
        run_learner_bench(LearnerOptions(buckets=("tools",), num_prompts=400), Console(quiet=True))
    with pytest.raises(ConfigError, match="'math' must have num_prompts"):
        run_learner_bench(LearnerOptions(num_prompts=400, num_judged=8, max_tokens=8), Console(quiet=True))
