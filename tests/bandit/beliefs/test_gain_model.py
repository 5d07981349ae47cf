import itertools

import numpy as np
import pytest

from paceline.bandit.beliefs.arms import default_arms, row_counts
from paceline.bandit.beliefs.gain_model import ARM_SHARE, GainModel, further_share, learned_share, newness

CALIBRATION, HEAD, FULL = default_arms()


def test_the_curve_rises_and_saturates_below_one():
    values = [learned_share(n) for n in (0, 100, 1000, 4000, 16_000, 10**6)]
    assert values[0] == 0 and values == sorted(values) and values[-1] < 1.0 + 1e-12


def test_shares_of_successive_jobs_compose_to_the_share_of_one_large_job():
    left = (1 - further_share(0, 1000)) * (1 - further_share(1000, 4000))
    assert 1 - left == pytest.approx(further_share(0, 4000))


def test_the_prior_foresees_measured_gains_of_an_unseen_domain():
    # a full fine-tune from acceptance length 1.39: 1.78 after 1k rows, 2.21 after 16k rows, best bucket 2.79
    model = GainModel()
    for rows, low, high in ((1000, 0.2, 0.6), (16_000, 0.5, 1.2)):
        mean, sd = model.predict("math", FULL, 1.4, further_share(0, rows))
        assert low < mean < high and sd > 0.1


def test_arms_are_ordered_by_prior_gain():
    model = GainModel()
    means = [model.predict("a", arm, 1.0, 0.5)[0] for arm in default_arms()]
    assert means == sorted(means)


def test_refused_jobs_shrink_the_gain_of_their_bucket_most():
    model = GainModel()
    start = model.predict("a", FULL, 0.8, 0.5)[0]
    for _ in range(3):
        model.update("a", FULL, 0.8, 0.5, 0.0, 0.03)
    here, elsewhere = model.predict("a", FULL, 0.8, 0.5)[0], model.predict("b", FULL, 0.8, 0.5)[0]
    assert here < 0.2 * start < elsewhere < start


def test_other_arms_learn_from_a_job():
    model = GainModel()
    before = model.predict("a", FULL, 0.8, 0.5)[0]
    model.update("a", HEAD, 0.8, 0.5, 0.5, 0.03)
    assert model.predict("a", FULL, 0.8, 0.5)[0] > before


def test_a_good_job_raises_and_narrows_the_posterior():
    model = GainModel()
    mean, sd = model.predict("a", FULL, 1.0, 0.5)
    model.update("a", FULL, 1.0, 0.5, 0.48, 0.02)
    after, narrower = model.predict("a", FULL, 1.0, 0.5)
    assert mean < after < 0.6 and narrower < sd


@pytest.mark.parametrize("misfit", [0.03, 0.12, 0.4])
@pytest.mark.parametrize("arm", default_arms(), ids=lambda a: a.name)
def test_the_predicted_spread_becomes_that_of_the_jobs(misfit, arm):
    rng, errors = np.random.default_rng(0), []
    for _ in range(60):
        model, kind = GainModel(), rng.normal(0.5, 0.2)
        for job in range(21):
            mean, sd = model.predict("a", arm, 0.8, 0.5)
            gain = 0.8 * 0.5 * ARM_SHARE[arm.parameters] * (kind + misfit * rng.standard_normal())
            errors += [(gain - mean) / sd] if job == 20 else []
            model.update("a", arm, 0.8, 0.5, gain, 0.002)
    assert 0.35 < np.std(errors) < 1.4, "1 where each prediction says how far off it may be"


def test_reset_restores_the_bucket_but_keeps_what_all_buckets_taught():
    model = GainModel()
    for _ in range(3):
        model.update("a", FULL, 0.8, 0.5, 0.0, 0.03)
    elsewhere = model.predict("new", FULL, 0.8, 0.5)
    model.reset_bucket("a")
    assert model.predict("a", FULL, 0.8, 0.5) == pytest.approx(elsewhere)


def test_discounting_brings_old_evidence_back_to_the_prior():
    model = GainModel()
    prior = model.predict("a", FULL, 0.8, 0.5)[0]
    for _ in range(3):
        model.update("a", FULL, 0.8, 0.5, 0.0, 0.03)
    low = model.predict("a", FULL, 0.8, 0.5)[0]
    for _ in range(120):
        model.update("z", CALIBRATION, 0.001, 0.001, 0.0, 1.0)  # says nothing, only ages
    assert low < 0.8 * prior < model.predict("a", FULL, 0.8, 0.5)[0]


def test_row_counts_rise_and_respect_minimum_and_arm():
    assert row_counts(FULL, 700, 768) == []
    for usable, arm in itertools.product((768, 1500, 9000, 50_000), default_arms()):
        counts = row_counts(arm, usable, 768)
        assert counts == sorted(set(counts)) and counts[0] >= 768 and counts[-1] == min(usable, arm.num_rows)


def test_rows_learned_before_teach_less_until_jobs_show_that_they_teach_again():
    model = GainModel()
    fresh, known = (model.predict("a", FULL, 0.8, 0.5, new)[0] for new in (1.0, 0.0))
    assert 0 < known < 0.6 * fresh
    for _ in range(4):
        model.update("b", FULL, 0.8, 0.5, 0.65 * 0.4, 0.02, 0.0)
    assert model.predict("a", FULL, 0.8, 0.5, 0.0)[0] > 1.3 * known
    assert newness(0, 1000, 1000) == pytest.approx(1.0)
    assert newness(16_000, 16_500, 4000) < 0.3 and newness(10**6, 10**6, 4000) < 0.01
