"""Of all ways to give a round's requests draft nodes, the split is the one with the highest rate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serving.budget.node_split import MAX_LIMITS, Padding, best_split


def falling_masses(seed, num_requests, num_columns):
    rng = np.random.default_rng(seed)
    masses = -np.sort(-(rng.random((num_requests, num_columns)) ** 2), axis=1)
    masses[rng.random(num_requests) < 0.2] = 0.0  # requests that were not drafted
    return masses * (np.arange(num_columns) < rng.integers(1, num_columns + 1, num_requests)[:, None])


def split(masses, seconds, padding=None):
    return best_split(masses, (masses > 0).sum(1), lambda start, stop: seconds(np.arange(start, stop)), padding)


def rate(masses, nodes, seconds, padding):
    tokens = len(nodes) + sum(masses[b, :n].sum() for b, n in enumerate(nodes))
    rows = len(nodes) + sum(nodes)
    extra = padding.seconds(len(nodes), 1 + max(nodes), rows) if padding is not None else 0.0
    return tokens / (float(seconds(np.array([rows]))[0]) + extra)


def staircase(rows):
    return 4e-3 + 1.5e-3 * ((rows + 3) // 4)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    num_requests=st.integers(1, 4),
    pair_s=st.sampled_from([None, 0.0, 1e-6, 2e-5, 1e-3]),
    is_convex=st.booleans(),
    max_s=st.sampled_from([1.0, 2e-4]),
    uneven_s=st.sampled_from([0.0, 3e-4, 5e-3]),
)
def test_no_other_split_has_a_higher_rate(seed, num_requests, pair_s, is_convex, max_s, uneven_s):
    masses = falling_masses(seed, num_requests, 4)
    padding = None if pair_s is None else Padding(uneven_s, pair_s, 30.0, max_s)

    def seconds(rows):
        return 4e-3 + 3e-4 * rows if is_convex else staircase(rows)

    nodes = split(masses, seconds, padding)
    available = (masses > 0).sum(1)
    assert (nodes <= available).all()
    every = itertools.product(*(range(n + 1) for n in available))
    best = max(rate(masses, each, seconds, padding) for each in every)
    assert rate(masses, nodes, seconds, padding) == pytest.approx(best, rel=1e-9)


def test_dear_padding_makes_trees_of_one_width():
    masses = np.array([[0.9, 0.8, 0.7, 0.6], [0.9, 0.5, 0.01, 0.005], [0.9, 0.45, 0.01, 0.005]])
    free = split(masses, lambda rows: 4e-3 + 2e-4 * rows)
    assert free.tolist() == [4, 2, 2]
    dear = split(masses, lambda rows: 4e-3 + 2e-4 * rows, Padding(0.0, 1e-4, 50.0, 1.0))
    assert dear.tolist() == [2, 2, 2]


@pytest.mark.parametrize("padding", [None, Padding(1e-4, 1e-6, 100.0, 1.0)])
def test_nothing_is_drafted_where_nothing_pays_or_nothing_was_proposed(padding):
    dear = split(np.full((3, 4), 1e-6), lambda rows: 1e-3 * rows, padding)
    assert dear.tolist() == [0, 0, 0]
    assert split(np.zeros((2, 4)), staircase, padding).tolist() == [0, 0]
    assert split(np.zeros((2, 0)), staircase, padding).tolist() == [0, 0]


def test_many_candidates_are_limited_in_steps_and_the_widest_stays_possible():
    masses = np.full((2, 5 * MAX_LIMITS), 0.9)
    nodes = split(masses, lambda rows: 1e-2 + 1e-6 * rows, Padding(0.0, 1e-9, 10.0, 1.0))
    assert nodes.tolist() == [5 * MAX_LIMITS] * 2
