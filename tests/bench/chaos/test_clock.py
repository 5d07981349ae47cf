"""Processes under a stepped clock see another time of day; what counts from some start, and waits, are left alone."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from paceline.bench.chaos.clock import VARIABLE, SteppedClock, why_no_clock

pytestmark = pytest.mark.skipif(why_no_clock() is not None, reason="clocks cannot be stepped here")

CHILD = """
import sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    threading.Event().wait(0.05)
    print(time.time(), time.monotonic(), time.monotonic() - began, flush=True)
"""


@pytest.fixture
def clock(tmp_path):
    found = SteppedClock(tmp_path)
    found.enter()
    yield found
    found.leave()


def ask(child: subprocess.Popen) -> tuple[float, float, float]:
    """What a child's clock is ahead of ours by, its steady one too, and how long its waits of 0.1 s took."""
    child.stdin.write("?\n")
    child.stdin.flush()
    wall, steady, waited = map(float, child.stdout.readline().split())
    return wall - time.time(), steady - time.monotonic(), waited


def test_a_step_moves_the_time_of_day_both_ways_and_back_and_nothing_else(clock):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        ask(child)  # it has loaded what it loads
        assert clock.is_of(psutil.Process(child.pid)) and not clock.is_of(psutil.Process())
        for shift_s in (0.0, 3660.0, -3660.0, 0.5, 0.0):
            clock.step(shift_s)
            wall, steady, waited = ask(child)
            assert wall == pytest.approx(shift_s, abs=20.0)
            assert steady == pytest.approx(0.0, abs=20.0) and 0.09 < waited < 20.0
        child.stdin.close()


def test_leaving_gives_the_environment_back_and_the_time_to_those_who_still_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/mine.so")
    clock = SteppedClock(tmp_path)
    clock.enter()
    assert os.environ["LD_PRELOAD"] != "/lib/mine.so" and VARIABLE in os.environ
    clock.step(60.0)
    clock.leave()
    assert os.environ["LD_PRELOAD"] == "/lib/mine.so" and VARIABLE not in os.environ
    assert (tmp_path / "clock.shift").read_bytes() == bytes(8)
    clock.leave()
