"""Evidence finds real gains, takes noise for noise however often one looks, and compares only equal requests."""

import msgspec
import numpy as np
import pytest

from paceline.adapt.gate.gate import (
    RECENT_REQUESTS,
    Evidence,
    Finding,
    RequestScore,
    paired_lower_bound,
    score_version,
)
from paceline.bootstrap import GRACE_REQUESTS, MIN_REQUESTS
from paceline.errors import ConfigError


def scores(rounds, tokens=120):
    return [RequestScore(f"r{i}", tokens, int(n)) for i, n in enumerate(rounds)]


def rng():
    return np.random.default_rng(0)


def read(evidence, gains, *, min_gain=0.0, others=(), spread=0.15, seed=1):
    """Enter requests whose log tokens per round exceed the incumbent's by `gains`, with noise; findings at every look."""
    r, found = np.random.default_rng(seed), []
    for gain in gains:
        old = RequestScore("r", 120, int(r.integers(50, 90)))
        new = old._replace(num_unseen_tokens=120 * float(np.expm1(gain + spread * r.standard_normal())))
        evidence.add(new, old, min_gain=min_gain)
        found.append(evidence.finding(min_gain))
    for gain in others:
        old = RequestScore("r", 120, 60)
        evidence.add_other(
            "other", old._replace(num_unseen_tokens=120 * float(np.expm1(gain + 0.1 * r.standard_normal()))), old
        )
    return found


def test_a_clear_gain_is_found_after_a_few_requests():
    evidence = Evidence()
    found = read(evidence, [0.2] * 40)
    assert Finding.BETTER in found and found.index(Finding.BETTER) < 20 and found[-1] is Finding.BETTER
    new, old = evidence.scores("new", "old", rng())
    assert new.gain_lower > 0 and new.acceptance_length > old.acceptance_length and old.gain_mean == 0
    assert new.num_requests == RECENT_REQUESTS and evidence.test.num_requests == 40


def test_no_difference_stays_open():
    evidence = Evidence()
    assert set(read(evidence, [0.0] * 200, spread=0.0)) == {Finding.OPEN}


@pytest.mark.parametrize("min_gain", [0.0, 0.1])
def test_one_learner_in_twenty_that_gains_no_more_than_the_swap_costs_is_ever_found_better(min_gain):
    gain = float(np.log1p(min_gain))
    hits = sum(Finding.BETTER in read(Evidence(), [gain] * 60, min_gain=min_gain, seed=s) for s in range(200))
    assert hits <= 18  # 5% of 200 = 10 at most; 18 is beyond two and a half standard deviations


def test_a_gain_below_the_swap_cost_is_found_short_after_its_grace():
    found = read(Evidence(), [0.05] * 120, min_gain=0.2)
    first = found.index(Finding.SHORT)
    assert GRACE_REQUESTS <= first < 100 and set(found[:first]) == {Finding.OPEN}


def test_a_slow_beginning_does_not_count_against_a_learner():
    gains = [0.0] * GRACE_REQUESTS + [0.3] * 40
    found = read(Evidence(), gains, min_gain=0.1)
    assert Finding.SHORT not in found and found[-1] is Finding.BETTER


def test_a_gain_that_is_gone_again_is_not_found_better():
    evidence = Evidence()
    assert read(evidence, [0.3] * 30)[-1] is Finding.BETTER
    assert read(evidence, [-0.05] * RECENT_REQUESTS)[-1] is not Finding.BETTER


def test_what_a_learner_does_to_other_classes_is_told_and_decides_nothing():
    evidence = Evidence()
    found = read(evidence, [0.3] * 30, others=[-0.3] * 20)
    assert found[-1] is Finding.BETTER and evidence.finding(0.0) is Finding.BETTER
    (new, old) = evidence.scores_elsewhere("new", "old", rng())["other"]
    assert (new.version, old.version, new.num_requests) == ("new", "old", 20)
    assert new.acceptance_length < 0.8 * old.acceptance_length and new.gain_mean < 0
    read(evidence, [], others=[0.0] * 100)
    assert evidence.scores_elsewhere("new", "old", rng())["other"][0].num_requests == RECENT_REQUESTS


def test_too_few_requests_say_nothing_whatever_the_gain():
    evidence = Evidence()
    assert set(read(evidence, [2.0] * (MIN_REQUESTS - 1))) == {Finding.OPEN}
    with pytest.raises(ConfigError, match="at least one request"):
        Evidence().scores("new", "old", rng())
    assert Evidence().scores_elsewhere("new", "old", rng()) == {}


def test_evidence_goes_on_where_it_was_stored_and_keeps_no_request_id():
    whole, half = Evidence(), Evidence()
    read(whole, [0.1] * 20, others=[0.0] * 3)
    read(half, [0.1] * 20, others=[0.0] * 3)
    stored = msgspec.json.encode(half)
    again = msgspec.json.decode(stored, type=Evidence)
    assert again == half == whole and again.finding(0.0) is whole.finding(0.0)
    read(again, [0.2] * 50, seed=2)
    read(whole, [0.2] * 50, seed=2)
    assert again == whole and len(again.own) == RECENT_REQUESTS
    assert b'"r"' not in stored


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
