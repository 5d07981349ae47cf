"""Draft length: as long as a token's worth exceeds its row's cost, none where nothing is accepted, found again after a change."""

import itertools

import numpy as np
import pytest

from paceline.infra.engines.draft_length import MAX_PAIRS, DraftLength

K = 6


class World:
    """Rounds of one request a class: the k-th draft is accepted with `rate` if those before it were."""

    def __init__(self, row_ms: float, fixed_ms: float = 10.0, seed: int = 0) -> None:
        self.row_ms, self.fixed_ms, self.rng = row_ms, fixed_ms, np.random.default_rng(seed)
        self.length = DraftLength(K)

    def run(self, rates: dict[str, float], rounds: int) -> None:
        for _ in range(rounds):
            total = 0
            for bucket, rate in rates.items():
                k = self.length.tokens(bucket, "v")
                accepted = next((i for i in range(k) if self.rng.random() >= rate), k)
                self.length.observe(bucket, "v", k, accepted)
                total += k
            self.length.observe_round(len(rates), total, self.fixed_ms * len(rates) + self.row_ms * total)

    def best(self, rate: float) -> int:
        """The length with most tokens a ms."""
        speeds = [sum(rate**i for i in range(k + 1)) / (self.fixed_ms + self.row_ms * k) for k in range(K + 1)]
        return int(np.argmax(speeds))


@pytest.mark.parametrize(("row_ms", "rate"), itertools.product((0.05, 2.0, 8.0), (0.05, 0.5, 0.9)))
def test_the_length_is_near_the_one_with_most_tokens_a_second(row_ms, rate):
    world = World(row_ms)
    world.run({"a": rate}, 2000)
    assert abs(world.length.best("a", "v") - world.best(rate)) <= 1


def test_each_class_has_its_own():
    world = World(3.0)
    world.run({"good": 0.9, "bad": 0.05}, 2000)
    assert world.length.best("bad", "v") == 0 < 3 <= world.length.best("good", "v")


def test_nothing_is_cut_before_enough_is_known_or_for_an_unknown_version():
    world = World(50.0)
    world.run({"a": 0.0}, 40)
    assert world.length.best("a", "v") == K
    world.run({"a": 0.0}, 2000)
    assert world.length.best("a", "v") == 0
    assert world.length.best("a", "another") == K


def test_a_class_that_drafts_nothing_is_found_again_when_its_drafts_become_good():
    world = World(3.0)
    world.run({"a": 0.02, "b": 0.9}, 2000)
    assert world.length.best("a", "v") == 0
    world.run({"a": 0.95, "b": 0.9}, 12000)
    assert world.length.best("a", "v") >= 3


def test_the_table_names_classes_and_versions():
    world = World(0.01)
    world.run({"a": 0.9}, 500)
    assert world.length.table() == {"a v": K}


def test_rates_of_versions_that_are_gone_are_forgotten_and_those_in_use_are_not():
    world = World(0.01)
    for i in range(2 * MAX_PAIRS):
        for version in ("first", f"v{i}"):
            world.length.tokens("a", version)
            world.length.observe("a", version, K, 3)
    table = world.length.table()
    assert len(table) == MAX_PAIRS and {"a first", f"a v{i}"} <= set(table)
