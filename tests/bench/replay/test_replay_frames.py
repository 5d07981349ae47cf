"""`paceline.replay` gives columns that data frames take; policies of others run without a fork."""

import importlib.machinery
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline.replay as replay
from paceline.bandit.controller.decision_log import parse_log
from paceline.bandit.off_policy.log import value_policy
from paceline.bandit.policies.table import is_self_funded, make_policy
from paceline.bandit.replay.logged import prepare
from paceline.bandit.replay.world import record
from paceline.bench.replay.command import ReplayOptions
from paceline.bench.replay.frames import FRAMES
from paceline.bench.replay.off_policy import simulated_world
from paceline.bench.replay.plan import Variant, policy_names
from paceline.cli.main import app
from paceline.config import PolicyConfig, build, load_config
from paceline.errors import ConfigError
from tests.helpers.own_policy import Cheapest

CELL = replay.Scenario(name="one", regime_s=200.0, duration_s=600.0, train_cost=0.3)
OWN = "tests.helpers.own_policy:Cheapest"
RUN = CliRunner()


@pytest.fixture(scope="module")
def found():
    return replay.replay(CELL, [Cheapest, "never", "oracle"], seeds=2)


def test_columns_are_of_one_length_and_say_what_the_runs_netted(found):
    for name in FRAMES:
        columns = getattr(found, name)
        assert columns and len({len(values) for values in columns.values()}) == 1, name
    runs = found.runs
    assert sorted(zip(runs["policy"], runs["seed"], strict=True)) == sorted((p, s) for p in (OWN, "never", "oracle") for s in (0, 1))  # fmt: skip
    spent = [sum(runs[k][i] for k in runs if k.startswith("spent_")) for i in range(len(runs["seed"]))]
    for i, net in enumerate(runs["net_s"]):
        assert net == pytest.approx(runs["never_s"][i] - runs["serving_s"][i] - spent[i])
    last = {(c, s): v for c, s, v in zip(found.curves["label"], found.curves["seed"], found.curves["net_s"], strict=True)}  # fmt: skip
    assert last == {(p, s): pytest.approx(n, abs=1e-3) for p, s, n in zip(runs["policy"], runs["seed"], runs["net_s"], strict=True)}  # fmt: skip
    assert found.cells["label"] == [c["label"] for c in found.report["cells"]]
    assert OWN in found.decisions["label"] and "train" in found.decisions["action"]


