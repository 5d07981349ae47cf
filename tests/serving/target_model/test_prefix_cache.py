"""Cached pages are found by their whole text, shared without being written, and evicted leaves first."""

from __future__ import annotations

import pytest
import torch

from paceline.serving.target_model.kv_cache import PageAllocator
from paceline.serving.target_model.prefix_cache import PrefixCache

PAGE = 4
TEXT = list(range(100, 140))


def make_pages(num_pages: int = 16, *, is_enabled: bool = True) -> tuple[PageAllocator, PrefixCache]:
    cache = PrefixCache(PAGE, is_enabled=is_enabled)
    return PageAllocator(num_pages, PAGE, cache), cache


def end(pages: PageAllocator, name: str, text: list[int], num_rows: int, tenant: str = "", **options) -> None:
    """A request computes num_rows rows of a text and ends."""
    assert pages.ensure(name, num_rows)
    pages.publish(name, tenant, text, num_rows, is_last=True, **options)
    pages.release(name)
    pages.check_integrity()


def test_full_pages_of_an_ended_request_are_found_and_the_rest_is_free():
    pages, cache = make_pages()
    pages.ensure("a", 11)
    first = pages.pages("a")
    end(pages, "a", TEXT, 11)
    assert cache.num_nodes == cache.num_idle == 2 and pages.num_free_pages == 16
    assert pages.share("b", "", TEXT, 39) == 8 and pages.pages("b") == first[:2]
    assert torch.equal(pages.rows("b", 0, 8), torch.tensor([p * PAGE + i for p in first[:2] for i in range(PAGE)]))
    assert pages.num_free_pages == 14
    pages.release("b")
    assert pages.num_free_pages == 16
    pages.check_integrity()


def test_no_more_rows_are_shared_than_allowed():
    pages, _ = make_pages()
    end(pages, "a", TEXT, 20)
    assert [pages.share(f"r{n}", "", TEXT, n) for n in (3, 4, 7, 15)] == [0, 4, 4, 12]


def test_a_page_is_found_only_with_the_token_behind_it():
    pages, _ = make_pages()
    end(pages, "a", TEXT, 12)
    other = [*TEXT[:8], 7, *TEXT[9:]]
    assert pages.share("b", "", other, 39) == 4, "row 7 of a drafter pairs with token 8, which differs"


def test_the_last_page_needs_a_token_behind_it():
    pages, cache = make_pages()
    end(pages, "a", TEXT[:8], 8)
    assert cache.num_nodes == 1


