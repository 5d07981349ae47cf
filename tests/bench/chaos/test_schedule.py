"""The schedule of faults follows from its seed, and a run that was cut off goes on behind its last whole line."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from paceline.bench.chaos import run as run_module
from paceline.bench.chaos.faults import FAULTS, Blow, Fault
from paceline.bench.chaos.load import Answer
from paceline.bench.chaos.report import summary
from paceline.bench.chaos.run import ChaosOptions, FaultRun, set_aside
from paceline.bench.chaos.schedule import JOURNAL, Journal, Outcome, fault_rng, schedule
from paceline.errors import ConfigError

NAMES = ("a", "b", "c", "d")
SETTINGS = {"seed": 1, "resume_answers": False}


def outcome(number: int) -> Outcome:
    return Outcome(number=number, name="a", status="ok", recovery_s=1.5)


def test_every_fault_comes_once_before_any_comes_again():
    drawn = [turn.names[0] for turn in schedule(7, NAMES, 10)]
    assert len(drawn) == 10 and sorted(drawn[:4]) == sorted(drawn[4:8]) == list(NAMES)
    assert drawn[:4] != drawn[4:8] or drawn[:4] != list(NAMES)


def test_the_same_seed_gives_the_same_faults_and_a_longer_run_begins_with_a_shorter_one():
    assert schedule(7, NAMES, 6) == schedule(7, NAMES, 40)[:6]
    assert schedule(7, NAMES, 40) != schedule(8, NAMES, 40)


@pytest.mark.parametrize("at_once", [2, 3])
def test_faults_that_may_share_a_moment_do_and_each_still_comes_once(at_once):
    names, together = tuple("abcdefgh"), {"b", "d", "e", "g", "h"}
    turns = schedule(3, names, 16, at_once=at_once, together=together)
    for own in (turns[: len(turns) // 2], turns[len(turns) // 2 :]):
        assert sorted(name for turn in own for name in turn.names) == sorted(names)
        sizes = sorted(len(turn.names) for turn in own)
        assert sizes == ([1, 1, 1, 1, 2, 2] if at_once == 2 else [1, 1, 1, 2, 3])
        assert all(set(turn.names) <= together for turn in own if len(turn.names) > 1)
    alone = {turn.number: turn.names[0] for turn in schedule(3, names, 16)}
    assert all(alone[turn.number] == turn.names[0] for turn in turns), "they begin where they would alone"
    for turn in turns:  # as the command that repeats one asks for it
        (found,) = [
            t
            for t in schedule(3, names, turn.number + 1, at_once=at_once, together=together)
            if t.number >= turn.number
        ]
        assert found == turn


def test_faults_of_one_moment_all_strike_and_answers_may_end_with_any_of_them():
    struck = []
    faults = [
        Fault(name=name, what="", seen="", breaks=breaks, is_blind=True, strike=strike)
        for name, breaks, strike in (
            ("a", "", lambda around: (struck.append(around.rng.random()), Blow(note="did"))[1]),
            ("b", "replica", lambda around: (struck.append(around.rng.random()), Blow(is_back=lambda: len(looks.append(1) or looks) > 2))[1]),
            ("c", "", lambda around: (_ for _ in ()).throw(ConnectionRefusedError("nobody"))),
        )
    ]  # fmt: skip
    looks = []
    place = SimpleNamespace(url="http://127.0.0.1:9", check=None, ills=list, leftovers=list)
    run = FaultRun(ChaosOptions(num_at_once=3, patience_s=5.0, width=1), place, None, 0, faults)
    load = patch.object(run_module, "Load", lambda *a, **k: nullcontext(SimpleNamespace(answers=[])))
    with load, patch.object(FaultRun, "_warm_up", lambda self, load, rng: None):
        found = run.outcome()
    assert (found.name, found.beside, found.status) == ("a", ["b"], "ok"), found
    assert len(set(struck)) == 2 and "did" in found.note and "nobody" in found.note
    assert run._may_break(answer(9.0, 200), 10.0, faults) and not run._may_break(answer(40.0, 200), 10.0, faults)
    assert not run._may_break(answer(9.0, 200), 10.0, faults[:1]), "what did not happen is no excuse"
    assert summary([found])["num_faults"] == 2 and set(summary([found])["by_name"]) <= set(FAULTS)


def test_what_a_fault_draws_does_not_depend_on_the_faults_before_it():
    first, again, other = (fault_rng(3, number).random() for number in (5, 5, 6))
    assert first == again != other


def test_a_journal_goes_on_where_it_ended(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    journal.add(outcome(0))
    journal.add(outcome(1))
    again = Journal(tmp_path, SETTINGS)
    assert again.done == [outcome(0), outcome(1)]
    again.add(outcome(2))
    assert [o.number for o in Journal(tmp_path, SETTINGS).done] == [0, 1, 2]


def test_a_line_that_was_torn_by_the_end_of_a_run_counts_for_nothing(tmp_path):
    journal = Journal(tmp_path, SETTINGS)
    journal.add(outcome(0))
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes() + b'{"number": 1, "na')
    again = Journal(tmp_path, SETTINGS)
    again.add(outcome(1))
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()[1:]] == [0, 1]


def test_a_folder_of_other_options_or_a_damaged_one_is_refused_with_what_to_do(tmp_path):
    Journal(tmp_path, SETTINGS).add(outcome(0))
    with pytest.raises(
        ConfigError, match="resume-answers was False there and is True now; give that value, or another"
    ):
        Journal(tmp_path, {**SETTINGS, "resume_answers": True})
    (tmp_path / JOURNAL).write_text("{}\n{nonsense\n")
    with pytest.raises(ConfigError, match="is damaged"):
        Journal(tmp_path, SETTINGS)


def test_a_run_without_a_folder_keeps_its_journal_in_memory():
    journal = Journal(None, SETTINGS)
    journal.add(outcome(0))
    assert journal.done == [outcome(0)]


def test_an_unknown_fault_or_one_that_cannot_happen_is_refused_with_those_that_can(monkeypatch):
    with pytest.raises(ConfigError, match=r"kinds must be among replica-kill, .*, got 'earthquake'"):
        ChaosOptions(kinds=("earthquake",))
    with pytest.raises(ConfigError, match="ingress-kill needs --resume-answers"):
        ChaosOptions(kinds=("ingress-kill",))
    assert ChaosOptions(kinds=("ingress-kill",), is_resuming_answers=True).drawn() == ("ingress-kill",)
    monkeypatch.setattr(run_module, "why_no_clock", lambda: None)
    assert set(FAULTS) - set(ChaosOptions().drawn()) == {"ingress-kill", "ingress-stop"}
    assert ChaosOptions().left_out() == []
    monkeypatch.setattr(run_module, "why_no_clock", lambda: "no C++ compiler was found: install g++")
    assert set(FAULTS) - set(ChaosOptions(is_resuming_answers=True).drawn()) == {"clock-step"}
    assert ChaosOptions().left_out() == [
        "clock-step needs a clock that can be stepped: no C++ compiler was found: install g++"
    ]
    with pytest.raises(ConfigError, match=r"clock-step needs a clock .* install g"):
        ChaosOptions(kinds=("clock-step",))
    with pytest.raises(ConfigError, match="drafter must have weights"):
        ChaosOptions(drafter="lookup")


def test_the_command_that_repeats_a_fault_draws_the_same_one():
    options = ChaosOptions(seed=5, num_faults=40, kinds=("redis-kill", "log-torn", "replica-kill"))
    words = options.again(17).split()
    assert words[:3] == ["paceline", "bench", "chaos"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    again = ChaosOptions(
        seed=int(given["--seed"]), skip=int(given["--skip"]), num_faults=int(given["--faults"]),
        kinds=tuple(given["--kinds"].split(",")),
    )  # fmt: skip
    assert again.turns() == [options.turns()[17 - options.skip]]


def test_data_with_a_wrong_ledger_are_kept_and_what_follows_begins_without_any(tmp_path):
    data, aside = tmp_path / "data", tmp_path / "data-after-3"
    for name in ("redis/appendonly.aof", "services/chaos/decisions.jsonl", "lost+found/x"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(name)
    set_aside(data, aside)
    assert [p.name for p in data.iterdir()] == ["lost+found"], "a folder of the file system"
    assert (aside / "redis" / "appendonly.aof").read_text() == "redis/appendonly.aof"
    assert (aside / "services" / "chaos" / "decisions.jsonl").is_file()


def answer(began_s: float, status: int) -> Answer:
    return Answer(question=0, num_wanted=8, is_stream=True, began_s=began_s, status=status, error="ConnectError")


def fault_run(name: str, **options) -> FaultRun:
    return FaultRun(ChaosOptions(**options), None, None, 0, [FAULTS[name]])


def may_break(run: FaultRun, given: Answer) -> bool:
    return run._may_break(given, 10.0, run.faults)


@pytest.mark.parametrize("is_resuming", [False, True])
def test_without_its_proxy_a_service_takes_no_connection_but_whom_it_answers_it_answers_in_full(is_resuming):
    run = fault_run("proxy-kill", is_resuming_answers=is_resuming)
    assert may_break(run, answer(9.0, 200)) and may_break(run, answer(40.0, 0))
    assert not may_break(run, answer(40.0, 200)) and not may_break(run, answer(40.0, 503))
    assert not may_break(fault_run("proxy-stop"), answer(9.0, 200))
    assert not may_break(fault_run("replica-kill"), answer(40.0, 0))
