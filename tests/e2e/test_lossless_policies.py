"""Text does not depend on the tree policy, on a suffix drafter or on whose turn it is either."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.config import EngineConfig, TreeConfig
from paceline.serving.drafters.interface import Drafter
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import make_text_drafter
from paceline.serving.engine.engine import Engine
from paceline.serving.loading.kv_size import pool_row_bytes
from tests.helpers.lossless import (
    NUM_PROMPTS,
    PAGE,
    SAMPLED,
    Outputs,
    assert_same,
    greedy_reference,
    make_drafter,
    run_until_idle,
    sampled_reference,
    submit,
    target,
)

TREE = TreeConfig(max_draft_tokens=8)


def make_engine(drafter: Drafter, num_pages: int = 200, **options) -> Engine:
    slots = DrafterSlots(drafter, "v0")
    row_bytes, _ = pool_row_bytes(target(), slots, has_traces=False)
    tree = dataclasses.replace(TREE, **options)
    return Engine(target(), slots, EngineConfig(page_tokens=PAGE, kv_bytes=num_pages * PAGE * row_bytes, tree=tree))


def check_greedy(engine: Engine, batch: int) -> None:
    outputs = Outputs()
    for i in range(NUM_PROMPTS):
        submit(engine, i, outputs)
        if batch == 1:
            run_until_idle(engine)
    run_until_idle(engine)
    for i, want in enumerate(greedy_reference()):
        assert_same(i, outputs.tokens[f"r{i}"], want)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("policy", ["bastion", "ddtree", "bundle"])
@pytest.mark.parametrize("name", ["product", "specblock"])
def test_greedy_output_is_the_targets_own_under_every_policy(policy, name, batch):
    drafter = make_drafter("random", 1) if name == "product" else make_drafter(name)
    engine = make_engine(drafter, policy=policy)
    check_greedy(engine, batch)
    assert not engine.slots.num_failures
    assert engine.policy.budget.states() == [], "there is no switch"


def test_warming_up_measures_the_prior_of_bastions_latency_and_what_drafting_takes_beside_a_text_drafter():
    engine = make_engine(make_drafter("specblock"), policy="bastion", mix="suffix")
    cost = engine.policy.budget.costs
    assert not cost.draft.is_known
    engine.warm_up()
    assert cost.draft.is_known and cost.expand.is_known and not engine.slots.num_failures
    assert cost.verify.prior(9, 500) > cost.verify.prior(9, 0) > 0, "context costs something before any was seen"
    assert cost.verify.speed == 1.0
    check_greedy(engine, 8)
    assert cost.verify.speed != 1.0


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["suffix", "suffix-recent"])
def test_greedy_output_is_the_targets_own_with_a_suffix_drafter(name, batch):
    engine = make_engine(make_text_drafter(name), policy="ddtree")
    for _ in range(2):  # the second time others' answers are known
        check_greedy(engine, batch)
    assert not engine.slots.num_failures


def test_recent_answers_make_a_repeated_question_faster():
    accepted = {}
    for name in ("suffix", "suffix-recent"):
        engine, last = make_engine(make_text_drafter(name), policy="ddtree"), {}
        for _ in range(2):
            for i in (0, 3, 5):
                submit(engine, i, lambda e, last=last: last.__setitem__(e.request_id, e))
                run_until_idle(engine)
        accepted[name] = sum(e.stats.num_accepted_tokens for e in last.values())
    assert accepted["suffix-recent"] > accepted["suffix"] + 20


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("name", "mix", "policy"),
    [
        ("specblock", "suffix", "adaptive"),
        ("specblock", "suffix", "bastion"),
        ("random", "lookup", "bundle"),
        ("product", "suffix-recent", "bundle"),
    ],
)
def test_greedy_output_is_the_targets_own_when_drafters_take_turns(name, mix, policy, batch):
    drafter = make_drafter("random", 1) if name == "product" else make_drafter(name)
    engine = make_engine(drafter, policy=policy, mix=mix)
    check_greedy(engine, batch)
    assert not engine.slots.num_failures


@pytest.mark.parametrize("num_pages", [200, 40])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("random", {"policy": "bastion"}),
        ("random", {"policy": "bundle"}),
        ("suffix", {"policy": "ddtree"}),
        ("specblock", {"policy": "ddtree", "mix": "suffix"}),
    ],
)
def test_seeded_sampled_output_is_the_same_as_without_drafting(name, options, num_pages):
    drafter = make_text_drafter(name) if name == "suffix" else make_drafter(name, seed=1)
    engine, outputs = make_engine(drafter, num_pages, **options), Outputs()
    for i, params in enumerate(SAMPLED):
        submit(engine, i, outputs, seed=100 + i, **params)
    run_until_idle(engine)
    for i, want in enumerate(sampled_reference()):
        assert outputs.tokens[f"r{i}"] == list(want), f"request {i}: {SAMPLED[i]}"


def test_turns_of_text_accept_more_than_a_useless_model_alone_and_keeps_nothing_of_ended_requests():
    accepted = {}
    for mix in ("none", "suffix-recent"):
        engine, last = make_engine(make_drafter("rejected"), policy="ddtree", mix=mix), {}
        for _ in range(2):
            for i in (0, 3, 5):
                submit(engine, i, lambda e, last=last: last.__setitem__(e.request_id, e))
                run_until_idle(engine)
        accepted[mix] = sum(e.stats.num_accepted_tokens for e in last.values())
        if mix != "none":
            assert engine.policy.text._texts == {} and engine.policy.text._histories == {}
    assert accepted["none"] == 0 and accepted["suffix-recent"] > 20
