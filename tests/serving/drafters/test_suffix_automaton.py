"""The automaton counts every short piece of a text exactly, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.drafters.suffix_automaton import SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 9), max_size=40)


def occurrences(text, piece):
    return [i + len(piece) for i in range(len(text) - len(piece) + 1) if text[i : i + len(piece)] == piece]


def followers(text, piece):
    found: dict[int, tuple[int, int]] = {}
    for end in occurrences(text, piece):
        if end < len(text):
            found[text[end]] = (found.get(text[end], (0, 0))[0] + 1, end + 1)
    return found


def counted(automaton, state):
    return {token: (count, end) for token, count, end in automaton.followers(state)}


def longest_end(text, tokens, max_length):
    """The longest end of `tokens` that occurs in the text with something behind it, by search."""
    for length in range(min(max_length, len(tokens)), 0, -1):
        if followers(text, tokens[-length:]):
            return length
    return 0


@settings(max_examples=150)
@given(text=TEXTS, query=TEXTS, max_length=st.integers(1, 6))
def test_matches_counts_and_newest_ends_equal_a_search_through_the_text(text, query, max_length):
    automaton = SuffixAutomaton(max_length)
    for at in range(len(text) + 1):
        automaton.extend(text[at - 1 : at] if at else ())
        if at % 7 and at < len(text):
            continue
        seen = text[:at]
        for tokens in (seen, query, [*seen[-3:], *query[:2]]):
            state, length = automaton.match(tokens)
            assert tokens is not seen or (state, length) == automaton.ending()
            assert length == longest_end(seen, tokens, max_length)
            if length:
                assert counted(automaton, state) == followers(seen, tokens[len(tokens) - length :])
                state, length = automaton.shorter((state, length))
                if length:
                    assert counted(automaton, state) == followers(seen, tokens[len(tokens) - length :])


@settings(max_examples=100)
@given(text=TEXTS, query=TEXTS, max_length=st.integers(1, 6))
def test_advancing_token_by_token_equals_matching_the_whole(text, query, max_length):
    automaton = SuffixAutomaton(max_length)
    automaton.extend(text)
    found = (0, 0)
    for i, token in enumerate(query):
        found = automaton.advance(found, token)
        assert automaton.continued(found) == automaton.match(query[: i + 1])


@pytest.mark.parametrize("kind", ["same", "random", "periodic"])
def test_states_and_counting_are_linear_in_the_text(kind):
    rng = np.random.default_rng(0)
    num = 3000
    text = {"same": [7] * num, "random": rng.integers(0, 50, num).tolist(), "periodic": [1, 2, 3, 4, 5] * (num // 5)}
    automaton = SuffixAutomaton(8)
    automaton.extend(text[kind])
    assert automaton.num_tokens == num
    state, length = automaton.match(text[kind][-20:])
    assert counted(automaton, state) == followers(text[kind], text[kind][len(text[kind]) - length :])


def test_separators_are_never_expected_and_nothing_matches_across_them():
    automaton = SuffixAutomaton(8)
    automaton.extend([5, 6, -1, 7, 8, 9, -2])
    assert automaton.followers(automaton.match([5, 6])[0]) == []
    assert automaton.match([6, 7]) == automaton.match([7])
    assert automaton.followers(automaton.match([6, 7])[0]) == [(8, 1, 5)]
