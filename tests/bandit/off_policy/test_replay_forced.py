"""A forced replay does what the log did, whoever is asked; from the hand-over on the policy decides."""

import msgspec
import pytest

from paceline.bandit.off_policy.forced import ForcedWorld, epochs_by_step
from paceline.bandit.off_policy.log import logged_orders
from paceline.bandit.replay.logged import logged_outcomes, logged_settings, prepare
from paceline.bandit.replay.simulate import policy_config


def _forced(service, policy):
    return ForcedWorld(
        service.traffic, logged_outcomes(service, 0), policy_config(policy, logged_settings(service, {}), 0), seed=0,
        slowdown=service.slowdown, epochs=epochs_by_step(service),
        orders=logged_orders(service),
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["never", "payoff", "always", "thompson"])
def test_jobs_and_versions_are_those_of_the_log_whoever_is_asked(served, policy):
    service, world = served
    replay = _forced(service, policy)
    asked = [replay.forced_step(k) for k in range(service.traffic.num_steps)]
    trained = [d for d in service.log.decisions if d.action == "train"]
    assert replay.num_jobs == len(trained) and replay.controller.num_missed == 0
    assert set(replay.outcomes.names.values()) >= {j.result.version for j in service.log.jobs if j.result.version}
    assert all(sum(p.values()) == pytest.approx(1.0) for p in asked if p)
    assert replay.never_s == pytest.approx(world.never_s, rel=0.05)


def test_what_the_replay_believes_is_what_the_service_believed(served):
    service, _ = served
    replay, orders = _forced(service, "payoff"), logged_orders(service)
    compared, known = 0, set()
    for k in range(service.traffic.num_steps):
        replay.forced_step(k)
        belief = orders[k].context["belief"] if k in orders else None
        drained = replay.controller.drain()[0]  # with every later update of a decision
        made = [d for d in drained if d.action == "train" and d.decision_id not in known]
        known |= {d.decision_id for d in drained}
        if belief and made:
            rebuilt = made[0].context["belief"]
            assert rebuilt["length"] == pytest.approx(belief["length"], rel=0.02)
            assert rebuilt["load"] == pytest.approx(belief["load"], rel=0.05)
            assert rebuilt["fresh_rows"] == belief["fresh_rows"]
            compared += 1
    assert compared >= 1


def test_tokens_of_a_text_drafter_are_no_device_time_of_a_version(served):
    """They are in no traffic; a log with as many again replays to the same, and to never buying is nothing lost."""
    service, _ = served
    epochs = [
        msgspec.structs.replace(
            e, cells=[msgspec.structs.replace(c, num_tokens=2 * c.num_tokens, text_tokens=c.num_tokens) for c in e.cells]
        )
        for e in service.log.epochs
    ]  # fmt: skip
    log = msgspec.structs.replace(service.log, epochs=epochs)
    mixed = prepare(log, "log")
    plain, other = (_forced(s, "never").follow() for s in (service, mixed))
    assert other.net_s == pytest.approx(plain.net_s, abs=0.02 * abs(plain.never_s))


def test_a_copy_runs_on_under_the_policy_and_leaves_the_original_alone(served):
    service, _ = served
    replay = _forced(service, "never")
    for k in range(10):
        replay.forced_step(k)
    before = (replay.net_s, replay.num_jobs)
    assert replay.rest(10, 10, 0) == pytest.approx(0.0, abs=1e-6)  # never trains
    assert (replay.net_s, replay.num_jobs) == before


def test_predictions_do_not_know_how_logged_jobs_went(served):
    service, _ = served
    replay, at = (
        _forced(service, "never"),
        next(service.step_of(d.ts) for d in service.log.decisions if d.action == "train"),
    )
    for k in range(at):
        replay.forced_step(k)
    nets = {replay.rest(at, at + 1, draw) for draw in range(3)}
    assert len(nets) == 3  # the job follows the gain model, draw by draw
