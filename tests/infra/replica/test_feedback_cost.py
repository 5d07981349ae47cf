"""The cost benchmark runs the real publisher, Redis and writer, and pairs the same work in every arm."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from paceline.errors import ConfigError
from paceline.infra.replica.feedback_cost import ARMS, FeedbackCostOptions, run_feedback_cost


def run(**fields) -> tuple[dict, str]:
    out = io.StringIO()
    options = FeedbackCostOptions(**{"num_prompts": 3, "max_tokens": 8, "buckets": ("tools", "math"), **fields})
    return run_feedback_cost(options, Console(file=out, width=120)), out.getvalue()


def test_every_arm_serves_the_same_and_nothing_is_dropped(tmp_path):
    path = tmp_path / "results" / "feedback.json"
    result, text = run(json=path)
    stored = json.loads(path.read_text())
    assert stored["rows"] == result["rows"] and stored["options"]["buckets"] == ["tools", "math"]
    assert [r["arm"] for r in result["rows"]] == list(ARMS)
    assert len({(r["num_groups"], r["num_tokens"]) for r in result["rows"]}) == 1
    none, _, both = result["rows"]
    assert "wall_s_ratio" not in none
    for key in ("wall_s", "engine_cpu_s", "process_cpu_s"):
        low, high = both[f"{key}_ratio_interval"]
        assert 0 < low <= both[f"{key}_ratio"] <= high
        ratio = both[f"tokens_per_{key}"] / none[f"tokens_per_{key}"]
        assert both[f"{key}_ratio"] == pytest.approx(ratio, rel=0.01)
    assert both["tokens_per_process_cpu_s"] <= both["tokens_per_engine_cpu_s"], "the other threads cost something"
    counters = result["counters"]
    assert counters["traces_written"] == 4, "one arm is traced: three prompts and the first as warm-up"
    assert counters["delivered"] == counters["produced"] > 0
    assert counters["dropped"] == counters["traces_dropped"] == counters["outages"] == 0
    assert "feedback+traces" in text and "engine-thread CPU" in text


def test_a_drafter_without_features_is_not_traced():
    result, _ = run(drafter="lookup", batch=2, num_prompts=2)
    assert [r["arm"] for r in result["rows"]] == ["none", "feedback"]
    assert result["counters"]["traces_written"] == 0 and result["counters"]["delivered"] > 0
    assert result["rows"][1]["wall_s_ratio_interval"] is None, "one group gives no interval"


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"num_prompts": 1, "batch": 2}, {"max_tokens": 0}, {"buckets": ()}])
def test_senseless_options_are_refused(wrong):
    with pytest.raises(ConfigError):
        dataclasses.replace(FeedbackCostOptions(), **wrong)


def test_an_unknown_bucket_or_share_is_refused():
    with pytest.raises(ConfigError, match="bucket"):
        run(buckets=("nothing",))
    with pytest.raises(ConfigError, match="share"):
        run(share=2.0)
