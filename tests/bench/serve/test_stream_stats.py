"""Sums over streamed answers, with known answers."""

import itertools

import pytest

from paceline.bench.serve.client import StreamRequest, StreamResult
from paceline.bench.serve.stats import (
    NEAR_TIE_NATS,
    StreamTotals,
    explain_difference,
    first_difference,
    percentiles_ms,
)

REQUEST = StreamRequest(prompt="x", bucket="b", max_tokens=4, temperature=0.0, seed=0)


def _result(arrivals, *, problem=None, began_s=0.0):
    times = [t for t, _ in arrivals]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return StreamResult(request=REQUEST, began_s=began_s, problem=problem, ttft_s=times[0] - began_s if times else None, gaps_s=gaps, arrivals=arrivals)  # fmt: skip


def test_percentiles_are_in_ms_and_absent_without_values():
    assert percentiles_ms([0.001 * i for i in range(1, 101)]) == {"p50": 50.5, "p95": 95.05, "p99": 99.01, "max": 100.0}
    assert percentiles_ms([]) == {"p50": None, "p95": None, "p99": None, "max": None}


def test_the_first_token_is_no_gap_and_what_drains_is_no_rate():
    totals = StreamTotals(began_s=10.0, bin_s=1.0)
    totals.add(_result([(10.5, 1), (11.5, 3), (11.9, 2), (14.0, 100)], began_s=10.0))
    summary = totals.summary(window_s=3.0)
    assert summary["ttft_ms"]["max"] == 500.0 and summary["gap_ms"]["max"] == pytest.approx(2100, abs=0.01)
    assert [b["tokens_per_s"] for b in summary["tokens_over_time"]] == [1.0, 5.0, 0.0]
    assert summary["num_tokens"] == 106
    assert summary["tokens_per_s"] == 2.5  # without the first tenth, which begins with the first bin


def test_refusals_are_counted_apart_from_errors():
    totals = StreamTotals(began_s=0.0, bin_s=1.0)
    for problem in (None, "refused: full", "refused: full", "no_done: cut", "lost_tokens: 3 of 4"):
        totals.add(_result([(0.1, 1)], problem=problem))
    summary = totals.summary(1.0)
    assert summary["problems"] == {"lost_tokens": 1, "no_done": 1, "refused": 2}
    assert (summary["num_answers"], summary["num_whole"], summary["num_errors"]) == (5, 1, 2)
    assert summary["examples"]["no_done"] == "no_done: cut"


@pytest.mark.parametrize(
    ("a", "b", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)]
)
def test_first_difference(a, b, at):
    assert first_difference(a, b) == at


@pytest.mark.parametrize(
    ("third", "kind"),
    [
        (([5, 6, 7], [9.0, NEAR_TIE_NATS / 2, 9.0]), "near_tie"),
        (([5, 8, 7], [9.0, NEAR_TIE_NATS * 2, 9.0]), "mismatch"),
        (([4, 6, 7], [9.0, 0.0, 9.0]), "unexplained"),  # the third answer went its own way before the difference
        (([5], [9.0]), "unexplained"),
        (None, "unexplained"),
    ],
)
def test_a_changed_greedy_answer_is_explained_by_the_distance_of_the_two_best_tokens(third, kind):
    assert explain_difference([5, 6, 7], [5, 8, 7], third)[0] == kind


def test_equal_answers_need_no_explanation():
    with pytest.raises(ValueError, match="must differ"):
        explain_difference([1], [1], None)
