"""Runs are planned, spread over processes, resumed after a kill, and give the same rows whichever way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from paceline.bandit.replay.scenario import Scenario
from paceline.bandit.replay.simulate import simulate
from paceline.bench.replay.plan import parse_sweep, plan, policy_names, read_scenarios, variants
from paceline.bench.replay.run import RUNS_FILE, read_finished, run_all
from paceline.errors import ConfigError
from tests.helpers.api_server import wait_until

QUIET = Console(quiet=True)
CELLS = [Scenario(name=n, regime_s=200.0, duration_s=400.0, recurrence=r) for n, r in (("one", "cycle"), ("two", "fresh"))]  # fmt: skip


def _tasks(seeds=2):
    return plan(CELLS, variants(("never", "payoff", "oracle"), {}), seeds)


@pytest.fixture(scope="module")
def rows():
    """Of one process."""
    return run_all(_tasks(), workers=1, resume=None, console=QUIET)


def test_rows_come_in_the_order_of_the_tasks_and_hold_their_names(rows):
    assert [(r["seed"], r["cell"], r["policy"]) for r in rows] == [
        (s, c, p) for s in (0, 1) for c in ("one", "two") for p in ("never", "payoff", "oracle")
    ]


def test_two_processes_give_the_rows_of_one(rows):
    found = run_all(_tasks(1), workers=2, resume=None, console=QUIET)
    assert found == rows[:6]


@pytest.fixture
def long_replay(tmp_path):
    """(a replay that takes long, its two workers at work); nothing of it is left behind."""
    scenario = tmp_path / "long.yaml"
    scenario.write_text("regime_s: 20000\nduration_s: 2000000\n")
    command = [sys.executable, "-m", "paceline.cli.main", "replay", str(scenario), "--policies", "payoff", "--seeds", "4", "--workers", "2"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    workers = []
    try:
        wait_until(lambda: len(_workers(process.pid)) == 2 or process.poll() is not None)
        workers = _workers(process.pid)
        wait_until(lambda: all(w.cpu_times().user > 0.5 for w in workers))
        yield process, workers
    finally:
        for left in (*workers, process):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.mark.parametrize("gap_s", [None, 0.02])
def test_interrupts_of_the_whole_group_end_it_with_its_workers(long_replay, gap_s):
    process, workers = long_replay
    for wait_s in (0.0, *(() if gap_s is None else (gap_s,))):
        time.sleep(wait_s)  # as two presses of Ctrl-C are apart
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) != 0
    wait_until(lambda: not any(map(_is_alive, workers)))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_workers_of_a_replay_that_was_killed_end_with_it(long_replay, sent):
    process, workers = long_replay
    process.send_signal(sent)
    process.wait(timeout=20)
    wait_until(lambda: not any(map(_is_alive, workers)))


def _workers(pid: int) -> list[psutil.Process]:
    """Worker processes of a replay."""
    try:
        return [p for p in psutil.Process(pid).children() if "spawn_main" in " ".join(p.cmdline())]
    except psutil.Error:  # ended
        return []


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended may wait for whoever adopted it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was_and_gives_the_same_result(tmp_path):
    scenario = tmp_path / "cells.yaml"
    scenario.write_text("regime_s: 300\nduration_s: 1200\ncells:\n  - {name: a}\n  - {name: b, recurrence: fresh}\n")
    command = [sys.executable, "-m", "paceline.cli.main", "replay", str(scenario), "--policies", "payoff,oracle", "--seeds", "40", "--resume"]  # fmt: skip
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (killed / RUNS_FILE).is_file():
        time.sleep(0.05)
    while time.monotonic() < deadline and len((killed / RUNS_FILE).read_bytes().splitlines()) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = (killed / RUNS_FILE).read_bytes().splitlines(keepends=True)[:2]  # however late a busy machine killed it
    (killed / RUNS_FILE).write_bytes(b"".join(lines) + b'{"key": "torn')  # what a kill within a write leaves
    first = read_finished(killed)
    before = os.stat(killed / RUNS_FILE).st_size
    tasks = plan(read_scenarios(str(scenario)), variants(("payoff", "oracle"), {}), 2)
    assert 2 == len(first) < len(tasks)
    resumed = run_all(tasks, workers=1, resume=killed, console=QUIET)
    assert os.stat(killed / RUNS_FILE).st_size > before and set(first) <= {r["key"] for r in resumed}
    assert json.dumps(resumed) == json.dumps(run_all(tasks, workers=1, resume=None, console=QUIET))


@pytest.mark.parametrize("damage", ["nonsense", '{"key": "a"}', "[1]"])
def test_a_damaged_line_in_the_middle_is_refused(tmp_path, rows, damage):
    good = json.dumps(rows[0])
    (tmp_path / RUNS_FILE).write_text(f"{good}\n{damage}\n{good}\n")
    with pytest.raises(ConfigError, match="line 2 is damaged"):
        read_finished(tmp_path)


def test_a_line_that_lacks_what_a_report_needs_is_damaged(tmp_path, rows):
    (tmp_path / RUNS_FILE).write_text(json.dumps({k: v for k, v in rows[0].items() if k != "spent"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1 is damaged .*`spent`"):
        read_finished(tmp_path)


def test_another_setting_is_another_run(tmp_path):
    tasks = plan(CELLS[:1], variants(("payoff",), {"bank_s": [5.0, 50.0]}), 1)
    assert len({t.key for t in tasks}) == 2
    assert [t.variant.label for t in tasks] == ["payoff bank_s=5", "payoff bank_s=50"]


def test_a_sweep_leaves_policies_alone_that_do_not_read_the_setting():
    found = variants(("never", "interval", "payoff", "oracle"), {"interval_s": [60.0, 600.0], "min_rows": [500]})
    assert [v.label for v in found] == [
        "never", "interval interval_s=60 min_rows=500", "interval interval_s=600 min_rows=500", "payoff min_rows=500", "oracle",
    ]  # fmt: skip


def test_settings_of_money_concern_those_alone_who_mind_it():
    found = variants(("always", "interval", "cara", "payoff", "thompson"), {"bank_s": [5.0, 50.0], "hysteresis": [2.0]})
    assert [v.label for v in found] == [
        "always", "interval", "cara", *(f"{p} bank_s={b} hysteresis=2" for p in ("payoff", "thompson") for b in (5, 50)),
    ]  # fmt: skip
    free = {"bank_s": 500.0, "bank_income": 0.5, "hysteresis": 3.0, "horizon_s": 2000.0}
    for policy in ("always", "interval", "dual_ema", "cara"):
        assert simulate(CELLS[1], policy, free, 0) == simulate(CELLS[1], policy, {}, 0)


def test_a_policy_of_anothers_is_swept_over_any_setting():
    found = variants(("tests.helpers.own_policy:Wasteful",), {"interval_s": [60.0, 600.0], "bank_s": [5.0]})
    assert [dict(v.settings)["interval_s"] for v in found] == [60.0, 600.0]


def test_a_plan_with_hindsight_is_swept_over_what_it_reads():
    found = variants(("never", "payoff", "oracle"), {"holdback_percent": [0, 10], "hysteresis": [2.0]})
    assert [v.label for v in found] == [
        "never", "payoff holdback_percent=0 hysteresis=2", "payoff holdback_percent=10 hysteresis=2",
        "oracle holdback_percent=0", "oracle holdback_percent=10",
    ]  # fmt: skip


def test_values_that_differ_late_are_runs_of_their_own():
    near = [100.00001, 100.00002]
    tasks = plan(CELLS[:1], variants(("interval",), {"interval_s": near}), 1)
    assert len({t.key for t in tasks}) == len({t.variant.label for t in tasks}) == 2


def test_a_sweep_reads_values_of_the_type_of_the_setting_each_once():
    assert parse_sweep(["trusts_groups=true,false"]) == {"trusts_groups": [True, False]}
    assert parse_sweep(["hysteresis=1.0", "hysteresis=2,1"]) == {"hysteresis": [1.0, 2.0]}


def test_settings_of_a_sweep_are_checked_together():
    (found,) = variants(("dual_ema",), parse_sweep(["ema_fast=0.04", "ema_slow=0.01"]))
    assert dict(found.settings) == {"ema_fast": 0.04, "ema_slow": 0.01}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interval_s", "sweep must be KEY="), ("interval_s=,", "sweep must be KEY="), ("nope=1", "sweep must be KEY="),
        ("policy=payoff", "sweep must be KEY="), ("seed=3", "sweep must be KEY="),
        ("interval_s=soon", "sweep interval_s must be float, got 'soon'"),
        ("trusts_groups=maybe", "sweep trusts_groups must be bool, got 'maybe'"),
        ("epoch_s=-1", "policy.epoch_s must be > 0"),
        ("trainer_price=nan", "policy.trainer_price must be a finite number"),
        ("ema_fast=0.04", "policy.ema_slow must be in"),
        ("cara_factor=2", "got cara_factor with never, dual_ema, oracle"),
    ],
)  # fmt: skip
def test_a_sweep_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        variants(("never", "dual_ema", "oracle"), parse_sweep([text]))


def test_policy_names_are_checked_and_all_names_every_one():
    from paceline.bandit.policies.table import POLICIES

    assert policy_names("all") == (*POLICIES, "oracle", "bound")
    assert policy_names("payoff, never,payoff") == ("payoff", "never")
    with pytest.raises(ConfigError, match=r"never, .*oracle.*'greedy'"):
        policy_names("never,greedy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regime: 3\n", "scenario.regime is not a setting"),
        ("cells:\n  - {train_costs: 3}\n", r"cells\[0\].train_costs is not a setting"),
        ("cells: 3\n", "cells must be a list"),
        ("- 3\n", "must be a mapping"),
        ("a: [\n", "must be YAML"),
        ("load: 1\nload: 2\n", r"must give each key once: 'load' of line 2 is in line 1 already"),
        ("load: none\n", "scenario.load must be float"),
        ("cells:\n  - {name: a}\n  - {name: a}\n", "names of their own"),
    ],
)
def test_a_scenario_file_with_a_mistake_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_scenarios(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_ray_cluster_gives_the_rows_of_one_process(rows):
    import ray

    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False
    )  # others may run on this computer
    try:
        found = run_all(_tasks(1), workers=1, resume=None, console=QUIET, ray_address="auto")
    finally:
        ray.shutdown()
    assert found == rows[:6]
