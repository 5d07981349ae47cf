"""A batch of mixed trees: a request gets the tokens that it gets alone, whoever else drafts, and however much, beside it."""

from __future__ import annotations

import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.contracts import Group
from tests.helpers.lossless import (
    DRAFTERS,
    NUM_PROMPTS,
    Outputs,
    assert_same,
    make_drafter,
    make_engine,
    run_until_idle,
    submit,
)

NETWORKS = ("specblock", "eagle3", "jetspec", "dflash")
"""Drafters of hidden states, which an engine keeps from its start on if its first drafter needs them."""


def two_drafters(first: str, live: str, policy: str):
    """An engine whose held-back requests draft with the first drafter and its adaptive ones with the live one."""
    engine = make_engine(make_drafter(first), policy=policy, max_running=NUM_PROMPTS)
    assert engine.slots.stage("v1", make_drafter(live, seed=1))
    engine.call_between_rounds(engine.slots.publish)
    return engine


class Stats(Outputs):
    """The events, and how many nodes each request had drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_draft_tokens: dict[str, int] = {}

    def __call__(self, event) -> None:
        super().__call__(event)
        self.num_draft_tokens[event.request_id] = event.stats.num_draft_tokens


@functools.cache
def alone(first: str, live: str, policy: str, prompt: int, group: Group) -> tuple[int, ...]:
    engine, outputs = two_drafters(first, live, policy), Outputs()
    name = submit(engine, prompt, outputs, group)
    run_until_idle(engine)
    return tuple(outputs.tokens[name])


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    first=st.sampled_from(NETWORKS),
    live=st.sampled_from(DRAFTERS),
    policy=st.sampled_from(["fixed", "adaptive"]),
    asked=st.lists(
        st.tuples(st.integers(0, NUM_PROMPTS - 1), st.sampled_from(list(Group)), st.integers(0, 3)),
        min_size=2, max_size=6, unique_by=lambda one: one[0],
    ),
)  # fmt: skip
def test_a_request_in_a_mixed_batch_gets_the_tokens_that_it_gets_alone(first, live, policy, asked):
    engine, outputs = two_drafters(first, live, policy), Outputs()
    for prompt, group, num_rounds in asked:
        submit(engine, prompt, outputs, group)
        for _ in range(num_rounds):  # later ones come while earlier ones decode
            engine.step()
    run_until_idle(engine)
    assert engine.stats()["num_drafter_failures"] == 0
    for prompt, group, _ in asked:
        assert_same(prompt, outputs.tokens[f"r{prompt}"], alone(first, live, policy, prompt, group))


def test_requests_of_one_batch_draft_differently():
    """Of the property above: its batches are mixed, in drafters and in numbers of nodes."""
    engine, outputs = two_drafters("specblock", "lookup", "fixed"), Stats()
    groups = {4: Group.ADAPTIVE, 5: Group.STATIC, 6: Group.PLAIN, 7: Group.STATIC}
    for prompt, group in groups.items():
        submit(engine, prompt, outputs, group)
    run_until_idle(engine)
    adaptive, static, plain, _ = (outputs.num_draft_tokens[f"r{i}"] for i in groups)
    assert plain == 0 < adaptive != static > 0
