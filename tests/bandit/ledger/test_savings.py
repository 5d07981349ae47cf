import msgspec
import numpy as np
import pytest

from paceline.bandit.ledger.savings import HALF_LIFE_S, Savings
from tests.helpers.epochs import epoch, stats


def test_no_saving_is_booked_for_the_first_version_or_without_a_holdback():
    rng = np.random.default_rng(1)
    savings = Savings()
    assert (
        savings.close(epoch(0, stats("adaptive", "v0", 0.01, 20, rng), stats("static", "v0", 0.01, 5, rng)), "v0") == []
    )
    alone = Savings()
    assert alone.close(epoch(0, stats("adaptive", "v1", 0.005, 20, rng)), "v0") == []


def test_tokens_that_wait_for_a_sample_are_booked_when_it_comes():
    rng = np.random.default_rng(2)
    savings = Savings()
    first = stats("adaptive", "v1", 0.005, 20, rng)
    assert savings.close(epoch(0, first), "v0") == []
    second = stats("adaptive", "v1", 0.005, 20, rng)
    (booking,) = savings.close(epoch(1, second, stats("static", "v0", 0.010, 6, rng)), "v0")
    assert booking.num_tokens == first.num_tokens + second.num_tokens
    assert booking.seconds == pytest.approx(0.005 * booking.num_tokens, rel=0.25)


def test_a_worse_version_books_a_loss():
    rng = np.random.default_rng(3)
    savings = Savings()
    (booking,) = savings.close(
        epoch(0, stats("adaptive", "v1", 0.012, 20, rng), stats("static", "v0", 0.008, 8, rng)), "v0"
    )
    assert booking.seconds < 0


def test_a_noisy_estimate_is_pulled_towards_nothing_saved():
    few, many = Savings(), Savings()
    seen = []
    for savings, requests in ((few, 4), (many, 400)):
        (booking,) = savings.close(
            epoch(
                0,
                stats("adaptive", "v1", 0.008, requests, np.random.default_rng(4)),
                stats("static", "v0", 0.010, requests, np.random.default_rng(4)),
            ),
            "v0",
        )
        seen.append(booking.seconds / booking.num_tokens / 0.002)
    assert seen[0] < seen[1] < 1.05


def test_tokens_of_a_text_that_is_gone_are_not_valued_at_the_rate_of_the_next_one():
    rng = np.random.default_rng(5)
    savings = Savings()
    assert savings.close(epoch(0, stats("adaptive", "v1", 0.005, 20, rng)), "v0") == []  # wait for a hold-back sample
    savings.reset_bucket("a")
    new = stats("adaptive", "v1", 0.008, 20, rng)
    (booking,) = savings.close(epoch(1, new, stats("static", "v0", 0.010, 6, rng)), "v0")
    assert booking.num_tokens == new.num_tokens


def test_what_comes_and_goes_is_booked_as_it_was_although_the_comparison_starts_anew_whenever_a_version_is_worse():
    """Two texts take turns behind one name: the version is better on one and as much worse on the other."""
    rng, savings = np.random.default_rng(6), Savings()
    booked = true = spread = 0.0
    for phase in range(60):
        static, adaptive = (0.010, 0.008) if phase % 2 else (0.014, 0.016)
        if not phase % 2:
            booked += sum(b.seconds for b in savings.reset_bucket("a"))
        for number in range(12):
            seen = stats("adaptive", "v1", adaptive, 40, rng)
            found = savings.close(epoch(12 * phase + number, seen, stats("static", "v0", static, 5, rng)), "v0")
            booked += sum(b.seconds for b in found)
            spread += sum(b.standard_error_s**2 for b in found)
            true += seen.num_tokens * (static - adaptive)
    assert abs(booked - true) < 3 * spread**0.5 < 0.02 * 60 * 12 * 40 * 50 * 0.012


def test_what_jobs_beside_serving_cost_is_no_saving():
    """Both groups are twice as slow while a job runs; the job is charged for that by itself."""
    booked = []
    for slow in (1.0, 2.0):
        rng, savings = np.random.default_rng(7), Savings()
        parts = (stats("adaptive", "v1", slow * 0.005, 40, rng), stats("static", "v0", slow * 0.010, 10, rng))
        booked += savings.close(epoch(0, *parts), "v0", 1 / slow)
    assert booked[0].seconds == pytest.approx(booked[1].seconds)
    assert booked[0].standard_error_s == pytest.approx(booked[1].standard_error_s)


def test_tokens_of_a_time_without_a_holdback_are_valued_as_those_beside_one():
    """What they took says nothing beside a hold-back of other times; so do those that an older release has left."""
    rng = np.random.default_rng(8)
    for has_waited in (True, False):
        savings = Savings()
        if has_waited:
            savings.close(epoch(0, stats("adaptive", "v1", 0.010, 400, rng)), "v0")
        else:
            old = {"static": {}, "adaptive": {"a": {"v1": {"time_per_token": {}, "waiting_tokens": 40_000}}}}
            savings = msgspec.convert(old, Savings)
        booked = []
        for number in range(1, 30):
            parts = (stats("adaptive", "v1", 0.002, 40, rng), stats("static", "v0", 0.004, 8, rng))
            booked += savings.close(epoch(number, *parts), "v0")
        later = sum(b.num_tokens for b in booked) * 0.002
        assert abs(sum(b.seconds for b in booked) - later) < 0.25 * later, has_waited


def test_hours_without_a_holdback_are_not_valued_by_its_first_requests():
    rng, savings = np.random.default_rng(9), Savings()
    for number in range(360):
        savings.close(epoch(number, stats("adaptive", "v1", 0.005, 40, rng)), "v0")
    waiting = savings.adaptive["a"]["v1"].waiting_tokens
    parts = (stats("adaptive", "v1", 0.005, 40, rng), stats("static", "v0", 0.005, 4, rng))
    span = epoch(0).end - epoch(0).start
    assert waiting <= 1.2 * parts[0].num_tokens * HALF_LIFE_S / span
    booked = savings.close(epoch(360, *parts), "v0")
    assert sum(b.num_tokens for b in booked) <= waiting + parts[0].num_tokens
