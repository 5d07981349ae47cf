"""Intervals of paceline.bootstrap cover the truth about as often as they say, also for few samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bootstrap import (
    TILTS,
    GainTest,
    expanded_level,
    interval,
    log_e_values,
    mean_interval,
    rate_ratio,
    ratio_interval,
    resample_counts,
    resampled,
    will_pay,
)
from paceline.contracts import BurstPlan


@pytest.mark.parametrize("num_samples", [2, 3, 4, 8, 24])
def test_the_interval_of_a_mean_misses_the_truth_equally_often_on_both_sides(num_samples):
    rng = np.random.default_rng(num_samples)
    below = above = 0
    for _ in range(400):
        _, (low, high) = mean_interval(rng.normal(1, 1, num_samples), level=0.9)
        below, above = below + (low > 1), above + (high < 1)
    assert 4 <= below <= 38 and 4 <= above <= 38  # 20 expected on each side; bounds are four standard deviations


@pytest.mark.parametrize(("num_samples", "is_paired"), [(3, True), (6, True), (24, True), (6, False), (24, False)])
def test_the_interval_of_a_speed_ratio_covers_the_truth(num_samples, is_paired):
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        size = rng.lognormal(0, 0.3, (2, num_samples))
        fast = size[0] * rng.lognormal(0, 0.1, num_samples) / 1.5
        slow = size[0 if is_paired else 1] * rng.lognormal(0, 0.1, num_samples)
        tokens = np.full(num_samples, 100.0)
        _, (low, high) = rate_ratio((tokens, fast), (tokens, slow), is_paired=is_paired)
        hits += low <= 1.5 <= high
    assert hits >= 180  # of 200 at 95%


def test_a_ratio_is_that_of_the_sums_and_lies_in_its_interval():
    tokens = [100.0, 50.0, 80.0, 120.0]
    ratio, (low, high) = rate_ratio((tokens, [1.0, 0.4, 0.9, 1.1]), (tokens, [2.0, 1.0, 1.7, 2.3]))
    assert ratio == pytest.approx(7.0 / 3.4) and 0 < low <= ratio <= high
    assert ratio_interval([12.0, 100.0], [3.0, 100.0])[0] == pytest.approx(112 / 103)


def test_pairing_removes_what_both_sides_share():
    size = np.random.default_rng(4).lognormal(0, 0.5, 20)
    sides = (np.ones(20), size), (np.ones(20), 2 * size)
    assert rate_ratio(*sides) == (2.0, [2.0, 2.0])
    low, high = rate_ratio(*sides, is_paired=False)[1]
    assert high - low > 0.5


def test_one_sample_gives_no_interval_and_a_positive_quantity_no_end_below_zero():
    assert mean_interval([3.0]) == (3.0, None)
    assert ratio_interval([1.0, 2.0], [1.0, 1.0])[1][0] > 0
    assert mean_interval([0.0, 0.0, 9.0], is_positive=True)[1][0] == 0.0 > mean_interval([0.0, 0.0, 9.0])[1][0]


def test_resamples_without_a_value_are_left_out():
    value, values = resampled(np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]), lambda s: s[0] / s[1])
    assert not np.isfinite(values).all() and interval(value, values, 3) == [1.0, 1.0]


def test_every_resample_draws_as_many_samples_as_there_are():
    counts = np.concatenate(list(resample_counts(3_000_000, 3, np.random.default_rng(0))))
    assert counts.shape == (3, 3_000_000) and (counts.sum(1) == 3_000_000).all()


def test_few_samples_are_trusted_less_and_many_as_usual():
    levels = [expanded_level(n) for n in (2, 4, 8, 1000)]
    assert levels == sorted(levels, reverse=True) and levels[-1] == pytest.approx(0.95, abs=1e-3)


def pays(recent=(), *, seconds=10.0, rise=0.2, pay_rise=0.1, num_read=40, num_left=40, left_s=5.0):
    plan = BurstPlan(seconds=seconds, rise=rise, pay_rise=pay_rise)
    return will_pay(plan, 0.02, list(recent), num_read=num_read, num_left=num_left, left_s=left_s)


def test_a_burst_of_which_nothing_is_known_goes_on_as_long_as_what_was_expected_covers_its_pace():
    assert pays() and pays(left_s=20.0)
    assert not pays(left_s=25.0), "0.02 + 0.08 x 25 / 10 is above 0.2"


def test_what_is_left_is_judged_by_the_gain_so_far_grown_with_the_root_of_the_requests():
    assert not pays([0.0] * 8), "nothing gained, and half of the cost is still to come"
    assert not pays([0.03] * 8) and pays([0.05] * 8), (
        "0.06 is needed; by 80 requests 36 have gained 1.5 times as little"
    )
    assert pays([0.03] * 8, left_s=1.0), "what is spent does not count any more"
    assert pays([0.0, 0.2] * 4), "noise leaves hope"
    assert pays([0.0] * 7), "too few to tell"


@given(st.lists(st.floats(-0.5, 0.5), min_size=8, max_size=32), st.floats(0.1, 20.0), st.floats(0.0, 0.3))
def test_more_gain_or_less_to_pay_never_ends_a_burst(recent, left_s, more):
    if pays(recent, left_s=left_s):
        assert pays([r + more for r in recent], left_s=left_s) and pays(recent, left_s=left_s / 2)


def test_the_gain_test_is_the_permutation_test_of_each_pair_from_every_beginning():
    rng, test, logs = np.random.default_rng(0), GainTest(), []
    scores = rng.normal(0.1, 1.5, 70)
    for i, score in enumerate(scores):
        test.add(float(score), 0.05)
        if i & (i - 1) == 0:  # 0, 1, 2, 4, ...
            logs.append((-math.log(len(logs) + 1) - math.log(len(logs) + 2), np.zeros(len(TILTS))))
        pair = np.multiply.outer(TILTS, [min(max(score, -3.0), 3.0) - math.log(1.05), 0.0])
        found = log_e_values(pair, np.array([True, False]))
        logs = [(weight, grown + found) for weight, grown in logs]
        wanted = np.logaddexp.reduce([weight + grown for weight, grown in logs])
        # the weight of beginnings that are still to come is not theirs
        assert test.more == pytest.approx(wanted, abs=1e-9)
