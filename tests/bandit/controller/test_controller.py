from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bandit.controller.controller import Controller, HostContext
from paceline.bandit.controller.epoch import class_began
from paceline.bandit.policies.table import POLICIES
from paceline.config import PolicyConfig
from paceline.contracts import Decision, TrainResult
from paceline.errors import ConfigError
from paceline.machine import ManualClock
from tests.helpers.world import FIRST, World


def shifting(t: float) -> dict[str, float]:
    return {"a": 0.5, "b": 0.5} if t < 30 else {"c": 1.0}


def world(policy: str = "payoff", mix=shifting, **changes) -> World:
    config = PolicyConfig(policy=policy, epoch_s=changes.pop("epoch_s", 5.0), bank_s=changes.pop("bank_s", 20.0))
    return World(
        config=config,
        mix=mix,
        lengths={"a": 2.5, "b": 2.8, "c": 1.4},
        ceilings={"a": 2.5, "b": 2.8, "c": 2.3},
        **{"round_s": 0.05, "batch_size": 6, **changes},
    )


def test_never_trains_nothing_and_says_so_once():
    w = world("never")
    w.run(120)
    assert [d.action for d in w.decisions] == ["hold"]
    assert w.controller.drain()[1] == []


@settings(max_examples=16)
@given(cut=st.integers(1, 110), seed=st.integers(0, 3), policy=st.sampled_from(sorted(POLICIES)))
def test_a_controller_restored_at_any_second_continues_identically_under_every_policy(cut, seed, policy):
    straight, broken = world(policy, seed=seed), world(policy, seed=seed)
    for second in range(120):
        if second == cut:
            data = broken.controller.state()
            broken.controller = Controller.restore(data, broken.config, clock=broken.clock)
            assert broken.controller.state() == data
        assert straight.step() == broken.step()
    assert straight.controller.state() == broken.controller.state()


def test_the_ledger_agrees_with_the_decisions_and_the_drained_entries():
    w = world()
    log, entries = {}, {}
    for _ in range(200):
        w.step()
        decisions, new = w.controller.drain()
        log.update({d.decision_id: d for d in decisions})
        for e in new:
            assert e.entry_id not in entries
            entries[e.entry_id] = e
    assert w.controller.check(entries.values()) == []
    assert w.controller.snapshot().num_decisions == Counter(d.action for d in log.values())
    spent = sum(e.seconds for e in entries.values() if e.kind != "saving")
    assert spent == pytest.approx(sum(d.realised_cost_s or 0.0 for d in log.values()))
    saved = sum(e.seconds for e in entries.values() if e.kind == "saving")
    assert saved == pytest.approx(sum(d.realised_saving_s or 0.0 for d in log.values())) and saved > 0
    kinds = {e.kind for e in entries.values()}
    assert kinds == {"training", "shadow", "staging", "interference", "saving"}
    finished = [d for d in log.values() if d.action == "train" and d.outcome is not None]
    assert finished and all(d.realised_gain is not None and d.reason.endswith(".") for d in finished)


def test_every_decision_survives_the_wire_with_its_context():
    w = world()
    w.run(60)
    for d in w.decisions:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(d), type=Decision) == d
        assert 0 < d.propensity <= 1 and d.context["epoch"] >= 1


def _ordered(w: World) -> Decision:
    for _ in range(400):
        for d in w.step():
            if d.action == "train":
                w.job = None
                return d
    raise AssertionError("no job was ordered")


def _failed(d: Decision, status: str = "failed") -> TrainResult:
    return TrainResult(job_id="j", status=status, version=None, reason="worker died", train_s=3.0, shadow_s=0.0)


def test_a_job_is_booked_once_and_answers_the_same_again():
    w = world()
    d = _ordered(w)
    first = w.controller.job_finished(w.train(d), decision_id=d.decision_id, now=w.clock.now())
    state = w.controller.state()
    again = w.controller.job_finished(w.train(d), decision_id=d.decision_id, now=w.clock.now())
    assert again == first and w.controller.state() == state
    with pytest.raises(ValueError, match="job in flight"):
        w.controller.job_finished(_failed(d), decision_id=999, now=w.clock.now())


def test_staging_for_a_canary_and_for_its_promotion_are_both_booked_each_once():
    w = world()
    made = w.controller.manual("pin", FIRST, w.clock.now(), "Operator pinned v0.")
    for tag, seconds in (("gen2", 0.5), ("gen2", 0.5), ("gen3", 0.25)):
        d = w.controller.staged(made.decision_id, seconds, w.clock.now(), tag)
    assert d is not None and d.realised_cost_s == pytest.approx(0.75)


def test_a_clock_that_was_set_back_before_a_new_start_stops_no_decisions():
    w = world()
    w.run(30)
    back = w.clock.now() - 3600.0
    again = Controller.restore(w.controller.state(), w.config, w.controller._arms, clock=ManualClock(back))
    context = w.controller._state.context
    assert again.tick(back, context) == []
    epoch = again._state.epoch
    again.tick(back + w.config.epoch_s, context)
    assert again._state.epoch == epoch + 1, "it began anew"


