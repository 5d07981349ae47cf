"""Claims of bandit/controller/controller.py and bandit/beliefs/gain_model.py."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.gain_model import ARM_SHARE, K_MEAN, GainModel, arm_posteriors, regime_starts
from paceline.bandit.controller.controller import Controller
from paceline.config import PolicyConfig
from paceline.machine import ManualClock


def controller() -> Controller:
    return Controller(PolicyConfig(), clock=ManualClock(), rng=np.random.default_rng(0))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 2e9])
def test_bank_refuses_what_is_no_balance(value: float) -> None:
    with pytest.raises(ValueError, match="bank_s"):
        controller().set_bank(value)


@given(st.floats(0, 1e9))
def test_bank_is_what_the_operator_set_also_after_a_restart(value: float) -> None:
    made = controller()
    made.set_bank(value)
    again = Controller.restore(made.state(), PolicyConfig(), clock=ManualClock())
    assert again.bank().start_s == made.bank().start_s == value


def test_order_before_any_replica_was_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="seen no replica"):
        controller().train_now("math", "head", 0.0)


JOBS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.floats(-0.5, 1.5)), max_size=12)


@given(JOBS)
def test_posterior_of_an_arm_agrees_with_the_models_own_prediction(jobs) -> None:
    gains, arms = GainModel(), default_arms()
    for arm in arms:
        for bucket in ("a", "b"):
            gains.predict(bucket, arm, 1.0, 1.0)  # what pricing does: names every arm and bucket
    for bucket, i, gain in jobs:
        gains.update(bucket, arms[i], 1.0, 0.5, gain, 0.05)
    names = list(gains.names)
    rows = {(r.arm, r.bucket): r for r in arm_posteriors(gains)}
    assert gains.names == names and set(rows) == {(a.name, b) for a in arms for b in (None, "a", "b")}
    for arm in arms:
        for bucket in ("a", "b"):
            row = rows[(arm.name, bucket)]
            mean, sd = gains.predict(bucket, arm, 1.0, 1.0)
            assert row.mean == pytest.approx(mean, abs=1e-9)
            assert (row.high - row.low) / 2 <= 1.645 * sd + 1e-9, "the misfit of the curve only widens it"
        assert rows[(arm.name, None)].prior_mean == pytest.approx(K_MEAN * ARM_SHARE[arm.parameters])


def test_without_jobs_the_posterior_is_the_prior() -> None:
    gains, arm = GainModel(), default_arms()[1]
    gains.predict("a", arm, 1.0, 1.0)
    (row,) = [r for r in arm_posteriors(gains) if r.bucket is None]
    assert (row.mean, row.low, row.high) == pytest.approx((row.prior_mean, row.prior_low, row.prior_high))


@given(st.floats(0, 1e6), st.lists(st.floats(0.1, 1e4), max_size=8))
def test_regime_starts_are_as_far_apart_as_the_regimes_lasted(start: float, lengths: list[float]) -> None:
    starts = regime_starts(start, lengths)
    assert starts[-1] == start
    assert [b - a for a, b in itertools.pairwise(starts)] == pytest.approx(lengths, abs=1e-3)
