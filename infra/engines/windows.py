"""Windows of time: what an engine with one drafter serves now, where shares of requests cannot have another one.

Time is cut into windows of equal length. For each one it is drawn, by a hash of its name and a version, whether its requests
are the hold-back's (first drafter), a canary's, or served as usual: every window is one draw, as a request is on an engine
with several drafters, and one piece of evidence (infra/controller/feedback.py pools its requests). Requests that live
through a switch are evidence of nothing. As usual means: the version of the class that has most traffic of late.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.contracts import DesiredState, Group, is_canary


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
