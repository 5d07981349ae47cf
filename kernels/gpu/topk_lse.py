"""Top-k with log-sum-exp: the k largest logits and their log-sum-exp in one pass over the logits.

Value and id are one 64-bit key: the value's bits in an order-preserving form above the complement of the id, so that
the largest key is the largest value with the lowest id. (a) Each program takes one block of a row and leaves its k
largest keys and its (peak, sum) of exponentials; (b) one program per row merges the blocks. log_softmax never exists.

Shape legend: N rows, V vocab, C blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors
from paceline.kernels.reference.topk_lse import MAX_K

_BLOCK_V = 4096
_NOTHING = -(2**63)
"""Smaller than the key of every value."""


@triton.jit
def _block_kernel(
    logits,
    scale,
    keys,
    peaks,
    sums,
    k,
    size,
    stride_row,
    stride_column,
    num_blocks,
    NOTHING: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Phase (a): one program per row and block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_id = ids < size
    values = tl.load(logits + row * stride_row + ids.to(tl.int64) * stride_column, mask=is_id, other=float("-inf"))
    values = values.to(tl.float32)
    if HAS_SCALE:
        values = tl.where(is_id, values * tl.load(scale + row), float("-inf"))  # beyond the row no product decides
    is_nan = values != values
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    numbers = tl.where(is_nan, float("-inf"), values)
    peak = tl.max(numbers, 0)
    is_finite = (peak > float("-inf")) & (peak < float("inf"))
    total = tl.sum(tl.exp(numbers - tl.where(is_finite, peak, 0.0)), 0)  # inf when +inf is among them
    slot = row * num_blocks + block
    tl.store(peaks + slot, peak)
    tl.store(sums + slot, tl.where(has_nan, float("nan"), total))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    bits = tl.where(is_nan, 0x7FC00000, bits)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
    key = tl.where(is_id, key, NOTHING)
    for i in range(k):
        best = tl.max(key, 0)
        tl.store(keys + slot * k + i, best)
        key = tl.where(key == best, NOTHING, key)


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_kernel(
    keys,
    peaks,
    sums,
    values,
    ids,
    lse,
    k,
    num_blocks,
    NOTHING: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Phase (b): one program per row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK_C)
    is_block = block < num_blocks
    peak = tl.load(peaks + row * num_blocks + block, mask=is_block, other=float("-inf"))
    total = tl.load(sums + row * num_blocks + block, mask=is_block, other=0.0)
    has_nan = tl.max((total != total).to(tl.int32), 0) > 0
    top = tl.max(peak, 0)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    shift = tl.where(is_finite, top, 0.0)
    whole = tl.sum(tl.where(total > 0.0, total * tl.exp(peak - shift), 0.0), 0)
    result = tl.where(is_finite, shift + tl.log(whole), top)
    tl.store(lse + row, tl.where(has_nan, float("nan"), result))
    candidate = tl.arange(0, BLOCK_K)
    key = tl.load(keys + row * num_blocks * k + candidate, mask=candidate < num_blocks * k, other=NOTHING)
    for i in range(k):
        best = tl.max(key, 0)
        ordered = (best >> 32).to(tl.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        tl.store(values + row * k + i, bits.to(tl.float32, bitcast=True))
        tl.store(ids + row * k + i, 0xFFFFFFFF - (best & 0xFFFFFFFF))
        key = tl.where(key == best, NOTHING, key)


def topk_lse(
    logits: torch.Tensor, k: int, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest values of each row, their ids, and the row's log-sum-exp; log p = value - lse.

    Ties, NaN and infinities as in the reference.

    Args:
        logits: (N, V) float32, bfloat16 or float16, any strides.
        k: 1 <= k <= min(V, MAX_K).
        scale: (N,) float32, contiguous, factors on the rows' logits; None = 1.
    Returns: values (N, k) float32 in falling order, ids (N, k) int64, lse (N,) float32.
    Raises: ValueError on a wrong shape, dtype or device, or when k is out of range.
    Syncs: none.
    """
    check_tensors(logits.device)
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"logits must be a float (N, V) tensor, got {logits.dtype} {tuple(logits.shape)}")
    num_rows, size = logits.shape
    if scale is not None:
        check_tensor("scale", scale, (num_rows,), torch.float32, logits.device)
    if not 1 <= k <= min(size, MAX_K):
        raise ValueError(f"k must be in [1, {min(size, MAX_K)}], got {k}")
    device = logits.device
    values = torch.empty(num_rows, k, device=device)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    lse = torch.empty(num_rows, device=device)
    if num_rows == 0:
        return values, ids, lse
    block_v = min(_BLOCK_V, max(32, triton.next_power_of_2(size)))
    num_blocks = triton.cdiv(size, block_v)
    keys = torch.empty(num_rows, num_blocks, k, dtype=torch.int64, device=device)
    peaks = torch.empty(num_rows, num_blocks, device=device)
    sums = torch.empty_like(peaks)
    _block_kernel[(num_rows, num_blocks)](
        logits,
        logits if scale is None else scale,  # the placeholder is not read
        keys,
        peaks,
        sums,
        k,
        size,
        *logits.stride(),
        num_blocks,
        NOTHING=_NOTHING,
        BLOCK_V=block_v,
        HAS_SCALE=scale is not None,
        num_warps=8,
    )
    _merge_kernel[(num_rows,)](
        keys, peaks, sums, values, ids, lse, k, num_blocks,
        NOTHING=_NOTHING, BLOCK_C=triton.next_power_of_2(num_blocks), BLOCK_K=triton.next_power_of_2(num_blocks * k), num_warps=4,
    )  # fmt: skip
    return values, ids, lse
