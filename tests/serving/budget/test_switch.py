"""The switch finds the faster mode, keeps to it at little cost, finds out when it changes, and never stops looking."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import RoundObservation
from paceline.serving.budget.switch import MAX_WAIT, PROBE_NODES, PROBE_REQUESTS, REST, TRIAL_ROUNDS
from tests.helpers.budget_world import Traffic, World

KEY = ("v1", "math", True)


def controller(world: World) -> BudgetController:
    """As warm-up leaves it: forwards and drafting measured, each with its own error."""
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 1.1 * world.verify_s(rows)))
    ctrl.costs.draft.calibrate(lambda n: 0.8 * (world.draft_s + n * world.draft_request_s), max_size=64)
    ctrl.costs.ingest_row_s = world.ingest_row_s
    return ctrl


def serve(ctrl, keys, num_rounds, seconds, accepted, *, backlog=1):
    """Rounds of these requests, all alike; seconds, accepted: functions of (round, requests that draft). Returns the
    number of drafting requests by round."""
    found = []
    for at in range(num_rounds):
        own = keys(at) if callable(keys) else keys
        wants = ctrl.wants_draft(own, 100 * len(own), [backlog] * len(own), [64] * len(own))
        n = sum(wants)
        round_s = seconds(at, n)
        ctrl.observe(
            RoundObservation(
                keys=own, is_drafted=wants, num_nodes=[4 * w for w in wants],
                num_accepted_tokens=[accepted(at, n) if w else 0 for w in wants], context_rows=100 * len(own),
                draft_s=max(round_s - 5e-3, 0.0) if n else 0.0, verify_s=min(round_s, 5e-3), round_s=round_s,
            )
        )  # fmt: skip
        found.append(n)
    return found


@pytest.mark.parametrize(("batch", "nodes"), [(1, 8), (8, 4), (64, 4)])
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0, 2.0, 3.5, 6.0])
def test_traffic_that_stays_as_it_is_loses_little_against_the_better_mode(batch, nodes, mean):
    world = World(traffics=[Traffic(key=KEY, acceptance=lambda _: mean, nodes=nodes)], batch=lambda _: batch)
    num_rounds = 2400 if batch == 1 else 1100
    chosen, drafted = np.mean(
        [[world.run(c, num_rounds, seed).rate() for c in (controller(world), True)] for seed in range(2)], axis=0
    )
    assert chosen > 0.96 * max(drafted, world.plain_rate())


@pytest.mark.parametrize(("batch", "nodes"), [(1, 8), (8, 4), (64, 4)])
@pytest.mark.parametrize("mean", [0.2, 1.0, 3.0])
def test_drafts_for_a_part_of_the_requests_lose_little_against_the_better_mode(batch, nodes, mean):
    traffic = Traffic(key=KEY, acceptance=lambda _: mean, nodes=nodes, share=0.2)
    world = World(traffics=[traffic], batch=lambda _: batch)
    num_rounds = 4000 if batch == 1 else 1100
    chosen, drafted = np.mean(
        [[world.run(c, num_rounds, seed).rate() for c in (controller(world), True)] for seed in range(2)], axis=0
    )
    assert chosen > 0.96 * max(drafted, world.plain_rate())


def test_traffic_of_changing_batches_and_classes_is_no_slower_than_either_mode():
    rng = np.random.default_rng(0)
    sizes = np.repeat(rng.choice([1, 2, 3, 8, 20], 60), 50)
    traffics = [
        Traffic(key=("v", name, is_greedy), acceptance=lambda _, mean=mean: mean, nodes=4)
        for name, is_greedy, mean in (("code", True, 5.0), ("facts", True, 0.1), ("tools", False, 3.0))
    ]
    world = World(traffics=traffics, batch=lambda at: int(sizes[at]))
    log, always, never = (world.run(c, len(sizes)) for c in (controller(world), True, False))
    assert log.rate() > 0.98 * max(always.rate(), never.rate())


@pytest.mark.parametrize("drift", [lambda at: 1 + at / 1500, lambda at: 2.5 if at % 900 > 450 else 1.0])
@pytest.mark.parametrize(("mean", "is_paying"), [(0.4, False), (3.0, True)])
def test_a_machine_whose_speed_changes_is_not_taken_for_a_drafter_that_does(drift, mean, is_paying):
    world = World(traffics=[Traffic(key=KEY, acceptance=lambda _: mean)], speed=drift)
    share = world.run(controller(world), 3000).share(500)
    assert share > 0.9 if is_paying else share < 0.1


def test_drafting_stops_when_it_stops_paying_and_returns_when_it_pays_again():
    num_stopped, num_back = [], []
    for seed in range(3):
        traffic = Traffic(key=KEY, acceptance=lambda at: 0.2 if 800 <= at < 2400 else 3.5)
        world = World(traffics=[traffic])
        log = world.run(controller(world), 4400, seed)
        assert log.share(100, 800) > 0.9
        num_stopped.append(log.share(800 + 300, 2400))
        num_back.append(log.share(2400 + 2 * MAX_WAIT))
    assert np.mean(num_stopped) < 0.1 and np.mean(num_back) > 0.9


@pytest.mark.parametrize("num_requests", [1, 5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_measured_the_rounds_between_two_drafts_are_bounded(seed, num_requests):
    rng = np.random.default_rng(seed)
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 1e-3 * rows))
    seconds = lambda _, n: float(np.exp(rng.normal(0, 3)) * (100 if n and rng.random() < 0.5 else 1))  # noqa: E731
    drafting = serve(ctrl, [KEY] * num_requests, 6000, seconds, lambda *_: int(rng.random() < 0.05), backlog=300)
    gaps = np.diff([0, *np.flatnonzero(drafting), 6000])
    assert gaps.max() <= MAX_WAIT + 5


@pytest.mark.parametrize("life", [1, 7, 100])
def test_classes_that_come_and_go_do_not_starve_probes_nor_get_a_trial_each(life):
    world = World(traffics=[])
    drafting = serve(
        controller(world), lambda at: [("v", f"bucket {at // life}", True)] * 2, 8000,
        lambda _, n: 5e-3 * (1 + (n > 0)), lambda *_: 0,
    )  # fmt: skip
    gaps = np.diff([0, *np.flatnonzero(drafting), 8000])
    assert gaps.max() <= MAX_WAIT + life + 5
    assert np.mean(np.array(drafting) > 0) < 0.05


def test_a_mistaken_time_does_not_lock_drafting_out():
    def seconds(at, n):
        return 5e-3 * (1 + (4.0 if at < 60 else 0.3) * (n > 0))  # its first rounds meet a busy machine

    for num_requests in (1, 32):
        ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3))
        ctrl.costs.draft.calibrate(lambda n: 1e-3, max_size=64)  # as warm-up does: parts of large batches rely on it
        drafting = serve(ctrl, [KEY] * num_requests, 12 * MAX_WAIT, seconds, lambda *_: 2)
        assert np.mean(drafting[-MAX_WAIT:]) > 0.9 * num_requests


def test_the_best_set_of_classes_drafts_together():
    good, bad = ("v", "code", True), ("v", "facts", True)
    drafting = []
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 4e-3 + 1e-3 * rows))
    for _ in range(400):
        keys = [good, bad, good, None]
        wants = ctrl.wants_draft(keys, 400)
        drafting.append(wants)
        accepted = [3 if w and k == good else 0 for k, w in zip(keys, wants, strict=True)]
        s = 8e-3 + 1e-3 * any(wants) + 2e-3 * sum(wants)
        ctrl.observe(
            RoundObservation(
                keys=keys, is_drafted=wants, num_nodes=[2 * w for w in wants], num_accepted_tokens=accepted,
                context_rows=400, draft_s=1e-3, verify_s=s - 1e-3, round_s=s,
            )
        )  # fmt: skip
    shares = np.mean(drafting[50:], axis=0)
    assert shares[0] > 0.9 and shares[2] > 0.9 and shares[1] < 0.15 and shares[3] == 0
    assert dict(ctrl.states()) == {good: "on", bad: "off"}


def test_a_trial_gives_few_requests_a_least_number_of_nodes_for_a_limited_time():
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 4e-3 + 1e-4 * rows))
    for num_requests in (1, 3, 40):
        key = ("v", f"b{num_requests}", False) if num_requests == 1 else (f"v{num_requests}", "b", False)
        serve(ctrl, [key] * num_requests, 3, lambda *_: 5e-3, lambda *_: 0)
        wants = ctrl.wants_draft([key] * num_requests, 100)
        assert sum(wants) == min(num_requests, PROBE_REQUESTS)
        nodes = ctrl.choose(np.full((num_requests, 16), 1e-4), [key] * num_requests, 100)
        assert (nodes == PROBE_NODES).all() or num_requests == 40
        drafting = serve(ctrl, [key] * num_requests, 60, lambda _, n: 5e-3 * (1 + 3 * (n > 0)), lambda *_: 0)
        assert 0 < sum(n > 0 for n in drafting) <= TRIAL_ROUNDS + 4


def test_a_probe_of_long_contexts_takes_those_that_have_least_to_catch_up_with():
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3))
    ctrl.costs.ingest_row_s = 1e-4
    backlogs = {False: list(range(100, 164)), True: list(range(4000, 4064))}
    seen = {is_long: set() for is_long in backlogs}
    for is_long, own in backlogs.items():
        key = (f"v{is_long}", "b", True)
        serve(ctrl, [key] * 64, 40, lambda _, n: 5e-3 * (1 + 3 * (n > 0)), lambda *_: 0)
        for _ in range(2 * MAX_WAIT):
            wants = ctrl.wants_draft([key] * 64, 5000, own, [64] * 64)
            seen[is_long] |= {i for i, is_wanted in enumerate(wants) if is_wanted}
    assert seen[True] == {0, 1, 2, 3} and min(seen[False]) > 20, seen


def test_catching_up_has_to_pay_within_what_an_answer_still_gets():
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3))
    ctrl.costs.ingest_row_s = 1e-3
    serve(ctrl, [KEY], 300, lambda _, n: 5e-3 * (1 + 0.2 * (n > 0)), lambda *_: 1)
    ctrl.wants_draft([KEY], 100)
    assert ctrl.wants_draft([KEY], 100, [40], [400]) == [True]
    assert ctrl.wants_draft([KEY], 100, [400], [40]) == [False]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("mean", [0.3, 0.8, 2.5])
def test_a_replayed_length_decides_before_the_first_round_and_a_wrong_one_is_overruled(batch, mean):
    world = World(traffics=[Traffic(key=KEY, acceptance=lambda _: mean, nodes=8)], batch=lambda _: batch)

    def against_better(foretold, num_rounds, num_seeds):
        rates = []
        for seed in range(num_seeds):
            ctrl = controller(world)
            ctrl.foretell("v1", "math", foretold)
            rates.append([world.run(c, num_rounds, seed).rate() for c in (ctrl, True)])
        chosen, drafted = np.mean(rates, axis=0)
        return chosen / max(drafted, world.plain_rate())

    assert against_better(1 + mean, 48, 20) > 0.97, "there is no trial to pay for"
    assert against_better(4.0 if mean < 1 else 1.0, 2000, 5) > 0.94


def test_versions_are_forgotten_and_classes_bounded():
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3))
    keys = [(f"v{i % 2}", f"bucket {i}", True) for i in range(700)]
    serve(ctrl, keys, 20, lambda *_: 5e-3, lambda *_: 1)
    assert len(ctrl.states()) <= 512
    ctrl.forget("v0")
    assert ctrl.states() and all(version == "v1" for (version, _, _), _ in ctrl.states())
    ctrl.foretell("v1", "math", 2.0)
    ctrl.forget("v1")
    assert ctrl.states() == []
    assert ctrl.wants_draft([KEY], 100) == [True] and ctrl.states() == [(KEY, "trial")]


def test_same_observations_give_the_same_decisions():
    world = World(traffics=[Traffic(key=KEY, acceptance=lambda _: 1.2)])
    logs = [world.run(controller(world), 500) for _ in range(2)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("round_s", "verify_s"), [(0.0, 0.0), (5e-3, 0.0)])
def test_rounds_too_short_for_the_clock_break_nothing(round_s, verify_s):
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3))
    ctrl.wants_draft([KEY], 100)
    ctrl.observe(
        RoundObservation(
            keys=[KEY], is_drafted=[True], num_nodes=[4], num_accepted_tokens=[2], context_rows=100,
            draft_s=0.0, verify_s=verify_s, round_s=round_s,
        )
    )  # fmt: skip
    assert ctrl.wants_draft([KEY], 100) == [True]


TEXT = ("suffix", "math", True)


def take_turns(ctrl, goes_on, rates, num_rounds):
    """Rounds of one request whose text goes on where goes_on(round); rates: key -> (tokens, seconds) of a drafted round.
    Returns (keys drafted by, tokens, seconds)."""
    found, tokens, seconds = [], 0.0, 0.0
    for at in range(num_rounds):
        (key,) = ctrl.turns([KEY], [TEXT if goes_on(at) else None], 100)
        (is_wanted,) = ctrl.wants_draft([key], 100, [1], [64])
        accepted, round_s = rates[key] if is_wanted else (0, 10e-3)
        ctrl.observe(
            RoundObservation(
                keys=[key], is_drafted=[is_wanted], num_nodes=[4 * is_wanted], num_accepted_tokens=[accepted],
                context_rows=100, draft_s=round_s - 10e-3, verify_s=10e-3, round_s=round_s,
                has_text_turns=is_wanted and key == TEXT,
            )
        )  # fmt: skip
        found.append(key if is_wanted else None)
        tokens, seconds = tokens + 1 + accepted, seconds + round_s
    return found, tokens, seconds


def decide_all(ctrl, num_requests, num_rounds, *, rests):
    """Rounds of requests for which neither drafter nor text pays. Returns who drafts in each, and how often was decided."""
    keys, texts, found, resting, num_decided = [KEY] * num_requests, [TEXT] * num_requests, [], 0, 0
    for _ in range(num_rounds):
        own, wants = keys, [False] * num_requests
        if resting > 0:
            resting -= 1
            ctrl.skip()
        else:
            num_decided += 1
            own = ctrl.turns(keys, texts, 100)
            wants = ctrl.wants_draft(own, 100, [1] * num_requests, [64] * num_requests)
            if rests and not any(wants):
                resting = ctrl.rest([KEY, TEXT], num_requests)
        round_s = 14e-3 if any(wants) else 10e-3
        ctrl.observe(
            RoundObservation(
                keys=own, is_drafted=wants, num_nodes=[4 * w for w in wants], num_accepted_tokens=[0] * num_requests,
                context_rows=100, draft_s=round_s - 10e-3, verify_s=10e-3, round_s=round_s,
                has_text_turns=any(w and key == TEXT for w, key in zip(wants, own, strict=True)),
            )
        )  # fmt: skip
        found.append([key if w else None for w, key in zip(wants, own, strict=True)])
    return found, num_decided


@pytest.mark.parametrize("num_requests", [1, 4, 48])
def test_rounds_without_a_decision_change_nothing_but_the_number_of_decisions(num_requests):
    found, num_decided = decide_all(plain_controller(), num_requests, 3000, rests=True)
    assert found == decide_all(plain_controller(), num_requests, 3000, rests=False)[0]
    assert num_decided < 3000 / REST + 300 and sum(any(keys) for keys in found) > 2 * TRIAL_ROUNDS


def test_no_round_goes_without_a_decision_while_anybody_may_draft():
    ctrl = plain_controller()
    assert ctrl.rest([KEY, TEXT], 1) == 0, "both are on trial"
    serve(ctrl, [KEY], 2 * TRIAL_ROUNDS, lambda _, n: 10e-3 + 4e-3 * n, lambda *_: 0)
    assert ctrl.rest([KEY], 1) > 0 and ctrl.rest([KEY, TEXT], 1) == 0, "the text is on trial"
    fixed = BudgetController(TreeConfig(policy="fixed"), CostModel(lambda rows: 10e-3))
    assert fixed.rest([KEY], 1) == 0


def plain_controller():
    return BudgetController(TreeConfig(), CostModel(lambda rows: 10e-3))


def test_text_that_pays_keeps_its_turns_and_the_drafter_has_the_others():
    found, _, _ = take_turns(plain_controller(), lambda at: at % 3 == 0, {TEXT: (2, 11e-3), KEY: (1, 13e-3)}, 600)
    of_text, others = [
        [k for i, k in enumerate(found) if (i % 3 == 0) is t and i >= TRIAL_ROUNDS] for t in (True, False)
    ]
    assert set(of_text) <= {TEXT, None} and of_text.count(TEXT) > 0.95 * len(of_text)
    assert set(others) <= {KEY, None} and others.count(KEY) > 0.9 * len(others)


@pytest.mark.parametrize("text", [(0, 11e-3), (1, 12e-3)], ids=["loses", "gains less"])
def test_text_that_makes_less_leaves_its_turns_to_the_drafter_but_for_probes(text):
    found, tokens, seconds = take_turns(plain_controller(), lambda _: True, {TEXT: text, KEY: (2, 13e-3)}, 3000)
    late = found[500:]
    assert late.count(KEY) > 0.95 * len(late) and tokens / seconds > 0.97 * 3 / 13e-3
    assert 0 < late.count(TEXT) < 0.02 * len(late), "it is tried again, and at little cost"
    gaps = np.diff([i for i, k in enumerate(found) if k == TEXT])
    assert gaps.max() <= MAX_WAIT + 2


def test_a_drafter_that_loses_does_not_take_the_texts_turns_along():
    found, _, _ = take_turns(plain_controller(), lambda at: at % 2 == 0, {TEXT: (2, 11e-3), KEY: (0, 14e-3)}, 2000)
    late = found[400:]
    assert late[::2].count(TEXT) > 0.95 * len(late[::2]) and late[1::2].count(None) > 0.95 * len(late[1::2])


def test_text_is_tried_again_where_several_buckets_know_as_little_of_it():
    ctrl, keys, texts = plain_controller(), [KEY, ("v1", "law", True)], [TEXT, ("suffix", "law", True)]
    asked = []
    for at in range(4 * MAX_WAIT):
        own = ctrl.turns(keys, texts, 200)
        wants = ctrl.wants_draft(own, 200, [1, 1], [64, 64])
        is_text = [w and key == text for w, key, text in zip(wants, own, texts, strict=True)]
        asked += [at] if any(is_text) else []
        round_s = 10e-3 + 2e-3 * sum(wants)
        ctrl.observe(
            RoundObservation(
                keys=own, is_drafted=wants, num_nodes=[4 * w for w in wants],
                num_accepted_tokens=[2 if w and not t else 0 for w, t in zip(wants, is_text, strict=True)],
                context_rows=200, draft_s=round_s - 10e-3, verify_s=10e-3, round_s=round_s, has_text_turns=any(is_text),
            )
        )  # fmt: skip
    assert np.diff(asked).max() <= MAX_WAIT + 5 and asked[-1] > 2 * MAX_WAIT


def test_a_trial_of_text_leaves_the_other_requests_to_their_drafter():
    ctrl, num = plain_controller(), 16
    keys, texts = [KEY] * num, [TEXT] * num
    serve(ctrl, keys, 2 * TRIAL_ROUNDS, lambda _, n: 10e-3 + 1e-4 * n, lambda _, n: 3)
    own = ctrl.turns(keys, texts, 100 * num)
    assert own.count(TEXT) == PROBE_REQUESTS and own.count(KEY) == num - PROBE_REQUESTS
    assert sum(ctrl.wants_draft(own, 100 * num, [1] * num, [64] * num)) == num


def test_a_drafter_is_asked_again_while_the_text_has_every_turn():
    found, _, _ = take_turns(plain_controller(), lambda _: True, {TEXT: (4, 11e-3), KEY: (1, 13e-3)}, 3 * MAX_WAIT)
    asked = [i for i, key in enumerate(found) if key == KEY]
    assert asked[-1] > 2 * MAX_WAIT and len(asked) < 0.03 * len(found)


def test_what_text_turns_take_says_nothing_of_the_drafters_costs():
    ctrl = plain_controller()
    ctrl.costs.draft.calibrate(lambda n: 4e-3, max_size=4)
    before = ctrl.costs.draft_s(1)
    found, _, _ = take_turns(ctrl, lambda _: True, {TEXT: (6, 10.1e-3), KEY: (1, 14e-3)}, 200)
    assert found.count(TEXT) > 150
    assert ctrl.costs.draft_s(1) == pytest.approx(before * ctrl.costs.speed, rel=1e-2)


def test_without_a_switch_a_text_that_goes_on_always_has_the_turn():
    ctrl = BudgetController(TreeConfig(policy="bastion"), CostModel(lambda rows: 10e-3))
    assert ctrl.turns([KEY, KEY, None], [TEXT, None, None], 100) == [TEXT, KEY, None]


@pytest.mark.parametrize("num_behind", [0, 1, 3])
def test_a_trial_begins_when_all_that_it_drafts_for_have_caught_up_and_ends_where_some_never_do(num_behind):
    """Drafting makes nothing here; the others of the batch wait for a prompt of which every round takes a part."""
    ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3 + 1e-4 * rows))
    ctrl.costs.ingest_row_s = 1e-5
    states = []
    for _ in range(40):
        wants = ctrl.wants_draft([KEY] * 4, 400, [1] * (4 - num_behind) + [4000] * num_behind, [64] * 4)
        is_drafted = [w and i < 4 - num_behind for i, w in enumerate(wants)]
        catching_up = [i for i, w in enumerate(wants) if w and not is_drafted[i]]
        ctrl.observe(
            RoundObservation(
                keys=[KEY] * 4, is_drafted=is_drafted, num_nodes=[4 * d for d in is_drafted],
                num_accepted_tokens=[0] * 4, context_rows=400, draft_s=4e-3 if any(is_drafted) else 0.0, verify_s=6e-3,
                round_s=10e-3 if any(is_drafted) else 6e-3, catch_up_s=2e-3 if catching_up else 0.0,
                num_catch_up_rows=200 if catching_up else 0, catching_up=catching_up,
            )
        )  # fmt: skip
        states.append(dict(ctrl.states())[KEY])
    assert states[0] == "trial" and states[-1] == "off"
    waited = states.index("off")
    assert waited <= 12 if num_behind == 0 else 16 <= waited <= 28


def test_what_one_class_takes_to_catch_up_is_no_cost_of_another():
    other = ("v1", "code", True)
    costs = {}
    for has_other in (False, True):
        ctrl = BudgetController(TreeConfig(), CostModel(lambda rows: 5e-3 + 1e-4 * rows))
        ctrl.costs.ingest_row_s = 1e-5
        keys = [KEY, KEY, other, other]
        for _ in range(3):
            ctrl.wants_draft(keys, 400, [1, 1, 4000, 4000], [64] * 4)
            ctrl.observe(
                RoundObservation(
                    keys=keys, is_drafted=[True, True, False, False], num_nodes=[4, 4, 0, 0],
                    num_accepted_tokens=[1, 1, 0, 0], context_rows=400, draft_s=1e-3, verify_s=6e-3, round_s=7e-3,
                    catch_up_s=0.05 * has_other, num_catch_up_rows=500 * has_other, catching_up=[2, 3] if has_other else [],
                )
            )  # fmt: skip
        costs[has_other] = ctrl._switch.record(KEY, 4).probe.cost
    assert costs[True] == pytest.approx(costs[False])
