"""The demo's scenario, sums and report, without a service."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from paceline.bench.common.result_file import write_json
from paceline.contracts import Decision, Group
from paceline.errors import ConfigError
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.run import DemoOptions
from paceline.infra.demo.scenario import GROUP_PATTERN, Traffic, shifting_scenario, steady_scenario
from paceline.infra.demo.stats import Answer, DemoStats, gross_saving_s, own_version_s, totals
from paceline.infra.demo.vllm_run import check_options


def _answer(
    group, *, tokens=100, rounds=50, device_s=1.0, temperature=0.0, phase="B", ended=1.0, bucket="math",
    traffic_class="~class-1", version="v",
):  # fmt: skip
    return Answer(
        phase=phase, bucket=bucket, traffic_class=traffic_class, group=group, temperature=temperature, num_tokens=tokens,
        num_rounds=rounds, num_accepted_tokens=tokens - rounds, device_s=device_s, latency_s=device_s, ended=ended,
        drafter_version=version, prompt_token_ids=(1,), output_token_ids=(2,),
    )  # fmt: skip


def test_groups_of_a_pattern_share_bucket_and_temperature():
    phase = shifting_scenario(("tools", "code"), ("math",), ("facts",))[0]
    traffic = Traffic(("tools", "code", "math"), None, seed=0)
    plans = [traffic.next(phase) for _ in range(96)]
    for i in range(0, 96, len(GROUP_PATTERN)):
        block = plans[i : i + len(GROUP_PATTERN)]
        assert [p.group for p in block] == list(GROUP_PATTERN)
        assert len({(p.prompt.bucket, p.temperature) for p in block}) == 1
    for bucket in ("tools", "code"):  # every bucket sees both temperatures
        assert {p.temperature for p in plans if p.prompt.bucket == bucket} == {0.0, 0.8}


def test_same_seed_sends_the_same_traffic():
    phase = steady_scenario(("code",))[0]
    one, two = Traffic(("code",), None, seed=5), Traffic(("code",), None, seed=5)
    assert [one.next(phase) for _ in range(20)] == [two.next(phase) for _ in range(20)]


def test_phase_shares_fill_the_demo():
    assert abs(sum(p.share for p in shifting_scenario(("tools",), ("math",), ("facts",))) - 1) < 1e-9


def test_saving_is_the_static_time_of_the_adaptive_tokens_minus_the_time_taken():
    answers = [_answer(Group.ADAPTIVE, device_s=0.5), _answer(Group.STATIC, tokens=50, device_s=1.0)]
    assert gross_saving_s(answers) == 100 * 1.0 / 50 - 0.5
    assert gross_saving_s(answers[:1]) is None


def test_net_saving_of_a_phase_charges_what_the_ledger_spent():
    stats = DemoStats(answers=[_answer(Group.ADAPTIVE, device_s=0.5), _answer(Group.STATIC), _answer(Group.PLAIN)])
    phase = stats.phase_dict("B", "math", spent_s=0.4)
    assert phase["gross_saved_s"] == 0.5 and phase["net_saved_s"] == 0.1
    assert phase["by_temperature"]["0"]["net_saved_s"] == 0.1
    assert phase["adaptive"]["acceptance_length"] == 2.0
    assert totals(stats.answers, Group.PLAIN).tokens_per_s == 100


def _result(answers):
    stats = DemoStats(answers=answers)
    return {
        "target": {"name": "bundled", "version": "t"}, "drafter": {"name": "bundled"}, "policy": "payoff", "trainer_price": 0.25,
        "hardware": {"cpu": "<cpu>", "cores": 2}, "phases": [stats.phase_dict("B", "math", 0.0) | {"started_s": 0.0, "own_version_s": None}],
        "decisions": [{"t_s": 3.0, "action": "train", "bucket": "math", "arm": "full", "reason": "a < b & c", "expected_saving_s": 2.0, "expected_cost_s": 1.0}],
        "ledger": {"spent_s": 1.0, "saved_s": 2.0, "net_s": 1.0, "by_kind": {"training": 0.6, "shadow": 0.2, "staging": 0.2}}, "ledger_cells": [], "saved_interval_s": [0.0, 0.0], "rows": {},
        "swaps": {"count": 1, "pause_ms_p50": 0.1, "pause_ms_p99": 0.1, "requests_dropped": 0, "times_s": [4.0]},
        "lossless": {"checked": 10, "near_ties": 0, "mismatches": 0}, "feedback": {"produced": 5, "delivered": 5, "dropped": 0},
    }  # fmt: skip


def test_the_ledger_says_what_it_would_be_with_the_trainers_core_counted_in_full():
    result = _result([_answer(Group.ADAPTIVE)])
    (line,) = [s for s in demo_report.summary_lines(result) if s.startswith("ledger")]
    assert "net +1.0 s" in line and "the trainer's 3.2 s count 0.25 of it" in line and "the net is -1.4 s" in line
    (line,) = [s for s in demo_report.summary_lines(result | {"trainer_price": 1.0}) if s.startswith("ledger")]
    assert "trainer" not in line


def test_the_closing_sentence_tells_what_was_learned_what_came_back_and_what_was_declined():
    sent = (
        ("A", "tools", "~class-1", "v", 3.0),
        ("B", "math", "~class-2", "v", 12.0),
        ("B", "math", "~class-2", "own", 15.5),
        ("C", "facts", "~class-2", "own", 21.0),  # one of seven looks like math
        ("C", "facts", "~class-3", "v", 22.0),
        ("B again", "math", "~class-2", "own", 31.25),
    )
    answers = [
        _answer(Group.ADAPTIVE, phase=p, bucket=b, traffic_class=c, version=v, ended=t) for p, b, c, v, t in sent
    ]
    answers += [dataclasses.replace(answers[4], ended=23.0)] * 5
    stats, result, began = (
        DemoStats(answers=answers),
        _result(answers),
        {"A": 0.0, "B": 10.0, "C": 20.0, "B again": 30.0},
    )
    result["phases"] = [
        stats.phase_dict(p, b, 0.0) | {"own_version_s": own_version_s(stats.of_phase(p), "v", began[p])}
        for p, b in (("A", "tools"), ("B", "math"), ("C", "facts"), ("B again", "math"))
    ]
    holds = [
        {"t_s": t, "action": "hold", "bucket": c, "reason": why}
        for t, c, why in (
            (21.0, "~class-3", "Too few rows."),
            (25.0, "~class-3", "It would save 0.1 s for 3 s."),
            (26.0, "~class-2", "No."),
        )
    ]
    result["decisions"] += holds
    assert demo_report.closing_sentence(result) == (
        "net +1.0 s: learning math took 1.0 s of device time and saved 2.0 s; facts was declined: It would save 0.1 s for 3 s; "
        "when math came back, its own version had answered after 1.2 s"
    )
    cells = result["ledger_cells"]
    result["ledger_cells"] = [*cells, {"bucket": "~class-3", "version": None, "spent_s": 0.75}]
    result["decisions"].append({"t_s": 25.0, "action": "train", "bucket": "~class-3", "reason": "It should pay."})
    assert "; facts took 0.8 s and had no version before it went; when" in demo_report.closing_sentence(result)
    result["decisions"], result["ledger_cells"] = [], cells
    assert "declined" not in demo_report.closing_sentence(result)
    result["rows"] = {"~class-3": (900, 3200), "~class-2": (10, 3200)}
    told = demo_report.closing_sentence(result)
    assert (
        "facts was declined: ~class-3 brought 900 of the 3200 rows that a job needs before it went; when math" in told
    )
    for phase in result["phases"]:
        phase["own_version_s"] = None
    assert "learning" not in demo_report.closing_sentence(result)
    result["decisions"] = [{"t_s": 3.0, "action": "train", "bucket": "~class-2", "outcome": "failed", "reason": "x"}]
    told = demo_report.closing_sentence(result)
    assert told.startswith("net +1.0 s: 1.0 s of device time brought no version (training jobs: failed)")


def test_html_report_is_self_contained_and_escapes_reasons(tmp_path):
    answers = [_answer(g, ended=float(i)) for i, g in enumerate(GROUP_PATTERN * 3)]
    demo_report.write_html(_result(answers), answers, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "a &lt; b &amp; c" in text and "&lt;cpu&gt;" in text and "<cpu>" not in text
    assert 'src="http' not in text and "Plotly.newPlot" in text


def test_json_report_reads_back(tmp_path):
    result = _result([_answer(g) for g in GROUP_PATTERN])
    write_json(tmp_path / "deep" / "r.json", result)
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == result


def test_view_and_table_render_without_any_data():
    console = Console(record=True, width=150)
    console.print(demo_view.render(phase="A", bucket="tools", elapsed_s=0, total_s=10, answers=[], state=Snapshot()))
    console.print(demo_report.result_table(_result([_answer(Group.ADAPTIVE)])))
    assert "none yet" in console.export_text()


def test_a_log_gets_a_line_now_and_then_and_each_decision_once():
    out = io.StringIO()
    lines, state, said = demo_view.Lines(Console(file=out, width=80)), Snapshot(), {}

    def say(elapsed_s, phase="A", decisions=()):
        before = len(out.getvalue())
        shown = replace(state, decisions=list(decisions))
        lines.say(phase=phase, bucket="tools", elapsed_s=elapsed_s, total_s=100, answers=[], state=shown)
        said[elapsed_s] = out.getvalue()[before:].splitlines()

    act = Decision(
        decision_id=1, ts=0.0, action="train", bucket="math", policy="payoff", reason="it [pays]", arm=None, version=None,
        propensity=1.0, expected_gain=0.0, expected_saving_s=0.0, expected_cost_s=0.0, context={},
    )  # fmt: skip
    for elapsed_s, more in (
        (0.0, {}),
        (5.0, {}),
        (6.0, {"decisions": [act]}),
        (7.0, {"decisions": [act]}),
        (21.0, {}),
        (22.0, {"phase": "B"}),
    ):
        say(elapsed_s, **more)
    assert [len(found) for found in said.values()] == [1, 0, 1, 0, 1, 1]
    assert said[6.0] == ["  6 of 100 s  train math: it [pays]"]
    assert "phase A" in said[0.0][0] and "adaptive -" in said[0.0][0] and "phase B" in said[22.0][0]


def test_the_demo_on_vllm_says_what_it_needs_before_anything_starts():
    python = Path(sys.executable)
    assert check_options(DemoOptions(engine="vllm", vllm_python=python)) == python
    with pytest.raises(ConfigError, match="must be the Python of an environment with vLLM"):
        check_options(DemoOptions(engine="vllm", vllm_python=Path("/nowhere/python")))
    for wrong in ({"html": Path("r.html")}, {"replicas": 2}):
        with pytest.raises(ConfigError, match="one replica"):
            check_options(DemoOptions(engine="vllm", vllm_python=python, **wrong))


def test_a_busy_vllm_is_sent_several_requests_at_once_unless_told_otherwise():
    assert DemoOptions().num_clients == 1
    assert DemoOptions(engine="vllm").num_clients == 4
    assert DemoOptions(engine="vllm", concurrency=2).num_clients == 2
