"""Slope of a wandering series with an interval that is neither blind nor overconfident."""

import numpy as np
import pytest

from paceline.bench.engine.soak import second_half, trend


def _noise(rng, count, keep):
    """A series whose neighbours are alike, as samples of memory are."""
    out = np.zeros(count)
    for i in range(1, count):
        out[i] = keep * out[i - 1] + rng.normal()
    return out


def test_an_exact_line_gives_its_slope():
    times = np.arange(100) * 0.5
    found = trend(times, 7 + 3 * times)
    assert found.slope == pytest.approx(3) and found.low <= found.slope <= found.high
    assert found.high - found.low < 1e-9 and found.num_samples == 100


def test_interval_covers_the_slope_also_when_neighbours_are_alike():
    rng = np.random.default_rng(0)
    times = np.arange(600.0)
    hits = [f.low <= 0.01 <= f.high for f in (trend(times, 0.01 * times + _noise(rng, 600, 0.9)) for _ in range(120))]
    assert 0.88 <= np.mean(hits) <= 1.0


def test_a_leak_is_told_from_wandering():
    rng = np.random.default_rng(1)
    times = np.arange(600.0)
    assert trend(times, 0.2 * times + _noise(rng, 600, 0.9)).low > 0
    flat = trend(times, _noise(rng, 600, 0.9))
    assert flat.low < 0.01 and flat.high > -0.01


def test_too_few_samples_give_no_slope():
    assert trend([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert trend([1.0] * 50, list(range(50))) is None


def test_second_half_is_by_time_not_by_count():
    assert second_half([0.0, 1.0, 2.0, 9.0, 10.0], [5, 6, 7, 8, 9]) == ([9.0, 10.0], [8, 9])
    assert second_half([], []) == ([], [])
