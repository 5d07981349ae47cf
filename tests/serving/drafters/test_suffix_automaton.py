"""The automaton counts every short piece of a text exactly, in bounded memory; compiled, it expects what it expects in Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.cpu.suffix import NativeSuffixes, load_suffixes
from paceline.serving.drafters.suffix_automaton import MAX_CONTEXT, HostSuffixes, SuffixAutomaton, make_suffixes

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


SEPARATED = st.lists(st.integers(-1, 2) | st.integers(0, 30), max_size=120)
native = pytest.mark.skipif(load_suffixes() is None, reason="no native code on this machine")


def separated(text):
    """Every separator is another one."""
    return [token if token >= 0 else -1 - i for i, token in enumerate(text)]


def proposal():
    return torch.zeros(2, 8, 4, dtype=torch.int64), torch.full((2, 8, 4), float("-inf"))


def assert_same(kinds, automata, end, is_own_end):
    found = []
    for suffixes, own in zip(kinds, automata, strict=True):
        found.append(proposal())
        suffixes.write_slots(own, end, is_own_end, found[-1], 1)
        assert not found[-1][0][0].any() and found[-1][1][0].isinf().all(), "the other row is left alone"
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=0)


@native
@settings(max_examples=200)
@given(texts=st.lists(SEPARATED, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 120), max_size=3), end=TEXTS)
def test_compiled_automata_expect_exactly_what_those_in_python_do(texts, cuts, end):
    kinds = HostSuffixes(), make_suffixes()
    assert isinstance(kinds[1], NativeSuffixes)
    automata = [[suffixes.automaton() for _ in texts] for suffixes in kinds]
    for own in automata:
        for automaton, text in zip(own, texts, strict=True):
            bounds = [0, *sorted(cuts), len(text)]
            for a, b in itertools.pairwise(bounds):
                automaton.extend(separated(text)[a:b])
    for host, compiled in zip(*automata, strict=True):
        assert (host.num_tokens, host.num_matched) == (compiled.num_tokens, compiled.num_matched)
    for tokens in (end, texts[0][-MAX_CONTEXT:], [*texts[-1][-4:], *end[:2]], [2**31 - 1]):
        assert kinds[0].longest(automata[0], tokens) == kinds[1].longest(automata[1], tokens)
        assert_same(kinds, automata, tokens, False)
    assert_same(kinds, automata, (), True)


@native
@pytest.mark.parametrize("kind", ["random", "skewed", "periodic"])
def test_compiled_automata_of_long_texts_grow_as_those_in_python(kind):
    rng = np.random.default_rng(1)
    text = {
        "random": rng.integers(0, 3000, 6000),
        "skewed": rng.zipf(1.3, 6000) % 50000,
        "periodic": np.tile(rng.integers(0, 50, 97), 62),
    }[kind].tolist()
    kinds = HostSuffixes(), make_suffixes()
    automata = [[suffixes.automaton()] for suffixes in kinds]
    for at in range(0, 6000, 500):
        for own in automata:
            own[0].extend(text[at : at + 500])
        for end in (text[max(at - 7, 0) : at], text[at : at + 20], text[:2]):
            assert_same(kinds, automata, end[-MAX_CONTEXT:], False)
        assert_same(kinds, automata, (), True)
