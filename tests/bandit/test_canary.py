"""The canary's tests hold their error rates while one looks after every request, and are quick when the effect is large."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.canary import (
    CanaryTest,
    batch_class,
    block_size,
    log_error_evidence,
)
from paceline.bootstrap import TILTS, log_e_values
from paceline.contracts import is_canary

ALPHA, MARGIN = 0.05, 0.05
LIMIT = math.log(1 / ALPHA)


def trial(
    rng: np.random.Generator,
    ratio: float,
    share: float,
    num_requests: int,
    *,
    heavy: bool,
    watch: tuple[str, ...],
    length: float = 2.5,
    sd: float = 0.25,
) -> tuple[str, int]:
    """Look whenever the evidence changes. Traffic drifts and mixes six strata of different speed; `heavy`: stalls too.

    Args:
        ratio: speed of the canary over the incumbent's.
        length: the canary's tokens per round; the incumbent's are 2.5.
    """
    test, levels = CanaryTest(share=share, margin=MARGIN), rng.normal(0.0, 0.3, 6)
    drift, strata = rng.normal(0.0, 0.03, num_requests).cumsum(), rng.integers(6, size=num_requests)
    is_own = rng.random(num_requests) < share
    noise = sd * np.clip(rng.standard_t(1.5, num_requests) if heavy else rng.standard_normal(num_requests), -20.0, 20.0)
    rates = 100.0 * np.exp(levels[strata] + drift + noise) * np.where(is_own, ratio, 1.0)
    tokens = rng.integers(16, 64, num_requests).astype(float)
    per_round = np.where(is_own, length, 2.5) * np.exp(rng.normal(0.0, 0.2, num_requests))
    rounds = np.maximum(np.rint(tokens / per_round), 1).astype(int)
    columns = (strata.astype(str), is_own, tokens, tokens / rates, rounds)
    for i, request in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        test.add(*request)
        if test.block:  # evidence changes when a block closes
            continue
        if "rolled back" in watch and test.evidence_worse() >= LIMIT:
            return "rolled back", i + 1
        if "promoted" in watch and test.evidence_fast_enough() >= LIMIT:
            return "promoted", i + 1
    return "undecided", num_requests


def ends(
    ratio: float, share: float, num_requests: int, num_trials: int, *, heavy: bool = False,
    watch: tuple[str, ...] = ("rolled back", "promoted"), **world: float,
) -> dict[str, list[int]]:  # fmt: skip
    out: dict[str, list[int]] = {"rolled back": [], "promoted": [], "undecided": []}
    rng = np.random.default_rng(7)
    for _ in range(num_trials):
        end, after = trial(rng, ratio, share, num_requests, heavy=heavy, watch=watch, **world)
        out[end].append(after)
    return out


# ---- one block ----------------------------------------------------------------------------------------------------
@given(
    st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    st.integers(1, 5),
    st.sampled_from([-15.0, -1.0, 2.5, 15.0]),
)
def test_mean_of_the_e_value_over_all_assignments_is_one(scores, num_canaries, tilt):
    n = len(scores)
    k = min(num_canaries, n - 1)
    logs = []
    for chosen in itertools.combinations(range(n), k):
        arms = np.isin(np.arange(n), chosen)
        logs.append(log_e_values(tilt * np.array([scores]), arms)[0])
    assert np.exp(np.logaddexp.reduce(logs) - math.log(len(logs))) == pytest.approx(1.0)


def test_a_block_without_one_of_the_arms_says_nothing():
    for arms in ([True, True], [False, False]):
        assert log_e_values(np.array([[0.1, 5.0], [1.0, 2.0]]), np.array(arms)).tolist() == [0.0, 0.0]


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.data())
def test_a_slower_canary_never_speaks_more_for_itself(scores, data):
    """Hence the test of 'slower by the margin or more' holds for every larger loss too."""
    arms = np.arange(len(scores)) < data.draw(st.integers(1, len(scores) - 1))
    slowed = np.where(arms, np.array(scores) - data.draw(st.floats(0, 2)), scores)
    worse, before = (log_e_values(np.multiply.outer(TILTS, x), arms) for x in (slowed, np.array(scores)))
    assert (worse <= before + 1e-9).all()


# ---- whole trials -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "heavy"), [(0.1, False), (0.5, False), (0.5, True)])
def test_a_drafter_as_fast_as_the_incumbent_is_rolled_back_with_probability_alpha_at_most(share, heavy):
    num_trials = 500
    found = ends(1.0, share, 400, num_trials, heavy=heavy, watch=("rolled back",))
    # four standard errors above alpha would still be chance
    assert len(found["rolled back"]) / num_trials <= ALPHA + 4 * math.sqrt(ALPHA * (1 - ALPHA) / num_trials)


def test_a_drafter_slower_by_the_margin_is_promoted_with_probability_alpha_at_most():
    num_trials = 500
    found = ends(1.0 - MARGIN, 0.5, 300, num_trials, watch=("promoted",))
    assert len(found["promoted"]) / num_trials <= ALPHA + 4 * math.sqrt(ALPHA * (1 - ALPHA) / num_trials)


def test_a_drafter_slower_by_a_tenth_goes_after_some_hundred_requests():
    few = ends(0.9, 0.1, 3000, 30)
    assert len(few["rolled back"]) >= 28 and np.median(few["rolled back"]) < 1000
    many = ends(0.9, 0.5, 1500, 30)
    assert len(many["rolled back"]) >= 27 and np.median(many["rolled back"]) < 450


def test_a_drafter_at_half_speed_goes_within_200_requests_at_a_tenth():
    found = ends(0.5, 0.1, 200, 200)
    assert len(found["rolled back"]) >= 196
    assert np.median(found["rolled back"]) < 80


def test_a_drafter_that_accepts_nothing_goes_soon_whatever_noise_the_machine_makes():
    found = ends(0.7, 0.1, 200, 100, length=1.0, sd=1.0)
    assert len(found["rolled back"]) >= 97 and np.median(found["rolled back"]) < 60


@pytest.mark.slow
def test_fewer_tokens_per_round_than_the_margin_allows_are_no_evidence_by_themselves():
    num_trials = 500
    found = ends(1.0, 0.5, 300, num_trials, watch=("rolled back",), length=2.5 * (1 - MARGIN))
    assert len(found["rolled back"]) / num_trials <= ALPHA + 4 * math.sqrt(ALPHA * (1 - ALPHA) / num_trials)


def test_a_better_drafter_is_promoted_soon():
    assert np.median(ends(1.25, 0.1, 1000, 40)["promoted"]) < 200
    assert np.median(ends(1.25, 0.5, 400, 40)["promoted"]) < 90


def test_the_estimate_is_the_ratio_of_speeds_within_strata():
    test = CanaryTest(share=0.5, margin=MARGIN)
    for i in range(200):  # the canary gets mostly slow traffic: pooling would call it slow
        is_own = i % 2 == 0
        stratum = "slow" if (i % 10 < 8) == is_own else "fast"
        rate = {"slow": 20.0, "fast": 200.0}[stratum] * (1.2 if is_own else 1.0)
        test.add(stratum, is_own, 30.0, 30.0 / rate, 12)
    assert test.ratio() == pytest.approx(1.2)
    assert {name: s.ratio() for name, s in test.strata.items()} == pytest.approx({"slow": 1.2, "fast": 1.2})


def test_evidence_survives_encoding_between_any_two_requests():
    rng = np.random.default_rng(1)
    one = CanaryTest(share=0.3, margin=MARGIN)
    other = CanaryTest(share=0.3, margin=MARGIN)
    for _ in range(60):
        args = ("s", bool(rng.random() < 0.3), 30.0, float(rng.uniform(0.2, 0.5)), int(rng.integers(8, 16)))
        one.add(*args)
        other = msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=CanaryTest)
        other.add(*args)
    assert other == one and one.evidence_worse() != 0.0


# ---- errors -------------------------------------------------------------------------------------------------------
def test_errors_that_prefer_the_canary_are_evidence_and_errors_of_everyone_are_not():
    assert log_error_evidence(0, 0, 0.1) == 0.0
    assert log_error_evidence(0, 4, 0.1) > LIMIT + math.log(10)  # also after its weight in the whole evidence
    assert log_error_evidence(90, 10, 0.1) < 0.0
    test = CanaryTest(share=0.1, margin=MARGIN, errors=[0, 4])
    assert test.evidence_worse() > LIMIT


def test_error_evidence_is_a_fair_bet():
    """One more failed request multiplies it by a factor whose mean is one."""
    for inc, own in ((0, 0), (3, 1), (0, 5)):
        now = math.exp(log_error_evidence(inc, own, 0.2))
        after = 0.2 * math.exp(log_error_evidence(inc, own + 1, 0.2)) + 0.8 * math.exp(
            log_error_evidence(inc + 1, own, 0.2)
        )
        assert after == pytest.approx(now)


# ---- who is a canary ----------------------------------------------------------------------------------------------
def test_canary_hash_is_independent_of_the_hold_back_and_of_other_canaries():
    import zlib

    ids = [f"req-{i:08d}" for i in range(20_000)]
    own = np.array([is_canary(i, "v2", 10) for i in ids])
    held = np.array([zlib.crc32(i.encode()) % 100 < 10 for i in ids])
    other = np.array([is_canary(i, "v3", 10) for i in ids])
    for share in (own.mean(), own[held].mean(), own[~held].mean(), own[other].mean()):
        assert share == pytest.approx(0.1, abs=0.025)
    assert all(is_canary(i, "v2", 30) for i, c in zip(ids, own, strict=True) if c)  # a larger share keeps the smaller
    assert not any(is_canary(i, "v2", 0) for i in ids[:100])


def test_blocks_and_classes():
    assert [block_size(s) for s in (0.01, 0.1, 0.5, 0.9)] == [20, 10, 4, 10]
    assert [batch_class(b) for b in (0.3, 1, 1.9, 2, 3.5, 4, 15.9, 16)] == [
        "1", "1", "1", "2-3", "2-3", "4-7", "8-15", "16-31",
    ]  # fmt: skip
