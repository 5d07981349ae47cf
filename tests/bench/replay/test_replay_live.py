"""A live replay really trains, prices versions by exact replay, and computes nothing twice."""

import json

import numpy as np
import pytest
from rich.console import Console

from paceline.bench.replay.live import LiveConfig, run_live
from paceline.bench.replay.off_policy import METHODS, Variant, run_live_check
from paceline.bench.replay.plan import variants
from paceline.bench.replay.run import RUNS_FILE
from paceline.contracts import TrainResult, decode

TINY = LiveConfig(num_requests=40, max_new_tokens=24, num_scored=8, phase_s=40.0)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Texts, jobs and scores of all replays of this module."""
    return tmp_path_factory.mktemp("live")


def kept_jobs(cache):
    return [decode(p.read_bytes(), TrainResult) for p in (cache / "jobs").iterdir()]


@pytest.mark.slow
def test_jobs_are_real_and_kept(cache):
    chosen = variants(("never", "always"), {"min_rows": [160], "job_time_limit_s": [600.0]})
    rows, scenarios, notes = run_live(chosen, config=TINY, num_orders=1, data=None, cache=cache, console=QUIET)
    never, always = rows
    assert never["net_s"] == pytest.approx(0.0, abs=1e-6) and always["num_jobs"] >= 1
    assert scenarios[0]["orders"] == [["tools", "math", "tools", "facts"]]
    assert any("acceptance length by exact replay" in n for n in notes)
    jobs = kept_jobs(cache)
    assert jobs and sum(j.train_s for j in jobs) > 0
    if not any(j.status in ("stopped",) for j in jobs):  # the last job may outlast the replay
        assert always["spent"]["training"] <= sum(j.train_s + j.shadow_s for j in jobs) + 1e-6
    scores = [json.loads(p.read_text())["acceptance_length"] for p in (cache / "scores").iterdir()]
    assert len(scores) >= 3 and all(1.0 <= s < 10.0 for s in scores)
    # a replay whose rows are lost takes texts, jobs and scores from the folder and gives the same figures
    (cache / RUNS_FILE).unlink()
    written = {p: p.stat().st_mtime_ns for p in [*cache.rglob("*.json"), *cache.rglob("*.msgpack")]}
    again, _, _ = run_live(chosen, config=TINY, num_orders=1, data=None, cache=cache, console=QUIET)
    assert again == rows
    assert {p: p.stat().st_mtime_ns for p in [*cache.rglob("*.json"), *cache.rglob("*.msgpack")]} == written


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_live_check_compares_estimates_with_what_replays_train_and_keep(cache):
    before = {p: p.stat().st_mtime_ns for p in (cache / "jobs").iterdir()}
    chosen = [Variant(policy="payoff", settings=(("min_rows", 160), ("horizon_s", 600.0)))]
    (found,) = run_live_check(chosen, 2, cache=cache, data=None, console=QUIET, draws=2, config=TINY)
    assert found["num_logs"] == 2 and found["covers_log"][1] == 2
    assert np.isfinite([found[name]["rmse"] for name in METHODS]).all()
    assert {p: p.stat().st_mtime_ns for p in before} == before, "a job that was kept is not trained again"
    assert sum(job.train_s for job in kept_jobs(cache)) > 0
