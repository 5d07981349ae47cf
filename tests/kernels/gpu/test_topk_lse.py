"""Top-k and log-sum-exp: the reference equals torch's, the Triton twin equals the reference, ties and NaN included.

Values and ids are exact; the log-sum-exp sums float32 in another order (1e-6 of it, and at least 1e-6).
"""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.gpu import topk_lse
from paceline.kernels.reference import topk_lse as topk_lse_ref
from tests.helpers.launches import launches

INF, NAN = float("inf"), float("nan")


def check(device, logits, k, scale=None):
    got = topk_lse.topk_lse(logits.to(device), k, scale=scale if scale is None else scale.to(device))
    expected = topk_lse_ref.topk_lse(logits, k, scale=scale)
    assert [g.dtype for g in got] == [torch.float32, torch.int64, torch.float32]
    torch.testing.assert_close(got[0].cpu(), expected[0], atol=0, rtol=0, equal_nan=True)
    assert torch.equal(got[1].cpu(), expected[1])
    torch.testing.assert_close(got[2].cpu(), expected[2], atol=1e-6, rtol=1e-6, equal_nan=True)
    return got


def test_reference_gives_log_softmax_and_torch_topk():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    values, ids, lse = topk_lse_ref.topk_lse(logits, 6)
    expected, expected_ids = logits.log_softmax(-1).topk(6)
    torch.testing.assert_close(values - lse[:, None], expected)
    assert torch.equal(ids, expected_ids)


def test_reference_with_a_scale_is_the_log_softmax_of_the_products():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.5, 1.0, 7.0])
    values, ids, lse = topk_lse_ref.topk_lse(logits, 6, scale=scale)
    expected, expected_ids = (logits * scale[:, None]).log_softmax(-1).topk(6)
    torch.testing.assert_close(values - lse[:, None], expected)
    assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 37, 4097])
def test_triton_scales_before_it_ranks(device, dtype, vocab, poisoned_memory):
    """Products that are equal in float32 are ties, and what lies beyond the row counts for no scale."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[3] = -INF
    check(device, logits, 4, torch.tensor([1.0, 0.3, 1e-40, 2.0, 20.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(0, 9, 3), (1, 1, 1), (3, 100, 32), (2, 5000, 7), (2, 8195, 8)])
def test_triton_equals_the_reference(device, dtype, rows, vocab, k, poisoned_memory):
    """Several blocks, a last block with fewer tokens than k; 16-bit logits hold many ties."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype) * 3
    check(device, logits, k)


def test_equal_values_come_by_rising_id(device):
    logits = torch.zeros(1, 5000)
    logits[0, 1::2] = -0.0
    logits[0, [4500, 20]] = 1.0
    _, ids, _ = check(device, logits, 5)
    assert ids.tolist() == [[20, 4500, 0, 1, 2]]


@pytest.mark.parametrize(
    ("row", "lse"),
    [
        ([-INF] * 6, -INF),
        ([0.0, -INF, 2.0, -INF, -INF, 1.0], None),
        ([0.0, INF, -INF, 1.0, INF, 3.0], INF),
        ([1.0, NAN, 2.0, -NAN, INF, -INF], NAN),
        ([1e4, -1e4, 9999.0, 1e4, 0.0, -3e38], None),
        ([3e38, 3e38, -3e38, 0.0, 1.0, 2.0], None),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy computes both sides of a `where`
def test_extreme_rows_are_defined(device, row, lse):
    got = check(device, torch.tensor([row, [0.0] * 6]), 4)[2][0].cpu()
    if lse is not None:
        torch.testing.assert_close(got, torch.tensor(lse), equal_nan=True)
    else:
        assert torch.isfinite(got)


def test_a_nan_in_one_block_reaches_the_lse_and_a_block_of_minus_infinity_does_not(device):
    logits = torch.zeros(2, 9000)
    logits[:, :4096] = -INF
    logits[0, 8999] = NAN
    check(device, logits, 3)


def test_strided_logits(device):
    check(device, torch.randn(6, 90, generator=torch.Generator().manual_seed(0))[::2, ::3], 4)


def test_the_triton_kernels_ran(device):
    with launches(topk_lse._block_kernel, topk_lse._merge_kernel) as ran:
        topk_lse.topk_lse(torch.zeros(1, 8, device=device), 2)
    assert ran.names == ["_block_kernel", "_merge_kernel"]


@pytest.mark.parametrize("k", [0, 33, 9])
def test_k_out_of_range_is_refused(device, k):
    for module in (topk_lse, topk_lse_ref):
        with pytest.raises(ValueError, match="k must be"):
            module.topk_lse(torch.zeros(2, 40 if k == 33 else 8, device=device), k)


def test_integers_are_refused(device):
    with pytest.raises(ValueError, match="float"):
        topk_lse.topk_lse(torch.zeros(2, 8, dtype=torch.int64, device=device), 2)


def test_a_scale_of_a_wrong_form_is_refused(device):
    for wrong in (torch.ones(3, device=device), torch.ones(2, dtype=torch.float64, device=device)):
        with pytest.raises(ValueError, match="scale"):
            topk_lse.topk_lse(torch.zeros(2, 8, device=device), 2, scale=wrong)
