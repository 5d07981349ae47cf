"""Claims of bench/drafters/workload_split.py."""

import itertools
import math

import numpy as np
import pytest

from paceline.bench.drafters.workload_split import hidden_means, select_diverse, tfidf
from tests.helpers.fakes import tiny_target


def loss(vectors, chosen):
    gram = vectors @ vectors.T
    return sum(gram[i, j] for i in chosen for j in chosen if i != j)


def unit_rows(num, size, seed):
    rows = np.abs(np.random.default_rng(seed).normal(size=(num, size)))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(6))
def test_no_single_swap_improves_and_the_best_set_is_near(seed):
    vectors = unit_rows(12, 5, seed)
    got = select_diverse(vectors, 4, seed=seed)
    own = loss(vectors, got.indices)
    assert len(set(got.indices)) == 4 and got.similarity == pytest.approx(own / 12)
    for out, new in itertools.product(got.indices, set(range(12)) - set(got.indices)):
        assert loss(vectors, (set(got.indices) - {out}) | {new}) >= own - 1e-9
    losses = sorted(loss(vectors, c) for c in itertools.combinations(range(12), 4))
    assert losses.index(min(losses, key=lambda v: abs(v - own))) < 0.02 * len(losses)
    assert got.uniform_similarity == pytest.approx(np.mean(losses) / 12)
    assert got.similarity < got.uniform_similarity


def test_swaps_repair_a_greedy_start_that_was_unlucky():
    """The first, random one lies between two groups: without swaps it stays."""
    vectors = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]) / np.array([[1], [1], [1], [math.sqrt(3)]])
    seed = next(s for s in range(50) if np.random.default_rng(s).integers(4) == 3)
    assert 3 in select_diverse(vectors, 3, seed=seed, max_swaps=0).indices
    got = select_diverse(vectors, 3, seed=seed)
    assert set(got.indices) == {0, 1, 2} and got.similarity == 0 and got.num_swaps == 1


def test_a_pool_that_is_too_small_is_taken_whole():
    got = select_diverse(unit_rows(3, 4, 0), 9)
    assert sorted(got.indices) == [0, 1, 2] and got.num_swaps == 0
    assert select_diverse(unit_rows(1, 4, 0), 1).similarity is None


def test_equal_seeds_choose_equally():
    vectors = unit_rows(40, 6, 9)
    assert select_diverse(vectors, 8, seed=3) == select_diverse(vectors, 8, seed=3)


def test_tfidf_has_the_documented_weights():
    rows = tfidf(["Cat cat dog", "dog bird", "!?"]).toarray()
    cat, dog, bird = (1 + math.log(4 / (1 + n)) for n in (1, 2, 1))
    first = np.array([2 * cat, dog, 0])
    assert rows[0] == pytest.approx(first / np.linalg.norm(first))
    assert rows[1] == pytest.approx(np.array([0, dog, bird]) / math.hypot(dog, bird))
    assert not rows[2].any(), "a text without words is like nothing"


def test_repeated_texts_are_chosen_last():
    texts = ["a red house"] * 5 + ["two green cats", "sums of numbers", "rain tomorrow"]
    chosen = select_diverse(tfidf(texts), 4).indices
    assert len({texts[i] for i in chosen}) == 4


def test_hidden_states_are_of_the_target_and_of_length_one():
    target = tiny_target(vocab=64, layers=2, width=16)
    got = hidden_means(target, [[5, 9, 7], [5, 9, 7], [30, 31, 32, 33]])
    assert np.linalg.norm(got, axis=1) == pytest.approx(1)
    assert got[0] == pytest.approx(got[1]) and got[0] @ got[2] < 0.999