@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_another_text_before_a_page_is_another_page(at):
    pages, _ = make_pages()
    end(pages, "a", TEXT, 20)
    other = list(TEXT)
    other[at] = 7
    assert pages.share("b", "", other, 39) == max(0, (at - 1) // PAGE) * PAGE


def test_tenants_do_not_see_each_others_pages():
    pages, _ = make_pages()
    end(pages, "a", TEXT, 20, tenant="one")
    assert pages.share("b", "two", TEXT, 39) == 0 and pages.share("c", "", TEXT, 39) == 0
    assert pages.share("d", "one", TEXT, 39) == 20


def test_equal_pages_of_two_requests_are_kept_once():
    pages, cache = make_pages()
    for name in ("a", "b"):
        assert pages.ensure(name, 20)
    pages.publish("a", "", TEXT, 8)
    pages.publish("b", "", TEXT, 8)  # computed at the same time: it keeps its own
    assert cache.num_nodes == 2 and not set(pages.pages("a")) & set(pages.pages("b"))
    pages.check_integrity()
    end(pages, "b", TEXT, 20)
    assert cache.num_nodes == 5, "pages behind the double ones follow in the tree"
    end(pages, "a", TEXT, 20)
    assert cache.num_nodes == 5 and pages.num_free_pages == 16


def test_pages_found_later_replace_own_ones_that_are_not_written_yet():
    pages, _ = make_pages()
    pages.ensure("a", 20)
    pages.ensure("b", 20)
    pages.publish("a", "", TEXT, 8)
    assert pages.share("b", "", TEXT, 19) == 8
    assert pages.pages("b")[:2] == pages.pages("a")[:2] and len(pages.pages("b")) == 5
    assert pages.num_free_pages == 16 - 5 - 3
    pages.check_integrity()


def test_a_shared_page_outlives_the_request_that_computed_it():
    pages, cache = make_pages(8)
    pages.ensure("a", 8)
    pages.publish("a", "", TEXT, 8)
    pages.share("b", "", TEXT, 39)
    pages.publish("a", "", TEXT, 8, is_last=True)
    pages.release("a")
    assert pages.num_free_pages == 6 and cache.num_idle == 0
    assert pages.ensure("c", 24) and not pages.ensure("c", 28), "held pages are not evicted"
    pages.check_integrity()


def test_the_least_recently_used_text_is_evicted_leaf_first():
    pages, cache = make_pages(8)
    texts = {name: [ord(name)] * 40 for name in "abc"}
    for name in "abc":
        end(pages, name, texts[name], 8)
    assert cache.num_idle == 6
    pages.share("again", "", texts["a"], 39)
    pages.release("again")
    assert pages.ensure("x", 12)  # two pages are free, one is evicted: the deeper one of b
    found = {name: pages.share(f"{name}2", "", texts[name], 39) for name in "abc"}
    assert found == {"a": 8, "b": 4, "c": 8} and cache.num_evictions == 1
    pages.check_integrity()


def test_everything_can_be_evicted():
    pages, cache = make_pages(8)
    for i in range(5):
        end(pages, f"r{i}", [i, *TEXT], 13, tenant=f"t{i}")
    assert pages.ensure("all", 32) and cache.num_nodes == 0 and not cache._roots
    pages.check_integrity()


def test_drafter_rows_count_until_the_first_page_without_them():
    pages, _ = make_pages()
    end(pages, "a", TEXT, 16, draft_writer=("A", 1), num_drafted_rows=10)
    pages.share("b", "", TEXT, 39)
    assert pages.num_drafted_rows("b", ("A", 1)) == 8
    assert pages.num_drafted_rows("b", ("A", 2)) == pages.num_drafted_rows("b", ("B", 1)) == 0
    pages.note_drafted("b", ("B", 1), 16)
    assert pages.num_drafted_rows("b", ("B", 1)) == 16 and pages.num_drafted_rows("b", ("A", 1)) == 8
    pages.note_drafted("b", ("A", 2), 4)  # new weights in slot A wrote over the first page
    assert pages.num_drafted_rows("b", ("A", 1)) == 0 and pages.num_drafted_rows("b", ("A", 2)) == 4


def test_an_own_copy_of_a_cached_page_says_nothing_about_the_cached_ones_drafter_rows():
    pages, _ = make_pages()
    pages.ensure("a", 12)
    pages.ensure("b", 12)
    end(pages, "a", TEXT, 12)
    end(pages, "b", TEXT, 12, draft_writer=("A", 1), num_drafted_rows=12)
    pages.share("c", "", TEXT, 39)
    assert pages.num_drafted_rows("c", ("A", 1)) == 0


def test_a_cache_that_is_off_keeps_nothing():
    pages, cache = make_pages(is_enabled=False)
    end(pages, "a", TEXT, 20)
    assert cache.num_nodes == 0 and pages.share("b", "", TEXT, 39) == 0
    assert pages.next_page_key("b", "", TEXT) is None


def test_integrity_check_finds_a_miscounted_holder():
    pages, _ = make_pages()
    end(pages, "a", TEXT, 20)
    pages.share("b", "", TEXT, 39)
    pages._paths["b"][0].num_holders += 1
    with pytest.raises(AssertionError, match="miscounted"):
        pages.check_integrity()
