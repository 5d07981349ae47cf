"""The demo's scenario, sums and report, without a service."""

import dataclasses
import io
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console

from paceline.bench.common.result_file import write_json
from paceline.bench.common.workloads import Prompt
from paceline.config import PolicyConfig, ServiceConfig
from paceline.contracts import Decision, Group, LedgerEntry
from paceline.errors import ConfigError, PacelineError
from paceline.infra.controller.snapshot import FeedbackCounts, LedgerSums, Snapshot
from paceline.infra.demo import report as demo_report
from paceline.infra.demo import view as demo_view
from paceline.infra.demo.day_report import day_dict, day_figure, kind_table, speedup
from paceline.infra.demo.diary import Answer, open_diary
from paceline.infra.demo.pools import bucket_pools, fitting_pools, kind_pools
from paceline.infra.demo.run import DAY_TRACES, DemoOptions, Schedule, demo_config, final_state, pools_of, with_history
from paceline.infra.demo.scenario import (
    DAY_GROUPS,
    GROUP_PATTERN,
    Phase,
    Traffic,
    day_scenario,
    shifting_scenario,
    steady_scenario,
)
from paceline.infra.demo.stats import DemoStats, gross_saving_s, own_version_s, totals
from paceline.infra.demo.vllm_run import check_options


def _answer(
    group, *, tokens=100, rounds=50, device_s=1.0, temperature=0.0, phase="B", ended=1.0, bucket="math",
    traffic_class="~class-1", version="v",
    place=0,
):  # fmt: skip
    return Answer(
        phase=phase, place=place, bucket=bucket, traffic_class=traffic_class, group=group, temperature=temperature, num_tokens=tokens,
        num_rounds=rounds, num_accepted_tokens=tokens - rounds, device_s=device_s, latency_s=device_s, ended=ended,
        drafter_version=version, prompt_token_ids=(1,), output_token_ids=(2,),
    )  # fmt: skip


def test_groups_of_a_pattern_share_bucket_and_temperature():
    phase = shifting_scenario(("tools", "code"), ("math",), ("facts",))[0]
    traffic = Traffic(bucket_pools(("tools", "code", "math"), None), seed=0)
    plans = [traffic.next(phase) for _ in range(96)]
    for i in range(0, 96, len(GROUP_PATTERN)):
        block = plans[i : i + len(GROUP_PATTERN)]
        assert [p.group for p in block] == list(GROUP_PATTERN)
        assert len({(p.prompt.bucket, p.temperature) for p in block}) == 1
    for bucket in ("tools", "code"):  # every bucket sees both temperatures
        assert {p.temperature for p in plans if p.prompt.bucket == bucket} == {0.0, 0.8}


def test_same_seed_sends_the_same_traffic():
    phase = steady_scenario(("code",))[0]
    one, two = (Traffic(bucket_pools(("code",), None), seed=5) for _ in range(2))
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
        assert before.buckets[1] == after.buckets[0] and len({*after.buckets}) == 2
    came = [p.buckets[0] for p in phases]
    for at in range(0, len(came) - num + 1, num):
        assert {*came[at : at + num]} == {*kinds}, "each once before one comes again"
    assert num == 2 or len({tuple(came[at : at + num]) for at in range(0, len(came) - num + 1, num)}) > 1
    # an hour of it is the first one
    hour = day_scenario(kinds, 60.0, seed)
    assert [p.buckets for p in hour] == [p.buckets for p in phases[: len(hour)]]
    assert [round(60 * p.share, 6) for p in hour[:-1]] == [round(m, 6) for m in minutes[: len(hour) - 1]]


ONE, TWO = Phase(name="1", buckets=("a", "b"), share=0.5), Phase(name="2", buckets=("b", "c"), share=0.5)
POOLS = {b: [Prompt(prompt_id=f"{b}{i}", bucket=b, text=f"{b} {i}") for i in range(7)] for b in "abc"}


def _sent(scenario, done=None, seed=3):
    """Bucket -> place -> what was asked there."""
    traffic, out = Traffic(POOLS, seed, groups=DAY_GROUPS, sent=done), {b: {} for b in POOLS}
    for phase, num in scenario:
        for _ in range(num):
            plan = traffic.next(phase)
            assert plan.prompt.bucket in phase.buckets
            out[plan.prompt.bucket][plan.place] = (plan.prompt, plan.temperature, plan.group, plan.seed)
    return out


