"""RoPE scatter: head norm, RoPE and K/V write of fresh projections in one Triton launch.

Shape legend: N packed rows, H/Hkv query/KV heads, Dh head dim, P positions, R pool rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_integers, check_tensor, check_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_H = 4
"""Heads of one program."""


@triton.jit
def _turn(
    heads, norm, cos, sin, position, head, is_head, stride_head, half, eps,
    HAS_NORM: tl.constexpr, STEP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The rotated first and second elements (BLOCK_H, BLOCK_D) float32 of the pairs of some heads of one row.

    Pair i holds the elements i * STEP and i * STEP + gap: halves (STEP 1, gap Dh / 2) or neighbours (STEP 2, gap 1).
    """
    pair = tl.arange(0, BLOCK_D)
    is_column = pair < half
    column = pair * STEP
    gap = half if STEP == 1 else 1
    mask = is_head[:, None] & is_column[None, :]
    at = heads + head[:, None] * stride_head + column[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + gap, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half)
        inverse = 1.0 / tl.sqrt(mean + eps)
        first_weight = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        second_weight = tl.load(norm + gap + column, mask=is_column, other=0.0).to(tl.float32)
        first = first * inverse[:, None] * first_weight[None, :]
        second = second * inverse[:, None] * second_weight[None, :]
    at = position * (2 * half) + column
    first_cos = tl.load(cos + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + at + gap, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + at + gap, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return first * first_cos - second * first_sin, second * second_cos + first * second_sin


@triton.jit
def _rope_kernel(
    query, key, value, pool, rows, positions, cos, sin, q_norm, k_norm, out, num_heads, num_kv_heads, half, eps,
    query_row, query_head, key_row, key_head, value_row, value_head, pool_row, pool_value, pool_head,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, STEP: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCK_H heads: first the blocks of query heads, then those of KV heads."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + row)
    pair = tl.arange(0, BLOCK_D)
    column = pair * STEP
    gap = half if STEP == 1 else 1
    query_blocks = (num_heads + BLOCK_H - 1) // BLOCK_H
    if block < query_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = head < num_heads
        first, second = _turn(
            query + row * query_row, q_norm, cos, sin, position, head, is_head, query_head, half, eps,
            HAS_Q_NORM, STEP, BLOCK_D,
        )  # fmt: skip
        mask = is_head[:, None] & (pair < half)[None, :]
        at = out + (row * num_heads + head)[:, None] * (2 * half) + column[None, :]
        tl.store(at, first.to(out.dtype.element_ty), mask=mask)
        tl.store(at + gap, second.to(out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(rows + row)
        if slot >= 0:
            head = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
            is_head = head < num_kv_heads
            first, second = _turn(
                key + row * key_row, k_norm, cos, sin, position, head, is_head, key_head, half, eps,
                HAS_K_NORM, STEP, BLOCK_D,
            )  # fmt: skip
            mask = is_head[:, None] & (pair < half)[None, :]
            at = pool + slot * pool_row + head[:, None] * pool_head + column[None, :]
            tl.store(at, first.to(pool.dtype.element_ty), mask=mask)
            tl.store(at + gap, second.to(pool.dtype.element_ty), mask=mask)
            source = value + row * value_row + head[:, None] * value_head + column[None, :]
            first_value = tl.load(source, mask=mask, other=0.0)
            second_value = tl.load(source + gap, mask=mask, other=0.0)
            tl.store(at + pool_value, first_value.to(pool.dtype.element_ty), mask=mask)
            tl.store(at + pool_value + gap, second_value.to(pool.dtype.element_ty), mask=mask)


def rope_scatter(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    is_adjacent: bool = False,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write K/V rows into one layer's pool, return the rotated queries.

    As the reference; query, key and value are float32, bfloat16 or float16, with unit stride in Dh like the pool, cos and
    sin contiguous. Rows >= R and positions >= P are undefined: finding them would stall the device.

    Returns: (N, H, Dh) of the query's dtype, contiguous.
    Raises: ValueError on a wrong shape, dtype, stride or device.
    Syncs: none.
    """
    check_tensors(
        query.device, key=key, value=value, pool=pool, rows=rows, positions=positions, cos=cos, sin=sin,
        q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    check_integers(rows=rows, positions=positions)
    if query.dim() != 3 or query.shape[2] % 2 or query.shape[2] == 0:
        raise ValueError(f"query must be (N, H, Dh) with an even Dh, got {tuple(query.shape)}")
    num_rows, num_heads, head_dim = query.shape
    check_tensor("key", key, (num_rows, None, head_dim), _FLOATS, is_contiguous=False)
    pool_shape = (None, 2, key.shape[1], head_dim)
    for name, tensor, shape in (("query", query, query.shape), ("value", value, key.shape), ("pool", pool, pool_shape)):
        check_tensor(name, tensor, shape, _FLOATS, is_contiguous=False)
    if rows.shape != (num_rows,) or positions.shape != (num_rows,):
        raise ValueError(f"rows and positions must be ({num_rows},), got {tuple(rows.shape)}, {tuple(positions.shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[1] != head_dim:
        raise ValueError(f"cos and sin must be (P, {head_dim}), got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous, got strided tables")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_tensor(name, norm, (head_dim,), norm.dtype)
    num_kv_heads, half = key.shape[1], head_dim // 2
    out = torch.empty(num_rows, num_heads, head_dim, dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    num_blocks = triton.cdiv(num_heads, _BLOCK_H) + triton.cdiv(num_kv_heads, _BLOCK_H)
    _rope_kernel[(num_rows, num_blocks)](
        query, key, value, pool, rows.contiguous(), positions.contiguous(), cos, sin,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,  # placeholders are not read
        out, num_heads, num_kv_heads, half, eps,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        pool.stride(0), pool.stride(1), pool.stride(2),
        HAS_Q_NORM=q_norm is not None, HAS_K_NORM=k_norm is not None, STEP=2 if is_adjacent else 1,
        BLOCK_H=_BLOCK_H, BLOCK_D=triton.next_power_of_2(half), num_warps=2,
    )  # fmt: skip
    return out
