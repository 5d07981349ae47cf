"""Windows of time: what an engine with one drafter serves now, where shares of requests cannot have another one.

Time is cut into windows of equal length. For each one it is drawn, by a hash of its name and a version, whether its requests
are the hold-back's (first drafter), a canary's, or served as usual: every window is one draw, as a request is on an engine
with several drafters, and one piece of evidence (infra/controller/feedback.py pools its requests). Requests that live
through a switch are evidence of nothing. As usual means: the version of the class that has most traffic of late.

Several replicas each draw their own windows, so a unit is a replica for the time of a window, and any load balancer will
do. They draw alone, not so that a fixed number holds back at a time: replicas differ for long, by their computers or by
who is sent to them, and a test that takes every choice of units for equally likely (bandit/canary.py) would then call such
a difference the drafter's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.contracts import DesiredState, Group, is_canary
from paceline.names import is_label
from paceline.serving.engine.buckets import DEFAULT_BUCKET

MAX_BUCKETS = 64
_MEMORY_S = 20.0
"""Rows of a class count for as long when it is asked which one has most traffic."""
_FORGOTTEN = 0.01
"""Rows left of a class that gives up its place: 90 s after a single one, 5 minutes after 10,000."""


class RecentRows:
    """Classes that requests named, at most MAX_BUCKETS, and their rows of late; times are any clock's, s."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[float, float]] = {}  # bucket -> (rows, which fade, at that time)

    def bucket(self, name: str) -> str:
        """The class of a request that names one: that, where it is known or there is room for it."""
        is_kept = is_label(name) and (name in self._rows or len(self._rows) < MAX_BUCKETS)
        return name if is_kept else DEFAULT_BUCKET

    def add(self, bucket: str, num_rows: int, now: float) -> None:
        self._rows[bucket] = (self._faded(bucket, now) + num_rows, now)

    def now(self, now: float) -> dict[str, float]:
        """Class -> its rows of late. Those that nobody has named for minutes are forgotten and leave room for others."""
        rows = {bucket: self._faded(bucket, now) for bucket in self._rows}
        for bucket, num_rows in rows.items():
            if num_rows < _FORGOTTEN:
                del self._rows[bucket]
        return rows

    def _faded(self, bucket: str, now: float) -> float:
        rows, at = self._rows.get(bucket, (0.0, now))
        return rows * math.exp(-(now - at) / _MEMORY_S)


def served_now(desired: DesiredState, rows: Mapping[str, float], name: str) -> tuple[Group, str]:
    """Group and drafter version of a window.

    Args:
        name: of the window, see contracts.window_name.
        rows: class -> its rounds of late.
    """
    if is_canary(name, "hold-back", desired.holdback_percent):
        return Group.STATIC, desired.first_version
    top = max(rows, key=lambda bucket: (rows[bucket], bucket)) if rows else ""
    scope = desired.canary_bucket
    is_tried = desired.canary_version and (scope == top if scope else top not in desired.class_versions)
    if is_tried and is_canary(name, desired.canary_version, desired.canary_percent):
        return Group.ADAPTIVE, desired.canary_version
    return Group.ADAPTIVE, desired.version_of(top)
