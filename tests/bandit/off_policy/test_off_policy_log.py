"""A log says as much about a policy as its randomisation allows, and says when that is nothing."""

import msgspec
import pytest

from paceline.bandit.off_policy.forced import ForcedWorld, epochs_by_step
from paceline.bandit.off_policy.log import (
    logged_orders,
    logged_probabilities,
    realised_steps,
    trace,
    translate,
    value_policy,
)  # fmt: skip
from paceline.bandit.replay.logged import logged_outcomes, logged_settings
from paceline.bandit.replay.simulate import policy_config
from paceline.contracts import Decision
from paceline.errors import ConfigError


def test_the_realised_net_is_what_the_ledger_booked(served):
    service, world = served
    booked = msgspec.to_builtins(world.controller.snapshot().ledger)
    spent = sum(booked.get(k, 0.0) for k in ("training", "shadow", "interference", "staging"))
    assert sum(realised_steps(service)) == pytest.approx(booked["saved_s"] - spent, abs=1e-6)
    assert world.num_jobs >= 1


def test_every_epoch_is_rebuilt_and_the_logged_policy_would_mostly_do_what_it_did(served):
    service, world = served
    replay = ForcedWorld(
        service.traffic, logged_outcomes(service, 0), policy_config("payoff", logged_settings(service, {}), 0), seed=0,
        slowdown=service.slowdown, epochs=epochs_by_step(service), orders=logged_orders(service),
    )  # fmt: skip
    same = []
    for k in range(service.traffic.num_steps):
        asked, order = replay.forced_step(k), replay.controller.orders.get(k)
        if asked and (order is not None or "hold" not in asked):
            logged, _ = logged_probabilities(order)
            same.append(max(asked, key=asked.get) == max(logged, key=logged.get))
    assert len(same) > 5 and sum(same) >= 0.9 * len(same)
    found = value_policy(service, "payoff", {}, draws=2)
    assert found.num_missed == 0
    assert found.net.low_s <= world.net_s <= found.net.high_s


def test_never_is_exact_and_a_policy_that_the_log_never_tried_cannot_be_told(served):
    service, _ = served
    never, always = (value_policy(service, p, {"min_rows": 300}, draws=2) for p in ("never", "always"))
    assert (never.net.total_s, never.net.low_s, never.net.high_s, never.verdict) == (0.0, 0.0, 0.0, "exact")
    assert always.verdict == "cannot tell" and "overlap is too thin" in always.why
    assert always.net.untried > 0 and always.net.low_s < always.net.high_s


def test_the_estimate_repeats_and_asking_does_not_change_what_is_followed(served):
    service, _ = served
    one, two = (value_policy(service, "interval", {}, draws=2, seed=1) for _ in range(2))
    assert msgspec.to_builtins(one) == msgspec.to_builtins(two)
    assert trace(service, "cara", {}, draws=2, seed=1)[0].realised_s == realised_steps(service)


def test_jobs_are_the_logged_ones_of_their_arm_and_bucket_with_nearly_their_rows():
    logged = ["train:full:b:1:4000", "train:full:b:1:8000", "hold", "recall:b:1:real"]
    asked = {"train:full:b:1:4300": 0.5, "train:head:b:1:4000": 0.2, "recall:b:1:v1": 0.2, "hold": 0.1}
    assert translate(asked, logged, {"v1": "real"}) == {
        "train:full:b:1:4000": 0.5, "train:head:b:1:4000": 0.2, "recall:b:1:real": 0.2, "hold": 0.1,
    }  # fmt: skip
    assert translate({"train:full:b:1:5500": 1.0}, logged, {}) == {"train:full:b:1:5500": 1.0}


def _decision(**changes):
    made = Decision(
        decision_id=1, ts=1.0, bucket="b", action="hold", arm=None, version=None, policy="thompson", context={},
        expected_gain=0.0, expected_saving_s=0.0, expected_cost_s=0.0, propensity=0.7, reason="r",
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_a_step_without_a_line_is_a_certain_hold_and_older_logs_have_the_propensity_only():
    assert logged_probabilities(None) == ({"hold": 1.0}, "hold")
    assert logged_probabilities(_decision()) == ({"hold": 0.7}, "hold")
    odds = {"hold": 0.7, "train:full:b:900": 0.3}
    assert logged_probabilities(_decision(context={"probabilities": odds})) == (odds, "hold")


def test_of_several_decisions_of_a_step_the_one_that_acted_counts(served):
    service, _ = served
    acted = [d for d in service.log.decisions if d.action != "hold"]
    orders = logged_orders(service)
    assert acted and all(orders[service.step_of(d.ts)].action != "hold" for d in acted)


def test_bad_arguments_are_refused(served):
    with pytest.raises(ValueError, match="draws must be >= 2"):
        value_policy(served[0], "payoff", {}, draws=1)
    with pytest.raises(ConfigError):
        value_policy(served[0], "payoff", {"epoch_s": -1.0}, draws=2)
