import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.beliefs.gain_model import K_MEAN, GainModel, further_share
from paceline.bandit.policies.table import make_policy
from paceline.bandit.policies.thompson import propensities
from paceline.config import PolicyConfig
from tests.helpers.views import CALIBRATION, FULL, HEAD, choose, make_belief, make_job, make_view
from tests.helpers.world import World


def _jobs():
    share = further_share(0, 2000)
    return tuple(
        make_job(arm, cost=cost, headroom=0.8, share=share, left_s=60.0)
        for arm, cost in ((CALIBRATION, 1.0), (HEAD, 4.0), (FULL, 5.0))
    )


def test_logged_propensities_match_how_often_each_action_is_taken():
    config = PolicyConfig(thompson_draws=2000)
    picks: dict[str, list[float]] = {}
    for seed in range(600):
        choice = choose("thompson", seed=seed, jobs=_jobs(), config=config)
        picks.setdefault(choice.job.arm.name if choice.job else "hold", []).append(choice.propensity)
    assert len(picks) >= 3
    for logged in picks.values():
        share = len(logged) / 600
        assert share == pytest.approx(np.mean(logged), abs=4 * np.sqrt(share * (1 - share) / 600) + 0.01)


def test_given_the_draws_the_action_is_drawn_from_the_very_frequencies_that_are_logged():
    view = make_view(jobs=_jobs(), config=PolicyConfig(thompson_draws=50))
    for seed in range(40):
        shares = propensities(view, list(view.jobs), np.random.default_rng(seed))
        choice = make_policy("thompson").choose(view, np.random.default_rng(seed))
        at = 0 if choice.job is None else 1 + view.jobs.index(choice.job)
        assert choice.propensity == pytest.approx(shares[at]) and shares.sum() == pytest.approx(1.0)


def test_a_small_arm_is_tried_as_often_as_the_posterior_says_it_is_best():
    gains = GainModel()
    view = make_view(jobs=_jobs(), gains=gains, config=PolicyConfig(thompson_draws=20_000))
    a, b = (propensities(view, list(view.jobs), np.random.default_rng(s)) for s in (1, 2))
    assert a == pytest.approx(b, abs=0.02)


def test_experience_sharpens_the_choice():
    gains = GainModel()
    share = further_share(0, 2000)
    view = make_view(jobs=_jobs(), gains=gains)
    before = propensities(view, list(view.jobs), np.random.default_rng(0))
    for _ in range(5):
        gains.update("c", FULL, 0.8, share, 0.0, 0.01)
        gains.update("c", HEAD, 0.8, share, 0.0, 0.01)
    after = propensities(view, list(view.jobs), np.random.default_rng(0))
    assert after[0] > 0.9 > before[0]


@settings(max_examples=40)
@given(costs=st.lists(st.floats(0.5, 100), min_size=1, max_size=5), balance=st.floats(0, 60), seed=st.integers(0, 99))
def test_it_never_takes_what_the_bank_does_not_cover(costs, balance, seed):
    jobs = tuple(make_job(FULL, cost=c, left_s=1000.0) for c in costs)
    choice = choose("thompson", seed=seed, jobs=jobs, balance_s=balance)
    assert choice.job is None or choice.job.cost.total_s <= balance
    if min(costs) > balance:
        assert choice.code == "bank"


def test_draws_of_jobs_move_together_through_what_they_share():
    draws = GainModel().draw([("c", HEAD, 1.0), ("c", FULL, 1.0), ("d", FULL, 1.0)], 20_000, np.random.default_rng(0))
    assert draws.shape == (20_000, 3)
    assert draws[:, 1].mean() == pytest.approx(K_MEAN, abs=0.02)
    same, other = np.corrcoef(draws[:, 0], draws[:, 1])[0, 1], np.corrcoef(draws[:, 1], draws[:, 2])[0, 1]
    assert same > other > 0.2


def test_a_served_belief_is_not_changed_by_looking():
    gains = GainModel()
    gains.predict("c", FULL, 1.0, 0.5)
    view = make_view(jobs=_jobs(), gains=gains, beliefs={"c": make_belief()})
    mean = list(gains.mean)
    choose("thompson", jobs=view.jobs, gains=gains)
    assert gains.mean[: len(mean)] == mean and gains.num_jobs == 0


def test_in_a_service_it_never_overdraws_the_bank():
    w = World(
        config=PolicyConfig(policy="thompson", epoch_s=5.0),
        mix=lambda t: {"abc"[int(t / 60) % 3]: 1.0},
        lengths={"a": 2.46, "b": 2.79, "c": 1.4},
        ceilings={"a": 2.46, "b": 2.79, "c": 1.4},
    )
    for _ in range(400):
        w.step()
        bank = w.controller.bank()
        assert bank.spent_s - max(bank.saved_s, 0.0) <= w.controller.bank().credit_s + 1.0
    assert w.of("train") and all(0 < d.propensity <= 1 for d in w.decisions)
