"""A live replay really trains, prices versions by exact replay, and computes nothing twice."""

import dataclasses
import json
import shutil

import msgspec
import numpy as np
import pytest
from rich.console import Console

from paceline.adapt.data.trace_store import TraceStore
from paceline.bench.common.diary import Answer, open_diary, read_diary
from paceline.bench.replay.day import DayConfig, DayService, run_day, split
from paceline.bench.replay.live import LiveConfig, run_live
from paceline.bench.replay.off_policy import METHODS, Variant, run_live_check
from paceline.bench.replay.plan import variants
from paceline.bench.replay.run import RUNS_FILE
from paceline.contracts import Group, TrainResult, decode
from paceline.errors import ConfigError
from paceline.machine import ManualClock
from paceline.paths import BUNDLED_TARGET, TRACES, bundled, service_home

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


STEP_S = 10.0


def write_day(folder, cache):
    """A day of two kinds, each in its own class for the first and the last minute, with text of a live replay; stopped once."""
    texts = {b: next(cache.glob(f"texts/{b}-*")) for b in ("tools", "math")}
    settings = {
        "model": str(bundled(BUNDLED_TARGET)),
        "drafter": str(bundled("specblock")),
        "trainer_price": 0.25,
        "replicas": 1,
    }
    with open_diary(folder, settings) as diary:
        clock = ManualClock(1000.0)
        store = TraceStore(service_home(folder, diary.model_name) / TRACES, clock=clock)
        diary.begin(1000.0)
        for number, (bucket, label) in enumerate((("tools", "~class-1"), ("math", "~class-2"))):
            if number:  # the night between both
                diary.answers = list(open_lines(folder))
                clock.advance(50_000.0)
                diary.begin(clock.now())
            traces = [
                t
                for s in TraceStore(texts[bucket]).list_shards()
                for t in TraceStore(texts[bucket]).read_shard(s.shard_id)
            ]
            for i, trace in enumerate(traces):
                clock.advance(60.0 / len(traces))
                trace = dataclasses.replace(trace, bucket=label, request_id=f"{label}-{i}")
                store.write_shard([trace], label)
                num, group = len(trace.token_ids) - trace.prompt_len, (Group.ADAPTIVE, Group.STATIC, Group.PLAIN)[i % 3]
                rounds = num if group == Group.PLAIN else num // 2
                diary.note(Answer(
                    phase="1", place=i, bucket=bucket, traffic_class=label, group=group, temperature=trace.temperature, num_tokens=num,
                    num_rounds=rounds, num_accepted_tokens=num - rounds, device_s=0.010 * rounds, latency_s=0.1,
                    ended=60.0 * number + 60.0 * (i + 1) / len(traces) - 1e-3, drafter_version="v",
                    prompt_token_ids=tuple(trace.token_ids[: trace.prompt_len]), output_token_ids=tuple(trace.token_ids[trace.prompt_len :]),
                ))  # fmt: skip
    return diary


def open_lines(folder):
    return [msgspec.json.decode(line, type=Answer) for line in (folder / "answers.jsonl").read_bytes().splitlines()]


@pytest.mark.slow
def test_policies_are_replayed_on_the_stream_of_a_day(cache, tmp_path):
    if not list(cache.glob("texts/math-*")):
        pytest.skip("test_jobs_are_real_and_kept writes the text")
    day = tmp_path / "day"
    diary = write_day(day, cache)
    service = DayService(DayConfig(step_s=STEP_S), read_diary(day), tmp_path / "own", lambda words: None)
    assert service.labels == ("~class-1", "~class-2")
    tokens, answers = service.traffic.tokens, open_lines(day)
    assert tokens.sum() == sum(a.num_tokens for a in answers) and tokens[:6, 1].sum() == tokens[6:, 0].sum() == 0
    assert (service.traffic.plain_s, service.traffic.drafted_s) == (pytest.approx(0.010), pytest.approx(0.010))
    ground, kept = service.ground, sum(s.num_rows for infos in service.ground.train_shards.values() for s in infos)
    assert (
        service.served[-1].sum() == kept and service.served[5, 1] == 0 < service.served[5, 0] == service.served[-1, 0]
    )
    for label in service.labels:
        trained, scored = ({s.shard_id for s in part[label]} for part in (ground.train_shards, ground.score_shards))
        assert not trained & scored and len(trained | scored) == 40 and len(scored) == 10
    chosen = variants(("never", "always"), {"min_rows": [160], "job_time_limit_s": [600.0]})
    rows, scenarios, _notes = run_day(chosen, day, num_seeds=1, cache=tmp_path / "own", console=QUIET)
    never, always = rows
    assert never["net_s"] == pytest.approx(0.0, abs=1e-6) and always["num_jobs"] >= 1
    assert scenarios[0]["name"] == "day" and scenarios[0]["settings"]["trainer_price"] == 0.25
    jobs = kept_jobs(tmp_path / "own")
    assert jobs and sum(j.train_s for j in jobs) > 0
    again, _, _ = run_day(chosen, day, num_seeds=1, cache=tmp_path / "own", console=QUIET)
    assert json.dumps(again) == json.dumps(rows)
    shutil.rmtree(service_home(day, diary.model_name))
    with pytest.raises(ConfigError, match="must have captured text"):
        run_day(chosen, day, num_seeds=1, cache=None, console=QUIET)
    with pytest.raises(ConfigError, match=r"must hold a run.json"):
        run_day(chosen, tmp_path, num_seeds=1, cache=None, console=QUIET)


@pytest.mark.parametrize("num", [8, 9, 40, 500])
def test_requests_that_score_are_spread_over_the_day(num):
    trained, scored = split(range(num))
    assert sorted([*trained, *scored]) == list(range(num)) and trained == sorted(trained)
    assert 4 <= len(scored) <= 48 and len(trained) >= len(scored)
    gaps = np.diff([-1, *scored, num])
    assert gaps.max() <= 2 * np.median(gaps)
