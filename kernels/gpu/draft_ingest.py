"""Draft ingest: new rows in four launches, whatever the number of layers; GEMMs by cuBLAS, the rest fused.

Shape legend: as in draft_ingest_ref, which says what is computed.
Both projections have R of about 5 to 12 rows and are bound by reading their weights, which cuBLAS does well. One Triton
program then takes one row of one layer: it norms and rotates the keys and scatters K and V to the pool, so that the
projected rows are read once and nothing between is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _write_kernel(
    kv,
    k_norm_weight,
    cos,
    sin,
    positions,
    pool_rows,
    pool,
    kv_stride,
    layer_stride,
    row_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    pool_row = tl.load(pool_rows + r)
    if pool_row >= 0:
        half = DIM // 2
        head = tl.arange(0, HEADS_PADDED)
        d = tl.arange(0, HALF_PADDED)
        is_dim = d < half
        inside = (head < HEADS)[:, None] & is_dim[None, :]
        first = head[:, None] * DIM + d[None, :]
        source = kv + r * kv_stride + layer * (2 * HEADS * DIM)
        a = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + first + half, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
            factor = tl.rsqrt(squares / DIM + eps)[:, None]
            weight = k_norm_weight + layer * DIM
            a = a * factor * tl.load(weight + d, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            b = b * factor * tl.load(weight + d + half, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        position = tl.load(positions + r)
        c = tl.load(cos + position * half + d, mask=is_dim, other=0.0)[None, :]
        s = tl.load(sin + position * half + d, mask=is_dim, other=0.0)[None, :]
        to = pool + layer * layer_stride + pool_row * row_stride
        out = pool.dtype.element_ty
        tl.store(to + first, (a * c - b * s).to(out), mask=inside)
        tl.store(to + first + half, (b * c + a * s).to(out), mask=inside)
        values, to_values = source + HEADS * DIM, to + HEADS * DIM
        tl.store(to_values + first, tl.load(values + first, mask=inside, other=0.0).to(out), mask=inside)
        tl.store(to_values + first + half, tl.load(values + first + half, mask=inside, other=0.0).to(out), mask=inside)


def draft_ingest(
    *,
    features: torch.Tensor,
    fc: torch.Tensor,
    norm_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    pool_rows: torch.Tensor,
    pool: torch.Tensor,
    eps: float,
) -> None:
    """`draft_ingest_ref.draft_ingest` on the device.

    Padding rows are projected, too (shapes are fixed), but write nothing.
    Raises: ValueError on a wrong shape, dtype, layout or device.  Syncs: none.
    """
    device = pool.device
    check_tensors(device)
    check_tensor("pool", pool, (None, None, 2, None, None), _DTYPES, is_contiguous=False)
    layers, _, _, heads, dim = pool.shape
    if dim % 2 or (pool.numel() and pool.stride()[2:] != (heads * dim, dim, 1)):
        raise ValueError(
            f"pool must have an even head dim and rows without gaps, got {tuple(pool.shape)} {pool.stride()}"
        )
    check_tensor("features", features, (None, None), _DTYPES, device, is_contiguous=False)
    num_rows, width = features.shape
    check_tensor("fc", fc, (width, None), features.dtype, device, is_contiguous=False)
    check_tensor("norm_weight", norm_weight, (fc.shape[1],), _DTYPES, device)
    columns = layers * 2 * heads * dim
    check_tensor("kv_weight", kv_weight, (fc.shape[1], columns), features.dtype, device, is_contiguous=False)
    if k_norm_weight is not None:
        check_tensor("k_norm_weight", k_norm_weight, (layers, dim), _DTYPES, device)
    check_tensor("cos", cos, (None, dim // 2), torch.float32, device)
    check_tensor("sin", sin, cos.shape, torch.float32, device)
    check_tensor("positions", positions, (num_rows,), torch.int64, device)
    check_tensor("pool_rows", pool_rows, (num_rows,), torch.int64, device)
    if num_rows == 0:
        return
    hidden = torch.nn.functional.rms_norm(
        torch.mm(features, fc), (fc.shape[1],), norm_weight.to(features.dtype), eps
    )  # computed in float32 inside
    kv = torch.mm(hidden, kv_weight)
    _write_kernel[(num_rows, layers)](
        kv,
        k_norm_weight,
        cos,
        sin,
        positions,
        pool_rows,
        pool,
        kv.stride(0),
        pool.stride(0),
        pool.stride(1),
        eps,
        HEADS=heads,
        DIM=dim,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HALF_PADDED=triton.next_power_of_2(max(dim // 2, 1)),
        HAS_NORM=k_norm_weight is not None,
        num_warps=4,
    )
