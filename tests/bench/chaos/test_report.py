"""The report of a run of faults: what swaps took beside rounds."""

from paceline.bench.chaos.report import summary, words
from paceline.bench.chaos.schedule import Outcome


def outcome(number: int, **values) -> Outcome:
    return Outcome(number=number, name="drafter-swapped", status="ok", recovery_s=1.0, **values)


def test_pauses_of_all_swaps_are_told_beside_a_round():
    run = [outcome(0, pauses_ms=[0.01] * 99, round_ms=4.0), outcome(1, pauses_ms=[2.0], round_ms=6.0)]
    found = summary(run)
    swaps = found["swaps"]
    assert (swaps["num_swaps"], swaps["pause_p50_ms"], swaps["pause_max_ms"], swaps["round_ms"]) == (
        100,
        0.01,
        2.0,
        5.0,
    )
    assert 0.01 < swaps["pause_p99_ms"] < 2.0
    assert "100 swaps" in words(found) and "2.000 (longest)" in words(found)


def test_a_run_without_swaps_says_nothing_of_them():
    found = summary([outcome(0)])
    assert found["swaps"] is None and "swaps" not in words(found)
