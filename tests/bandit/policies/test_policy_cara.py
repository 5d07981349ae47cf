import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.beliefs.gain_model import GainModel
from paceline.bandit.policies.memory import PolicyMemory
from paceline.bandit.policies.pricing import staleness_rates
from paceline.config import PolicyConfig
from tests.helpers.views import FULL, HEAD, choose, make_belief, make_job
from tests.helpers.world import World

COSTS, STALE = st.floats(0.1, 500), st.floats(0, 500)


def _trains(stale: float, cost: float, factor: float = 1.0) -> bool:
    memory = PolicyMemory(staleness_s={"c": stale})
    config = PolicyConfig(cara_factor=factor)
    return choose("cara", memory=memory, jobs=(make_job(cost=cost),), config=config).action == "train"


@given(stale=STALE, cost=COSTS, factor=st.floats(0, 5))
def test_it_trains_exactly_when_staleness_reaches_the_factor_times_the_cost(stale, cost, factor):
    assert _trains(stale, cost, factor) == (stale >= factor * cost)


@given(stale=STALE, more=st.floats(0, 100), cost=COSTS, less=st.floats(0.01, 1.0))
def test_it_is_monotone_in_staleness_and_in_cost(stale, more, cost, less):
    if _trains(stale, cost):
        assert _trains(stale + more, cost) and _trains(stale, cost * less)


def test_it_retrains_with_the_largest_arm_the_bucket_that_is_most_stale_for_its_cost():
    beliefs = {"c": make_belief(), "d": make_belief(bucket="d")}
    jobs = (make_job(HEAD, cost=5.0), make_job(FULL, cost=30.0), make_job(FULL, cost=10.0, bucket="d"))
    memory = PolicyMemory(staleness_s={"c": 40.0, "d": 20.0})
    choice = choose("cara", beliefs=beliefs, jobs=jobs, memory=memory, balance_s=0.0)
    assert (choice.action, choice.bucket, choice.job.arm.name) == ("train", "d", "full")


def test_staleness_accrues_with_load_and_room_to_gain_and_not_without_traffic():
    def rate(**changes) -> float:
        found = staleness_rates(
            {"c": make_belief(**changes)}, (HEAD, FULL), gains=GainModel(), best_length=2.5, min_rows=768
        )
        return found.get("c", 0.0)

    assert rate() > 0 and rate(load=600.0) == pytest.approx(2 * rate())
    assert rate(length=2.4) < 0.3 * rate()
    assert rate(learned_rows=10**6) < 0.7 * rate()
    assert rate(is_active=False) == 0.0


def test_a_job_starts_the_count_anew():
    memory = PolicyMemory()
    memory.add_staleness({"c": 0.5, "d": 0.1}, 10.0)
    memory.add_staleness({"c": 0.5}, 10.0)
    assert memory.staleness_s == {"c": 10.0, "d": 1.0}
    memory.job_started("c")
    assert memory.staleness_s == {"d": 1.0}


def test_in_a_service_dearer_training_waits_longer():
    first = {}
    for factor in (0.5, 1.0, 2.0):
        w = World(
            config=PolicyConfig(policy="cara", epoch_s=5.0, cara_factor=factor),
            mix=lambda t: {"c": 1.0},
            lengths={"c": 1.4},
            ceilings={"c": 2.3},
        )
        while not w.of("train"):
            w.step()
            assert w.t < 600
        first[factor] = w.t
    assert first[0.5] < first[1.0] < first[2.0]
