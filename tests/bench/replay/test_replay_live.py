"""A live replay really trains, prices versions by exact replay, and computes nothing twice."""

import json
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

from paceline.adapt.data.trace_store import TraceStore
from paceline.bandit.controller.decision_log import read_log
from paceline.bandit.replay.logged import prepare
from paceline.bandit.replay.outcomes import FIRST
from paceline.bandit.replay.world import START, record
from paceline.bench.replay.live import LiveConfig, LiveOutcomes, LiveService, run_live
from paceline.bench.replay.off_policy import METHODS, Variant, run_live_check
from paceline.bench.replay.plan import variants
from paceline.bench.replay.run import RUNS_FILE
from paceline.bench.replay.served import ServedService, run_served, split
from paceline.contracts import TrainResult, decode
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.machine import ManualClock
from paceline.paths import TRACES, resolve_drafter
from paceline.serving.loading.families import build_model, read_drafter_files, save_drafter

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


def write_service(folder, cache):
    """What a service of the live replay's traffic would leave behind: log, first drafter, and text that came as it was served; of
    `facts` next to none was kept."""
    live = LiveService(TINY, None, cache, lambda words: None)
    folder.mkdir()
    log = record(live.world(Variant(policy="never"), 0))
    (folder / "decisions.jsonl").write_bytes(log.replace(f'"{FIRST}"'.encode(), f'"{live.texts.first}"'.encode()))
    shutil.copytree(cache / "registry", folder / "registry")
    clock = ManualClock(START)
    store = TraceStore(folder / TRACES, clock=clock)
    for bucket in ("tools", "math", "facts"):
        shards = [*live.texts.train_shards[bucket], *live.texts.score_shards[bucket]]
        traces = [t for s in shards for t in live.texts.store.read_shard(s.shard_id)]
        for trace in traces[: 3 if bucket == "facts" else None]:
            clock.advance(TINY.phase_s / len(traces))
            store.write_shard([trace], bucket)
    return live


@pytest.mark.slow
def test_policies_are_replayed_on_what_a_service_left_behind(cache, tmp_path):
    folder = tmp_path / "served"
    live = write_service(folder, cache)
    log = prepare(read_log(folder / "decisions.jsonl"), "served")
    service = ServedService(log, folder, "bundled", tmp_path / "own", lambda words: None)
    assert service.texts.labels == ("math", "tools") and service.texts.first == live.texts.first
    assert (service.traffic.drafted_s, service.traffic.plain_s) == (log.traffic.drafted_s, log.traffic.plain_s)
    order = [log.traffic.labels.index(b) for b in service.texts.labels]
    assert np.array_equal(service.traffic.tokens, log.traffic.tokens[:, order])
    told = service.notes()[0]
    assert (
        told.startswith(f"{100 * service.traffic.tokens.sum() / log.traffic.tokens.sum():.0f}% of the log's tokens")
        and "100%" not in told
    )
    rows = np.array([sum(s.num_rows for s in service.texts.train_shards[b]) for b in service.texts.labels])
    assert np.array_equal(service.served[-1], rows) and service.served[2, 0] == 0 < service.served[2, 1], (
        "math comes second"
    )
    assert service.traffic.rows()[-1] == pytest.approx(np.minimum(rows, service.traffic.tokens.sum(0)), rel=1e-6)
    for label in service.texts.labels:
        trained, scored = (
            {s.shard_id for s in part[label]} for part in (service.texts.train_shards, service.texts.score_shards)
        )
        assert not trained & scored and len(trained | scored) == 40 and len(scored) == 10
    chosen = variants(("never", "always"), {"min_rows": [160], "job_time_limit_s": [600.0]})
    options = {"model": "bundled", "num_seeds": 1, "cache": tmp_path / "own", "console": QUIET}
    (never, always), scenarios, _notes = run_served(chosen, folder, **options)
    assert never["net_s"] == pytest.approx(0.0, abs=1e-6) and always["num_jobs"] >= 1
    assert scenarios[0]["name"] == "served" and never["cell"] == "served"
    jobs = kept_jobs(tmp_path / "own")
    assert any(j.status in ("accepted", "learning") for j in jobs) and sum(j.num_rows or 0 for j in jobs) > 0
    again, _, _ = run_served(chosen, folder, **options)
    assert json.dumps(again) == json.dumps([never, always])


@pytest.mark.slow
def test_a_replay_of_a_service_may_begin_with_another_drafter(cache, tmp_path):
    live = write_service(tmp_path / "served", cache)
    log = prepare(read_log(tmp_path / "served" / "decisions.jsonl"), "served")
    model = build_model(*read_drafter_files(resolve_drafter("bundled")))
    with torch.no_grad():
        model.get_parameter("final_norm").neg_()
    save_drafter(tmp_path / "worse", model, live.texts.target.version)
    save_drafter(tmp_path / "foreign", model, "0" * 16)
    options = {"model": "bundled", "num_seeds": 1, "cache": tmp_path / "own", "console": QUIET}
    own, other = (
        ServedService(log, tmp_path / "served", "bundled", tmp_path / "own", lambda words: None, drafter)
        for drafter in (None, tmp_path / "worse")
    )
    assert own.texts.first == live.texts.first != other.texts.first
    lengths = [LiveOutcomes(s.texts, s.served).lengths(FIRST) for s in (own, other)]
    tools = own.texts.labels.index("tools")
    assert lengths[1][tools] < lengths[0][tools] - 0.5
    assert any(str(tmp_path / "worse") in note for note in other.notes()) and len(own.notes()) == len(other.notes()) - 1
    chosen = variants(("never",), {})
    (first,), _, _ = run_served(chosen, tmp_path / "served", **options)
    (second,), _, _ = run_served(chosen, tmp_path / "served", drafter=tmp_path / "worse", **options)
    assert second["never_s"] > first["never_s"], (
        "runs of another first drafter are not taken for those of the service's"
    )
    with pytest.raises(DrafterMismatchError, match="trained for target"):
        run_served(chosen, tmp_path / "served", drafter=tmp_path / "foreign", **options)


def test_what_no_replay_of_a_service_can_use_is_said(tmp_path, cache):
    chosen, options = variants(("never",), {}), {"num_seeds": 1, "cache": None, "console": QUIET}
    with pytest.raises(ConfigError, match=r"--service must be a service's folder"):
        run_served(chosen, tmp_path, model="bundled", **options)
    folder = tmp_path / "served"
    live = write_service(folder, cache)
    manifest = next((folder / "registry").rglob(f"{live.texts.first}*.json"))
    text = manifest.read_text()
    manifest.write_text(text.replace(live.texts.target.version, "0" * 16))
    with pytest.raises(ConfigError, match="--model must be the service's target, 0000000000000000, got 'bundled'"):
        run_served(chosen, folder, model="bundled", **options)
    manifest.write_text(text)
    shutil.rmtree(folder / TRACES)
    with pytest.raises(ConfigError, match="must hold 8 or more shards of a class"):
        run_served(chosen, folder, model="bundled", **options)


@pytest.mark.parametrize("num", [8, 9, 40, 500])
def test_requests_that_score_are_spread_over_the_day(num):
    trained, scored = split(range(num))
    assert sorted([*trained, *scored]) == list(range(num)) and trained == sorted(trained)
    assert 4 <= len(scored) <= 48 and len(trained) >= len(scored)
    gaps = np.diff([-1, *scored, num])
    assert gaps.max() <= 2 * np.median(gaps)
