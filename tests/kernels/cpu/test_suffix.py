"""Compiled suffix automata hold and expect what those in Python do, and cannot be slowed down by chosen tokens."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.kernels.cpu.suffix import NativeSuffixes, load_suffixes
from paceline.serving.drafters.suffix_automaton import MAX_CONTEXT, HostSuffixes, make_suffixes

pytestmark = pytest.mark.skipif(load_suffixes() is None, reason="no native code on this machine")
TEXTS = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 9), max_size=40)
SEPARATED = st.lists(st.integers(-1, 2) | st.integers(0, 30), max_size=120)


def separated(text):
    """Every separator is another one."""
    return [token if token >= 0 else -1 - i for i, token in enumerate(text)]


def assert_same(kinds, automata, end, is_own_end, shape=(2, 8, 4)):
    found = []
    for suffixes, own in zip(kinds, automata, strict=True):
        found.append((torch.zeros(shape, dtype=torch.int64), torch.full(shape, float("-inf"))))
        suffixes.write_slots(own, end, is_own_end, found[-1], 1)
        assert not found[-1][0][0].any() and found[-1][1][0].isinf().all(), "the other row is left alone"
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=0)


@settings(max_examples=200)
@example(texts=[[]], cuts=[], end=[])
@example(texts=[[5]], cuts=[0], end=[5])
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
    assert_same(kinds, automata, (), True, shape=(2, 1, 1))


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


def test_tokens_that_were_chosen_to_lie_at_one_place_of_an_unseeded_table_cost_no_more_than_others():
    """With the state's number 0 the multiplier alone would put these side by side."""
    vocab = np.arange(151_936, dtype=np.uint64)
    with np.errstate(over="ignore"):
        places = vocab * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32) & np.uint64(2**15 - 1)
    chosen, others = vocab[np.argsort(places)[:8192]].tolist(), vocab[:8192].tolist()

    def best_s(tokens):
        found = []
        for _ in range(5):
            automaton, start = make_suffixes().automaton(), time.perf_counter()
            automaton.extend(tokens)
            found.append(time.perf_counter() - start)
        return min(found)

    assert best_s(chosen) < 8 * best_s(others)
