"""Behind a step of the clock every armed timer of the process ends at once; without one none is touched."""

import ctypes
import os
import select
import sys

import pytest

from paceline.infra.replica.late_timers import StepWatch, _TimerSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's timers")
LIBRARY = ctypes.CDLL(None)


@pytest.fixture
def timer():
    found = LIBRARY.timerfd_create(1, os.O_NONBLOCK)
    yield found
    os.close(found)


def arm(timer: int, seconds: int, interval: int = 0) -> None:
    assert LIBRARY.timerfd_settime(timer, 0, ctypes.byref(_TimerSpec(interval, 0, seconds, 0)), None) == 0


def is_over(timer: int, patience_s: float) -> bool:
    return bool(select.select([timer], [], [], patience_s)[0])


@pytest.mark.parametrize("step_s", [-1800.0, 1800.0, -1.0])
def test_an_armed_timer_ends_behind_a_step(timer, step_s):
    now = [1000.0]
    watch = StepWatch(wall=lambda: now[0], steady=lambda: 0.0)
    arm(timer, 300, interval=60)
    now[0] += 0.01  # slewed
    assert not watch.look() and not is_over(timer, 0.05)
    now[0] += step_s
    assert watch.look() and is_over(timer, 5.0)
    os.read(timer, 8)
    left = _TimerSpec()
    LIBRARY.timerfd_gettime(timer, ctypes.byref(left))
    assert (left.interval_s, left.value_s > 50) == (60, True), "it goes on as it was"
    assert not watch.look() and not is_over(timer, 0.05)


def test_time_that_passes_is_no_step(timer):
    now = [0.0]
    watch = StepWatch(wall=lambda: 1000.0 + now[0], steady=lambda: now[0])
    arm(timer, 300)
    now[0] += 4000.0
    assert not watch.look() and not is_over(timer, 0.05)


def test_a_timer_that_is_not_armed_stays_so(timer):
    now = [0.0]
    watch = StepWatch(wall=lambda: now[0], steady=lambda: 0.0)
    now[0] -= 60.0
    assert watch.look() and not is_over(timer, 0.05)
