"""The checks of a run with faults find what they look for: lost, doubled and altered tokens, books that do not add up."""

import msgspec
import pytest

from paceline.bench.chaos.checks import Questions, answer_problems, booked_problems, difference
from paceline.bench.chaos.load import Answer
from paceline.config import PolicyConfig
from paceline.contracts import LedgerEntry
from paceline.infra.controller.session import restore_controller
from paceline.infra.controller.store import HostConfig, HostState
from paceline.machine import ManualClock

WANT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
NUM = 8


def questions(gap: float = 5.0) -> Questions:
    return Questions(prompts=[[1, 2]], want=[WANT], gap=lambda prompt, output: gap)


def answer(token_ids: list[int], **changes) -> Answer:
    values = {"status": 200, "finish_reason": "length", "is_done": True, "num_usage": len(token_ids)}
    return Answer(question=0, num_wanted=NUM, is_stream=True, token_ids=token_ids, **{**values, **changes})


def problems(token_ids: list[int], *, may_break: bool = False, gap: float = 5.0, **changes) -> str:
    return "; ".join(answer_problems(answer(token_ids, **changes), questions(gap), may_break=may_break))


def test_the_targets_own_tokens_are_no_problem():
    assert problems(WANT[:NUM]) == ""


@pytest.mark.parametrize(
    ("token_ids", "kind"),
    [
        ([11, 12, 13, 13, 14, 15, 16, 17], "doubled"),
        ([11, 12, 13, 12, 13, 14, 15, 16], "doubled"),
        ([11, 12, 14, 15, 16, 17, 18, 19], "lost"),
        ([11, 12, 16, 17, 18, 19, 20, 21], "lost"),
        ([11, 12, 99, 14, 15, 16, 17, 18], "altered"),
        ([11, 12, 13, 14, 15, 16, 17, 99], "altered"),
    ],
)
def test_a_doubled_a_lost_and_an_altered_token_are_found_though_the_length_is_right(token_ids, kind):
    assert len(token_ids) == NUM
    assert f"tokens {kind} at" in problems(token_ids)
    assert difference(token_ids, WANT) == kind


def test_a_whole_answer_of_another_length_has_lost_or_doubled_tokens():
    assert "tokens lost: 7 of 8" in problems(WANT[:7])
    assert "tokens doubled: 9 of 8" in problems(WANT[:9])
    assert "usage says 8 tokens, 7 came" in problems(WANT[:7], num_usage=8)


def test_a_near_tie_is_the_targets_own_choice_too_but_excuses_no_length():
    other = [11, 12, 99, 14, 15, 16, 17, 18]
    assert problems(other, gap=1e-6) == ""
    assert "tokens lost: 7 of 8" in problems(other[:7], gap=1e-6)


def test_an_answer_that_breaks_off_is_lost_unless_its_process_died():
    broken = {"finish_reason": None, "is_done": False, "error": "ReadError", "num_usage": None}
    assert "answer lost: status 200, 3 of 8 tokens, no [DONE], ReadError" in problems(WANT[:3], **broken)
    assert problems(WANT[:3], may_break=True, **broken) == ""
    assert "altered" in problems([11, 99, 13], may_break=True, **broken), "what came must be right all the same"


def test_a_part_that_looks_like_the_whole_is_never_excused():
    assert "looks like a whole answer" in problems(WANT[:3], may_break=True, is_done=True, error="boom")
    assert "looks like a whole answer" in problems(
        WANT[:3], may_break=True, is_done=False, error="boom", finish_reason="length"
    )
    assert "1 events after [DONE]" in problems(WANT[:NUM], num_late=1)
    malformed = problems([], is_malformed=True, error="malformed: KeyError()", may_break=True)
    assert "no answer that the API has" in malformed


# ---- the books ----------------------------------------------------------------------------------------------------------
POLICY = PolicyConfig(policy="never")


def books(num: int = 3, kind: str = "saving", seconds: float = 0.5) -> tuple[HostState, list[dict]]:
    """The state of a controller that has booked `num` entries, and the lines of its log, the latest first."""
    controller = restore_controller(HostConfig(redis_url="redis://", model="m", policy=POLICY), b"", ManualClock(1.0))
    lines = []
    for i in range(num):
        entry = LedgerEntry(
            entry_id=f"d0:{kind}:{i}", ts=float(i), kind=kind, bucket="b", version="v", seconds=seconds, arm=None
        )
        controller.ledger_totals().add(entry)
        lines.append({**msgspec.to_builtins(entry), "number": i + 1})
    return HostState(controller=controller.state(), num_booked=num), lines[::-1]


def test_books_that_add_up_are_no_problem_and_entries_of_a_forgotten_commit_count_for_nothing():
    state, lines = books()
    assert booked_problems(state, lines, [], POLICY) == []
    late = {**lines[0], "entry_id": "d0:saving:late", "number": 4}
    assert booked_problems(state, [late, *lines], [], POLICY) == []


def test_a_lost_a_doubled_and_an_altered_entry_are_found():
    state, lines = books()
    lost = "; ".join(booked_problems(state, lines[1:], [], POLICY))
    assert "counts 3 entries, the log has 2" in lost and "its entries sum to" in lost
    doubled = [{**lines[0], "number": 4}, *lines]
    state.num_booked = 4
    assert "1 entries were booked twice" in "; ".join(booked_problems(state, doubled, [], POLICY))
    state.num_booked = 3
    altered = [{**lines[0], "seconds": 0.75}, *lines[1:]]
    assert "its entries sum to" in "; ".join(booked_problems(state, altered, [], POLICY))


def test_only_interference_which_is_a_difference_may_cost_less_than_nothing():
    assert "cannot be" not in "; ".join(booked_problems(*books(kind="interference", seconds=-0.5), [], POLICY))
    assert "entries that cannot be: d0:training:2" in "; ".join(
        booked_problems(*books(kind="training", seconds=-0.5), [], POLICY)
    )
    assert "cannot be" in "; ".join(booked_problems(*books(seconds=float("nan")), [], POLICY))
