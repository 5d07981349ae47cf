"""Text drafters propose what followed: prompt lookup the newest match, the suffix drafter the most frequent ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS, resolve_drafter
from paceline.serving.drafters import text
from paceline.serving.drafters.interface import Frontier
from paceline.serving.drafters.suffix_automaton import MAX_CONTEXT, HostSuffixes
from paceline.serving.drafters.text import (
    MAX_TENANTS,
    PromptLookupDrafter,
    RecentTexts,
    SuffixDrafter,
    make_text_drafter,
)
from tests.helpers.trees import draft_fixed, inputs_for, present


@pytest.fixture(params=["compiled, where it can be", "in Python"], autouse=True)
def suffixes(request, monkeypatch):
    """The tests of this file run with compiled automata, and with those in Python."""
    if request.param == "in Python":
        monkeypatch.setattr(text, "make_suffixes", HostSuffixes)
    return text.make_suffixes()


BOTH = pytest.mark.parametrize("kind", [PromptLookupDrafter, SuffixDrafter])


@BOTH
def test_no_match_proposes_nothing(kind):
    drafter = kind()
    p = drafter.propose(inputs_for([[1, 2, 3], [5]]))
    assert not (p.logprobs > -torch.inf).any()
    assert draft_fixed(drafter, inputs_for([[1, 2, 3]]), 8).token_ids.tolist() == [3]


@BOTH
def test_scores_are_valid_log_masses_and_equal_in_a_batch(kind):
    rng = np.random.default_rng(0)
    histories = [[1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2], *(rng.integers(0, 4, n).tolist() for n in (2, 30, 200, 90))]
    p = kind().propose(inputs_for(histories))
    assert (p.logprobs.exp().sum(2) <= 1 + 1e-6).all() and (p.logprobs <= 0).all()
    assert (p.logprobs[:, :, :-1] >= p.logprobs[:, :, 1:]).all(), "best first, absent last"
    for i, history in enumerate(histories):
        alone = kind().propose(inputs_for([history]))
        assert torch.equal(alone.token_ids[0], p.token_ids[i]) and torch.equal(alone.logprobs[0], p.logprobs[i])


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
def test_a_draft_is_expected_exactly_where_there_is_one(name):
    rng, drafter = np.random.default_rng(0), make_text_drafter(name)
    found = set()
    for at in range(60):
        history = rng.integers(0, rng.choice([3, 30, 300]), rng.integers(1, 60)).tolist()
        for end in range(len(history) // 2 + 1, len(history) + 1):
            inputs = inputs_for([history[:end]], [f"r{at}"])
            expected = drafter.expects(f"r{at}", history[:end])
            assert expected == bool((drafter.propose(inputs).logprobs > -torch.inf).any())
            found.add(expected)
        drafter.release(f"r{at}")
    assert found == {False, True}


@BOTH
def test_text_grows_between_calls_and_is_forgotten(kind):
    grown, text = kind(), np.random.default_rng(1).integers(0, 5, 120).tolist()
    history = text[:3]
    for end in (4, 5, 9, 40, 41, 120):
        history += text[len(history) : end]
        p, fresh = grown.propose(inputs_for([history])), kind().propose(inputs_for([history]))
        assert torch.equal(p.token_ids, fresh.token_ids) and torch.equal(p.logprobs, fresh.logprobs)
    grown.release("r0")
    assert present(grown.propose(inputs_for([[7, 8, 9, 7, 8]])), 0, 0) == [9]


@BOTH
def test_reentry_continues_an_alternative(kind):
    history = [3, 4, 10, 11, 12, 7, 3, 4, 20, 21, 8, 3, 4, 20, 21, 9, 3, 4]
    drafter, inputs = kind(), inputs_for([history])
    p = drafter.propose(inputs)
    assert present(p, 0, 0) == [20, 10]
    frontier = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=torch.tensor([10]))
    block = drafter.expand(inputs, p, frontier)
    assert [present(block, 0, s)[0] for s in range(2)] == [11, 12]
    assert {10, 11, 12, 20, 21} <= set(draft_fixed(drafter, inputs, 12).token_ids.tolist())


def test_prompt_lookup_is_led_by_the_longest_and_then_the_newest_match():
    history = [1, 2, 3, 4, 10, 11, 12, 9, 3, 4, 20, 21, 22, 1, 2, 3, 4]
    p = PromptLookupDrafter().propose(inputs_for([history]))
    assert [present(p, 0, s)[0] for s in range(3)] == [10, 11, 12]
    history = [3, 4, 10, 11, 7, 3, 4, 20, 21, 8, 3, 4]
    p = PromptLookupDrafter().propose(inputs_for([history]))
    assert present(p, 0, 0) == [20, 10]
    assert present(p, 0, 1) == [21]


def test_prompt_lookup_takes_a_long_text_in_by_parts_that_a_round_may_wait_for():
    history = np.random.default_rng(0).integers(0, 9, 5000).tolist()
    history += history[100:104]  # and 4 more as at its beginning
    drafter, whole = PromptLookupDrafter(), PromptLookupDrafter()
    for end in range(500, len(history) + 1, 500):
        whole.follow("r", history[:end])
    whole.follow("r", history)
    counted = []
    for _ in range(7):
        drafter.follow("r", history)
        counted.append(max(max(ends) for ends in drafter._tables["r"]._ends.values()) + 1)
    assert counted == [1024, 2048, 3072, 4096, len(history), len(history), len(history)]
    assert drafter._tables["r"]._ends == whole._tables["r"]._ends and drafter.expects("r", history)


def test_the_most_frequent_continuation_leads_and_the_newest_wins_ties():
    often = [1, 2, 5] * 5 + [1, 2, 6, 1, 2]
    p = SuffixDrafter().propose(inputs_for([often]))
    assert present(p, 0, 0) == [5, 6]
    mass = p.logprobs[0, 0, :2].exp()
    assert float(mass[0]) == pytest.approx(5 / 3 * float(mass[1]), rel=1e-5), "the newest counts for two more"
    assert present(p, 0, 1) == [1] and present(p, 0, 2) == [2]
    p = SuffixDrafter().propose(inputs_for([[1, 2, 5, 1, 2, 6, 1, 2]]))
    assert present(p, 0, 0) == [6, 5]


def test_a_longer_match_outweighs_a_more_frequent_shorter_one():
    history = [3, 4, 7, 3, 4, 7, 3, 4, 7, 9, 3, 4, 8, 2, 9, 3, 4]
    p = SuffixDrafter().propose(inputs_for([history]))
    assert present(p, 0, 0)[:2] == [8, 7], "9 3 4 was followed by 8 once, 3 4 by 7 three times"
    assert present(p, 0, 1)[0] == 2


def test_what_is_counted_of_a_long_text_is_bounded_and_is_its_newest_part():
    drafter = SuffixDrafter(max_text=64)
    history = [1, 2, 3, *range(100, 400)]
    drafter.propose(inputs_for([history]))
    for token in range(400, 900):
        history.append(token)
        drafter.follow("r0", history)
        assert drafter._texts["r0"].automaton.num_tokens <= 64
    assert present(drafter.propose(inputs_for([[*history, 880, 881]])), 0, 0) == [882]
    history += [880, 881, 1, 2]
    assert present(drafter.propose(inputs_for([history])), 0, 0) == []


def test_a_long_prompt_is_counted_in_steps_so_that_no_round_waits_long(suffixes):
    step = suffixes.max_step
    drafter, history = SuffixDrafter(max_text=1 << 20), list(range(20000, 20000 + 3 * step - 75)) + [7, 20500, 20501]
    counted = []
    for _ in range(4):
        p = drafter.propose(inputs_for([history]))
        counted.append(drafter._texts["r0"].automaton.num_tokens)
        assert present(p, 0, 0) == [20502], "what is counted already serves"
    assert counted == [step, 2 * step, len(history), len(history)]


def test_recent_answers_help_other_requests_but_prompts_are_not_kept():
    drafter = SuffixDrafter(recent_tokens=1000)
    prompt, answer = [50, 51, 52, 53], [10, 11, 12, 13, 14]
    history = list(prompt)
    drafter.propose(inputs_for([history]))
    history += answer
    drafter.release("r0")
    p = drafter.propose(inputs_for([[7, 10, 11], [7, 50, 51]]))
    assert [present(p, 0, s) for s in range(3)] == [[12], [13], [14]]
    assert present(p, 0, 3) == [] and present(p, 1, 0) == []
    other = dataclasses.replace(inputs_for([[7, 10, 11]], ids=["other"]), tenants=["somebody"])
    assert present(drafter.propose(other), 0, 0) == [], "a tenant's answers are nobody else's"
    alone = SuffixDrafter()
    alone.propose(inputs_for([[*prompt, *answer]]))
    alone.release("r0")
    assert present(alone.propose(inputs_for([[7, 10, 11]])), 0, 0) == []


def test_the_tenants_that_are_remembered_are_bounded():
    drafter = SuffixDrafter(recent_tokens=1000)
    for i in range(MAX_TENANTS + 1):
        history = [50, 51]
        drafter.follow("r", history, f"tenant {i}")
        history += [10, 11, 12 + i, 13]
        drafter.release("r")

    def expected(tenant: str) -> list:
        inputs = dataclasses.replace(inputs_for([[7, 10, 11]], ids=["x"]), tenants=[tenant])
        p = drafter.propose(inputs)
        drafter.release("x")
        return present(p, 0, 0)

    assert (
        expected("tenant 0") == []
        and expected("tenant 1") == [13]
        and expected(f"tenant {MAX_TENANTS}") == [12 + MAX_TENANTS]
    )


def test_recent_texts_are_bounded_and_the_oldest_go_first(suffixes):
    texts = RecentTexts(suffixes, 200)
    rng = np.random.default_rng(0)
    for i in range(60):
        texts.add([1000 + i, 2000 + i, 3000 + i, *rng.integers(0, 50, 30).tolist()])
        texts.take_in(100)
        assert texts.num_tokens <= 200
    found = [suffixes.longest(texts.automata, [1000 + i, 2000 + i]) for i in range(60)]
    assert found[59] == 2 and found[0] == 0
    texts.add(list(range(5000)))
    texts.take_in(5000)
    assert texts.num_tokens <= 200


def test_recent_texts_are_counted_a_few_tokens_a_round_and_those_that_never_were_stay_bounded(suffixes):
    texts, size = RecentTexts(suffixes, 400), 40
    texts.add(range(1000, 1000 + size))
    for counted in (0, 32, 40):
        assert texts.num_tokens == counted + (counted == size)  # a mark behind each text
        texts.take_in(32)
    texts.add([1, 2, 3, 4, 5, 6])
    texts.take_in(3)
    for i in range(100):
        texts.add([7, 8, 9, 10 + i] * 5)
    assert sum(map(len, texts._waiting)) <= 200
    texts.take_in(1000)
    assert suffixes.longest(texts.automata, [3, 7]) == 1, "nothing matches across the end of a text that was cut"


def test_trust_grows_with_the_match_and_with_the_number_of_occurrences():
    text = list(range(40))
    by_length = []
    for length in range(2, MAX_CONTEXT + 1):
        p = SuffixDrafter().propose(inputs_for([[*text, 99, *text[20 - length : 20]]]))
        by_length.append(math.exp(float(p.logprobs[0, 0, 0])))
    assert by_length == sorted(by_length) and by_length[0] == pytest.approx(0.45)
    by_count = []
    for count in range(1, 5):
        history = [t for i in range(count) for t in (50 + i, 1, 2, 3)] + [1, 2]
        by_count.append(math.exp(float(SuffixDrafter().propose(inputs_for([history])).logprobs[0, 0, 0])))
    assert by_count == sorted(by_count) and by_count[-1] == pytest.approx(1 - 0.55 / 2)


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
def test_every_name_makes_a_drafter_of_that_name_without_weights(name):
    assert make_text_drafter(name).caps.name == name and resolve_drafter(name) is None


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="lookup, suffix, suffix-recent"):
        make_text_drafter("none")
