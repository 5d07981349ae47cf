"""The life-cycle table covers every state and refuses everything else."""

import itertools

import pytest

from paceline.adapt.lifecycle import END_STATUSES, NEXT_STATUS, DrafterStatus, advance
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
