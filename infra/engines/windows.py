"""Windows of time: what an engine with one drafter serves now, where shares of requests cannot have another one.

Time is cut into windows of equal length. For each one it is drawn, by a hash of replica, window and version, whether its
requests are the hold-back's (first drafter), a canary's, or served as usual: every window is one draw, as a request is on
an engine with several drafters, and one piece of evidence (infra/controller/rollout.py). Requests that live through a
switch are evidence of nothing. As usual means: the version of the class that has most traffic of late.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.contracts import DesiredState, Group, is_canary


def window_of(ts: float, window_s: float) -> int:
    """Number of the window that a time in seconds since the epoch lies in."""
    return int(ts // window_s)


def window_name(replica_id: str, window: int) -> str:
    """What the draw of a window is made by, and what its requests are counted as."""
    return f"{replica_id}@{window}"


def served_now(desired: DesiredState, rows: Mapping[str, float], name: str) -> tuple[Group, str]:
    """Group and drafter version of the window `name`.

    Args:
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
