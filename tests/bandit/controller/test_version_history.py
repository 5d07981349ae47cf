import pytest

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.observation import HostContext
from paceline.bandit.beliefs.regime import BucketRegime
from paceline.bandit.controller.epoch import learn_history
from paceline.bandit.controller.state import ControllerState

FULL = default_arms()[2]


def _context(gained: float, *, parent_rows: int = 0) -> HostContext:
    return HostContext(
        live_version="v2",
        first_version="v0",
        rows={},
        learned_rows={"v0": {"c": parent_rows}, "v1": {"c": 4000}, "v2": {"c": 16_000}},
        shadow={"c": {"v0": 1.4, "v1": 1.4 + gained, "v2": 1.4 + 1.5 * gained}},
    )


def _gain(state: ControllerState) -> float:
    return state.gains.predict("c", FULL, 0.8, 0.5)[0]


def test_a_history_of_good_versions_raises_the_prior_and_one_of_vain_ones_lowers_it():
    fresh, good, vain = (
        ControllerState(policy="payoff"),
        ControllerState(policy="payoff"),
        ControllerState(policy="payoff"),
    )
    assert learn_history(good, _context(0.6)) == 2
    assert learn_history(vain, _context(0.0)) == 2
    assert _gain(vain) < 0.8 * _gain(fresh) < _gain(fresh) < _gain(good)
    elsewhere = [s.gains.predict("new", FULL, 0.8, 0.5)[0] for s in (vain, good)]
    assert elsewhere[0] < elsewhere[1]


def test_every_pair_teaches_once():
    state = ControllerState(policy="payoff")
    learn_history(state, _context(0.6))
    before = _gain(state)
    assert learn_history(state, _context(0.6)) == 0 and _gain(state) == before
    assert state.gains.num_jobs == 0


def test_own_jobs_and_changed_texts_are_left_out():
    own = ControllerState(policy="payoff", learned={"v1": {"c": 1}, "v2": {"c": 1}})
    assert learn_history(own, _context(0.6)) == 0
    drifted = ControllerState(policy="payoff", buckets={"c": BucketRegime(0.0, num_alarms=1)})
    assert learn_history(drifted, _context(0.6)) == 0


def test_versions_without_a_record_of_rows_teach_nothing():
    state = ControllerState(policy="payoff")
    context = HostContext(live_version="v0", first_version="v0", rows={}, shadow={"c": {"v0": 1.4, "v1": 2.0}})
    assert learn_history(state, context) == 0
    assert _gain(state) == pytest.approx(_gain(ControllerState(policy="payoff")))