def test_worlds_come_as_tables_as_values_as_files_and_by_name(tmp_path):
    values = json.loads((Path(replay.__file__).parent / "worlds" / "nothing-to-gain.json").read_text())
    for spell in values["traffic"]:
        spell["steps"] = max(spell.get("steps", 1) // 4, 1)
    by_values = replay.replay(values, "payoff", seeds=1)
    by_table = replay.replay([replay.table_of(values)], "payoff", seeds=1)
    (tmp_path / "w.json").write_text(json.dumps(values))
    by_file, by_folder = (replay.replay(str(p), "payoff", seeds=1) for p in (tmp_path / "w.json", tmp_path))
    assert by_values.runs == by_table.runs == by_file.runs == by_folder.runs
    with pytest.raises(ConfigError, match="names of their own"):
        replay.replay([values, values], "payoff", seeds=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="must hold worlds"):
        replay.replay(tmp_path / "empty", "payoff", seeds=1)


def test_a_frame_without_its_library_says_what_to_install(found, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for library in ("pyarrow", "tensorboard"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[frames\]'"):
        found.frame("runs")
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[frames\]'"):
        found.write_parquet(tmp_path / "out")
    with pytest.raises(ConfigError, match="frame must be one of runs, cells"):
        found.frame("rows")
    result = RUN.invoke(app, ["replay", "small", "--seeds", "1", "--parquet", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError) and "parquet needs pyarrow" in str(result.exception)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'"):
        found.write_tensorboard(tmp_path / "out")


def test_a_pandas_frame_has_the_columns(found):
    pytest.importorskip("pandas")
    frame = found.frame("runs")
    assert list(frame.columns) == list(found.runs) and frame.shape == (6, len(found.runs))
    assert frame.groupby("policy").net_percent.mean()["never"] == pytest.approx(0.0, abs=1e-9)


def test_parquet_files_hold_the_columns(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    scenario = tmp_path / "s.yaml"
    scenario.write_text("regime_s: 200\nduration_s: 400\n")
    result = RUN.invoke(app, ["replay", str(scenario), "--seeds", "1", "--policies", "payoff,oracle", "--parquet", str(tmp_path / "out")])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted(p.stem for p in (tmp_path / "out").iterdir()) == sorted(FRAMES)
    runs = parquet.read_table(tmp_path / "out" / "runs.parquet").to_pydict()
    assert runs["policy"] == ["payoff", "oracle"] and runs["cell"] == ["s", "s"]
    assert parquet.read_table(tmp_path / "out" / "cells.parquet").num_rows == 2


def test_tensorboard_has_a_log_of_each_run_with_its_curve_and_figures(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scenario, out = tmp_path / "s.yaml", tmp_path / "out"
    scenario.write_text("name: ../s\nregime_s: 200\nduration_s: 400\n")
    result = RUN.invoke(app, ["replay", str(scenario), "--seeds", "1", "--policies", "never", "--tensorboard", str(out)])  # fmt: skip
    assert result.exit_code == 0 and "tensorboard --logdir" in result.output, result.output
    found = replay.replay(scenario, "payoff,never", seeds=2)
    found.write_tensorboard(out / "all")
    assert len(list(out.iterdir())) == 2, "one folder a run, whatever the cell is called"
    keys = list(zip(*(found.curves[k] for k in ("label", "seed")), strict=True))
    for i, (label, seed, net_s) in enumerate(zip(*(found.runs[k] for k in ("label", "seed", "net_s")), strict=True)):
        (folder,) = (out / "all").glob(f"* {label} seed {seed} run {i}")
        log = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        *curve, figure = log.Scalars("net_s")  # the last is that of the hyperparameters
        points = [
            (t, v)
            for k, t, v in zip(keys, found.curves["t_s"], found.curves["net_s"], strict=True)
            if k == (label, seed)
        ]
        assert [(p.wall_time, p.value) for p in curve] == [pytest.approx(p, abs=1e-3) for p in points]
        assert figure.value == pytest.approx(net_s, abs=1e-3)
        assert "_hparams_/session_start_info" in log.summary_metadata


def test_columns_of_one_seed_are_numbers_too():
    cells = replay.replay(CELL, "never", seeds=1).cells
    names = ("net_low_percent", "net_high_percent", "of_oracle")
    assert all(isinstance(cells[name][0], float) and math.isnan(cells[name][0]) for name in names)


def test_acts_have_their_columns_where_nothing_acted(found):
    idle = replay.replay(CELL, "never", seeds=1)
    assert idle.decisions == {name: [] for name in found.decisions}


def test_parquet_where_it_cannot_be_written_is_refused_before_anything_runs(monkeypatch, tmp_path):
    library = types.ModuleType("pyarrow")
    library.__spec__ = importlib.machinery.ModuleSpec("pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow", library)
    (tmp_path / "runs.parquet").mkdir()
    for folder, message in ((Path(__file__), "parquet must be a folder"), (tmp_path, "parquet must name a file")):
        with pytest.raises(ConfigError, match=message):
            ReplayOptions(source="small", parquet=folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds must be >= 1, got 0"), ({"seeds": "2"}, "seeds must be int, got '2'"),
        ({"seeds": 1.5}, "seeds must be int, got 1.5"), ({"first_seed": -1}, "first-seed must be in \\[0, "),
        ({"first_seed": 2**63}, "first-seed must be in "), ({"source": replay.TableWorld}, "source must be a name or a file"),
        ({"source": types.SimpleNamespace(name="own", family="own", draw=print)}, "source must be a name or a file"),
        ({"workers": 0}, "workers must be >= 1"), ({"sweep": "bank_s=1"}, "sweep must be a list"),
        ({"resume": __file__}, "resume must be a folder"), ({"source": ""}, "source must not be empty"),
        ({"source": None}, "source must be a name or a file, .* got None"), ({"source": [3]}, "source must be .* got 3"),
        ({"source": ["small"]}, "source must be .* got 'small'"), ({"source": []}, "names of their own, got none"),
        ({"policies": [Cheapest()]}, "policies must be names or classes"), ({"policies": None}, "got None"),
        ({"policies": [type("In", (Cheapest,), {"__qualname__": "Out.In"})]}, "classes at module level only"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        replay.replay(**{"source": CELL, "policies": "never", "seeds": 1} | changes)


def test_a_class_alone_and_a_folder_by_its_name_are_taken(tmp_path):
    runs = replay.replay(CELL, Cheapest, seeds=1, resume=str(tmp_path / "runs")).runs
    assert runs["policy"] == [OWN] and (tmp_path / "runs" / "runs.jsonl").is_file()


def test_a_policy_of_another_runs_by_its_class_and_is_funded_as_it_says():
    assert policy_names(f"payoff,{OWN}") == ("payoff", OWN)
    assert is_self_funded(OWN) and is_self_funded("payoff") and not is_self_funded("cara")
    assert type(make_policy(OWN)) is Cheapest
    assert build(PolicyConfig, {"policy": OWN}).policy == OWN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.helpers.own_policy:Absent", "must be importable; put its folder on PYTHONPATH"),
        ("no_such_module:Policy", "must be importable; put its folder on PYTHONPATH"),
        ("tests.helpers.own_policy:NoPolicy", r"must be a class with a method choose\(view, rng\)"),
        ("tests.helpers.own_policy:NeedsMore", "must be a class that needs no arguments"),
        ("tests.helpers.own_policy:np", r"must be a class with a method choose\(view, rng\)"),
        ("a b:c", "policy.policy must be one of never, always, .*, or MODULE:CLASS"),
        ("greedy", "policies must be among"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_before_anything_runs(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        policy_names(name)
    assert "\n" not in str(caught.value)


def test_a_policy_that_returns_no_choice_is_named():
    name = "tests.helpers.own_policy:ReturnsNothing"
    message = f"policy '{name}' must return a Choice from choose.*got None"
    with pytest.raises(ConfigError, match=message):
        replay.replay(CELL, name, seeds=1)
    with pytest.raises(ConfigError, match=message):  # asked about each decision of a log
        value_policy(
            prepare(parse_log(record(simulated_world(CELL, Variant(policy="payoff"), 0)), "log"), "log"), name, {}
        )


def test_a_class_that_is_defined_anew_is_the_one_that_runs(monkeypatch):
    """As in a notebook, whose classes are those of `__main__`."""

    class Defined(Cheapest):
        is_self_funded = False

    monkeypatch.setattr("tests.helpers.own_policy.Defined", Cheapest, raising=False)
    name = "tests.helpers.own_policy:Defined"
    assert type(make_policy(name)) is Cheapest and is_self_funded(name)
    monkeypatch.setattr("tests.helpers.own_policy.Defined", Defined)
    assert type(make_policy(name)) is Defined and not is_self_funded(name)


def test_a_configuration_names_no_policy_that_is_not_there(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("policy: {policy: sometimes}\n")
    with pytest.raises(ConfigError, match=r"policy\.policy must be one of payoff, never, .* got 'sometimes'"):
        load_config(path)


def test_an_installed_package_brings_a_policy_by_its_entry_point(tmp_path):
    (tmp_path / "brought.py").write_text("from tests.helpers.own_policy import Cheapest as Brought\n")
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.policies]\nthrifty = brought:Brought\n")
    scenario = tmp_path / "s.yaml"
    scenario.write_text("regime_s: 200\nduration_s: 400\ntrain_cost: 0.3\n")
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "paceline.cli.main", "replay", str(scenario), "--policies", "thrifty", "--seeds", "2", "--workers", "2", "--json", str(out)]  # fmt: skip
    path = os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["policy"] == "thrifty" and cell["num_seeds"] == 2
