"""Claims about the pay-off rule over whole simulated services."""

import dataclasses
from datetime import UTC, datetime

import msgspec
import pytest

from paceline.bandit.beliefs.evidence import PRIOR_ROWS
from paceline.bandit.controller.policy_inputs import HOPE_S
from paceline.bandit.replay.grid import named_cells
from paceline.bandit.replay.simulate import simulate
from paceline.bootstrap import MIN_REQUESTS, UNSCORED_REQUESTS
from paceline.config import PolicyConfig
from paceline.contracts import burst_plan
from tests.helpers.world import FIRST, World

LENGTHS = {"a": 2.46, "b": 2.79, "c": 1.4}
CEILINGS = {"a": 2.46, "b": 2.79, "c": 2.3}


def _world(
    mix, *, seed: int = 0, epoch_s: float = 10.0, policy: str = "payoff", bank_s: float = 20.0, **changes
) -> World:
    config = PolicyConfig(epoch_s=epoch_s, policy=policy, bank_s=bank_s)
    return World(config=config, mix=mix, lengths=dict(LENGTHS), ceilings=dict(CEILINGS), seed=seed, **changes)


def _spent(w: World) -> float:
    return w.controller.snapshot().ledger.spent_s


def _net(w: World) -> float:
    return w.controller.snapshot().ledger.net_s


@pytest.mark.parametrize(("seed", "bank_s", "round_s"), [(0, 20.0, 0.1), (1, 200.0, 0.2), (2, 20.0, 0.2)])
def test_an_hour_without_a_shift_costs_at_most_one_percent(seed, bank_s, round_s):
    w = _world(lambda t: {"a": 0.5, "b": 0.5}, seed=seed, bank_s=bank_s, round_s=round_s, step_s=5.0)
    w.run(3600)
    assert _spent(w) <= 0.01 * 3600
    assert w.controller.snapshot().drift_alarms == {"a": 0, "b": 0}


@pytest.mark.parametrize(("length", "ceiling"), [(2.3, 3.2), (3.0, 4.0)])
def test_drafts_that_are_long_already_are_tried_at_the_income_s_expense_and_become_longer(length, ceiling):
    w = World(
        config=PolicyConfig(epoch_s=10.0), mix=lambda t: {"c": 1.0}, lengths={"c": length}, ceilings={"c": ceiling},
        round_s=0.2, step_s=5.0,
    )  # fmt: skip
    while not w.of("train") and w.t < 7200:
        w.step()
    first = w.of("train")[0]
    assert first.expected_cost_s is not None and first.expected_cost_s <= 0.01 * max(w.t, HOPE_S)
    w.run(3 * 3600 - w.t)
    assert _net(w) > 0.05 * 3 * 3600


def test_known_training_rows_of_the_first_drafter_spare_the_first_try_for_long():
    learned = {FIRST: {"a": 200_000, "b": 200_000}}
    w = _world(lambda t: {"a": 0.5, "b": 0.5}, learned=learned, round_s=0.1, step_s=5.0)
    w.run(1500)
    assert _spent(w) == 0.0
    w.run(1500)
    assert _spent(w) <= 0.005 * 3000


@pytest.mark.parametrize("epoch_s", [5.0, 10.0, 30.0])
def test_a_shift_to_an_unseen_domain_is_trained_for_within_two_epochs_of_enough_rows(epoch_s):
    w = _world(lambda t: {"a": 0.5, "b": 0.5} if t < 60 else {"c": 1.0}, epoch_s=epoch_s)
    enough = None
    while not w.of("train"):
        w.step()
        if enough is None and w.rows.get("c", 0) >= (UNSCORED_REQUESTS + 2 * MIN_REQUESTS) * PRIOR_ROWS:
            enough = w.t
        assert w.t < 300
    assert w.of("train")[0].bucket == "c"
    assert w.t - enough <= 2 * epoch_s + 1


def test_training_goes_on_while_it_pays_and_stops_when_the_headroom_is_used_up():
    w = _world(lambda t: {"a": 0.5, "b": 0.5} if t < 60 else {"c": 1.0}, epoch_s=5.0)
    w.run(660)
    rows = [d.context["belief"]["usable_rows"] for d in w.of("train")]
    assert len(rows) >= 2 and rows[0] < 4000 and rows == sorted(rows) and rows[-1] > 9000
    assert w.true[w.version_of("c")]["c"] > 2.1
    assert _net(w) > 20.0
    assert len(w.of("train")) <= 9
    before = len(w.of("train"))
    w.run(1320)
    assert len(w.of("train")) - before <= 3


def test_a_domain_that_returns_has_its_version_at_once_and_the_others_keep_theirs():
    w = _world(lambda t: {"a": 0.5, "b": 0.5} if t < 50 or 180 <= t < 240 else {"c": 1.0}, epoch_s=5.0, forget=0.15)
    w.run(180)
    adapted = w.version_of("c")
    assert adapted != FIRST and w.version_of("a") == w.version_of("b") == FIRST
    before = len(w.swaps)
    w.run(100)
    assert w.version_of("a") == w.version_of("b") == FIRST
    assert {bucket for _, bucket, _ in w.swaps[before:]} <= {"c"}