def test_a_bucket_is_asked_the_same_whatever_else_is():
    whole, other = _sent([(ONE, 80), (TWO, 80)]), _sent([(TWO, 33), (ONE, 77), (TWO, 50)])
    for bucket in POOLS:
        both = whole[bucket].keys() & other[bucket].keys()
        assert len(both) >= 30 and all(whole[bucket][at] == other[bucket][at] for at in both)
    asked = whole["b"]
    assert len({seed for *_, seed in asked.values()}) == len(asked)
    for turn in range(0, len(asked) - 7, 7):
        assert {asked[at][0] for at in range(turn, turn + 7)} == {*POOLS["b"]}, "every prompt before one comes again"
    assert asked != _sent([(ONE, 80), (TWO, 80)], seed=4)["b"]


@given(st.lists(st.integers(0, 79), unique=True, max_size=79), st.integers(0, 60))
def test_a_run_that_goes_on_asks_what_was_not_answered_and_nothing_twice(lost, num):
    """Whatever was answered when it was stopped: several clients answer out of order, and requests fail."""
    whole = _sent([(ONE, 400)])
    done = {b: {at for at in range(40) if 2 * at + (b == "b") not in lost} for b in "ab"}
    rest = _sent([(ONE, num)], done)
    for bucket in "ab":
        assert not rest[bucket].keys() & done[bucket]
        assert sorted(rest[bucket]) == [at for at in range(200) if at not in done[bucket]][: len(rest[bucket])]
        assert all(whole[bucket][at] == asked for at, asked in rest[bucket].items())


def test_a_run_goes_on_where_its_diary_ends(tmp_path):
    options = DemoOptions(scenario="day", kinds=("tools", "math"), minutes=20.0)
    with open_diary(tmp_path / "run", options.settings()) as diary:
        name = diary.model_name
        diary.begin(1000.0)
        for i, bucket in enumerate(("tools", "math", "tools")):
            diary.note(_answer(Group.STATIC, ended=10.0 * (i + 1), bucket=bucket, place=i))
        diary.note(PacelineError("request 7 of math got HTTP 503"))
        with pytest.raises(ConfigError, match="of a run that goes on now"), open_diary(tmp_path / "run", {}):
            pass
    with (tmp_path / "run/answers.jsonl").open("ab") as file:
        file.write(b'{"phase": "1", "buck')  # killed while it wrote
    longer = dataclasses.replace(options, minutes=60.0)
    with open_diary(tmp_path / "run", longer.settings()) as again:
        assert (again.model_name, again.elapsed_s, again.failures) == (name, 30.0, ["request 7 of math got HTTP 503"])
        assert [a.ended for a in again.answers] == [10.0, 20.0, 30.0] and again.answers[0].group is Group.STATIC
        assert again.places() == {"tools": {0, 2}, "math": {1}}
        again.begin(5000.0)
        again.note(_answer(Group.PLAIN, ended=40.0, place=9))
        schedule = Schedule(longer, pools_of(longer), starts=again.starts)
    assert 30.0 <= schedule.elapsed_s() < 60.0
    assert [schedule.at(ts) for ts in (1004.0, 1029.0, 1040.0, 4999.0, 5000.0, 5012.0)] == [
        4.0,
        29.0,
        30.0,
        30.0,
        30.0,
        42.0,
    ]
    with open_diary(tmp_path / "run", options.settings()) as last:
        assert [a.ended for a in last.answers] == [10.0, 20.0, 30.0, 40.0], "the broken line is gone"


