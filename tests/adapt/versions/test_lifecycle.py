"""The life-cycle table covers every state and refuses everything else."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.adapt.versions.lifecycle import (
    ADMISSIBLE,
    END_STATUSES,
    MAX_JOBS,
    MAX_TRANSITIONS,
    MAX_VERSIONS,
    NEXT_STATUS,
    DrafterStatus,
    Lifecycle,
    advance,
)
from paceline.errors import IllegalTransitionError

S = DrafterStatus


def test_table_covers_every_state():
    assert set(NEXT_STATUS) == set(S)
    assert all(following <= set(S) for following in NEXT_STATUS.values())


def test_ends_are_rejected_rolled_back_and_failed():
    assert {S.REJECTED, S.ROLLED_BACK, S.FAILED} == END_STATUSES


def test_every_state_is_reachable_from_training_and_reaches_an_end():
    seen, todo = set(), {S.TRAINING}
    while todo:
        seen |= todo
        todo = {n for s in todo for n in NEXT_STATUS[s]} - seen
    assert seen == set(S)
    for status in set(S) - END_STATUSES:
        assert S.FAILED in NEXT_STATUS[status]


@pytest.mark.parametrize("path", [
    (S.TRAINING, S.TRAINED, S.SHADOWED, S.CANARY, S.LIVE, S.RETIRED, S.LIVE),
    (S.TRAINING, S.TRAINED, S.SHADOWED, S.LIVE, S.ROLLED_BACK),
    (S.TRAINING, S.TRAINED, S.REJECTED),
    (S.TRAINING, S.TRAINED, S.SHADOWED, S.RETIRED, S.CANARY, S.RETIRED, S.CANARY, S.ROLLED_BACK),
])  # fmt: skip
def test_documented_paths_are_allowed(path):
    for before, after in itertools.pairwise(path):
        t = advance(before, after, version="v", reason="because", ts=1.0)
        assert (t.before, t.after, t.reason) == (before, after, "because")


@pytest.mark.parametrize("before, after", [(b, a) for b in S for a in S if a not in NEXT_STATUS[b]])
def test_every_other_transition_raises(before, after):
    with pytest.raises(IllegalTransitionError, match="not allowed"):
        advance(before, after, version="v", reason="x", ts=0.0)


def test_rejected_draft_never_goes_live():
    assert S.LIVE not in NEXT_STATUS[S.REJECTED] and S.LIVE not in NEXT_STATUS[S.TRAINED]


def test_a_transition_needs_a_reason():
    with pytest.raises(IllegalTransitionError, match="reason"):
        advance(S.TRAINING, S.TRAINED, version="v", reason="", ts=0.0)


def test_a_life_keeps_its_way_and_survives_encoding():
    book = Lifecycle()
    book.admit("job:1", S.TRAINING, reason="ordered", ts=1.0, bucket="math", arm="full")
    book.move("job:1", S.TRAINED, reason="in 3 s", ts=2.0)
    book.name("job:1", "v2")
    book.move("v2", S.SHADOWED, reason="better", ts=2.0)
    book.move("v2", S.LIVE, reason="published", ts=3.0)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(book), type=Lifecycle)
    life = again.versions["v2"]
    assert [t.after for t in life.transitions] == [S.TRAINING, S.TRAINED, S.SHADOWED, S.LIVE]
    assert (life.bucket, life.arm, life.was_live, life.since) == ("math", "full", True, 3.0)
    assert again.status("job:1") is None and again.with_status(S.LIVE) == {"v2"}


def test_a_version_enters_only_where_it_may_and_only_once():
    book = Lifecycle()
    with pytest.raises(IllegalTransitionError, match="admitted"):
        book.admit("v", S.CANARY, reason="x", ts=0.0)
    with pytest.raises(IllegalTransitionError, match="unknown"):
        book.move("v", S.LIVE, reason="x", ts=0.0)
    book.admit("v", S.LIVE, reason="first drafter", ts=0.0)
    with pytest.raises(IllegalTransitionError, match="admitted"):
        book.admit("v", S.LIVE, reason="again", ts=1.0)


def test_only_an_order_brings_an_ended_version_back():
    book = Lifecycle()
    book.admit("v", S.LIVE, reason="first drafter", ts=0.0)
    book.move("v", S.ROLLED_BACK, reason="NaN", ts=1.0)
    assert book.barred() == {"v"} and not any(book.may("v", s) for s in S)
    book.admit("v", S.LIVE, reason="pinned by the operator", ts=2.0)
    assert book.status("v") == S.LIVE and book.barred() == set()
    assert len(book.versions["v"].transitions) == 3


def test_content_that_was_known_before_keeps_its_own_life():
    book = Lifecycle()
    book.admit("v", S.LIVE, reason="first drafter", ts=0.0)
    book.admit("job:1", S.TRAINING, reason="ordered", ts=1.0)
    book.name("job:1", "v")
    assert book.status("v") == S.LIVE and set(book.versions) == {"v"}


def test_what_is_served_is_never_forgotten():
    book = Lifecycle()
    book.admit("first", S.LIVE, reason="first drafter", ts=0.0)
    for i in range(MAX_VERSIONS + 30):
        book.admit(f"v{i}", S.RETIRED, reason="known to the registry", ts=float(i))
    assert len(book.versions) == MAX_VERSIONS and book.status("first") == S.LIVE
    assert f"v{MAX_VERSIONS + 29}" in book.versions and "v0" not in book.versions


def test_what_is_barred_is_forgotten_last_and_what_enters_not_at_once():
    book = Lifecycle()
    for i in range(MAX_VERSIONS):
        book.admit(f"bad{i}", S.RETIRED, reason="known", ts=float(i))
        book.move(f"bad{i}", S.CANARY, reason="tried", ts=float(i))
        book.move(f"bad{i}", S.ROLLED_BACK, reason="slow", ts=float(i))
    book.admit("back", S.RETIRED, reason="known", ts=1000.0)
    book.move("back", S.CANARY, reason="tried", ts=1001.0)
    assert "bad0" not in book.versions and len(book.versions) == MAX_VERSIONS
    book.move("back", S.RETIRED, reason="called off", ts=1002.0)
    book.admit("next", S.RETIRED, reason="known", ts=1003.0)
    assert "back" not in book.versions and "bad1" in book.barred()


def test_failed_jobs_push_out_no_version():
    book = Lifecycle()
    book.admit("old", S.LIVE, reason="first drafter", ts=0.0)
    book.move("old", S.RETIRED, reason="v took over", ts=1.0)
    book.admit("bad", S.LIVE, reason="pinned by the operator", ts=2.0)
    book.move("bad", S.ROLLED_BACK, reason="NaN", ts=3.0)
    book.admit("v", S.LIVE, reason="rolled back to it", ts=4.0)
    for i in range(MAX_VERSIONS + 30):
        book.admit(f"job:{i}", S.TRAINING, reason="ordered", ts=10.0 + i)
        if i:
            book.move(f"job:{i}", S.FAILED, reason="too little data", ts=10.5 + i)
    assert book.versions["old"].was_live and book.barred() >= {"bad"} and book.status("v") == S.LIVE
    jobs = [v for v in book.versions if v.startswith("job:")]
    assert len(jobs) <= MAX_JOBS + 1 and f"job:{MAX_VERSIONS + 29}" in jobs
    assert book.status("job:0") == S.TRAINING, "a job in flight is not forgotten"


@given(st.lists(st.sampled_from(list(S)), max_size=80))
def test_any_sequence_of_orders_leaves_a_way_that_the_table_allows(orders):
    book = Lifecycle()
    for k, to in enumerate(orders):
        try:
            book.move("v", to, reason="r", ts=float(k))
        except IllegalTransitionError:
            try:
                book.admit("v", to, reason="r", ts=float(k))
            except IllegalTransitionError:
                continue
    ways = book.versions["v"].transitions if "v" in book.versions else []
    assert len(ways) <= MAX_TRANSITIONS
    for a, b in itertools.pairwise(ways):
        assert b.after in NEXT_STATUS[a.after] if b.before is not None else (a.after in END_STATUSES)
    assert all(t.after in ADMISSIBLE for t in ways if t.before is None)