def test_what_is_remembered_of_times_goes_back_with_the_clock():
    """A class that began before the clock was set back is older than the jobs that are ordered behind it."""
    w = world()
    d = _ordered(w)
    state = w.controller._state
    bucket = state.buckets[d.bucket]
    bucket.began, bucket.start = w.clock.now() - 20.0, w.clock.now() - 15.0
    others = {name: regime.began for name, regime in state.buckets.items() if name != d.bucket}
    back = w.clock.now() - 3600.0
    again = Controller.restore(w.controller.state(), w.config, w.controller._arms, clock=ManualClock(back))
    again.tick(back, state.context)
    found, since = again._state, state.epoch_start
    assert found.buckets[d.bucket].began - back == pytest.approx(w.clock.now() - 20.0 - since)
    assert found.buckets[d.bucket].start > found.buckets[d.bucket].began and found.job.started - back == pytest.approx(
        state.job.started - since
    )
    assert class_began(found, d.bucket) < back and all(class_began(found, n) == began for n, began in others.items())
    outcome = again.job_finished(
        msgspec.structs.replace(_failed(d), status="accepted", version="v9", reason="it is better"),
        decision_id=d.decision_id, now=back,
    )  # fmt: skip
    assert outcome.publish == "v9" and found.learned["v9"]


def test_a_job_that_never_began_asks_for_no_more_rows():
    for seconds in (0.0, 3.0):
        w = world()
        d = _ordered(w)
        failed = msgspec.structs.replace(_failed(d), train_s=seconds)
        w.controller.job_finished(failed, decision_id=d.decision_id, now=w.clock.now())
        assert (d.bucket in w.controller._state.required_rows) == (seconds > 0)


def test_a_failed_job_costs_changes_no_version_and_frees_the_slot():
    w = world()
    d = _ordered(w)
    outcome = w.controller.job_finished(_failed(d), decision_id=d.decision_id, now=w.clock.now())
    assert outcome.publish is None and outcome.decision.realised_cost_s == pytest.approx(3.0, abs=0.5)
    assert outcome.decision.outcome == "failed" and outcome.decision.realised_gain == 0.0
    assert w.controller.snapshot().job is None
    w.run(60)
    assert len(w.of("train")) >= 2


@pytest.mark.parametrize("policy", ["always", "interval", "payoff", "dual_ema", "cara", "thompson"])
def test_no_second_job_while_one_is_in_flight(policy):
    w = world(policy)
    _ordered(w)
    w.run(60)
    assert w.of("train")[1:] == []


def test_the_bank_reserves_what_the_job_in_flight_is_expected_to_cost():
    w = world()
    d = _ordered(w)
    bank = w.controller.bank()
    assert bank.reserved_s == pytest.approx(d.expected_cost_s)
    assert bank.balance_s == pytest.approx(w.config.bank_s - d.expected_cost_s, abs=0.5)
    w.controller.job_finished(w.train(d), decision_id=d.decision_id, now=w.clock.now())
    assert w.controller.bank().reserved_s == 0.0


def test_memories_are_kept_whichever_policy_decides_so_that_a_switch_starts_warm():
    w = world("never")
    w.run(60)
    memory = w.controller._state.memory
    assert memory.ema.num_epochs > 5 and memory.ema.is_collecting
    assert memory.staleness_s["c"] > 0 and set(memory.hedges["c"].weights) == {FIRST}


def test_a_job_order_names_arm_rows_base_and_an_affordable_time():
    w = world()
    d = _ordered(w)
    arm = w.controller.arm_of(d)
    assert arm.name == d.arm and w.config.min_rows <= arm.num_rows <= w.rows[d.bucket]
    assert d.context["base_version"] == FIRST and 0 < d.context["time_limit_s"] <= w.config.bank_s
    with pytest.raises(ValueError, match="must be 'train'"):
        w.controller.arm_of(msgspec.structs.replace(d, action="hold"))


def test_a_pin_stops_every_action_until_it_is_lifted():
    w = world()
    d = w.controller.manual("pin", FIRST, w.clock.now(), "Operator pinned v0.")
    assert (d.action, d.version) == ("pin", FIRST)
    w.run(120)
    assert w.of("train", "recall") == []
    w.controller.unpin()
    w.run(30)
    assert w.of("train") != []


def test_a_rollback_to_another_version_ends_the_pin():
    w = world()
    w.controller.manual("pin", "v9", w.clock.now(), "Operator pinned v9.")
    w.controller.manual("rollback", FIRST, w.clock.now(), "Replica a refused v9.", ["v9"])
    w.run(120)
    assert w.of("train") != []


def test_an_operators_rollback_is_not_undone_by_a_recall():
    w = world()
    while w.version_of("c") == FIRST:
        w.step()
    bad = w.own.pop("c")
    w.controller.manual("rollback", FIRST, w.clock.now(), "Operator rolled back.", [bad])
    w.run(60)
    assert all(d.version != bad for d in w.of("recall"))
    with pytest.raises(ValueError, match="'pin' or 'rollback'"):
        w.controller.manual("dance", FIRST, 0.0, "")


def test_policies_can_be_switched_while_running():
    w = world("never")
    w.run(60)
    with pytest.raises(ConfigError, match="payoff"):
        w.controller.set_policy("maybe")
    w.controller.set_policy("payoff")
    w.run(30)
    assert w.of("train") != [] and w.of("train")[0].policy == "payoff"


def test_an_idle_service_holds_without_traffic():
    clock = ManualClock(0.0)
    c = Controller(PolicyConfig(epoch_s=5.0), clock=clock, rng=np.random.default_rng(0))
    context = HostContext(live_version=FIRST, first_version=FIRST, rows={"a": 5000})
    decisions = [d for t in range(60) for d in c.tick(float(t), context)]
    assert [d.action for d in decisions] == ["hold"]
    assert decisions[0].context["code"] == "no_traffic"


def test_no_tick_decides_before_its_epoch_is_over():
    w = world("always", epoch_s=30.0)
    w.run(29)
    assert w.decisions == []


def test_an_empty_set_of_arms_is_refused():
    with pytest.raises(ConfigError, match="arms must name"):
        Controller(PolicyConfig(), (), clock=ManualClock(), rng=np.random.default_rng(0))
