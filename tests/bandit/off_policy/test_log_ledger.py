"""A replay that does what a log did spends and saves what the log's own ledger says, whatever the service was like."""

import dataclasses

import msgspec
import numpy as np
import pytest

from paceline.bandit.controller.decision_log import parse_log
from paceline.bandit.ledger.totals import fold_entries
from paceline.bandit.off_policy.forced import follow_log
from paceline.bandit.replay.families import FamilyWorld
from paceline.bandit.replay.logged import prepare, replay_logged
from paceline.bandit.replay.simulate import policy_config
from paceline.bandit.replay.world import World, record


def _two_phases():
    """Three replicas whose rounds slow down by 40% during jobs, a third of the tokens traced, 30% held back, a cheap trainer."""
    table = FamilyWorld(name="two-phases").table(1)
    rounds = dataclasses.replace(table.rounds, slowdown=0.4, staging_s=0.5)
    table = dataclasses.replace(table, num_replicas=3, rows_share=0.3, rounds=rounds)
    return (
        table.draw(1),
        "payoff",
        {"epoch_s": 30.0, "holdback_percent": 30, "bank_s": 200.0, "hysteresis": 1.0, "trainer_price": 0.25},
    )


def _failures():
    """A quarter of the jobs fail, some harm."""
    return FamilyWorld(name="failures").draw(2), "interval", {"epoch_s": 20.0, "interval_s": 100.0}


@pytest.fixture(scope="module", params=[_two_phases, _failures], ids=["two-phases", "failures"])
def service(request):
    """(prepared log, its ledger, world that wrote it)."""
    (traffic, outcomes), policy, settings = request.param()
    world = World(traffic, outcomes, policy_config(policy, settings, 3), seed=3, slowdown=outcomes.slowdown)
    prepared = prepare(parse_log(record(world), "log"), "log")
    return prepared, fold_entries(prepared.log.entries), world


def test_a_replay_that_does_what_the_log_did_agrees_with_the_ledger_of_the_log(service):
    prepared, ledger, world = service
    run, booked = follow_log(prepared), ledger.by_kind()
    assert run.num_jobs == world.num_jobs and run.num_accepted == world.num_accepted and run.num_swaps == world.num_swaps  # fmt: skip
    assert run.spent["shadow"] == pytest.approx(booked["shadow"]) and run.spent["staging"] == pytest.approx(booked["staging"])  # fmt: skip
    # a job in flight at the end is booked to the end of the log's last epoch, of which the replay keeps the whole steps
    assert run.spent["training"] == pytest.approx(booked["training"], abs=10.01)
    assert run.spent["interference"] == pytest.approx(booked["interference"], rel=0.2)
    assert run.never_s == pytest.approx(world.never_s, rel=0.03)
    # harmful versions in quick succession are seen too briefly to know their lengths well
    assert run.serving_s == pytest.approx(world.serving_s, rel=0.15)
    if world.config.policy == "payoff":
        low, high = ledger.saved_interval_s()
        saved = run.never_s - run.serving_s
        assert low - 0.05 * abs(ledger.saved_s()) <= saved <= high + 0.05 * abs(ledger.saved_s())


@pytest.mark.parametrize("price", [0.0, 0.5])
def test_the_price_of_the_trainer_is_that_of_the_jobs_which_a_log_knows_whole(service, price):
    """A free trainer stays free; entries of a job whose order the log has lost count for nothing."""
    log = service[0].log
    entries = [
        msgspec.structs.replace(e, seconds=e.seconds / service[2].config.trainer_price * price)
        if e.kind in ("training", "shadow")
        else e
        for e in log.entries
    ]
    for jobs in (log.jobs, log.jobs[1:]):
        again = prepare(msgspec.structs.replace(log, entries=entries, jobs=jobs), "log")
        assert again.trainer_price == pytest.approx(price, abs=1e-3)
        assert again.slowdown == pytest.approx(service[0].slowdown, rel=0.5)


def test_what_a_log_says_of_its_service_is_what_the_service_was(service):
    prepared, _, world = service
    assert prepared.slowdown == pytest.approx(world.slowdown, rel=0.1)
    assert prepared.staging_s == pytest.approx(world.outcomes.staging_s)
    assert prepared.trainer_price == pytest.approx(world.config.trainer_price, rel=1e-3)
    assert prepared.holdback_percent == pytest.approx(world.config.holdback_percent, abs=2)
    assert prepared.traffic.rows_share == pytest.approx(world.traffic.rows_share, rel=0.03)
    rows = dict(zip(prepared.traffic.labels, prepared.traffic.rows()[-1], strict=True))
    truth = dict(zip(world.traffic.labels, world.traffic.rows()[-1], strict=True))
    assert {b: rows[b] for b in rows} == pytest.approx({b: truth[b] for b in rows}, rel=0.1, abs=500)


def test_the_logged_policy_replayed_freely_nets_about_what_the_ledger_says(service):
    prepared, ledger, world = service
    settings = {"bank_s": world.config.bank_s, "interval_s": world.config.interval_s}
    nets = [replay_logged(prepared, world.config.policy, settings, seed).net_share for seed in range(3)]
    booked = (ledger.saved_s() - ledger.spent_s()) / world.never_s
    assert 100 * np.mean(nets) == pytest.approx(100 * booked, abs=5.0)


def test_rows_that_were_there_before_the_log_began_can_be_trained_on(service):
    prepared, _, _ = service
    epochs = [
        msgspec.structs.replace(e, rows_written={b: n + 5000 for b, n in e.rows_written.items()})
        for e in prepared.log.epochs
    ]
    log = msgspec.structs.replace(prepared.log, epochs=epochs)
    later = prepare(log, "log")
    before = dict(zip(later.traffic.labels, later.traffic.rows_at_start(), strict=True))
    assert all(before[b] == pytest.approx(5000, abs=300) for b in prepared.log.epochs[0].rows_written)
    assert later.traffic.rows_share == pytest.approx(prepared.traffic.rows_share, rel=0.05)
