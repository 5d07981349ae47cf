import numpy as np
import pytest

from paceline.bandit.ratio import RatioSums
from paceline.bandit.regime import BucketRegime, MixRegime


def _epoch(rng: np.random.Generator, length: float, requests: int = 12) -> RatioSums:
    pool = RatioSums()
    for _ in range(requests):
        rounds = int(rng.integers(20, 40))
        level = length * (1 + 0.1 * rng.standard_normal())
        pool.add(rounds * level, rounds)
    return pool


def test_stationary_acceptance_raises_no_alarm():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(20):
        regime = BucketRegime(0.0)
        alarms += sum(regime.update({"v0": _epoch(rng, 2.4)}) for _ in range(120))
    assert alarms == 0


@pytest.mark.parametrize("after", [1.5, 3.2])
def test_a_changed_text_is_noticed_within_a_few_epochs(after):
    rng = np.random.default_rng(1)
    regime = BucketRegime(0.0)
    for _ in range(20):
        assert not regime.update({"v0": _epoch(rng, 2.4)})
    assert any(regime.update({"v0": _epoch(rng, after)}) for _ in range(4))


def test_a_swap_is_no_drift():
    rng = np.random.default_rng(2)
    regime = BucketRegime(0.0)
    for version, length in (("v0", 1.4), ("v1", 1.8), ("v2", 2.2)):
        assert not any(regime.update({version: _epoch(rng, length)}) for _ in range(15))


def test_the_mix_regime_ends_when_the_mix_moves_and_remembers_its_length():
    regime = MixRegime(0.0)
    for i in range(6):
        regime.update({"a": 100, "b": 100}, 10.0 * i)
    assert regime.start == 0.0
    for i in range(6, 12):
        regime.update({"c": 200}, 10.0 * i)
    assert regime.start in (60.0, 70.0) and len(regime.lengths) == 1
    assert set(regime.mean) == {"c"}


def test_the_horizon_grows_with_age_and_learns_from_past_regimes():
    regime = MixRegime(0.0)
    assert regime.horizon_s(0.0, 120.0) == 120.0
    assert regime.horizon_s(100.0, 120.0) > 120.0
    assert regime.horizon_s(10_000.0, 120.0) == regime.horizon_s(100_000.0, 120.0)
    regime.lengths = [20.0] * 10
    assert regime.horizon_s(0.0, 120.0) < 60.0
