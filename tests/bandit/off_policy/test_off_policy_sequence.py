"""Estimates over sequences are unbiased, cover the truth as often as they say, and beat importance sampling."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.bandit.off_policy.sequence import Branch, Trajectory, estimate, pooled

STEPS, P_LOG, P_NEW = 4, 0.6, 0.9
"""A service that may train (1) or hold (0) at each of four steps; what was trained before helps later."""


def reward(history: tuple[int, ...], act: int) -> float:
    return sum(history) * 2.0 + (1.0 if act else 0.0) * (3.0 - 2.0 * sum(history)) - act


def value(history: tuple[int, ...], wrong: float) -> float:
    """Expected net from here on under the new policy; `wrong` scales a model that is off."""
    total = 0.0
    for rest in itertools.product((0, 1), repeat=STEPS - len(history)):
        p, h, net = 1.0, history, 0.0
        for a in rest:
            p *= P_NEW if a else 1 - P_NEW
            net += reward(h, a)
            h = (*h, a)
        total += p * net
    return wrong * total


def after(history: tuple[int, ...], act: int, wrong: float) -> float:
    return wrong * (reward(history, act) + value((*history, act), 1.0))


def log(rng: np.random.Generator, wrong: float, noise: float = 0.5) -> Trajectory:
    history: tuple[int, ...] = ()
    realised, branches = [], []
    for k in range(STEPS):
        act = int(rng.random() < P_LOG)
        weight = P_NEW / P_LOG if act else (1 - P_NEW) / (1 - P_LOG)
        values, taken = [value(history, wrong)], [after(history, act, wrong)]
        branches.append(Branch(step=k, weight=weight, values_s=values, taken_s=taken))
        realised.append(reward(history, act) + noise * rng.standard_normal())
        history = (*history, act)
    return Trajectory(realised_s=realised, branches=branches, start_s=[value((), wrong)], is_act=[True] * STEPS)


@pytest.mark.parametrize("wrong", [1.0, 0.5, 0.0])
def test_it_is_unbiased_whatever_the_model_and_its_pooled_intervals_cover(wrong):
    rng, truth = np.random.default_rng(0), value((), 1.0)
    found = [[estimate(log(rng, wrong)).total_s for _ in range(30)] for _ in range(200)]
    means = np.array(found).ravel()
    assert abs(means.mean() - truth) < 4 * means.std() / np.sqrt(means.size)
    covered = sum(low <= truth <= high for _, low, high in map(pooled, found))
    assert stats.binom.cdf(covered, 200, 0.95) > 0.001 and stats.binom.sf(covered - 1, 200, 0.95) > 0.001


def test_one_log_s_interval_covers_at_least_as_often_as_it_says_when_the_model_is_right():
    rng, truth = np.random.default_rng(1), value((), 1.0)
    found = [estimate(log(rng, 1.0)) for _ in range(600)]
    # |sum of n residuals| never exceeds sqrt(n) times the root of their squares: with few branches it covers too often
    assert stats.binom.cdf(sum(n.low_s <= truth <= n.high_s for n in found), 600, 0.95) > 0.001


def test_a_usable_model_makes_the_error_no_larger_than_that_of_importance_sampling():
    rng, truth = np.random.default_rng(2), value((), 1.0)
    for wrong in (1.0, 0.7):
        found = [estimate(log(rng, wrong)) for _ in range(400)]
        dr, ips = (np.sqrt(np.mean([(getattr(n, f) - truth) ** 2 for n in found])) for f in ("total_s", "ips_s"))
        assert dr < 0.8 * ips
    assert np.mean([n.ips_s for n in found]) == pytest.approx(truth, abs=4 * ips / 20)


@settings(max_examples=50)
@given(realised=st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_where_both_policies_are_certain_of_the_same_the_realised_net_stands(realised):
    n = estimate(Trajectory(realised_s=realised, branches=[], start_s=[0.0], is_act=[True] * len(realised), realised_error_s=2.0))  # fmt: skip
    assert n.total_s == pytest.approx(sum(realised)) == n.ips_s
    assert n.high_s - n.total_s == pytest.approx(1.96 * 2.0, rel=1e-3)
    assert n.agreement == 1.0 and n.effective_decisions == pytest.approx(len(realised))


def test_after_the_log_parted_from_the_policy_only_the_model_speaks():
    branch = Branch(step=2, weight=0.0, values_s=[10.0, 14.0], taken_s=[], untried=1.0)
    n = estimate(Trajectory(realised_s=[1.0, 1.0, 50.0, 50.0], branches=[branch], start_s=[11.0], is_act=[True] * 4))
    assert n.total_s == pytest.approx(14.0) and n.ips_s == pytest.approx(2.0)
    assert n.agreement == 0.5 and n.untried == 1.0 and n.final_weight == 0.0
    assert n.high_s - n.low_s == pytest.approx(2 * 1.96 * np.std([10, 14], ddof=1), rel=1e-3)


def test_an_interval_over_logs_needs_two():
    with pytest.raises(ValueError, match="at least 2"):
        pooled([1.0])
    mean, low, high = pooled([1.0, 3.0])
    assert low < mean == 2.0 < high
