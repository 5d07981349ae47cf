"""The demo's scenario, sums and report, without a service."""

import dataclasses
import io
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from paceline.bench.common.result_file import write_json
from paceline.bench.common.workloads import Prompt
from paceline.contracts import Decision, Group
from paceline.errors import ConfigError
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.day_report import day_dict, day_figure, kind_table, speedup
from paceline.infra.demo.diary import Diary
from paceline.infra.demo.run import DemoOptions, Schedule, prompts_of, with_kinds
from paceline.infra.demo.scenario import (
    DAY_GROUPS,
    GROUP_PATTERN,
    Phase,
    Traffic,
    day_scenario,
    shifting_scenario,
    steady_scenario,
)
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
    traffic = Traffic(("tools", "code", "math"), prompts_of(DemoOptions()), seed=0)
    plans = [traffic.next(phase) for _ in range(96)]
    for i in range(0, 96, len(GROUP_PATTERN)):
        block = plans[i : i + len(GROUP_PATTERN)]
        assert [p.group for p in block] == list(GROUP_PATTERN)
        assert len({(p.prompt.bucket, p.temperature) for p in block}) == 1
    for bucket in ("tools", "code"):  # every bucket sees both temperatures
        assert {p.temperature for p in plans if p.prompt.bucket == bucket} == {0.0, 0.8}


def test_same_seed_sends_the_same_traffic():
    phase = steady_scenario(("code",))[0]
    one, two = (Traffic(("code",), prompts_of(DemoOptions()), seed=5) for _ in range(2))
    assert [one.next(phase) for _ in range(20)] == [two.next(phase) for _ in range(20)]


def test_phase_shares_fill_the_demo():
    for phases in (shifting_scenario(("tools",), ("math",), ("facts",)), day_scenario(("a", "b", "c"), 100.0, 0)):
        assert abs(sum(p.share for p in phases) - 1) < 1e-9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num", [2, 3, 8])
def test_the_kinds_of_a_day_come_go_and_return(seed, num):
    kinds = tuple("abcdefgh"[:num])
    phases = day_scenario(kinds, 120.0, seed)
    minutes = [p.share * 120 for p in phases]
    assert {*minutes[:-1]} == {3.0, 5.0, 7.0} and sum(minutes) == pytest.approx(120)
    for before, after in itertools.pairwise(phases):
        assert len(before.buckets) == 2 and {*before.buckets} & {*after.buckets}, "one of the two stays"
    for kind in kinds:
        visits = [kind in p.buckets for p in phases]
        num_visits = sum(here and not was for was, here in zip([False, *visits], visits, strict=False))
        assert num < 8 or 2 <= num_visits <= 4
    # an hour of it is the first one
    hour = day_scenario(kinds, 60.0, seed)
    assert [p.buckets for p in hour] == [p.buckets for p in phases[: len(hour)]]
    assert [round(60 * p.share, 6) for p in hour[:-1]] == [round(m, 6) for m in minutes[: len(hour) - 1]]


def test_a_kind_is_asked_the_same_whatever_else_is_and_where_a_run_goes_on():
    def prompts(bucket, seed):
        return [Prompt(prompt_id=f"{bucket}-{seed}-{i}", bucket=bucket, text=str(i)) for i in range(7)]

    def sent(scenario, before=None, num=80):
        traffic = Traffic(("a", "b", "c"), prompts, 3, groups=DAY_GROUPS, sent=before)
        plans = [traffic.next(phase) for phase in scenario for _ in range(num)]
        return {b: [(p.prompt, p.temperature, p.group, p.seed) for p in plans if p.prompt.bucket == b] for b in "abc"}

    one, two = Phase(name="1", buckets=("a", "b"), share=0.5), Phase(name="2", buckets=("b", "c"), share=0.5)
    whole, other = sent((one, two)), sent((two, one, one))
    for bucket in "abc":
        count = min(len(whole[bucket]), len(other[bucket]))
        assert count >= 30 and whole[bucket][:count] == other[bucket][:count]
    assert len({s for *_, s in whole["a"]}) == len(whole["a"])
    first = sent((one,))
    rest = sent((two,), before={b: len(first[b]) for b in "abc"})
    assert all(first[b] + rest[b] == whole[b] for b in "abc")


def test_a_run_goes_on_where_its_diary_ends(tmp_path):
    options = DemoOptions(scenario="day", kinds=("tools", "math"), minutes=20.0)
    diary = Diary.open(tmp_path / "new", options.told())
    schedule = Schedule(options, diary=diary)
    assert schedule.elapsed_s() < 1.0
    for i in range(3):
        diary.note(_answer(Group.STATIC, ended=10.0 * (i + 1), bucket=("tools", "math", "tools")[i]))
    with (tmp_path / "new" / "answers.jsonl").open("ab") as file:
        file.write(b'{"phase": "1", "buck')  # killed while it wrote
    again = Diary.open(tmp_path / "new", dataclasses.replace(options, minutes=60.0).told())
    assert [a.ended for a in again.answers] == [10.0, 20.0, 30.0] and again.answers[0].group is Group.STATIC
    later = Schedule(options, diary=again)
    assert 30.0 <= later.elapsed_s() < 31.0
    assert later.at(time.time()) == pytest.approx(later.elapsed_s(), abs=0.5)
    assert later.at(diary._starts[0][1] + 12.0) == pytest.approx(42.0, abs=0.5), "of the part that runs"
    assert [b for b, n in later._traffic._sent.items() for _ in range(n)] == ["tools", "tools", "math"]
    assert len(Diary.open(tmp_path / "new", options.told()).answers) == 3, "the broken line is gone"
    with pytest.raises(ConfigError, match=r"--seed must be that of the run in .*, 0, got 1"):
        Diary.open(tmp_path / "new", dataclasses.replace(options, seed=1).told())
    short = DemoOptions(minutes=2.0)
    Diary.open(tmp_path / "other", short.told()).begin(0.0, 0.0)
    with pytest.raises(ConfigError, match="--minutes must be"):
        Diary.open(tmp_path / "other", dataclasses.replace(short, minutes=3.0).told())


