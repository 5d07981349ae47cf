"""The gate accepts real gains, refuses noise, and compares only equal requests."""

import numpy as np
import pytest

from paceline.adapt.gate.gate import RequestScore, gate, paired_lower_bound, score_version
from paceline.errors import ConfigError


def scores(rounds, tokens=120):
    return [RequestScore(f"r{i}", tokens, int(n)) for i, n in enumerate(rounds)]


def rng():
    return np.random.default_rng(0)


def test_a_clear_gain_is_accepted():
    base = np.random.default_rng(1).integers(50, 90, size=30)
    result = gate("new", scores(base - 8), "old", scores(base), rng())
    assert result.is_accepted and result.candidate.gain_lower > 0
    assert result.candidate.acceptance_length > result.incumbent.acceptance_length
    assert result.incumbent.gain_mean == 0 and "better" in result.reason


def test_no_difference_is_refused():
    base = scores(np.full(30, 60))
    result = gate("new", base, "old", base, rng())
    assert not result.is_accepted and result.candidate.gain_lower == 0


def test_a_loss_is_refused():
    base = np.full(30, 60)
    assert not gate("new", scores(base + 10), "old", scores(base), rng()).is_accepted


def test_a_gain_within_noise_is_refused():
    r = np.random.default_rng(2)
    base = r.integers(50, 90, size=12)
    noisy = base + r.permutation([-9, 9] * 6)
    assert not gate("new", scores(noisy), "old", scores(base), rng()).is_accepted


def test_a_gain_below_the_swap_cost_is_refused():
    base = np.full(30, 60)
    assert gate("new", scores(base - 1), "old", scores(base), rng(), min_gain=0.0).is_accepted
    assert not gate("new", scores(base - 1), "old", scores(base), rng(), min_gain=0.1).is_accepted


def test_too_few_requests_are_refused_whatever_the_gain():
    result = gate("new", scores([30] * 3), "old", scores([90] * 3), rng())
    assert not result.is_accepted and "too few" in result.reason


@pytest.mark.parametrize("num_requests", [4, 6, 40])
def test_false_acceptance_of_equal_drafters_is_near_five_percent(num_requests):
    r = np.random.default_rng(3)
    hits = sum(paired_lower_bound(r.normal(0, 1, num_requests), r, num_resamples=400) > 0 for _ in range(400))
    assert hits <= 36  # 5% of 400 = 20 expected; 36 is beyond three standard deviations


def test_one_request_says_nothing():
    assert paired_lower_bound([3.0], rng()) == float("-inf")


def test_acceptance_length_is_pooled_over_rounds():
    s = [RequestScore("a", 100, 100), RequestScore("b", 100, 25)]
    assert score_version("v", s, s, rng()).acceptance_length == 200 / 125


def test_unpaired_or_empty_scores_raise():
    a, b = scores([50, 60]), scores([50, 60, 70])
    for new, old in ((a, b), (a + a[:1], a), ([], [])):
        with pytest.raises(ConfigError):
            score_version("v", new, old, rng())


def test_non_finite_differences_raise():
    with pytest.raises(ConfigError, match="finite"):
        paired_lower_bound([1.0, float("nan")], rng())


def test_result_is_reproducible_from_the_generator():
    base = np.random.default_rng(1).integers(50, 90, size=30)
    runs = [gate("n", scores(base - 3), "o", scores(base), np.random.default_rng(7)) for _ in range(2)]
    assert runs[0] == runs[1]
