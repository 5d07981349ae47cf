import numpy as np
import pytest

from paceline.bandit.beliefs.arms import default_arms, sized
from paceline.bandit.beliefs.job_cost import CostModel

CALIBRATION, HEAD, FULL = default_arms()


def test_prior_costs_rise_with_arm_and_rows():
    model = CostModel()
    costs = [model.predict(sized(a, 2000), busy=1.0, num_replicas=1).total_s for a in default_arms()]
    assert costs == sorted(costs)
    assert (
        model.predict(sized(FULL, 1000), busy=1, num_replicas=1).total_s
        < model.predict(FULL, busy=1, num_replicas=1).total_s
    )


def test_predictions_follow_measured_jobs_and_other_arms_follow_weakly():
    model = CostModel()
    arm = sized(FULL, 4000)
    before, head = (model.predict(a, busy=1, num_replicas=1).training_s for a in (arm, HEAD))
    for _ in range(6):
        model.update(arm, 3 * before, 2.0)
    assert model.predict(arm, busy=1, num_replicas=1).training_s == pytest.approx(3 * before, rel=0.2)
    assert model.predict(HEAD, busy=1, num_replicas=1).training_s > 1.5 * head


def test_interference_scales_with_the_device_time_that_serving_uses():
    model = CostModel()
    idle, full = (model.predict(FULL, busy=b, num_replicas=1).interference_s for b in (0.0, 1.0))
    assert idle == 0 and full > 0
    for _ in range(12):
        model.observe_slowdown(0.5, 1000)
    assert model.predict(FULL, busy=1.0, num_replicas=1).interference_s > 5 * full


def test_noise_around_no_slow_down_is_none_in_the_mean():
    model, rng = CostModel(), np.random.default_rng(0)
    found = []
    for _ in range(400):
        model.observe_slowdown(float(0.2 * rng.standard_normal()), 400)
        found.append(model.slowdown)
    assert np.mean(found[50:]) == pytest.approx(0.0, abs=0.02)


def test_a_job_that_waits_for_the_processor_slows_serving_down_for_longer():
    model = CostModel()
    before = model.predict(FULL, busy=1.0, num_replicas=1)
    for _ in range(8):
        model.update_duration(60.0, 20.0)
    after = model.predict(FULL, busy=1.0, num_replicas=1)
    assert after.interference_s == pytest.approx(3.0 * before.interference_s, rel=0.1)
    assert (after.training_s, after.shadow_s) == (before.training_s, before.shadow_s)
    model.update_duration(1.0, 0.0)  # it ended before it used any
    assert model.predict(FULL, busy=1.0, num_replicas=1) == after


def test_scoring_costs_by_the_row():
    model = CostModel()
    model.update(sized(FULL, 4000), 10.0, 8.0)
    model.update(sized(FULL, 4000), 10.0, 8.0)
    small, large = (model.predict(sized(FULL, n), busy=0.0, num_replicas=1).shadow_s for n in (2000, 8000))
    assert large > 3 * small


def test_the_price_of_the_trainer_holds_for_its_seconds_alone():
    model = CostModel()
    dear, cheap = (model.predict(FULL, busy=1.0, num_replicas=2, price=p) for p in (1.0, 0.25))
    assert (cheap.training_s, cheap.shadow_s, cheap.interference_s) == (
        dear.training_s,
        dear.shadow_s,
        dear.interference_s,
    )
    assert dear.total_s - cheap.total_s == pytest.approx(0.75 * (dear.training_s + dear.shadow_s))


def test_the_margin_falls_with_the_jobs_that_were_measured():
    costs = CostModel()
    margins = [costs.margin()]
    for i in range(6):
        if i % 2:
            costs.update(FULL, 10.0, 2.0)
        else:
            costs.update_cut_short(FULL, 10.0)
        margins.append(costs.margin())
    assert margins[0] == 1.5 and margins == sorted(margins, reverse=True) and 1.0 < margins[-1] < 1.1
