"""`paceline replay` runs a small grid to its reports and answers bad input in one sentence."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from paceline.bench.replay.report import advice, cell_rows, checks, regret, suggest, write_suggestion
from paceline.cli.main import app
from paceline.config import load_config
from paceline.errors import PacelineError

RUN = CliRunner()


@pytest.mark.slow
def test_a_small_grid_end_to_end(tmp_path):
    names = {n: tmp_path / n for n in ("r.json", "r.html")}
    result = RUN.invoke(app, ["replay", "small", "--policies", "all", "--seeds", "2", "--json", str(names["r.json"]), "--html", str(names["r.html"])])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(names["r.json"].read_text())
    assert report["format"] == 1 and report["num_seeds"] == 2 and report["off_policy"] is None
    cells = {(c["cell"], c["label"]): c for c in report["cells"]}
    for (cell, label), c in cells.items():
        net = c["net_percent"]
        assert net["low"] <= net["mean"] <= net["high"] and net["worst"] <= net["mean"]
        limit = "bound" if label == "bound" else "oracle"
        assert net["mean"] <= cells[(cell, limit)]["net_percent"]["mean"] + 1e-3
        if label == "never":
            assert net["mean"] == 0.0
    lines = report["over_time"]["medium-cheap-cycle"]["payoff"]
    assert len(lines["times_s"]) == len(lines["regret_percent"]) and lines["regret_percent"][-1] >= 0
    page = names["r.html"].read_text()
    assert "Which policy to run" in page and not re.search(r"<script[^>]+src=", page)


def test_a_suggestion_is_a_configuration_with_its_reasons(tmp_path):
    scenario, out = tmp_path / "s.yaml", tmp_path / "tuned.yaml"
    scenario.write_text("regime_s: 200\nduration_s: 400\n")
    result = RUN.invoke(app, ["replay", str(scenario), "--policies", "payoff,never", "--seeds", "6", "--suggest", str(out)])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert load_config(out).policy.policy in ("payoff", "never")
    assert out.read_text().startswith("# ") and "6 seeds" in out.read_text()
    assert "oracle" not in result.output.replace("oracle %", "").replace("of oracle", "")


def test_a_name_that_breaks_lines_breaks_no_suggestion(tmp_path):
    rows = [_row("a\nb: 1\u2028- \x07c", label, seed, 1.0) for label in ("payoff", "never") for seed in range(6)]
    write_suggestion(_report(rows), tmp_path / "s.yaml")
    assert load_config(tmp_path / "s.yaml").policy.policy in ("payoff", "never")
    assert "(a b: 1 -  c)" in (tmp_path / "s.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "scenario must be"),
        ([""], "source must not be empty"),
        (["small", "--first-seed", "-1"], "first-seed must be in [0, "),
        (["small", "--resume", "/dev/null"], "resume must be a folder"),
        (["small", "--policies", "never", "--sweep", "bank_s=1,2"], "got bank_s with never"),
        (["small", "--policies", "greedy"], "policies must be among"),
        (["small", "--sweep", "nope=1"], "sweep must be"),
        (["small", "--seeds", "0"], "seeds must be >= 1"),
        (["small", "--workers", "0"], "workers must be >= 1"),
        (["live", "--load", "0"], "load must be > 0"),
        (
            ["live", "--service", ".", "--load", "2"],
            "--service must go with source live, and without --data and --load",
        ),
        (["live-small", "--service", "."], "--service must go with source live"),
        (["live", "--service", "nowhere"], "must be a folder"),
        (["live", "--service", "."], "--service must be a service's folder"),
        (["live", "--model", "smollm2"], "--model must go with --service"),
        (["live", "--drafter", "."], "--drafter must go with --service"),
        (
            ["small", "--seeds", "5", "--suggest", "s.yaml"],
            "seeds must be >= 6 to suggest settings, got 5; give --seeds 6 or more",
        ),
        (["live", "--suggest", "s.yaml"], "suggest must be left out of live replays: it needs 6 seeds"),
        (["absent.yaml"], "readable file"),
        (["absent.jsonl"], "readable file"),
        (["live-small", "--policies", "payoff,oracle"], "live replay"),
        (["small", "--data", "/absent-folder"], "data must be a folder"),
        (["small", "--data", "/"], "--data must be left out with small"),
        *(
            ([source, "--policies", "payoff", "--seeds", "2", *option], f"{option[0]} must be left out with {source}")
            for source in ("live", "live-small", "off-policy-live")
            for option in (["--workers", "2"], ["--ray", "auto"], ["--first-seed", "3"])
        ),
        (["live", "--workers", "2", "--first-seed", "1"], "--workers, --first-seed must be left out with live"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(arguments, message):
    result = RUN.invoke(app, ["replay", *arguments])
    assert isinstance(result.exception, PacelineError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize("source", ["live", "live-small", "off-policy", "off-policy-live"])
@pytest.mark.parametrize("named", [[], ["--policies", "all"]])
def test_plans_of_hindsight_that_nobody_named_are_left_out_where_there_can_be_none(monkeypatch, source, named):
    ran = []

    def stop(chosen, *args, **kwargs):
        ran.extend(v.policy for v in chosen)
        raise PacelineError("enough")

    for name in ("off_policy.run_check", "off_policy.run_live_check", "live.run_live"):
        monkeypatch.setattr(f"paceline.bench.replay.{name}", stop)
    result = RUN.invoke(app, ["replay", source, *named, "--seeds", "2"])
    assert str(result.exception) == "enough"
    assert "payoff" in ran and "oracle" not in ran and ("hedge" in ran) is bool(named)


def test_an_own_policy_that_fails_keeps_its_traceback_and_the_run_is_named():
    own = "tests.helpers.own_policy:ReadsAFile"
    arguments = ["replay", "medium-normal-cycle", "--policies", own, "--seeds", "1"]
    found = subprocess.run([sys.executable, "-m", "paceline.cli.main", *arguments], capture_output=True, text=True)
    assert found.returncode == 1 and "error:" not in found.stderr
    assert 'open("/absent/table.npz")' in found.stderr and "FileNotFoundError" in found.stderr
    assert f"policy '{own}' raised this in choose(view, rng)" in found.stderr
    assert f"run: policy {own}, cell 'medium-normal-cycle', seed 0" in found.stderr


def test_a_policy_that_trains_while_a_job_runs_is_refused_by_its_name():
    own = "tests.helpers.own_policy:Careless"
    result = RUN.invoke(app, ["replay", "medium-normal-cycle", "--policies", own, "--seeds", "1"])
    assert isinstance(result.exception, PacelineError)
    assert f"policy '{own}' must return no job while another one runs" in str(result.exception)


def test_a_suggestion_without_a_policy_to_suggest_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.bench.replay.command.run_all", None)
    result = RUN.invoke(app, ["replay", "small", "--policies", "oracle,bound", "--seeds", "6", "--suggest", str(tmp_path / "s.yaml")])  # fmt: skip
    assert isinstance(result.exception, PacelineError) and "besides the oracle" in str(result.exception)


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path):
    scenario = tmp_path / "s.yaml"
    shared = "regime_s: 200\nduration_s: 200\nfamily: '[/z]'\n"
    scenario.write_text(shared + "cells:\n  - {name: 'a[/b]'}\n  - {name: '[red]x'}\n")
    result = RUN.invoke(app, ["replay", str(scenario), "--policies", "payoff,never", "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "a[/b]" in result.output and "[red]x" in result.output and "[/z]" in result.output


def test_a_cell_that_serves_nothing_nets_nothing_and_says_so(tmp_path):
    scenario, out = tmp_path / "s.yaml", tmp_path / "r.json"
    scenario.write_text("load: 0.0001\nduration_s: 600\n")
    result = RUN.invoke(app, ["replay", str(scenario), "--policies", "payoff,oracle", "--seeds", "1", "--json", str(out)])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert {c["net_percent"]["mean"] for c in report["cells"]} == {0.0}
    assert any("nothing was served in s" in note for note in report["notes"])


def test_a_damaged_log_is_answered_in_one_sentence(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"kind": "decision"}\n')
    result = RUN.invoke(app, ["replay", str(path)])
    assert isinstance(result.exception, PacelineError) and "line 1 is damaged" in str(result.exception)


def _row(cell, label, seed, net, *, policy=None, settings=None):
    return {
        "cell": cell, "family": "f", "label": label, "policy": policy or label, "settings": settings or {}, "seed": seed,
        "never_s": 100.0, "serving_s": 100.0 - net - 1.0, "net_s": net, "spent": {"training": 1.0}, "ledger": {"saved_s": net + 1.0},
        "curve": [0.0, net], "times": [0.0, 10.0], "num_jobs": 1, "num_swaps": 1, "events": [], "contradictions": [],
    }  # fmt: skip


def _report(rows):
    from paceline.bench.replay.report import build_report

    return build_report(rows, kind="synthetic", source="x", scenarios=[{"name": "a"}])


def test_intervals_hold_the_mean_and_shrink_with_seeds():
    few, many = (
        cell_rows([_row("a", "payoff", i, float(1 + i % 4)) for i in range(n)])[0]["net_percent"] for n in (4, 40)
    )
    assert few["low"] < few["mean"] == many["mean"] == 2.5 < few["high"]
    assert many["high"] - many["low"] < few["high"] - few["low"]


def test_the_net_of_a_cell_is_what_it_saved_less_what_it_spent_however_much_its_runs_served():
    rows = [_row("a", "payoff", seed, net) | {"never_s": never_s, "serving_s": never_s - net - 1.0} for seed, (never_s, net) in enumerate([(10.0, 5.0), (1000.0, 20.0)])]  # fmt: skip
    (cell,) = cell_rows(rows)
    assert cell["net_percent"]["mean"] == pytest.approx(cell["true_saving_percent"] - cell["spent_percent"], abs=2e-3)
    assert cell["booked_saving_percent"] == cell["true_saving_percent"]


def test_regret_is_the_bound_less_the_net():
    rows = [_row("a", "oracle", 0, 8.0), _row("a", "payoff", 0, 5.0)]
    assert regret(rows)["a"]["payoff"]["regret_percent"] == [0.0, 3.0]
    assert regret(rows[1:])["a"]["payoff"]["regret_percent"] == []


def test_a_run_is_compared_with_the_oracle_of_its_own_settings():
    swept = [
        _row("a", f"{policy} trainer_price={price}", 0, net, policy=policy, settings={"trainer_price": price, **more})
        for policy, price, net, more in (
            ("payoff", 0, 9.0, {"hysteresis": 2}), ("payoff", 1, 4.0, {"hysteresis": 2}), ("oracle", 0, 10.0, {}), ("oracle", 1, 8.0, {})
        )
    ]  # fmt: skip
    rows = [*swept, _row("a", "never", 0, 0.0)]
    shares = {c["label"]: c["of_oracle"] for c in cell_rows(rows)}
    assert shares["payoff trainer_price=0"] == 0.9 and shares["payoff trainer_price=1"] == 0.5
    assert regret(rows)["a"]["payoff trainer_price=1"]["regret_percent"] == [0.0, 4.0]
    assert regret(rows)["a"]["never"]["regret_percent"] == [0.0, 9.0]  # the mean of those that might be its own
    assert advice(rows)[0]["oracle_percent"] == 10.0


def test_no_share_of_an_oracle_is_claimed_where_none_ran():
    rows = [_row("a", "payoff", 0, 6.0), _row("b", "payoff", 0, -2.0)]
    found = _report(rows)
    assert not [c for c in found["checks"] if "oracle" in c["claim"]]
    assert {c["of_oracle"] for c in found["cells"]} == {o["of_oracle_mean"] for o in found["overall"]} == {None}
    poor = _report([*rows, _row("a", "oracle", 0, 1.0), _row("b", "oracle", 0, 0.0)])
    assert not [c for c in poor["checks"] if "oracle" in c["claim"]]


def test_one_seed_has_no_interval_and_tells_no_policies_apart():
    rows = [_row("a", label, 0, net) for label, net in (("x", 5.0), ("y", 1.0))]
    assert {c["net_percent"]["low"] for c in cell_rows(rows)} == {None}
    assert advice(rows)[0]["as_good"] == ["y"]


def test_a_suggestion_needs_six_seeds_and_says_when_they_do_not_tell_the_sign():
    def report(num, nets):
        return _report([_row("a", "payoff", s, nets[s % len(nets)]) for s in range(num)])

    with pytest.raises(PacelineError, match=r"seeds must be >= 6 to suggest settings, got 5"):
        suggest(report(5, [4.0, 5.0]))
    assert not any("do not say" in line for line in suggest(report(6, [4.0, 5.0]))[1])
    (line,) = [line for line in suggest(report(6, [-1.0, 1.5]))[1] if "do not say" in line]
    needed = int(re.search(r"about (\d+) would", line)[1])
    assert needed > 6 and not any("do not say" in line for line in suggest(report(2 * needed, [-1.0, 1.5]))[1])


def test_a_suggestion_that_surely_loses_says_so():
    _, why = suggest(_report([_row("a", "payoff", seed, -0.5 - seed / 100) for seed in range(6)]))
    assert "It surely loses on this traffic; 'never' would not." in why
    _, why = suggest(_report([_row("a", "payoff", seed, 0.5 + seed / 100) for seed in range(6)]))
    assert not any("loses" in line for line in why)


def test_checks_name_the_cells_that_fall_short():
    rows = [_row("a", "oracle", 0, 10.0), _row("a", "payoff", 0, 6.0), _row("b", "oracle", 0, 1.0), _row("b", "payoff", 0, -2.0),
            _row("a", "interval interval_s=60", 0, 4.0, policy="interval"), _row("b", "interval interval_s=60", 0, 0.5, policy="interval")]  # fmt: skip
    found = checks(cell_rows(rows))
    assert [c["holds"] for c in found] == [False, False, False]
    assert found[0]["numbers"] == ["b (payoff): -2.00%"] and found[1]["numbers"] == ["a (payoff): 60%"]


def test_advice_tells_apart_only_what_the_seeds_tell_apart():
    rows = [_row("a", label, seed, net) for seed in range(6) for label, net in (("x", 5.0 + seed % 2), ("y", 5.1 - seed % 2), ("z", 1.0))]  # fmt: skip
    (found,) = advice(rows)
    assert found["best"] == "x" and "z" not in found["as_good"]


def test_advice_is_the_same_in_every_process(monkeypatch):
    seen = []
    monkeypatch.setattr("paceline.bench.replay.report.mean_interval", lambda values: (0.0, seen.append(values)))
    advice([_row(c, label, seed, net) for c in "ab" for seed in range(20) for label, net in (("x", 50.0), ("y", seed))])
    assert seen == [[50.0 - seed for seed in range(20)]]  # names in sets are in an order of the process


def test_a_safe_setting_is_suggested_before_a_higher_but_risky_one():
    rows = [row for seed in range(6) for row in (
            _row("a", "risky", seed, 20.0, policy="always"), _row("b", "risky", seed, -5.0, policy="always"),
            _row("a", "payoff bank_s=50", seed, 4.0, policy="payoff", settings={"bank_s": 50.0}), _row("b", "payoff bank_s=50", seed, 0.0, policy="payoff", settings={"bank_s": 50.0}))]  # fmt: skip
    values, why = suggest(_report(rows))
    assert values == {"policy": {"policy": "payoff", "bank_s": 50.0}}
    assert any("higher net, but a worse worst cell" in line for line in why)
    assert yaml.safe_load(yaml.safe_dump(values)) == values


def test_a_decision_log_is_valued_by_its_own_randomisation(tmp_path):
    from paceline.bandit.replay.world import record
    from paceline.bench.replay.off_policy import CELL, Variant, simulated_world

    path, names = tmp_path / "replay.jsonl", {n: tmp_path / n for n in ("r.json", "r.html")}
    world = simulated_world(dataclasses.replace(CELL, duration_s=900.0), Variant(policy="payoff"), 3)
    path.write_bytes(record(world))
    result = RUN.invoke(app, ["replay", str(path), "--policies", "never,payoff,always,oracle", "--seeds", "1", "--json", str(names["r.json"]), "--html", str(names["r.html"])])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "What the log says" in result.output
    found = {o["label"]: o for o in json.loads(names["r.json"].read_text())["off_policy"]}
    assert set(found) == {"never", "payoff", "always"}
    assert found["never"]["verdict"] == "exact" and found["always"]["verdict"] == "cannot tell"
    payoff = found["payoff"]
    assert payoff["low_s"] <= payoff["total_s"] <= payoff["high_s"]
    assert payoff["mean_s"] * payoff["num_decisions"] == pytest.approx(payoff["total_s"], abs=0.01)
    page = names["r.html"].read_text()
    assert "What the log says" in page and "overlap is too thin" in page


def test_a_log_whose_jobs_went_better_than_the_gain_model_says_beats_its_plans_and_says_so(tmp_path):
    from paceline.bandit.replay.world import record
    from paceline.bench.replay.off_policy import CELL, Variant, simulated_world

    path, out = tmp_path / "replay.jsonl", tmp_path / "r.json"
    cell = dataclasses.replace(CELL, headroom=2.5, regime_s=900.0, train_cost=1.0)
    path.write_bytes(record(simulated_world(cell, Variant(policy="payoff"), 0)))
    result = RUN.invoke(app, ["replay", str(path), "--policies", "payoff,oracle,bound", "--seeds", "1", "--json", str(out)])  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    net = {o["label"]: o["net_percent"]["mean"] for o in report["overall"]}
    assert net["payoff"] > net["bound"] > net["oracle"] > 0
    plans = [n for n in report["notes"] if n.startswith(("oracle: ", "bound: "))]
    assert len(plans) == 2 and all("by the gain model alone, which the log's own jobs may beat" in n for n in plans)
