"""Dense layer: what a decoder layer does between its matrix products and its attention, in one Triton launch each.

Shape legend: N rows, Dm hidden size, I width of the gated layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 1024
"""Columns of one program of the gate."""


@triton.jit
def _add_norm_kernel(x, delta, weight, out, size, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row, which holds all of it: Dm is at most some ten thousand."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    at = row * size + column
    value = tl.load(x + at, mask=mask, other=0.0)
    if HAS_DELTA:
        added = value.to(tl.float32) + tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
        value = added.to(x.dtype.element_ty)
        tl.store(x + at, value, mask=mask)
    wide = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * inverse).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (activated * up).to(out.dtype.element_ty), mask=mask)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference; all contiguous.

    Raises: ValueError on a wrong shape, dtype or device.
    Syncs: none.
    """
    check_tensors(x.device, delta=delta, weight=weight)
    check_tensor("x", x, (None, None), _FLOATS)
    if delta is not None:
        check_tensor("delta", delta, x.shape, x.dtype)
    check_tensor("weight", weight, (x.shape[1],), x.dtype)
    out = torch.empty_like(x)
    if x.numel():
        _add_norm_kernel[(x.shape[0],)](
            x, x if delta is None else delta, weight, out, x.shape[1], eps,  # the placeholder is not read
            HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8,
        )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference; contiguous.

    Raises: ValueError on a wrong shape, dtype or device.
    Syncs: none.
    """
    check_tensors(gate_up.device)
    check_tensor("gate_up", gate_up, (None, None), _FLOATS)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {gate_up.shape[1]}")
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(size))
        _silu_mul_kernel[(num_rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out
