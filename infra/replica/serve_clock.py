"""Serve's clock: time in Serve's controller without the steps that the computer's clock makes.

The controller takes the time of day for what it measures between two looks at replicas and proxies: behind a step back by an
hour it looks at none for an hour, and replaces none that died. Serve's controller imports this module by CONTROLLER_VARIABLE,
which must stand in the environment of Ray's processes: `paceline serve` sets it, ray_cluster.yaml and the manifests for
Kubernetes do.
"""

from __future__ import annotations

import time
from typing import Any

from paceline.infra.replica.late_timers import StepWatch
from paceline.machine import SystemClock

CONTROLLER_VARIABLE = "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"
CONTROLLER_CALLBACK = "paceline.infra.replica.serve_clock.carry_time_on"


class CarriedTime:
    """The module `time`, whose `time()` goes on without steps from where the process began."""

    _clock = SystemClock()

    def time(self) -> float:
        return self._clock.now()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def carry_time_on() -> None:
    """Give this time to the parts of Serve's controller that look after replicas and proxies, and watch for steps."""
    from ray._common.utils import Timer
    from ray.serve._private import deployment_state

    carried = CarriedTime()
    Timer.time = lambda _: carried.time()  # type: ignore[method-assign, assignment]
    deployment_state.time = carried  # type: ignore[assignment]
    StepWatch().start()
