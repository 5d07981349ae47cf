"""Free pages are handed out in order, merged when they come back, and never scanned."""

import numpy as np
import pytest

from paceline.serving.target_model.kv_cache import PageRuns


def test_pages_come_in_order_behind_the_last_one():
    runs = PageRuns(10)
    assert runs.take(3, None) == [0, 1, 2]
    assert runs.take(2, 2) == [3, 4]
    assert runs.num_free == 5


def test_a_second_owner_starts_in_the_middle_so_that_the_first_can_grow():
    runs = PageRuns(20)
    runs.take(2, None)
    assert runs.take(1, None) == [11]
    assert runs.take(3, 1) == [2, 3, 4]


def test_neighbours_merge_whatever_the_order_in_which_they_return():
    for order in ([3, 5, 4], [4, 3, 5], [5, 4, 3]):
        runs = PageRuns(9)
        runs.take(9, None)
        for page in order:
            runs.give(page)
        assert runs.take(3, None) == [3, 4, 5]


def test_fragments_are_joined_to_one_answer():
    runs = PageRuns(6)
    runs.take(6, None)
    for page in (0, 2, 3, 5):
        runs.give(page)
    assert sorted(runs.take(4, None)) == [0, 2, 3, 5] and runs.num_free == 0


def test_more_than_there_is_is_refused():
    with pytest.raises(AssertionError):
        PageRuns(2).take(3, None)


def test_random_taking_and_giving_matches_a_set_of_pages():
    rng = np.random.default_rng(0)
    runs, free, held = PageRuns(50), set(range(50)), []
    for _ in range(5000):
        if held and rng.random() < 0.5:
            page = held.pop(int(rng.integers(len(held))))
            runs.give(page)
            free.add(page)
        elif free:
            pages = runs.take(int(rng.integers(1, len(free) + 1)) // 4 or 1, held[-1] if held else None)
            assert len(set(pages)) == len(pages) and set(pages) <= free
            free -= set(pages)
            held += pages
        assert runs.pages() == free and runs.num_free == len(free)
    assert len(runs._longest) <= 4 * 50 + 65, "stale entries are dropped"
