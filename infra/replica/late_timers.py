"""Late timers: Ray's own in this process, woken behind a step of the computer's clock.

Timers of Ray's C++ parts are due at a time of day (boost::asio::deadline_timer), and one kernel timer per event loop, armed for
the first of them but for 5 minutes at most, looks at them. While the clock is behind by more, that one is armed for 5 minutes;
when the clock is right again the timers that are long due wait for its end, and all that are set meanwhile wait behind them. A
replica does not learn within that time that the proxy it answers is gone: its event loop stands still, it fails Serve's health
checks and is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

STEP_S = 0.5
"""A larger change between two looks is a step: clocks that are only slewed change by at most 0.5 ms a second."""
LOOK_S = 1.0
_SOON_NS = 1_000_000
_TIMER = "anon_inode:[timerfd]"


class _TimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class StepWatch:
    """Looks at the clock every LOOK_S and wakes this process' timers behind a step; needs Linux, else it does nothing.

    A step that is undone before the next look is not seen.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        """steady: stands still while the computer sleeps, as its timers do: waking up is a step."""
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()

    def start(self) -> StepWatch:
        """Look for as long as the process lives."""
        if sys.platform == "linux":
            threading.Thread(target=self._run, name="paceline-clock-steps", daemon=True).start()
        return self

    def look(self) -> bool:
        """Whether the clock has made a step since the last look, behind which all timers were woken."""
        offset_s = self._wall() - self._steady()
        step_s = offset_s - self._offset_s
        if abs(step_s) >= STEP_S:
            log.warning("the computer's clock made a step of %+.1f s: %d timers are woken", step_s, wake_timers())
        self._offset_s = offset_s
        return abs(step_s) >= STEP_S

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                self.look()
            except OSError as e:  # no file may be opened any more: the next look sees the step again
                log.warning("timers could not be woken behind a step of the clock: %s", e)


def wake_timers() -> int:
    """Let every kernel timer of this process that is armed end at once, whose owner then looks at its own; their number."""
    library, num_woken = ctypes.CDLL(None, use_errno=True), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it may be closed by now
            if os.readlink(f"/proc/self/fd/{name}") != _TIMER:
                continue
            timer, spec = int(name), _TimerSpec()
            library.timerfd_gettime(timer, ctypes.byref(spec))
            if spec.value_s or spec.value_ns:
                spec.value_s, spec.value_ns = 0, _SOON_NS
                num_woken += library.timerfd_settime(timer, 0, ctypes.byref(spec), None) == 0
    return num_woken
