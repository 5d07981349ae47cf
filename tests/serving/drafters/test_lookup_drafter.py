"""Prompt lookup proposes what followed the newest, longest match."""

import torch

from paceline.serving.drafters.interface import Frontier
from paceline.serving.drafters.text import PromptLookupDrafter
from tests.helpers.trees import draft_fixed, inputs_for, present


def test_longest_then_newest_match_leads():
    history = [1, 2, 3, 4, 10, 11, 12, 9, 3, 4, 20, 21, 22, 1, 2, 3, 4]
    p = PromptLookupDrafter().propose(inputs_for([history]))
    assert [present(p, 0, s)[0] for s in range(3)] == [10, 11, 12]
    history = [3, 4, 10, 11, 7, 3, 4, 20, 21, 8, 3, 4]
    p = PromptLookupDrafter().propose(inputs_for([history]))
    assert present(p, 0, 0) == [20, 10]
    assert present(p, 0, 1) == [21]


def test_no_match_proposes_nothing():
    drafter = PromptLookupDrafter()
    p = drafter.propose(inputs_for([[1, 2, 3], [5]]))
    assert not (p.logprobs > -torch.inf).any()
    assert draft_fixed(drafter, inputs_for([[1, 2, 3]]), 8).token_ids.tolist() == [3]


def test_table_grows_with_the_history_and_is_forgotten():
    drafter = PromptLookupDrafter()
    history = [1, 2, 3]
    drafter.propose(inputs_for([history]))
    history += [1, 2]
    assert present(drafter.propose(inputs_for([history])), 0, 0) == [3]
    drafter.release("r0")
    assert present(drafter.propose(inputs_for([[7, 8, 9, 7, 8]])), 0, 0) == [9]


def test_reentry_continues_an_alternative():
    history = [3, 4, 10, 11, 12, 7, 3, 4, 20, 21, 8, 3, 4]
    drafter = PromptLookupDrafter()
    inputs = inputs_for([history])
    p = drafter.propose(inputs)
    frontier = Frontier(request=torch.tensor([0]), slot=torch.tensor([0]), token_ids=torch.tensor([10]))
    block = drafter.expand(inputs, p, frontier)
    assert [present(block, 0, s)[0] for s in range(2)] == [11, 12]
    tree = draft_fixed(drafter, inputs, 12)
    assert {10, 11, 12, 20, 21} <= set(tree.token_ids.tolist())


def test_scores_are_valid_log_masses():
    history = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    p = PromptLookupDrafter().propose(inputs_for([history]))
    mass = p.logprobs[0, 0].exp()
    assert mass.sum() <= 1 and (mass[:-1] >= mass[1:]).all() and p.logprobs.max() <= 0
