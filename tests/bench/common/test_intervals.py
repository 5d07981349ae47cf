"""Bootstrap intervals of speed ratios."""

import numpy as np

from paceline.bench.common.intervals import ratio_of_rates


def test_ratio_is_that_of_pooled_rates_and_lies_in_its_interval():
    tokens = [100.0, 50.0, 80.0, 120.0]
    ratio, (low, high) = ratio_of_rates(tokens, [1.0, 0.4, 0.9, 1.1], tokens, [2.0, 1.0, 1.7, 2.3])
    assert abs(ratio - 7.0 / 3.4) < 1e-12
    assert low <= ratio <= high


def test_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        difficulty = rng.lognormal(0, 0.3, 24)
        fast = list(difficulty * rng.lognormal(0, 0.1, 24) / 1.5)
        slow = list(difficulty * rng.lognormal(0, 0.1, 24))
        _, (low, high) = ratio_of_rates([100.0] * 24, fast, [100.0] * 24, slow, num_resamples=300)
        hits += low <= 1.5 <= high
    assert 0.85 <= hits / 200 <= 1.0


def test_no_samples_give_nan_instead_of_a_number():
    ratio, (low, high) = ratio_of_rates([], [], [], [])
    assert np.isnan([ratio, low, high]).all()