def test_kinds_that_the_data_has_not_are_named(tmp_path):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(3)))
    (tmp_path / "less.jsonl").write_text(json.dumps({"prompt": "Say less"}) + "\n")
    found = with_kinds(DemoOptions(scenario="day", data=tmp_path))
    assert found.kinds == ("mine", "less")
    with pytest.raises(ConfigError, match="--kinds must be of less, mine, got 'chess'"):
        with_kinds(DemoOptions(scenario="day", data=tmp_path, kinds=("mine", "chess")))
    with pytest.raises(ConfigError, match="--kinds must be those of --scenario day"):
        DemoOptions(kinds=("mine", "less"))
    texts = prompts_of(found)("mine", 0)
    assert sorted(p.text for p in texts) == [f"user: Say {i}\nassistant:" for i in range(3)]
    with pytest.raises(ConfigError, match="at most 1 tokens"):
        prompts_of(found, lambda text: {"input_ids": text.split()}, 1)


def _day(seed=0, num=400, gain=1.25):
    """Answers of two kinds of which one is slow and mostly asked of the static group."""
    rng, answers = np.random.default_rng(seed), []
    for i in range(num):
        kind, group = ("slow", "fast")[i % 2], DAY_GROUPS[(i // 2) % len(DAY_GROUPS)]
        rate = {"slow": 50.0, "fast": 200.0}[kind] * {Group.ADAPTIVE: gain, Group.STATIC: 1.0, Group.PLAIN: 0.5}[group]
        tokens = int(rng.integers(40, 150)) * (3 if group == Group.STATIC and kind == "slow" else 1)
        seconds = tokens / rate * float(rng.lognormal(0, 0.1))
        version = "own" if kind == "slow" and group == Group.ADAPTIVE and i > num / 2 else "v"
        answers.append(_answer(group, tokens=tokens, device_s=seconds, ended=float(i), bucket=kind, version=version))
    return [dataclasses.replace(a, prompt_token_ids=(i % 90,)) for i, a in enumerate(answers)]


def test_a_speedup_is_that_of_the_tokens_whatever_mix_the_groups_had():
    answers = _day()
    found = speedup(answers, Group.STATIC)
    assert found["interval_95"][0] < 1.25 < found["interval_95"][1] and found["value"] == pytest.approx(1.25, abs=0.03)
    assert speedup(answers, Group.PLAIN)["value"] == pytest.approx(2.5, abs=0.06)
    taken = sum(a.device_s for a in answers if a.group == Group.ADAPTIVE)
    assert speedup(answers, Group.STATIC, taken / 4)["value"] == pytest.approx(found["value"] / 1.25, rel=1e-3)
    assert speedup([a for a in answers if a.group == Group.STATIC], Group.STATIC)["value"] is None
    assert speedup([a for a in answers if a.group == Group.ADAPTIVE], Group.STATIC)["value"] is None
    hits = [speedup(_day(seed, 120), Group.STATIC)["interval_95"] for seed in range(40)]
    assert sum(low <= 1.25 <= high for low, high in hits) >= 34


def test_the_report_of_a_day_is_by_kind(tmp_path):
    answers = _day()
    result = _result(answers) | {"day": day_dict(answers, 1.0)}
    result["drafter"] |= {"first_version": "v"}
    result["ledger_entries"] = [
        {"t_s": 5.0, "seconds": 1.0, "kind": "training"},
        {"t_s": 60.0, "seconds": 2.0, "kind": "saving"},
    ]
    slow, fast = sorted(result["day"]["kinds"], key=lambda row: row["kind"], reverse=True)
    assert slow["requests"] == fast["requests"] == 200 and slow["prompts"] == 45
    assert slow["over_static"]["value"] == pytest.approx(1.25, abs=0.05)
    assert slow["over_static_first_time"]["value"] is not None
    sentence = demo_report.summary_lines(result)[-1]
    assert sentence.startswith("net +1.0 s: 1 of 2 kinds had versions of their own (slow); adaptive requests were 1.2")
    console = Console(record=True, width=150)
    console.print(kind_table(result))
    assert "slow" in console.export_text()
    demo_report.write_html(result, answers, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "Kinds of text" in text and "first drafter" in text and "Plotly.newPlot" in text
    figure = day_figure(result, answers)
    assert [*figure.data[-1].y] == [-1.0, 1.0], "what was spent, then what was saved less that"


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
