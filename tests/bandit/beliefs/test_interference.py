import numpy as np
import pytest

from paceline.bandit.beliefs.interference import Interference
from tests.helpers.feedback import sums_of


def _rows(n: int, size: int, ms: float, busy: bool, rng) -> list[dict]:
    return [
        {"batch_size": size, "share_ms": float(ms * (1 + 0.05 * rng.standard_normal())), "is_training": busy}
        for _ in range(n)
    ]


def test_slow_down_is_measured_within_equal_batch_sizes():
    rng = np.random.default_rng(0)
    meter = Interference()
    meter.fold(sums_of(_rows(200, 1, 10.0, False, rng) + _rows(200, 8, 3.0, False, rng)))
    assert meter.close() is None
    # the job coincides with small batches: their longer share is no interference, the 10% on top is
    meter.fold(sums_of(_rows(300, 1, 11.0, True, rng) + _rows(10, 8, 3.3, True, rng)))
    seen = meter.close()
    assert seen is not None
    assert seen.relative == pytest.approx(0.10, abs=0.02)
    assert seen.seconds == pytest.approx(0.3 + 0.003, rel=0.2)


def test_rounds_without_a_baseline_are_not_guessed():
    meter = Interference()
    meter.fold(sums_of(_rows(50, 4, 10.0, True, np.random.default_rng(1))))
    assert meter.close() is None


def test_faster_rounds_during_training_count_as_what_they_are_so_that_noise_adds_up_to_nothing():
    rng = np.random.default_rng(2)
    meter = Interference()
    meter.fold(sums_of(_rows(100, 4, 10.0, False, rng) + _rows(100, 4, 9.0, True, rng)))
    seen = meter.close()
    assert seen is not None and seen.relative == pytest.approx(-0.1, abs=0.02)
    assert seen.seconds == pytest.approx(-0.1, abs=0.02)
    total = 0.0
    for _ in range(60):
        meter.fold(sums_of(_rows(60, 4, 10.0, False, rng) + _rows(60, 4, 10.0, True, rng)))
        total += meter.close().seconds
    assert total == pytest.approx(0.0, abs=0.01 * 60 * 0.6)


def test_the_share_is_of_all_rounds_and_a_baseline_that_is_off_is_believed_to_a_bound():
    rng = np.random.default_rng(3)
    meter = Interference()
    meter.fold(sums_of(_rows(100, 4, 10.0, False, rng)))
    assert meter.close() is None
    meter.fold(sums_of(_rows(300, 4, 10.0, False, rng) + _rows(100, 4, 11.0, True, rng)))
    seen = meter.close()
    assert seen is not None and seen.share == pytest.approx(0.1 / 4.1, abs=0.01)
    meter.fold(sums_of(_rows(100, 4, 0.01, True, rng)))
    seen = meter.close()
    assert seen is not None and -1.0 * 100 * 0.01e-3 * 1.05 < seen.seconds < 0


def _drifting(i: int, drift: float, slower: float, rng, *, is_busy: bool, idle: int = 0):
    """Rounds of an epoch of a computer whose speed drifts over 30 of them; `idle` more are another host's."""
    ms = 10.0 * (1 + drift * i / 30)
    busy = _rows(150, 4, ms * (1 + slower * is_busy), is_busy, rng) + _rows(
        50, 1, 2 * ms * (1 + slower * is_busy), is_busy, rng
    )
    return sums_of(busy + _rows(idle, 4, ms, False, rng))


@pytest.mark.parametrize("slower", [0.0, 0.1])
@pytest.mark.parametrize("drift", [-0.3, 0.0, 0.3])
def test_what_is_booked_of_a_job_in_all_is_its_own_on_a_computer_whose_speed_drifts(drift, slower):
    rng = np.random.default_rng(4)
    meter, booked, settled = Interference(), 0.0, []
    for i in range(30):
        if i == 10:
            assert meter.begin(7) is None
        elif i == 20:
            meter.end()
        meter.fold(_drifting(i, drift, slower, rng, is_busy=10 <= i < 20))
        seen, whole = meter.close(), meter.settle()
        booked += 0.0 if seen is None else seen.seconds
        if whole is not None:
            settled.append((i, whole[0]))
            booked += whole[1].seconds
            assert whole[1].relative == pytest.approx(slower, abs=0.02)
    assert settled == [(20, 7)]
    whole_s = sum(2.5 * (1 + drift * i / 30) for i in range(10, 20))
    assert booked == pytest.approx(slower * whole_s, abs=0.02 * whole_s), "the rounds before it alone would err by 7%"


def test_a_job_is_settled_once_and_not_while_it_runs_beside_other_hosts_rounds():
    rng = np.random.default_rng(5)
    meter = Interference()
    meter.fold(_drifting(0, 0.0, 0.0, rng, is_busy=False))
    meter.close()
    meter.begin(1)
    for _ in range(5):
        meter.fold(sums_of(_rows(10, 4, 11.0, True, rng) + _rows(300, 4, 10.0, False, rng)))
        meter.close()
        assert meter.settle() is None
    meter.end()
    meter.fold(sums_of(_rows(10, 4, 11.0, True, rng) + _rows(300, 4, 10.0, False, rng)))
    meter.close()
    assert meter.settle() is None, "the last rounds beside it are told late"
    meter.fold(sums_of(_rows(300, 4, 10.0, False, rng)))
    meter.close()
    owner, whole = meter.settle()
    assert (owner, whole.num_rounds) == (1, 60) and whole.relative == pytest.approx(0.1, abs=0.02)
    assert meter.settle() is None


@pytest.mark.parametrize("gap", [0, 100])
def test_jobs_back_to_back_are_settled_each_with_its_own(gap):
    rng = np.random.default_rng(6)
    meter = Interference()
    meter.fold(sums_of(_rows(200, 4, 10.0, False, rng)))
    meter.close()
    told = []
    for number in range(1, 5):
        told.append(meter.begin(number))
        meter.fold(sums_of(_rows(200, 4, 10.0 + number, True, rng)))
        meter.end()
        if gap:
            meter.fold(sums_of(_rows(gap, 4, 10.0, False, rng)))
        assert meter.close() is not None and meter.settle() is None
    assert told[0] is None and [owner for owner, _ in told[1:]] == [1, 2, 3]
    for number, (_, whole) in enumerate(told[1:], 1):
        assert whole.relative == pytest.approx(0.1 * number, abs=0.02)
        assert whole.seconds == pytest.approx(0.0, abs=0.02) or gap


def test_a_job_without_rounds_before_it_is_not_guessed_and_is_let_go():
    rng = np.random.default_rng(7)
    meter = Interference()
    meter.begin(1)
    meter.fold(sums_of(_rows(100, 4, 10.0, True, rng)))
    meter.end()
    assert meter.close() is None and meter.settle() is None
    meter.fold(sums_of(_rows(600, 4, 8.0, False, rng)))
    assert meter.close() is None and meter.settle() is None and meter.job is None
