"""The learner and the job learn the same text, and both are judged on requests that neither learned."""

import dataclasses
import json

import pytest
from rich.console import Console

from paceline.bench.shadow import learning
from paceline.bench.shadow.learning import LearnerOptions, over_jobs, run_learner_bench
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

    with pytest.raises(ConfigError, match="holds results of other options"):
        run_learner_bench(dataclasses.replace(options, max_tokens=14), Console(quiet=True))


def test_a_job_that_gains_nothing_has_no_gain_to_be_over():
    rows = [
        {"bucket": "math", "arm": a, "gain_per_s": g, "seconds": s} for a, g, s in (("job", 0.0, 2.0), ("l", 0.1, 1.0))
    ]
    assert [(r["over_job"], r["seconds_over_job"]) for r in over_jobs(rows)] == [(None, 1.0), (None, 0.5)]


def test_a_bundled_drafter_is_that_of_the_model(monkeypatch):
    asked = []
    monkeypatch.setattr(learning, "resolve_drafter", lambda *names: asked.append(names))
    with pytest.raises(ConfigError, match="drafter must have weights"):
        run_learner_bench(LearnerOptions(model="smollm2"), Console(quiet=True))
    assert asked == [("bundled", "smollm2")]


def test_a_class_without_prompts_is_refused():
    with pytest.raises(ConfigError, match="buckets must be among"):
        run_learner_bench(LearnerOptions(buckets=("nothing",)), Console(quiet=True))


def test_only_a_class_that_nobody_learns_may_have_fewer_prompts():
    with pytest.raises(ConfigError, match="'tools' must have num_prompts"):
        run_learner_bench(LearnerOptions(buckets=("tools",), num_prompts=400), Console(quiet=True))
    with pytest.raises(ConfigError, match="'math' must have num_prompts"):
        run_learner_bench(LearnerOptions(num_prompts=400, num_judged=8, max_tokens=8), Console(quiet=True))
