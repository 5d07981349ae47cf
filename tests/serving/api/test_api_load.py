"""How long a client that found the queue full is told to wait."""

from __future__ import annotations

from paceline.machine import ManualClock
from paceline.serving.api.http import MAX_RETRY_S, WINDOW_S, FinishRate


def rate(num: int, every_s: float) -> tuple[FinishRate, ManualClock]:
    """A rate after `num` finishes, one every `every_s` seconds, the last one just now."""
    clock = ManualClock(100.0)
    finishes = FinishRate(clock.now)
    for _ in range(num):
        finishes.note()
        clock.advance(every_s)
    return finishes, clock


def test_the_wait_is_the_queue_over_the_rate() -> None:
    finishes, _ = rate(10, 0.5)
    assert [finishes.retry_after_s(n) for n in (1, 4, 5, 20)] == [1, 2, 3, 10]


def test_the_wait_is_bounded() -> None:
    finishes, _ = rate(10, 0.5)
    assert finishes.retry_after_s(10**9) == MAX_RETRY_S
    assert finishes.retry_after_s(0) == 1
    assert rate(200, 1e-6)[0].retry_after_s(3) == 1


def test_without_finishes_the_wait_is_the_longest() -> None:
    assert FinishRate(ManualClock().now).retry_after_s(1) == MAX_RETRY_S
    finishes, clock = rate(10, 0.5)
    clock.advance(WINDOW_S + 1)
    assert finishes.retry_after_s(1) == MAX_RETRY_S


def test_a_pause_lengthens_the_wait() -> None:
    finishes, clock = rate(10, 0.5)
    before = finishes.retry_after_s(10)
    clock.advance(10)
    assert finishes.retry_after_s(10) == before + 10