def test_a_folder_that_is_no_runs_or_another_ones_is_left_alone(tmp_path):
    options = DemoOptions(scenario="day", minutes=20.0)
    for name in ("mine", "broken", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine/answers.jsonl").write_text("my own\n")
    (tmp_path / "broken/run.json").write_text('{"settings": []}')
    for name, words in (("mine", "must be a new or empty folder"), ("broken", "cannot be read")):
        before = {p: p.read_bytes() for p in (tmp_path / name).iterdir()}
        with pytest.raises(ConfigError, match=words), open_diary(tmp_path / name, options.settings()):
            pass
        assert {p: p.read_bytes() for p in (tmp_path / name).iterdir()} == before
    short = DemoOptions(minutes=2.0)
    with open_diary(tmp_path / "run", short.settings()):
        pass  # killed before anything was answered
    for changes, name in (
        ({"seed": 1}, "seed"),
        ({"minutes": 3.0}, "minutes"),
        ({"data": tmp_path}, "data"),
        ({"policy": "never"}, "policy"),
    ):
        other = dataclasses.replace(short, **changes).settings()
        with pytest.raises(ConfigError, match=f"--{name} must be that of the run"), open_diary(tmp_path / "run", other):
            pass
    with open_diary(tmp_path / "cut", short.settings()) as diary:
        diary.note(_answer(Group.STATIC))
    (tmp_path / "cut/answers.jsonl").write_bytes(b"no json\n" + (tmp_path / "cut/answers.jsonl").read_bytes())
    with (
        pytest.raises(ConfigError, match=r"answers.jsonl line 1 must be as the run wrote it"),
        open_diary(tmp_path / "cut", short.settings()),
    ):
        pass


class Template:
    """A tokenizer whose template refuses system turns; a token is a word."""

    chat_template = "{}"

    def __call__(self, texts, *, add_special_tokens):
        return {"input_ids": [t.split() for t in texts]}

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        if turns[0]["role"] == "system":
            raise TemplateError("no system turn")
        return " ".join(f"<{t['role']}> {t['content']}" for t in turns) + " <assistant>"

    def convert_tokens_to_ids(self, token):
        return None

    unk_token_id = None


def test_the_prompts_of_a_day_are_those_that_the_model_can_be_asked(tmp_path):
    lines = [{"prompt": f"Say {'very ' * i}little"} for i in range(4)]
    lines += [{"prompt": "Twice"}] * 2
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    talks = [
        {"messages": [{"role": role, "content": "Hi"}, {"role": "user", "content": "Ho"}]}
        for role in ("system", "user")
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(x) + "\n" for x in talks))
    pools = kind_pools((), tmp_path, Template())
    assert [*pools] == ["mine", "talks"]
    assert [p.text for p in pools["talks"]] == ["<user> Hi <user> Ho <assistant>"]
    room = fitting_pools(pools, Template(), 5)
    assert [p.text for p in room["mine"]] == [f"<user> Say {'very ' * i}little <assistant>" for i in range(2)] + [
        "<user> Twice <assistant>"
    ] * 2
    for room in (1, 4):
        with pytest.raises(ConfigError, match=r"must fit the model"):
            fitting_pools(pools, Template(), room)
    for kinds, words in (
        (("mine", "chess"), "must be of mine, talks, got 'chess'"),
        (("mine", "mine"), "two or more, and different"),
        (("mine",), "two or more"),
    ):
        with pytest.raises(ConfigError, match=words):
            kind_pools(kinds, tmp_path, Template())
    with pytest.raises(ConfigError, match="--kinds must be those of --scenario day"):
        DemoOptions(kinds=("mine", "talks"))


def test_a_day_serves_with_default_settings_and_something_to_train():
    day, usual = demo_config(DemoOptions(scenario="day")), ServiceConfig()
    ours = {
        "policy": PolicyConfig(trainer_price=0.25, trusts_groups=True),
        "trainer_threads": 1,
        "port": 0,
        "trace": DAY_TRACES,
    }
    ours |= {"engine": dataclasses.replace(usual.engine, num_threads=1, max_running=16), "model_name": day.model_name}
    assert day == dataclasses.replace(usual, **ours)
    with pytest.raises(ConfigError, match="--drafter must be one with weights"):
        demo_config(DemoOptions(scenario="day", drafter="lookup"))


