"""Pages neither leak nor overlap, and row tables follow the page tables."""

import numpy as np
import psutil
import pytest
import torch

from paceline.errors import ConfigError
from paceline.kernels.cpu.memory import pool_zeros
from paceline.kernels.cpu.trees import copy_rows, load_trees
from paceline.serving.target_model.kv_cache import KVPool, PageAllocator


def _pool(**changes):
    args = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "num_pages": 3, "page_tokens": 4, "num_scratch_rows": 5}
    return KVPool(**{**args, "dtype": torch.float32, "device": "cpu", **changes})


def test_scratch_lies_behind_the_canonical_rows():
    pool = _pool()
    assert pool.scratch_start == 12
    assert pool.keys.shape == pool.values.shape == (2, 17, 2, 4)
    assert pool.scratch_rows(5).tolist() == [12, 13, 14, 15, 16]
    assert pool.row_bytes == 2 * 2 * 2 * 4 * 4
    with pytest.raises(ConfigError, match="num_scratch_rows"):
        pool.scratch_rows(6)


def test_commit_moves_scratch_rows_to_canonical_rows():
    pool = _pool()
    pool.keys.copy_(torch.randn_like(pool.keys))
    pool.values.copy_(torch.randn_like(pool.values))
    keys, values = pool.keys.clone(), pool.values.clone()
    pool.commit(torch.tensor([12, 15]), torch.tensor([6, 7]))
    assert torch.equal(pool.keys[:, [6, 7]], keys[:, [12, 15]])
    assert torch.equal(pool.values[:, [6, 7]], values[:, [12, 15]])


def test_growth_that_does_not_fit_changes_nothing():
    pages = PageAllocator(3, 4)
    assert pages.ensure("a", 5)
    before = pages.pages("a")
    assert not pages.ensure("a", 13)
    assert not pages.ensure("b", 5)
    assert pages.pages("a") == before
    assert pages.num_free_pages == 1
    pages.check_integrity()


def test_a_lone_request_grows_in_order():
    pages = PageAllocator(64, 4)
    for rows in range(1, 120):
        assert pages.ensure("a", rows)
    rows = pages.rows("a", 0, 119)
    assert (rows[1:] - rows[:-1] == 1).all()


def test_tables_are_padded_with_zero():
    pages = PageAllocator(8, 4)
    pages.ensure("a", 4)
    pages.ensure("b", 8)
    table = pages.table(["a", "b"], 6)
    assert table.shape == (2, 6)
    assert table[0].tolist() == pages.rows("a", 0, 4).tolist() + [0, 0]
    assert table[1].tolist() == pages.rows("b", 0, 6).tolist()
    assert pages.table(["missing"], 3).tolist() == [[0, 0, 0]]
    with pytest.raises(ValueError, match="positions"):
        pages.rows("a", 0, 5)


def test_random_growth_and_release_never_leaks():
    rng = np.random.default_rng(0)
    pages, lengths = PageAllocator(20, 3), {}
    for _ in range(2000):
        name = f"r{rng.integers(6)}"
        if rng.random() < 0.25:
            pages.release(name)
            lengths.pop(name, None)
        else:
            wanted = lengths.get(name, 0) + int(rng.integers(0, 9))
            held = pages.rows(name, 0, lengths.get(name, 0)).tolist()
            if pages.ensure(name, wanted):
                lengths[name] = wanted
            assert pages.rows(name, 0, len(held)).tolist() == held
        pages.check_integrity()
    rows = [row for name, length in lengths.items() for row in pages.rows(name, 0, length).tolist()]
    assert len(rows) == len(set(rows))
    for name in list(lengths):
        pages.release(name)
    assert pages.num_free_pages == 20


def test_integrity_check_finds_a_leak():
    pages = PageAllocator(4, 2)
    pages.ensure("a", 3)
    pages._runs.take(1, None)
    with pytest.raises(AssertionError):
        pages.check_integrity()


def test_a_pool_takes_memory_when_it_is_written():
    before = psutil.Process().memory_info().rss
    pool = pool_zeros((2**16, 4096), torch.float32, "cpu")  # 1 GiB
    pool[7] = 1.0
    assert psutil.Process().memory_info().rss - before < 2**26
    assert pool.data_ptr() % 64 == 0 and float(pool[:9].sum()) == 4096 and not pool[-1].any()
    assert pool_zeros((0, 4), torch.float32, "cpu").shape == (0, 4)


def test_a_pool_that_the_system_refuses_says_how_much_was_asked_for_and_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"4398046511104 MiB .*: lower engine\.kv_bytes"):
        pool_zeros((2**31, 2**29), torch.float32, "cpu")


def test_rows_are_copied_as_torch_copies_them_and_only_where_they_are() -> None:
    rng = torch.Generator().manual_seed(0)
    for shape in ((3, 9, 2, 2, 4), (9, 5)):
        pool = torch.randn(shape, generator=rng)
        rows_at = int(len(shape) > 2)
        for _ in range(20):
            src, dst = torch.randperm(9, generator=rng)[:4], torch.randperm(9, generator=rng)[:4]
            expected = pool.index_copy(rows_at, dst, pool.index_select(rows_at, src))
            if copy_rows(pool, dst, pool, src):
                assert torch.equal(pool, expected)
        if load_trees() is not None:
            with pytest.raises(IndexError):
                copy_rows(pool, torch.tensor([9]), pool, torch.tensor([0]))
