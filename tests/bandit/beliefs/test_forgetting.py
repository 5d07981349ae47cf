"""What jobs cost the buckets they do not train on is learned from versions that were served there."""

import math

import pytest

from paceline.bandit.beliefs.arms import default_arms, sized
from paceline.bandit.beliefs.forgetting import MAX_LOSS, MIN_OBSERVED_ROUNDS, ForgettingModel, forgetting
from paceline.bandit.beliefs.recall import ScoreTable

CALIBRATION, HEAD, FULL = default_arms()
JOB = sized(FULL, 4000)


def _served(table: ScoreTable, bucket: str, version: str, length: float, num_requests: int = 40) -> None:
    realised = table._score(bucket, version).realised
    for i in range(num_requests):
        realised.add(20 * (length + (0.1 if i % 2 else -0.1)), 20)


def _lived(model: ForgettingModel, loss: float, times: int) -> None:
    for i in range(times):
        table = ScoreTable()
        _served(table, "other", "v0", 2.5)
        model.expect("c", f"v{i + 1}", "v0", JOB, table)
        _served(table, "other", f"v{i + 1}", 2.5 * (1 - loss))
        model.observe(table)


def test_without_evidence_the_prior_curve_holds():
    assert ForgettingModel().loss(JOB) == pytest.approx(forgetting(JOB))
    assert ForgettingModel().loss(CALIBRATION) == 0.0


@pytest.mark.parametrize("factor", [0.0, 1.0, 3.0])
def test_the_expected_loss_goes_to_the_measured_one(factor):
    model, true = ForgettingModel(), factor * forgetting(JOB)
    _lived(model, true, 6)
    assert model.num_seen == 6
    assert model.loss(JOB) == pytest.approx(true, abs=0.35 * forgetting(JOB))


def test_a_version_teaches_once_and_only_when_it_was_served_enough():
    model, table = ForgettingModel(), ScoreTable()
    _served(table, "other", "v0", 2.5)
    model.expect("c", "v1", "v0", JOB, table)
    _served(table, "other", "v1", 2.0, num_requests=MIN_OBSERVED_ROUNDS // 20 - 1)
    model.observe(table)
    assert model.num_seen == 0
    _served(table, "other", "v1", 2.0)
    model.observe(table)
    model.observe(table)
    assert model.num_seen == 1 and model.scale > 1.0


def test_the_trained_bucket_and_buckets_without_a_measured_base_teach_nothing():
    model, table = ForgettingModel(), ScoreTable()
    _served(table, "c", "v0", 1.5)
    table.set_shadow("other", "v0", 2.5, 10)  # a replay score alone is no measurement
    model.expect("c", "v1", "v0", JOB, table)
    _served(table, "c", "v1", 2.2)
    _served(table, "other", "v1", 1.0)
    model.observe(table)
    assert model.num_seen == 0


def test_a_changed_text_is_not_waited_for():
    model, table = ForgettingModel(), ScoreTable()
    _served(table, "other", "v0", 2.5)
    model.expect("c", "v1", "v0", JOB, table)
    model.reset_bucket("other")
    _served(table, "other", "v1", 1.2)
    model.observe(table)
    assert model.num_seen == 0


def test_losses_stay_bounded():
    model = ForgettingModel()
    _lived(model, 0.59, 30)
    assert 0 < model.loss(FULL) <= MAX_LOSS and math.isfinite(model.variance)
    gained = ForgettingModel()
    _lived(gained, -0.3, 30)
    assert gained.loss(FULL) == 0.0


def test_state_survives_storage():
    import msgspec

    model = ForgettingModel()
    _lived(model, 0.1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ForgettingModel) == model
