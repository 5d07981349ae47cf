import numpy as np
import pytest

from paceline.bandit.beliefs.ratio import RatioSums
from paceline.bandit.beliefs.regime import CLIP, PRESENT_SHARE, BucketRegime, MixRegime, has_drifted


def _epoch(rng: np.random.Generator, length: float, requests: int = 12) -> RatioSums:
    pool = RatioSums()
    for _ in range(requests):
        rounds = int(rng.integers(20, 40))
        level = length * (1 + 0.1 * rng.standard_normal())
        pool.add(rounds * level, rounds)
    return pool


@pytest.mark.parametrize(
    ("seed", "shift", "alarms"), [(0, 2, [38]), (1, -2, [37]), (2, 1, [50]), (3, -1, [57]), (4, 0, []), (5, 0.4, [])]
)
def test_the_page_hinkley_test_alarms_where_another_implementation_does(seed, shift, alarms):
    """Expected: river 0.26.1, PageHinkley(min_instances=3, delta=0.5, threshold=10, alpha=1, mode="both")."""
    rng = np.random.default_rng(seed)
    stream = np.clip(rng.normal(0, 1.2, 60) + np.repeat([0, shift], 30), -CLIP, CLIP).tolist()
    assert [i for i in range(60) if has_drifted(stream[: i + 1])] == alarms


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


def _cycled(visits: list[tuple[str, float]]) -> tuple[MixRegime, float]:
    regime, now = MixRegime(0.0), 0.0
    for bucket, seconds in visits:
        for _ in range(int(seconds / 10)):
            regime.update({bucket: 100}, now)
            now += 10.0
    return regime, now


def test_a_wait_costs_what_of_the_regime_it_takes():
    regime = MixRegime(0.0)
    waits = [regime.horizon_s(50.0, 120.0, w) for w in (0, 10, 60, 300)]
    assert waits[0] == regime.horizon_s(50.0, 120.0) and waits == sorted(waits, reverse=True)
    assert all(
        later >= waits[0] - w for later, w in zip(waits, (0, 10, 60, 300), strict=True)
    )  # E[(R - w)+] >= E[R] - w
    regime.lengths = [100.0] * 1000
    assert regime.horizon_s(50.0, 120.0, 30.0) == pytest.approx(20.0, abs=1.0)
    assert regime.horizon_s(50.0, 120.0, 80.0) == pytest.approx(0.0, abs=1.0)


def test_a_bucket_that_keeps_coming_back_is_expected_again_and_a_new_one_is_not():
    regime, now = _cycled([("a", 300), ("c", 300), ("a", 300), ("c", 300), ("a", 100)])
    assert len(regime.lengths) == 4
    returning = regime.returning_s("a", now, 120.0)
    assert 200 < returning < 700  # about half of the time for as long as was watched, less doubt and lags
    assert regime.returning_s("new", now, 120.0) == 0.0


def test_a_new_bucket_is_expected_again_as_far_as_those_before_it_came_back():
    steady, now = _cycled([("a", 300), ("c", 300), ("a", 300), ("c", 300), ("new", 100)])
    fresh, _ = _cycled([("a", 300), ("b", 300), ("c", 300), ("d", 300), ("new", 100)])
    often, seldom = (r.returning_s("new", now, 120.0) for r in (steady, fresh))
    assert often > 2 * seldom > 0


def test_the_first_regime_promises_no_return_and_a_changed_text_is_new():
    regime, now = _cycled([("a", 300)])
    assert regime.returning_s("a", now, 120.0) == 0.0
    regime, now = _cycled([("a", 300), ("c", 300), ("a", 300), ("b", 300), ("a", 100)])
    known = regime.returning_s("a", now, 120.0)
    regime.forget("a")
    assert 0 < regime.returning_s("a", now, 120.0) < 0.7 * known


def test_nothing_is_expected_behind_a_known_end():
    regime, now = _cycled([("a", 300), ("c", 300), ("a", 300), ("c", 300), ("a", 100)])
    free = regime.horizon_s(now, 120.0), regime.returning_s("a", now, 120.0)
    share = max(regime.mean["a"], PRESENT_SHARE)
    for left in (0.0, 10.0, 50.0, 200.0, 500.0):
        assert regime.horizon_s(now, 120.0, ends_at=now + left) == min(free[0], left)
        for wait in (0.0, 30.0, 250.0):
            rest = regime.horizon_s(now, 120.0, wait, now + left)
            returns = regime.returning_s("a", now, 120.0, wait, now + left)
            assert rest <= max(left - wait, 0.0) and 0.0 <= returns <= free[1]
            assert share * returns <= max(
                left - max(wait, free[0]), 0.0
            )  # of what is left behind this regime and the wait
    assert regime.returning_s("a", now, 120.0, ends_at=now + 1e6) == free[1]