def _day(seed=0, num=400, gain=1.25, kinds=("slow", "fast")):
    """Answers of kinds of which the first is slow and mostly asked of the static group."""
    rng, answers = np.random.default_rng(seed), []
    for i in range(num):
        kind, group = kinds[i % len(kinds)], DAY_GROUPS[(i // len(kinds)) % len(DAY_GROUPS)]
        rate = (50.0 if kind == kinds[0] else 200.0) * {Group.ADAPTIVE: gain, Group.STATIC: 1.0, Group.PLAIN: 0.5}[
            group
        ]
        tokens = int(rng.integers(40, 150)) * (3 if group == Group.STATIC and kind == kinds[0] else 1)
        seconds = tokens / rate * float(rng.lognormal(0, 0.1))
        version = "own" if kind == kinds[0] and group == Group.ADAPTIVE and i > num / 2 else "v"
        answers.append(_answer(group, tokens=tokens, device_s=seconds, ended=float(i), bucket=kind, version=version))
    return [dataclasses.replace(a, prompt_token_ids=(i % 90,)) for i, a in enumerate(answers)]


def test_a_speedup_is_that_of_the_tokens_whatever_mix_the_groups_had():
    answers = _day()
    found = speedup(answers, Group.STATIC)
    assert found["interval_95"][0] < 1.25 < found["interval_95"][1] and found["value"] == pytest.approx(1.25, abs=0.03)
    assert speedup(answers, Group.PLAIN)["value"] == pytest.approx(2.5, abs=0.06)
    taken = sum(a.device_s for a in answers if a.group == Group.ADAPTIVE)
    assert speedup(answers, Group.STATIC, taken / 4)["value"] == pytest.approx(found["value"] / 1.25, rel=1e-3)
    for group in (Group.STATIC, Group.ADAPTIVE):
        assert speedup([a for a in answers if a.group == group], Group.STATIC)["value"] is None
    empty = [dataclasses.replace(a, num_tokens=0) if a.group == Group.STATIC else a for a in answers]
    assert speedup([*empty, *answers], Group.STATIC)["interval_95"] is not None


@pytest.mark.parametrize("num_kinds", [2, 12])
def test_the_interval_of_a_speedup_holds_it_with_few_answers_of_many_kinds_too(num_kinds):
    """Two to four static answers a kind in a short run."""
    runs = [_day(seed, 24 * num_kinds, kinds=tuple("abcdefghijkl"[:num_kinds])) for seed in range(60)]
    found = [
        speedup([dataclasses.replace(a, prompt_token_ids=(i,)) for i, a in enumerate(run)], Group.STATIC)
        for run in runs
    ]
    held = sum(f["interval_95"][0] <= 1.25 <= f["interval_95"][1] for f in found)
    assert held >= 51, "57 of 60 are expected, fewer than 51 in one of 400"


def _day_result(answers):
    state = Snapshot(first_version="v", ledger=LedgerSums(spent_s=1.0, saved_s=2.0, net_s=1.0))
    result = _result(answers) | {"day": day_dict(answers, state)}
    result["drafter"] |= {"first_version": "v"}
    booked = ((60.0, 2.0, "saving"), (5.0, 0.75, "training"), (70.0, 0.25, "staging"))
    result["ledger_entries"] = [{"t_s": t, "seconds": s, "kind": kind} for t, s, kind in booked]
    return result


def test_the_report_of_a_day_is_by_kind(tmp_path):
    answers = _day()
    result = _day_result(answers)
    fast, slow = result["day"]["kinds"]
    assert (fast["kind"], slow["kind"]) == ("fast", "slow")
    assert slow["requests"] == fast["requests"] == 200 and slow["prompts"] == 45
    assert slow["over_static"]["value"] == pytest.approx(1.25, abs=0.05) and slow["over_static_asked_once"]["value"]
    assert slow["has_own_version"] and not fast["has_own_version"]
    sentence = demo_report.summary_lines(result)[-1]
    assert sentence.startswith("net +1.0 s: 1 of 2 kinds had versions of their own (slow); adaptive requests were 1.2")
    one = [dataclasses.replace(a, drafter_version="v" if i else "other") for i, a in enumerate(answers)]
    assert not any(row["has_own_version"] for row in _day_result(one)["day"]["kinds"]), "one request of another class"
    console = Console(record=True, width=170)
    console.print(kind_table(result))
    assert "slow" in console.export_text()
    demo_report.write_html(result, answers, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "Kinds of text" in text and "by a later version" in text and "Plotly.newPlot" in text


def test_the_figure_of_a_day_has_speeds_answers_and_the_books():
    answers = _day(num=2400)
    figure = day_figure(_day_result(answers[::-1]), answers[::-1])  # several clients: in any order
    lines = {trace.name: trace for trace in figure.data}
    middle = slice(12, -12)
    for name, rate in (("adaptive", 1.25), ("static", 1.0), ("plain", 0.5)):
        seen = [a for a in answers if a.group.value == name]
        mean = sum(a.num_tokens for a in seen) / sum(a.device_s for a in seen)
        assert [*lines[name].y[middle]] == pytest.approx([mean] * len(lines[name].y[middle]), rel=0.15), rate
    assert {*lines["by a later version"].y} == {"slow"} and min(lines["by a later version"].x) > 19.9
    assert len(lines["by the first drafter"].x) + len(lines["by a later version"].x) == 1920
    assert [*figure.data[-1].y] == [-0.75, 1.25, 1.0]


def test_decisions_and_entries_that_a_snapshot_has_no_more_are_read_from_the_log(tmp_path):
    def decision(i, outcome=None):
        return Decision(
            decision_id=i, ts=float(i), action="hold", bucket="", policy="payoff", reason="", arm=None, version=None, propensity=1.0,
            expected_gain=0.0, expected_saving_s=0.0, expected_cost_s=0.0, context={}, outcome=outcome,
        )  # fmt: skip

    def entry(i):
        return LedgerEntry(entry_id=f"e{i}", ts=float(i), kind="training", bucket="", version=None, seconds=float(i))

    lines = [{"kind": "decision", **to_builtins(decision(i))} for i in range(6)]
    lines += [{"kind": "ledger", **to_builtins(entry(9)), "number": 2}]  # of a commit that was lost, and made again
    lines += [{"kind": "ledger", **to_builtins(entry(i)), "number": i + 1} for i in range(6)]
    lines += [{"kind": "decision", **to_builtins(decision(1, "accepted"))}, {"kind": "note", "text": "x"}]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps({"log_id": "0-1"} | x) + "\n" for x in lines))
    state = Snapshot(decisions=[decision(3), decision(4)], ledger_entries=[entry(3), entry(4)])
    whole = with_history(state, tmp_path)
    assert [d.decision_id for d in whole.decisions] == [0, 1, 2, 3, 4] and whole.decisions[1].outcome == "accepted"
    assert [e.seconds for e in whole.ledger_entries] == [0.0, 1.0, 2.0, 3.0, 4.0], "none that came behind the snapshot"
    assert with_history(state, tmp_path / "nowhere") == state


def test_the_last_state_of_a_demo_is_one_with_figures():
    sent = Snapshot(ts=1.0, has_controller=True, feedback=FeedbackCounts(produced=5, delivered=3))
    done = replace(sent, feedback=FeedbackCounts(produced=5, delivered=5))
    signals: Any = SimpleNamespace(check=lambda: None)

    def last(*states: Snapshot | None, timeout_s: float = 3.0) -> Snapshot:
        given = iter(states)
        client: Any = SimpleNamespace(state=lambda: next(given, None))
        return final_state(client, signals, timeout_s)

    assert last(None, Snapshot(), sent, None, done) == done
    assert last(sent, Snapshot(), timeout_s=1.2) == sent, "a state without a controller has no ledger"
    fixed = Snapshot(is_adaptive=False)
    assert last(fixed) == fixed
    with pytest.raises(PacelineError, match="there are no figures"):
        last(None, Snapshot(), timeout_s=0.8)


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


def test_a_phases_own_version_is_that_of_its_main_class_in_whatever_class_it_answers_first():
    sent = [("~class-8", "other", 10.2), ("~class-9", "own", 10.5), *[("~class-2", "own", 12.0 + i) for i in range(9)]]
    answers = [_answer(Group.ADAPTIVE, traffic_class=c, version=v, ended=t) for c, v, t in sent]
    assert own_version_s(answers, "v", 10.0) == pytest.approx(0.5)
    assert own_version_s(answers[:1] + answers[2:], "v", 10.0) == pytest.approx(2.0)
    assert own_version_s(answers, "own", 10.0) is None


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
        "net +1.0 s: learning took 1.0 s of device time in all, and math saved 2.0 s; facts was declined: It would save 0.1 s for 3 s; "
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
