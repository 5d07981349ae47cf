import math

import numpy as np

from paceline.bandit.beliefs.ratio import RatioSums


def test_standard_error_matches_the_spread_over_repeated_samples():
    rng = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(400):
        pool = RatioSums()
        for _ in range(40):
            x = rng.uniform(50, 150)
            pool.add(x * rng.normal(2.0, 0.3), x)
        ratios.append(pool.ratio())
        errors.append(pool.standard_error())
    assert abs(np.mean(ratios) - 2.0) < 0.01
    assert abs(np.mean(errors) / np.std(ratios) - 1.0) < 0.1


def test_no_data_is_none_and_infinitely_unsure():
    pool = RatioSums()
    assert pool.ratio() is None
    assert math.isinf(pool.standard_error())


def test_merging_is_adding_the_units_and_discounting_keeps_the_ratio():
    a, b, both = RatioSums(), RatioSums(), RatioSums()
    for i in range(6):
        (a if i % 2 else b).add(i + 1.0, 2.0 * i + 1)
        both.add(i + 1.0, 2.0 * i + 1)
    a.merge(b)
    assert math.isclose(a.ratio(), both.ratio()) and math.isclose(a.standard_error(), both.standard_error())
    a.discount(0.5)
    assert math.isclose(a.ratio(), both.ratio()) and a.standard_error() > both.standard_error()
