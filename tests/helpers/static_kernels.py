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


def rope_scatter(
    query, key, value, pool, rows, positions, cos, sin, *, q_norm=None, k_norm=None, eps=1e-6, is_adjacent=False
):
    """A kept row is written by itself; the others write what is there already, at the place of the first kept one."""

    def turn(heads, weight):
        heads = heads.float()
        if weight is not None:
            heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()
        if is_adjacent:
            crossed = torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2)
        else:
            first, second = heads.chunk(2, -1)
            crossed = torch.cat((-second, first), -1)
        return heads * cos[positions].float()[:, None] + crossed * sin[positions].float()[:, None]

    is_kept = rows >= 0
    source = torch.where(is_kept, torch.arange(rows.numel()), is_kept.long().argmax())
    kv = torch.stack((turn(key, k_norm), value.float()), 1).to(pool.dtype)[source]
    at = rows[source]
    nothing = pool[at.clamp(min=0)]  # without a kept row there is nothing to write
    pool.index_copy_(0, at.clamp(min=0), torch.where(is_kept.any(), kv, nothing))
    return turn(query, q_norm).to(query.dtype)


def slot_attention(*, query, current, pool, slot_table, context_rows, own_slots, scale):
    batch, blocks, slots, heads, dim = query.shape
    length = slot_table.shape[1] * slots
    limit = torch.where(context_rows >= 0, context_rows * slots + own_slots, 0)  # (B, F)
    in_context = torch.arange(length) < limit[..., None]
    is_used = in_context.view(batch, blocks, -1, slots).any(-1).any(1)  # (B, L)
    keys = pool[torch.where(is_used, slot_table, 0)].flatten(1, 2)  # (B, L * K, C)
    keys = keys[:, None].expand(-1, blocks, -1, -1)
    lane = torch.arange(slots)
    own = (lane[:, None] >= lane) & (context_rows >= 0)[..., None, None]  # (B, F, K, K)
    visible = torch.cat((in_context[:, :, None].expand(-1, -1, slots, -1), own), -1)  # (B, F, K, keys)
    is_seen = visible.any(2)[..., None]
    kv = (
        torch.where(is_seen, torch.cat((keys, current), 2), 0.0).float().view(batch, blocks, length + slots, 2, -1, dim)
    )
    key, value = kv.repeat_interleave(heads // kv.shape[4], 4).unbind(3)
    scores = torch.einsum("bfkhd,bfnhd->bfkhn", query.float(), key) * scale
    scores = scores.masked_fill(~visible[:, :, :, None], float("-inf"))
    probs = scores.softmax(-1).masked_fill((context_rows < 0)[..., None, None, None], 0.0)
    return torch.einsum("bfkhn,bfnhd->bfkhd", probs, value).to(query.dtype)


def draft_ingest(*, features, fc, norm_weight, kv_weight, k_norm_weight, cos, sin, positions, pool_rows, pool, eps):
    """As rope_scatter: rows that are not kept write what the first kept one does."""
    layers, _, _, heads, dim = pool.shape
    hidden = torch.mm(features, fc).float()
    hidden = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + eps) * norm_weight.float()
    kv = torch.mm(hidden.to(kv_weight.dtype), kv_weight).view(-1, layers, 2, heads, dim).float()
    keys, values = kv.unbind(2)
    if k_norm_weight is not None:
        keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + eps) * k_norm_weight.float()[:, None]
    c, s = (t[positions][:, None, None, :] for t in (cos, sin))
    a, b = keys.chunk(2, dim=-1)
    keys = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    is_kept = pool_rows >= 0
    source = torch.where(is_kept, torch.arange(pool_rows.numel()), is_kept.long().argmax())
    at = pool_rows[source].clamp(min=0)
    rows = torch.stack((keys, values), dim=2).transpose(0, 1).to(pool.dtype)[:, source]
    pool.index_copy_(1, at, torch.where(is_kept.any(), rows, pool[:, at]))


def commit_rows(pool, src_rows, dst_rows):
    """Pairs with a negative row are skipped; as rope_scatter."""
    is_pair = (src_rows >= 0) & (dst_rows >= 0)
    source = torch.where(is_pair, torch.arange(src_rows.numel()), is_pair.long().argmax())
    src, dst = src_rows[source].clamp(min=0), dst_rows[source].clamp(min=0)
    pool.index_copy_(1, dst, pool[:, torch.where(is_pair.any(), src, dst)])


def scatter_rows(pool, rows, keys, values):
    """As rope_scatter, of what is turned already."""
    is_kept = rows >= 0
    source = torch.where(is_kept, torch.arange(rows.numel()), is_kept.long().argmax())
    at = rows[source].clamp(min=0)
    pool.index_copy_(0, at, torch.where(is_kept.any(), torch.stack((keys, values), 1)[source], pool[at]))


STATIC_KERNELS = replace(
    select_kernels("cpu", "reference"),
    backend="static",
    is_capturable=True,
    plan_attention=plan_attention,
    tree_attention=tree_attention,
    rope_scatter=rope_scatter,
    slot_attention=slot_attention,
    draft_ingest=draft_ingest,
    scatter_rows=scatter_rows,
    commit_rows=commit_rows,
)


class NoHostReads(TorchFunctionMode):
    """Refuses the methods of tensors that wait for a device."""

    def __init__(
        self, names=("tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__", "nonzero")
    ):
        super().__init__()
        self._names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self._names:
            raise RuntimeError(f"work that may not wait calls {func.__name__}")
        return func(*args, **(kwargs or {}))


class StrictGraphs:
    """EagerGraphs that refuse what a CUDA capture would: host reads and shapes that depend on data."""

    def __init__(self) -> None:
        self.num_captured = 0
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)  # one for all: it keeps a fake of every weight

    def capture(self, run):
        run()  # first: what is made once and kept must be real
        with NoHostReads(), self._fakes:
            run()
        self.num_captured += 1
        return _Graph(run)


class _Graph:
    def __init__(self, run) -> None:
        self.replay = run
