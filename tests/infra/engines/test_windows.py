"""Windows of time: shares come true, one window has one drafter, and the class with most traffic has its own."""

import itertools

import pytest

from paceline.contracts import DesiredState, Group, window_name
from paceline.infra.engines.windows import MAX_BUCKETS, RecentRows, served_now


def desired(**fields):
    return DesiredState(**{"gen": 2, "version": "live", "first_version": "first", "holdback_percent": 0, **fields})


def draws(wanted, rows=None, n=4000):
    return [served_now(wanted, rows or {}, window_name("r", 10.0 * i, 10.0)) for i in range(n)]


def test_a_window_has_one_name_from_its_begin_to_its_end():
    assert window_name("r", 10.0, 10.0) == window_name("r", 19.99, 10.0) != window_name("r", 20.0, 10.0)
    assert window_name("r", 10.0, 10.0) != window_name("s", 10.0, 10.0)


def test_hold_back_and_canary_get_their_shares_of_the_windows():
    found = draws(desired(holdback_percent=25, canary_version="new", canary_percent=40))
    static = found.count((Group.STATIC, "first"))
    tried, live = found.count((Group.ADAPTIVE, "new")), found.count((Group.ADAPTIVE, "live"))
    assert static + tried + live == len(found)
    assert static / len(found) == pytest.approx(0.25, abs=0.03)
    assert tried / (tried + live) == pytest.approx(0.40, abs=0.03)


def test_neighbours_are_drawn_alone():
    """A hold-back that came every fourth window would meet whatever else comes so often."""
    held = [group == Group.STATIC for group, _ in draws(desired(holdback_percent=50))]
    both = sum(a and b for a, b in itertools.pairwise(held)) / (len(held) - 1)
    assert both == pytest.approx(0.25, abs=0.03)


def test_the_class_with_most_traffic_has_its_own_version():
    wanted = desired(class_versions={"math": "maths"})
    assert served_now(wanted, {"math": 9.0, "code": 3.0}, "w") == (Group.ADAPTIVE, "maths")
    assert served_now(wanted, {"math": 3.0, "code": 9.0}, "w") == (Group.ADAPTIVE, "live")
    assert served_now(wanted, {}, "w") == (Group.ADAPTIVE, "live")


def test_a_canary_of_a_class_is_tried_while_that_class_has_most_traffic():
    wanted = desired(canary_version="new", canary_percent=90, canary_bucket="math")
    assert {v for _, v in draws(wanted, {"code": 1.0}, 200)} == {"live"}
    assert {v for _, v in draws(wanted, {"math": 1.0}, 200)} == {"live", "new"}


def test_a_canary_of_all_is_not_tried_on_a_class_with_a_version_of_its_own():
    wanted = desired(canary_version="new", canary_percent=90, class_versions={"math": "maths"})
    assert {v for _, v in draws(wanted, {"math": 1.0}, 200)} == {"maths"}


def test_names_that_nobody_sends_any_more_leave_room_for_others():
    recent = RecentRows()
    for i in range(MAX_BUCKETS):
        recent.add(recent.bucket(f"invented-{i}"), 100, now=0.0)
    recent.add("invented-0", 100, now=200.0)
    assert recent.bucket("chat") == "default" and recent.bucket("invented-1") == "invented-1"
    assert len(recent.now(200.0)) == MAX_BUCKETS and set(recent.now(201.0)) == {"invented-0"}
    assert recent.bucket("chat") == "chat"
