"""Kernels whose shapes follow from their inputs' shapes alone, in plain torch: what a capturable backend is to the engine.

They tolerate padding as a capturable backend must: rows after cu_rows[-1] belong to nobody (their output is NaN here, so
that a reader would show), requests without rows, slot-table entries past the context that are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from paceline.kernels.dispatch import select_kernels


@dataclass
class StaticPlan:
    owner: torch.Tensor  # (N,) request of each row
    is_row: torch.Tensor  # (N,) bool
    key_rows: torch.Tensor  # (N, L + W)
    visible: torch.Tensor  # (N, L + W) bool
    num_requests: int


def plan_attention(*, cu_rows, context_lens, slot_table, out_rows, ancestors, num_groups, dtype):
    rows = torch.arange(out_rows.numel())
    owner = torch.searchsorted(cu_rows[1:], rows, right=True).clamp(max=context_lens.numel() - 1)
    is_row = rows < cu_rows[-1]
    start = cu_rows[owner]
    width = out_rows.numel() if ancestors is None else ancestors.shape[1]
    lane = torch.arange(width)
    own = (start[:, None] + lane).clamp(max=out_rows.numel() - 1)
    seen = lane <= (rows - start)[:, None] if ancestors is None else ancestors
    in_context = torch.arange(slot_table.shape[1]) < context_lens[owner][:, None]
    visible = torch.cat((in_context, seen & is_row[:, None]), 1)
    key_rows = torch.cat((slot_table[owner], out_rows[own]), 1)
    return StaticPlan(owner, is_row, torch.where(visible, key_rows, out_rows[:, None]), visible, context_lens.numel())


def tree_attention(query, pool, plan, scale):
    groups = query.shape[1] // pool.shape[2]
    kv = pool[plan.key_rows].repeat_interleave(groups, 3)  # (N, keys, 2, H, Dh)
    scores = torch.einsum("nhd,nkhd->nhk", query * scale, kv[:, :, 0])
    probs = scores.masked_fill(~plan.visible[:, None], float("-inf")).softmax(-1)
    values = torch.where(plan.visible[:, :, None, None], kv[:, :, 1], 0.0)
    out = torch.einsum("nhk,nkhd->nhd", probs, values)
    return out.masked_fill(~plan.is_row[:, None, None], float("nan"))


STATIC_KERNELS = replace(
    select_kernels("cpu", "reference"),
    backend="static",
    is_capturable=True,
    plan_attention=plan_attention,
    tree_attention=tree_attention,
)


class _NoHostReads(TorchFunctionMode):
    NAMES = ("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "nonzero")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            raise RuntimeError(f"captured work may not call {func.__name__}")
        return func(*args, **(kwargs or {}))


class StrictGraphs:
    """EagerGraphs that refuse what a CUDA capture would: host reads and shapes that depend on data."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, run):
        with _NoHostReads(), FakeTensorMode(allow_non_fake_inputs=True):
            run()
        run()
        self.num_captured += 1
        return _Graph(run)


class _Graph:
    def __init__(self, run) -> None:
        self.replay = run
