"""How is a batch's node budget chosen on the device, without a host read? One Triton program for the whole batch.

Shape legend: as in tree_budget_ref, which says what is computed.
The program sorts all masses, evaluates every total at once and counts each request's share by comparing its masses with
the last one taken. Sums and rates are float64, as in the reference: totals are compared by tiny differences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import check_tensor, check_tensors
from paceline.kernels.reference.tree_budget import NodeBudget

_MAX_MASSES = 16384


@triton.jit(do_not_specialize=["num_requests", "num_masses", "num_steps", "max_rows"])
def _budget_kernel(
    masses,
    table_rows,
    table_seconds,
    fixed_seconds,
    min_nodes,
    out_nodes,
    out_cu,
    num_requests,
    num_masses,
    num_steps,
    max_rows,
    B: tl.constexpr,
    M: tl.constexpr,
    IS_STEPPED: tl.constexpr,
):
    b = tl.arange(0, B)
    m = tl.arange(0, M)
    inside = (b < num_requests)[:, None] & (m < num_masses)[None, :]
    mass = tl.load(masses + b[:, None] * num_masses + m[None, :], mask=inside, other=0.0)
    is_present = mass > 0.0  # neither NaN nor -0.0
    mass = tl.where(is_present, mass, 0.0)
    available = tl.sum(is_present.to(tl.int32), axis=1)

    # Bits of non-negative floats rise with the float; the reversed index below them breaks ties.
    flat = b[:, None] * M + m[None, :]
    key = (mass.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (B * M - 1 - flat)
    falling = tl.sort(tl.reshape(key, (B * M,)), descending=True)
    i = tl.arange(0, B * M)
    limit = tl.minimum(tl.sum(available), max_rows - num_requests)
    gain = (falling >> 32).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    gains = tl.cumsum(gain, axis=0)

    # Seconds of i + 1 draft nodes, and of none.
    rows = (num_requests + 1 + i).to(tl.float64)
    none = (rows * 0.0) + num_requests
    fixed = tl.load(fixed_seconds).to(tl.float64)
    first_rows = tl.load(table_rows).to(tl.float64)
    first_seconds = tl.load(table_seconds).to(tl.float64)
    last_rows = tl.load(table_rows + num_steps - 1).to(tl.float64)
    last_seconds = tl.load(table_seconds + num_steps - 1).to(tl.float64)
    if IS_STEPPED:
        seconds = tl.where(rows <= last_rows, last_seconds, float("inf"))
        none_seconds = tl.where(none <= last_rows, last_seconds, float("inf"))
    else:
        seconds = tl.where(rows > last_rows, last_seconds + (rows - last_rows) * last_seconds / last_rows, last_seconds)
        none_seconds = tl.where(
            none > last_rows, last_seconds + (none - last_rows) * last_seconds / last_rows, last_seconds
        )
    for step in range(num_steps - 1):
        at = num_steps - 2 - step  # from the last interval to the first: the smallest fitting entry wins
        low = tl.load(table_rows + at).to(tl.float64)
        high = tl.load(table_rows + at + 1).to(tl.float64)
        low_seconds = tl.load(table_seconds + at).to(tl.float64)
        high_seconds = tl.load(table_seconds + at + 1).to(tl.float64)
        if IS_STEPPED:
            seconds = tl.where(rows <= low, low_seconds, seconds)
            none_seconds = tl.where(none <= low, low_seconds, none_seconds)
        else:
            slope = (high_seconds - low_seconds) / (high - low)
            seconds = tl.where((rows >= low) & (rows < high), low_seconds + slope * (rows - low), seconds)
            none_seconds = tl.where((none >= low) & (none < high), low_seconds + slope * (none - low), none_seconds)
    if not IS_STEPPED:
        seconds = tl.where(rows < first_rows, first_seconds, seconds)
        none_seconds = tl.where(none < first_rows, first_seconds, none_seconds)

    rate = tl.where(i < limit, (num_requests + gains) / (fixed + seconds), -1.0)
    none_rate = tl.max(num_requests / (fixed + none_seconds), axis=0)
    best_rate = tl.max(rate, axis=0)
    best = tl.min(tl.where(rate == best_rate, i, B * M), axis=0) + 1
    best = tl.where(best_rate > none_rate, best, 0)

    # A mass is taken when its key is not below the last one taken.
    last_key = tl.max(tl.where(i == best - 1, falling, 0), axis=0)
    is_taken = is_present & (key >= last_key) & (best > 0)
    nodes = tl.sum(is_taken.to(tl.int32), axis=1)
    is_request = b < num_requests
    floor = tl.load(min_nodes + b, mask=is_request, other=0)
    floor = tl.minimum(tl.maximum(floor, 0), available.to(tl.int64)).to(tl.int32)
    extra = tl.maximum(floor - nodes, 0)
    spare = max_rows - num_requests - best
    before = tl.cumsum(extra, axis=0) - extra
    nodes += tl.minimum(extra, tl.maximum(spare - before, 0))
    ends = tl.cumsum(tl.where(is_request, nodes + 1, 0), axis=0)
    tl.store(out_nodes + b, nodes.to(tl.int64), mask=is_request)
    tl.store(out_cu + 1 + b, ends.to(tl.int64), mask=is_request)
    tl.store(out_cu + b, tl.zeros((B,), tl.int64), mask=b == 0)


def choose_budget(
    *,
    masses: torch.Tensor,
    table_rows: torch.Tensor,
    table_seconds: torch.Tensor,
    fixed_seconds: torch.Tensor,
    min_nodes: torch.Tensor,
    max_rows: int,
    is_stepped: bool,
) -> NodeBudget:
    """`tree_budget_ref.choose_budget` on the device.

    Raises: ValueError on a wrong shape, dtype, layout or device, and on more masses than the kernel sorts.
    Syncs: none.
    """
    device = masses.device
    check_tensors(device)
    check_tensor("masses", masses, (None, None), torch.float32)
    num_requests, num_masses = masses.shape
    check_tensor("table_rows", table_rows, (None,), torch.int64, device)
    num_steps = table_rows.numel()
    check_tensor("table_seconds", table_seconds, (num_steps,), torch.float32, device)
    check_tensor("fixed_seconds", fixed_seconds, (1,), torch.float32, device)
    check_tensor("min_nodes", min_nodes, (num_requests,), torch.int64, device)
    if num_steps == 0:
        raise ValueError("table_rows must have at least one entry, got none")
    if max_rows < num_requests:
        raise ValueError(f"max_rows must be at least the number of requests ({num_requests}), got {max_rows}")
    padded = triton.next_power_of_2(max(num_requests, 1)), max(triton.next_power_of_2(max(num_masses, 1)), 2)
    size = padded[0] * padded[1]
    if size > _MAX_MASSES:
        raise ValueError(
            f"masses must have at most {_MAX_MASSES} entries after padding to powers of two, got {padded[0]} x {padded[1]}"
        )
    out = NodeBudget.empty(num_requests, device)
    if num_requests == 0:
        out.cu_nodes.zero_()
        return out
    _budget_kernel[(1,)](
        masses,
        table_rows,
        table_seconds,
        fixed_seconds,
        min_nodes,
        out.num_nodes,
        out.cu_nodes,
        num_requests,
        num_masses,
        num_steps,
        max_rows,
        B=padded[0],
        M=padded[1],
        IS_STEPPED=is_stepped,
        num_warps=min(max(size // 128, 4), 16),  # a power of two; few entries a thread keep the sort's code short
    )
    return out