def test_a_version_of_another_bucket_that_serves_a_new_one_better_is_given_to_it_without_training():
    """'d' is the same kind of text as 'c': the replay of rehearsed requests of it shows that."""
    w = _world(lambda t: {"c": 0.8, "d": 0.2} if t < 120 else {"d": 1.0}, epoch_s=5.0, forget=-0.4)
    w.lengths["d"] = w.true[FIRST]["d"] = 1.4
    w.ceilings["d"] = 1.4
    w.run(240)
    found = [d for d in w.of("recall") if d.bucket == "d"]
    assert found and w.version_of("d") == found[-1].version and w.true[w.version_of("d")]["d"] > 1.6
    own = [d.ts for d in w.of("train") if d.bucket == "d"]
    assert len(own) <= 1 and all(ts > found[-1].ts for ts in own), "given first, and tried once on its own text at most"


def test_a_bucket_that_an_operator_assigned_is_left_alone():
    w = _world(lambda t: {"c": 1.0}, epoch_s=5.0)
    w.own["c"] = FIRST
    context = w.context
    w.context = lambda: msgspec.structs.replace(context(), assigned=["c"])
    w.run(240)
    assert w.of("train", "recall", "rollback") == []


@pytest.mark.parametrize("period", [20, 45, 90])
def test_the_loss_never_exceeds_the_bank_however_the_traffic_turns(period):
    w = _world(lambda t: {"abc"[int(t / period) % 3]: 1.0}, forget=0.3, slowdown=0.1, epoch_s=5.0)
    for _ in range(600):
        w.step()
        bank = w.controller.bank()
        assert bank.spent_s - max(bank.saved_s, 0.0) <= w.controller.bank().credit_s + 1.0


def test_jobs_that_teach_nothing_stop_within_the_bank():
    w = _world(lambda t: {"c": 1.0}, policy="payoff")
    w.ceilings["c"] = w.lengths["c"]
    w.run(900)
    assert 1 <= len(w.of("train")) <= 3
    assert _spent(w) <= w.controller.bank().credit_s + 1.0


def test_a_changed_text_inside_one_bucket_is_noticed_and_trained_for():
    w = _world(lambda t: {"a": 1.0}, learned={FIRST: {"a": 200_000}})
    w.run(200)
    assert w.of("train") == []
    for lengths in w.true.values():
        lengths["a"] = 1.4
    w.ceilings["a"] = 2.3
    w.run(120)
    assert w.controller.snapshot().drift_alarms["a"] == 1
    assert w.of("train") and w.true[w.version_of("a")]["a"] > 1.6


def test_always_spends_where_the_payoff_rule_does_not():
    spent = {}
    for policy in ("always", "interval", "payoff"):
        w = _world(lambda t: {"a": 0.5, "b": 0.5}, policy=policy)
        w.run(300)
        spent[policy] = _spent(w)
    assert spent["always"] > spent["interval"] > 10.0 > spent["payoff"]


def test_drafting_that_was_turned_off_is_trained_for_when_that_would_make_it_pay():
    w = _world(lambda t: {"a": 0.5, "b": 0.5} if t < 60 else {"c": 1.0}, epoch_s=5.0, off_below=1.65, bank_s=40.0)
    w.run(900)
    assert w.of("train") and w.true[w.version_of("c")]["c"] > 1.65
    assert _net(w) > 0.0


@pytest.mark.parametrize("cell", ["idle-dear", "flat", "no-headroom", "dear"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_nothing_pays_at_most_one_percent_is_spent(cell, seed):
    run = simulate(named_cells()[cell], "payoff", {}, seed)
    assert run.net_share > -0.0105


def test_a_burst_that_an_operator_orders_is_read_whole_whether_it_pays_or_not():
    w = _world(lambda t: {"a": 0.5, "b": 0.5})
    w.run(300)
    assert not w.of("train"), "it would not pay"
    assert burst_plan(w.controller.train_now("a", "full", w.clock.now())) is None


def test_an_order_goes_on_with_the_learner_that_a_bucket_has():
    w = _world(lambda t: {"a": 0.5, "b": 0.5})
    w.run(300)
    w.controller._state.learners["a"] = (w.version_of("a"), 500, "full")
    with pytest.raises(ValueError, match="arm must train 'full' as the learner of bucket 'a' does"):
        w.controller.train_now("a", "head", w.clock.now())
    assert w.controller.arm_of(w.controller.train_now("a", "", w.clock.now())).parameters == "full"


def test_nothing_is_bought_that_could_not_pay_by_a_known_end():
    def served(end: float | None) -> World:
        w = _world(lambda t: {"c": 1.0} if t > 600 else {"a": 0.5, "b": 0.5}, bank_s=200.0)
        ends_at = "" if end is None else datetime.fromtimestamp(end, UTC).isoformat()
        w.controller._config = dataclasses.replace(w.config, ends_at=ends_at)
        w.run(1500)
        return w

    free = served(None)
    first = free.of("train")[0]
    assert [d.ts for d in served(first.ts + 1e6).of("train")] == [d.ts for d in free.of("train")]
    late = served(first.ts + 10.0)
    assert not late.of("train")
    order = late.controller.train_now("c", "full", late.clock.now())
    assert order.context["min_gain"] < 0.5, "an order is no bet on the time that is left"
