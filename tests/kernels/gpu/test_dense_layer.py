"""The parts of a layer between its products equal their references, and take one launch each."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.reference import dense_layer as reference

pytest.importorskip("triton")
from paceline.kernels.gpu import dense_layer
from tests.helpers.launches import launches

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = pytest.mark.parametrize(("rows", "size"), [(0, 7), (1, 1), (3, 5), (2, 300), (5, 1024)])


def _close(got, expected):
    # Sums of squares may be added in another order, and the interpreter does not round to 16 bits as a device does.
    step = 1e-5 if got.dtype == torch.float32 else 1e-2 if got.is_cuda else 2.5e-2
    tolerance = {"atol": step, "rtol": step}
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, **tolerance)


@DTYPES
@SHAPES
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_norm_equals_the_reference_and_overwrites_the_stream_alike(device, rows, size, dtype, has_delta):
    g = torch.Generator().manual_seed(size)
    x, delta = ((3 * torch.randn(rows, size, generator=g)).to(device, dtype) for _ in range(2))
    weight, mine, theirs = torch.randn(size, generator=g).to(device, dtype), x.clone(), x.clone()
    with launches(dense_layer._add_norm_kernel) as ran:
        got = dense_layer.add_norm(mine, delta if has_delta else None, weight, 1e-6)
    _close(got, reference.add_norm(theirs, delta if has_delta else None, weight, 1e-6))
    _close(mine, theirs)
    assert has_delta or torch.equal(mine, x)
    assert len(ran.names) == (1 if rows else 0)


@DTYPES
@SHAPES
def test_silu_mul_equals_the_reference(device, rows, size, dtype):
    gate_up = (4 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(device, dtype)
    with launches(dense_layer._silu_mul_kernel) as ran:
        got = dense_layer.silu_mul(gate_up)
    _close(got, reference.silu_mul(gate_up))
    assert len(ran.names) == (1 if rows else 0)


def test_what_does_not_fit_is_refused(device):
    x = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="weight"):
        dense_layer.add_norm(x, None, torch.zeros(5, device=device), 1e-6)
    with pytest.raises(ValueError, match="delta"):
        dense_layer.add_norm(x, x.bfloat16(), torch.zeros(4, device=device), 1e-6)
    with pytest.raises(ValueError, match="even"):
        dense_layer.silu_mul(torch.zeros(2, 5, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        dense_layer.silu_mul(torch.zeros(4, 2, device=device).T)
