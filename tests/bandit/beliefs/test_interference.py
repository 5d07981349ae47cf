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


@pytest.mark.parametrize("slower", [0.0, 0.1])
@pytest.mark.parametrize("drift", [-0.3, 0.0, 0.3])
def test_what_is_booked_of_a_job_in_all_is_its_own_on_a_computer_whose_speed_drifts(drift, slower):
    rng = np.random.default_rng(4)
    meter, booked = Interference(), 0.0
    for i in range(30):  # epochs, the job beside those of the middle
        is_busy = 10 <= i < 20
        ms = 10.0 * (1 + drift * i / 30) * (1 + slower * is_busy)
        meter.fold(sums_of(_rows(150, 4, ms, is_busy, rng) + _rows(50, 1, 2 * ms, is_busy, rng)))
        seen = meter.close()
        settled = meter.settle() if seen is None else None
        booked += sum(found.seconds for found in (seen, settled) if found is not None)
        if settled is not None:
            assert i == 20 and settled.relative == pytest.approx(slower, abs=0.02)
    whole = sum(2.5 * (1 + drift * i / 30) for i in range(10, 20))
    assert booked == pytest.approx(slower * whole, abs=0.02 * whole), "the rounds before it alone would err by 7%"
    assert meter.job == {} and meter.settle() is None


def test_a_job_without_rounds_before_it_is_not_guessed_and_is_let_go():
    rng = np.random.default_rng(5)
    meter = Interference()
    meter.fold(sums_of(_rows(100, 4, 10.0, True, rng)))
    assert meter.close() is None and meter.settle() is None
    meter.fold(sums_of(_rows(600, 4, 8.0, False, rng)))
    assert meter.close() is None and meter.settle() is None and meter.job == {}
