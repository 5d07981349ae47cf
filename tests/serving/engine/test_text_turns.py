"""A text drafter beside one with weights: each drafts the rounds that it is better at, and neither changes a token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.config import TreeConfig
from paceline.contracts import Group
from paceline.serving.budget.switch import REST
from tests.helpers.engines import PROMPT, FeatureDrafter, Run, Sinks, finish, greedy, make_engine

LOOP = (7, 8, 9, 7, 8, 9, 7, 8)
"""A prompt that repeats itself."""
NEW = (21, 33, 5, 47, 12, 60, 18)
"""One in which nothing occurs twice."""


def turns_of(engine, monkeypatch):
    """Names of the drafters that were asked, one a call, and for whom."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def watch(drafter, name):
        propose = drafter.propose

        def noted(inputs):
            asked.append((name, tuple(inputs.request_ids)))
            return propose(inputs)

        monkeypatch.setattr(drafter, "propose", noted)

    watch(engine.policy.text, "text")
    watch(engine.slots.drafter("A"), "own")
    return asked


@pytest.mark.parametrize("policy", ["fixed", "adaptive", "bundle"])
@pytest.mark.parametrize("mix", ["lookup", "suffix", "suffix-recent"])
def test_texts_that_go_on_are_drafted_from_text_and_the_rest_by_the_drafter(policy, mix, monkeypatch):
    """FeatureDrafter fails unless every row is handed over once and in order: also those of rounds that were not its turn."""
    tree = TreeConfig(max_draft_tokens=6, policy=policy, mix=mix)
    engine = make_engine(FeatureDrafter(), sinks=Sinks(), tree=tree)
    asked = turns_of(engine, monkeypatch)
    prompts = {"loop": LOOP, "new": NEW, "p": PROMPT}
    runs = {name: Run(engine, name, prompt, max_tokens=40) for name, prompt in prompts.items()}
    finish(engine)
    for name, run in runs.items():
        assert run.tokens == greedy(prompts[name], 40)
    assert {name for name, _ in asked} == {"text", "own"}
    assert next(name for name, ids in asked if "new" in ids) == "own", "nothing in it has occurred before"
    assert engine.stats()["num_drafter_failures"] == 0


def test_a_round_has_one_drafter_a_request(monkeypatch):
    sinks = Sinks()
    tree = TreeConfig(max_draft_tokens=6, policy="fixed", mix="suffix")
    engine = make_engine(FeatureDrafter(), sinks=sinks, tree=tree)
    asked = turns_of(engine, monkeypatch)
    Run(engine, "loop", LOOP, max_tokens=40)
    rounds = Counter[str]()
    while engine.step():
        assert len(asked) <= 1, "the drafter's time is saved where the text goes on"
        assert [r["is_from_text"] for r in sinks.rows] == (
            [asked[0][0] == "text"] if asked else [False][: len(sinks.rows)]
        )
        rounds.update(name for name, _ in asked)
        asked.clear()
        sinks.rows.clear()
    assert min(rounds["text"], rounds["own"]) > 1


def test_requests_without_a_drafter_have_no_text_turns_either(monkeypatch):
    engine = make_engine(FeatureDrafter(), tree=TreeConfig(policy="fixed", mix="suffix"))
    asked = turns_of(engine, monkeypatch)
    run = Run(engine, "plain", LOOP, group=Group.PLAIN, max_tokens=20)
    finish(engine)
    assert run.tokens == greedy(LOOP, 20) and asked == []


@pytest.mark.parametrize("place", ["expects", "write_slots", "release"])
def test_a_text_drafter_that_fails_costs_its_drafts_only(place, monkeypatch):
    engine = make_engine(FeatureDrafter(), tree=TreeConfig(max_draft_tokens=6, policy="fixed", mix="suffix"))
    own = []
    monkeypatch.setattr(engine.slots.drafter("A"), "propose", lambda i, p=engine.slots.drafter("A").propose: own.append(1) or p(i))  # fmt: skip

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.policy.text, place, fail)
    runs = [Run(engine, f"r{i}", LOOP, max_tokens=30 + i) for i in range(2)]
    finish(engine)
    assert all(run.tokens == greedy(LOOP, 30 + i) for i, run in enumerate(runs))
    stats = engine.stats()
    assert engine.policy.text is None and stats["num_drafter_failures"] == 1
    assert "broken" in stats["drafter_failures"]["suffix"] and engine.slots.num_failures == 0
    assert own, "the drafter with weights goes on"


def test_a_request_that_ends_is_forgotten():
    engine = make_engine(FeatureDrafter(), tree=TreeConfig(policy="fixed", mix="suffix"))
    for i in range(3):
        Run(engine, f"r{i}", LOOP)
    for _ in range(6):
        engine.step()
    text = engine.policy.text
    assert text is not None and len(text._texts) == 3  # type: ignore[attr-defined]
    finish(engine)
    assert text._texts == {}  # type: ignore[attr-defined]


def test_a_text_that_is_off_is_looked_at_once_in_several_rounds_and_is_complete_when_it_is(monkeypatch):
    engine = make_engine(FeatureDrafter(), tree=TreeConfig(max_draft_tokens=6, policy="adaptive", mix="suffix"))
    switch, text, looked = engine.policy.budget._switch, engine.policy.text, []
    record = switch.record

    def off(key, num_requests):
        found = record(key, num_requests)
        found.state, found.left, found.is_idle, found.wait = "off", 0, True, 100.0
        return found

    def noted(request_id, history, tenant=""):
        looked.append(len(history))
        found = type(text).expects(text, request_id, history, tenant)
        assert text._texts[request_id].num_seen == len(history)
        return found

    monkeypatch.setattr(switch, "record", off)
    monkeypatch.setattr(text, "expects", noted)
    run = Run(engine, "loop", LOOP, max_tokens=41)
    finish(engine)
    assert run.tokens == greedy(LOOP, 41)
    assert set(np.diff(looked)) == {REST} and len(looked) == 5
