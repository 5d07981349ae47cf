"""Intervals of answers: they hold the value, widen with fewer answers, and never treat chunks as independent."""

import numpy as np
import pytest

from paceline.bench.serve.stats import mean_with_interval, percentiles_with_intervals, ratio_with_interval


def test_percentiles_are_those_of_all_values_in_ms():
    rng = np.random.default_rng(0)
    groups = [list(rng.exponential(0.02, size=rng.integers(0, 30))) for _ in range(40)]
    flat = 1e3 * np.concatenate([np.array(g) for g in groups])
    out = percentiles_with_intervals(groups)
    assert out["num_values"] == len(flat) and out["max"] == pytest.approx(flat.max(), abs=1e-3)
    for point in (50, 95, 99):
        name = f"p{point}"
        assert out[name] == pytest.approx(np.percentile(flat, point), abs=1e-3)
        low, high = out["intervals"][name]
        assert low <= out[name] <= high and low < high


def test_chunks_of_one_answer_do_not_narrow_the_interval():
    """20 answers whose 50 chunks are all alike know as much as 20 answers of one chunk."""
    values = np.random.default_rng(1).exponential(0.02, size=20)
    one = percentiles_with_intervals([[v] for v in values], (50,))["intervals"]["p50"]
    many = percentiles_with_intervals([[v] * 50 for v in values], (50,))["intervals"]["p50"]
    assert many == pytest.approx(one)


def test_the_interval_of_a_percentile_covers_the_truth_at_about_its_level():
    rng = np.random.default_rng(2)
    truth = 1e3 * np.log(2)
    hits = 0
    for _ in range(60):
        low, high = percentiles_with_intervals([[v] for v in rng.exponential(1.0, size=40)], (50,))["intervals"]["p50"]
        hits += low <= truth <= high
    assert hits >= 51  # of 60 at 95%: fewer than 51 has a probability below 0.1%


def test_too_few_answers_give_no_interval():
    assert percentiles_with_intervals([])["p50"] is None
    assert percentiles_with_intervals([[0.1, 0.2]])["intervals"] is None
    assert mean_with_interval([]) is None and mean_with_interval([3.0]) == {"value": 3.0, "interval": None}
    assert ratio_with_interval([], []) is None and ratio_with_interval([1.0], [0.0]) is None


def test_a_ratio_is_pooled_and_not_a_mean_of_ratios():
    """One answer of 12 tokens in 3 rounds and one of 100 in 100: 1.087 tokens a round, not the mean 2.5."""
    found = ratio_with_interval([12.0, 100.0], [3.0, 100.0])
    assert found["value"] == pytest.approx(112 / 103, abs=1e-4)
    assert found["interval"][0] <= found["value"] <= found["interval"][1]
