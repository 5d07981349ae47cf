"""Scatter and commit move exactly the named rows, byte for byte."""

import pytest
import torch

from paceline.errors import ConfigError
from paceline.kernels.dispatch import select_kernels
from paceline.kernels.reference.kv_rows import commit_rows, scatter_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_copies_all_layers_and_nothing_else(dtype):
    pool = torch.randn(3, 10, 2, 2, 4).to(dtype)
    before = pool.clone()
    commit_rows(pool, torch.tensor([8, 9, 4]), torch.tensor([0, 1, 2]))
    assert torch.equal(pool[:, [0, 1, 2]], before[:, [8, 9, 4]])
    assert torch.equal(pool[:, 3:], before[:, 3:])


def test_commit_reads_every_row_before_it_writes():
    pool = torch.randn(1, 5, 2, 1, 2)
    before = pool.clone()
    commit_rows(pool, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert torch.equal(pool[:, [2, 1]], before[:, [1, 2]])


def test_commit_of_nothing_changes_nothing_and_unequal_lengths_are_refused():
    pool = torch.randn(1, 5, 2, 1, 2)
    before = pool.clone()
    empty = torch.empty(0, dtype=torch.int64)
    commit_rows(pool, empty, empty)
    assert torch.equal(pool, before)
    with pytest.raises(ValueError, match="dst_rows"):
        commit_rows(pool, torch.tensor([1]), empty)


def test_scatter_takes_strided_rows():
    pool = torch.zeros(6, 2, 2, 4)
    keys, values = torch.randn(2, 3, 4).transpose(0, 1), torch.randn(2, 3, 4).transpose(0, 1)
    scatter_rows(pool, torch.tensor([5, 0, 2]), keys, values)
    assert torch.equal(pool[[5, 0, 2], 0], keys)
    assert torch.equal(pool[[5, 0, 2], 1], values)
    assert not pool[[1, 3, 4]].any()


def test_unknown_backend_is_refused():
    assert select_kernels("cpu").backend == "reference"
    with pytest.raises(ConfigError, match="backend"):
        select_kernels("cpu", "cuda-magic")
