"""Triton scatter and commit move exactly the named rows, byte for byte, as the references do."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu import kv_rows
from paceline.kernels.reference import kv_rows as kv_rows_ref
from tests.helpers.launches import launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_bytes(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern, NaN with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_commit_equals_the_reference_byte_for_byte(device, dtype, num_rows):
    pool = random_bytes(3, 16, 2, 2, 20, dtype=dtype)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    src, dst = order[:num_rows], order[num_rows : 2 * num_rows]
    got, expected = pool.clone().to(device), pool.clone()
    kv_rows.commit_rows(got, src.to(device), dst.to(device))
    kv_rows_ref.commit_rows(expected, src, dst)
    assert torch.equal(as_bytes(got), as_bytes(expected))


@pytest.mark.parametrize("max_rows", [1024, 8], ids=["in one launch", "through a copy"])
def test_sources_and_destinations_may_overlap(device, monkeypatch, max_rows):
    """A rotation of all rows: each row is a source and a destination."""
    monkeypatch.setattr(kv_rows, "_MAX_ROWS", max_rows)
    pool = random_bytes(2, 100, 2, 1, 6, dtype=torch.bfloat16)
    src = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    dst = src.roll(1)
    got = pool.clone().to(device)
    kv_rows.commit_rows(got, src.to(device), dst.to(device))
    expected = pool.clone()
    expected[:, dst] = pool[:, src]
    assert torch.equal(as_bytes(got), as_bytes(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_overlap_is_safe_among_the_threads_of_a_program(device):
    pool = random_bytes(36, 1024, 2, 8, 128, dtype=torch.bfloat16)
    src = torch.randperm(1024, generator=torch.Generator().manual_seed(2))
    got = pool.clone().to(device)
    kv_rows.commit_rows(got, src.to(device), src.roll(1).to(device))
    expected = pool.clone()
    expected[:, src.roll(1)] = pool[:, src]
    assert torch.equal(as_bytes(got), as_bytes(expected))


@pytest.mark.parametrize("max_rows", [1024, 2], ids=["in one launch", "through a copy"])
def test_pairs_with_a_negative_row_are_skipped(device, monkeypatch, max_rows, poisoned_memory):
    monkeypatch.setattr(kv_rows, "_MAX_ROWS", max_rows)
    pool = random_bytes(2, 10, 2, 2, 4, dtype=torch.float32)
    got = pool.clone().to(device)
    kv_rows.commit_rows(got, torch.tensor([8, -1, 9, 7]).to(device), torch.tensor([0, 1, -1, 2]).to(device))
    expected = pool.clone()
    expected[:, [0, 2]] = pool[:, [8, 7]]
    assert torch.equal(as_bytes(got), as_bytes(expected))


def test_commit_refuses_what_it_cannot_copy(device):
    pool = torch.zeros(2, 5, 2, 2, 4, device=device)
    rows = torch.tensor([1]).to(device)
    with pytest.raises(ValueError, match="dst_rows"):
        kv_rows.commit_rows(pool, rows, rows[:0])
    with pytest.raises(ValueError, match="int64"):
        kv_rows.commit_rows(pool, rows.int(), rows.int())
    with pytest.raises(ValueError, match="contiguous"):
        kv_rows.commit_rows(pool.transpose(3, 4), rows, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_scatter_equals_the_reference_for_strided_rows(device, dtype, num_rows):
    pool = random_bytes(9, 2, 3, 20, dtype=dtype)
    keys = random_bytes(3, num_rows, 20, dtype=dtype, seed=1).transpose(0, 1)
    values = random_bytes(num_rows, 3, 40, dtype=dtype, seed=2)[..., ::2]
    rows = torch.tensor([8, 0, 3, 5, 2])[:num_rows]
    got, expected = pool.clone().to(device), pool.clone()
    kv_rows.scatter_rows(got, rows.to(device), keys.to(device), values.to(device))
    kv_rows_ref.scatter_rows(expected, rows, keys, values)
    assert torch.equal(as_bytes(got), as_bytes(expected))


def test_scatter_of_rows_longer_than_a_block_and_of_padding(device):
    pool = torch.zeros(4, 2, 3, 400, device=device)
    keys = torch.randn(3, 3, 400, generator=torch.Generator().manual_seed(0)).to(device)
    kv_rows.scatter_rows(pool, torch.tensor([2, -1, 0]).to(device), keys, -keys)
    assert torch.equal(pool[[2, 0]], torch.stack((keys[[0, 2]], -keys[[0, 2]]), 1))
    assert not pool[[1, 3]].any()


def test_scatter_refuses_other_shapes_and_types(device):
    pool, rows = torch.zeros(4, 2, 3, 8, device=device), torch.tensor([1]).to(device)
    keys = torch.zeros(1, 3, 8, device=device)
    with pytest.raises(ValueError, match="keys and values"):
        kv_rows.scatter_rows(pool, rows, keys, keys[:, :2])
    with pytest.raises(ValueError, match="as the pool"):
        kv_rows.scatter_rows(pool, rows, keys, keys.bfloat16())


def test_the_triton_kernels_ran(device):
    pool, row = torch.zeros(1, 4, 2, 1, 4, device=device), torch.tensor([1]).to(device)
    with launches(kv_rows._copy_kernel, kv_rows._scatter_kernel) as ran:
        kv_rows.commit_rows(pool, row, row)
        kv_rows.scatter_rows(pool[0], row, pool[0, :1, 0], pool[0, :1, 1])
    assert ran.names == ["_copy_kernel", "_scatter_kernel"]
