import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bandit.policies.memory import EMA_WARM_UP, DualEma, PolicyMemory
from paceline.config import PolicyConfig
from tests.helpers.views import FULL, HEAD, choose, make_job
from tests.helpers.world import FIRST, World

WEIGHTS = {"fast": 0.5, "slow": 0.05, "margin": 0.05}
LENGTHS, CEILINGS = {"a": 2.46, "c": 1.4}, {"a": 2.46, "c": 2.3}


def _world(mix, **changes) -> World:
    config = PolicyConfig(policy="dual_ema", epoch_s=10.0)
    return World(config=config, mix=mix, lengths=dict(LENGTHS), ceilings=dict(CEILINGS), **changes)


@given(levels=st.lists(st.floats(1.0, 6.0), min_size=1, max_size=40))
def test_it_collects_from_the_first_epoch_whose_fast_mean_is_below_the_slow_one_by_the_margin(levels):
    ema, fast, slow = DualEma(), levels[0], levels[0]
    for i, level in enumerate(levels):
        ema.update(level, {}, **WEIGHTS)
        fast, slow = fast + 0.5 * (level - fast), slow + 0.05 * (level - slow)
        dropped = i + 1 > EMA_WARM_UP and fast < 0.95 * slow
        assert ema.is_collecting == dropped
        if dropped:
            break


@given(levels=st.lists(st.floats(1.0, 3.0), min_size=1, max_size=30))
def test_rising_acceptance_never_triggers(levels):
    ema = DualEma()
    for level in sorted(levels):
        ema.update(level, {"a": 10_000}, **WEIGHTS)
    assert not ema.is_collecting and ema.collected == {}


def test_only_rows_since_the_drop_count():
    ema = DualEma()
    for i in range(6):
        ema.update(2.5, {"a": 1000 * i}, **WEIGHTS)
    for i in range(3):
        ema.update(1.4, {"a": 5000, "c": 400 * (i + 1)}, **WEIGHTS)
    assert ema.is_collecting and ema.collected["a"] == 0
    assert ema.collected["c"] == 800  # the rows of the epoch in which it dropped are not counted


def test_a_refused_job_ends_the_collection_until_the_next_shift_and_an_accepted_one_does_not():
    def dropped() -> DualEma:
        ema = DualEma()
        for level in (2.5, 2.5, 2.5, 2.5, 1.4, 1.4):
            ema.update(level, {"c": 100}, **WEIGHTS)
        return ema

    ema = dropped()
    ema.job_ended("accepted", {"c": 900})
    ema.update(1.4, {"c": 1000}, **WEIGHTS)
    assert ema.is_collecting and ema.collected == {"c": 100}
    ema.job_ended("failed", {"c": 1500})
    assert ema.is_collecting and ema.at_trigger == {"c": 900}
    ema.job_ended("rejected", {"c": 2000})
    for _ in range(20):
        ema.update(1.4, {"c": 9000}, **WEIGHTS)
        assert not ema.is_collecting
    for _ in range(3):
        ema.update(1.1, {"c": 9000}, **WEIGHTS)
    assert ema.is_collecting


def test_the_policy_trains_the_largest_arm_on_the_bucket_with_most_collected_rows():
    ema = DualEma(fast=1.5, slow=2.4, num_epochs=9, is_collecting=True, collected={"c": 768})
    jobs = (make_job(HEAD, saving=-1.0), make_job(FULL, saving=-9.0, cost=50.0))
    choice = choose("dual_ema", memory=PolicyMemory(ema=ema), jobs=jobs, balance_s=0.0)
    assert choice.action == "train" and choice.job.arm.name == "full"
    ema.collected["c"] = 767
    assert choose("dual_ema", memory=PolicyMemory(ema=ema), jobs=jobs).code == "rows"
    ema.is_collecting = False
    assert choose("dual_ema", memory=PolicyMemory(ema=ema), jobs=jobs).code == "ema"


@pytest.mark.parametrize("seed", range(3))
def test_in_a_service_it_trains_after_a_drop_and_not_before(seed):
    w = _world(lambda t: {"a": 1.0} if t < 120 else {"c": 1.0}, seed=seed)
    w.run(120)
    assert w.of("train") == []
    w.run(90)
    assert w.of("train") and w.of("train")[0].bucket == "c" and "fast mean" in w.of("train")[0].reason


def test_in_a_service_it_never_trains_without_a_drop():
    w = _world(lambda t: {"a": 1.0})
    w.run(400)
    assert w.of("train") == [] and w.live == FIRST


def test_in_a_service_it_stops_once_the_gate_refuses():
    w = _world(lambda t: {"a": 1.0} if t < 60 else {"c": 1.0})
    w.ceilings["c"] = 1.4
    w.run(600)
    assert 1 <= len(w.of("train")) <= 2  # the second, if any, on a noisy epoch; `always` would start one after another
