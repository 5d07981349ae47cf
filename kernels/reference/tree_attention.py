"""Tree attention: packed tree rows attend to their paged context and to their own ancestors. Plain torch reference.

Padding every request to the widest tree and the longest context of the round costs arithmetic that nobody wants; a call of
its own costs operators. Requests are split into groups that share a padded call where the first outweighs the second.

Shape legend: B requests, N packed rows (all requests), L context length, C keys of the widest request, W widest tree,
R pool rows, H query heads, Hkv KV heads, G = H / Hkv, Dh head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

CALL_PAIRS = 16_384
"""Padded (row, key) pairs that take about as long as one more attention call in every layer (measured on 2 CPU cores)."""
MAX_GROUPS = 6


def group_requests(num_rows: Sequence[int], num_keys: Sequence[int], call_pairs: int = CALL_PAIRS) -> list[list[int]]:
    """Split B requests into groups that are padded apart.

    Args:
        num_rows: (B,) rows of each request.
        num_keys: (B,) keys of each request, its own rows included.
    Returns: request indices by group, rising inside a group; one group when nothing is gained.
    """
    groups = [list(range(len(num_rows)))]
    while len(groups) < MAX_GROUPS:
        splits = [_best_split(group, num_rows, num_keys) for group in groups]
        best = max(range(len(groups)), key=lambda i: splits[i][0])
        saved, first, second = splits[best]
        if saved <= call_pairs:
            break
        groups[best : best + 1] = [first, second]
    return [sorted(group) for group in groups]


def _best_split(
    group: Sequence[int], num_rows: Sequence[int], num_keys: Sequence[int]
) -> tuple[int, list[int], list[int]]:
    """(pairs saved, first part, second part) of the best cut along the rows or along the keys."""
    widest, longest = max(num_rows[i] for i in group), max(num_keys[i] for i in group)
    whole = len(group) * widest * longest
    best: tuple[int, list[int], list[int]] = (0, [], [])
    for sizes in (num_rows, num_keys):
        order = sorted(group, key=sizes.__getitem__)
        rows_left, keys_left = [0], [0]  # largest of the first n
        for i in order:
            rows_left.append(max(rows_left[-1], num_rows[i]))
            keys_left.append(max(keys_left[-1], num_keys[i]))
        rows, keys = 0, 0
        for n in range(len(order) - 1, 0, -1):
            rows, keys = max(rows, num_rows[order[n]]), max(keys, num_keys[order[n]])
            saved = whole - n * rows_left[n] * keys_left[n] - (len(order) - n) * rows * keys
            if saved > best[0]:
                best = (saved, list(order[:n]), list(order[n:]))
    return best


@dataclass(kw_only=True, slots=True)
class AttentionPlan:
    """Indices and mask of one forward, shared by all layers."""

    num_rows: int  # N
    num_requests: int  # B
    width: int  # rows of the request with most rows
    num_keys: int  # C
    key_rows: torch.Tensor | None = None  # (B * C,) int64 pool rows, request after request; None = key_slice
    key_slice: tuple[int, int] | None = None  # [start, stop) of the pool when one request's keys lie in order
    query_index: torch.Tensor | None = None  # (B * width,) int64 packed row of each padded row; None = not padded
    row_index: torch.Tensor | None = None  # (N,) int64 padded row of each packed row; None = rows are not padded
    mask: torch.Tensor | None = None  # (B, 1, width * G, C) additive, 0 or -inf; None = every key is visible
    parts: list[AttentionPlan] | None = None
    """Requests that are padded apart from each other; everything else then only counts (N, B, width)."""
    packed_rows: torch.Tensor | None = None  # (rows of the part,) int64 packed rows that a part fills, in its order


def plan_attention(
    *,
    cu_rows: torch.Tensor,
    context_lens: torch.Tensor,
    slot_table: torch.Tensor,
    out_rows: torch.Tensor,
    ancestors: torch.Tensor | None,
    num_groups: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Lay out the keys of every request as [committed rows, own rows] and build the mask once for all layers.

    Args:
        cu_rows: (B + 1,) int64 offsets of each request's packed rows.
        context_lens: (B,) int64 committed rows, visible to every row of the request.
        slot_table: (B, L) int64 pool rows of positions; entries >= context_len are not read.
        out_rows: (N,) int64 pool rows that hold the packed rows' own K/V.
        ancestors: (N, W) bool, [i, j]: own row j is i or an ancestor of i; None = causal inside the request.
        num_groups: G.
        dtype: of the queries (and of the additive mask).
    Syncs: reads cu_rows and context_lens on the host.
    """
    offsets, contexts = cu_rows.tolist(), context_lens.tolist()
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    num_rows, batch = offsets[-1], len(counts)
    if batch == 1:
        return _plan_single(num_rows, contexts[0], slot_table, out_rows, ancestors, num_groups, dtype)
    layout = (cu_rows, context_lens, slot_table, out_rows, ancestors, num_groups, dtype)
    groups = group_requests(counts, [n + c for n, c in zip(counts, contexts, strict=True)])
    if len(groups) == 1:
        return _plan_ragged(counts, contexts, None, *layout)
    parts = [_plan_ragged([counts[i] for i in g], [contexts[i] for i in g], g, *layout) for g in groups]
    num_keys = max(part.num_keys for part in parts)
    return AttentionPlan(num_rows=num_rows, num_requests=batch, width=max(counts), num_keys=num_keys, parts=parts)


def _plan_single(
    num_rows: int,
    context: int,
    slot_table: torch.Tensor,
    out_rows: torch.Tensor,
    ancestors: torch.Tensor | None,
    num_groups: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    rows = torch.cat((slot_table[0, :context], out_rows)) if context else out_rows
    total = context + num_rows
    key_slice = None
    if rows.device.type == "cpu":  # a host read elsewhere would stall the device
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if stop - start == total and (total == 1 or bool((rows[1:] - rows[:-1] == 1).all())):
            key_slice = (start, stop)
    mask = None
    if num_rows > 1:
        own = ancestors[:, :num_rows] if ancestors is not None else _causal(num_rows, rows.device)
        mask = torch.zeros(num_rows, total, dtype=dtype, device=rows.device)
        mask[:, context:].masked_fill_(~own, float("-inf"))
        mask = mask.repeat_interleave(num_groups, 0)[None, None]
    return AttentionPlan(
        num_rows=num_rows,
        num_requests=1,
        width=num_rows,
        key_rows=None if key_slice else rows,
        key_slice=key_slice,
        num_keys=total,
        mask=mask,
    )


def _plan_ragged(
    counts: list[int],
    contexts: list[int],
    requests: list[int] | None,
    cu_rows: torch.Tensor,
    context_lens: torch.Tensor,
    slot_table: torch.Tensor,
    out_rows: torch.Tensor,
    ancestors: torch.Tensor | None,
    num_groups: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """`requests`: which of the forward's requests counts and contexts belong to; None = all."""
    device, batch, width = out_rows.device, len(counts), max(counts)
    num_keys = max(n + c for n, c in zip(counts, contexts, strict=True))
    starts, sizes = cu_rows[:-1, None], (cu_rows[1:] - cu_rows[:-1])[:, None]
    if requests is not None:
        index = torch.tensor(requests, device=device)
        starts, sizes, context_lens, slot_table = starts[index], sizes[index], context_lens[index], slot_table[index]
    lens = context_lens[:, None]
    position = torch.arange(num_keys, device=device)[None]
    own = position - lens  # (B, C) index among the request's own rows
    is_own = (own >= 0) & (own < sizes)
    # Padding keys repeat an own row: masked, and finite whatever unused pool rows hold (0 * NaN would be NaN).
    own_rows = out_rows[starts + torch.where(is_own, own, 0)]
    if slot_table.shape[1] and num_keys > min(counts):
        table = slot_table[:, :num_keys]
        if table.shape[1] < num_keys:
            table = torch.nn.functional.pad(table, (0, num_keys - table.shape[1]))
        own_rows = torch.where(own < 0, table, own_rows)
    lane = torch.arange(width, device=device)[None]
    is_row = lane < sizes
    packed_rows: torch.Tensor | None = None
    query_index: torch.Tensor | None = None
    row_index: torch.Tensor | None = None
    if requests is not None:
        packed = starts + torch.where(is_row, lane, 0)
        query_index, row_index = packed.view(-1), is_row.view(-1).nonzero().view(-1)
        packed_rows = query_index[row_index]
    elif all(n == width for n in counts):
        packed = torch.arange(batch * width, device=device).view(batch, width)
    else:
        packed = starts + torch.where(is_row, lane, 0)  # padding rows repeat the first row: finite, then dropped
        query_index = packed.view(-1)
        row_index = is_row.view(-1).nonzero().view(-1)
    mask = None
    if width > 1 or any(n + c != num_keys for n, c in zip(counts, contexts, strict=True)):
        lookup = torch.where(is_own, own, 0)[:, None, :].expand(batch, width, num_keys)
        if ancestors is None:
            local = torch.where(is_row, lane, 0)[:, :, None]
            seen = lookup <= local
        else:
            seen = ancestors[packed].gather(2, lookup)
        visible = (own < 0)[:, None, :] | (seen & is_own[:, None, :])
        mask = torch.zeros(batch, width, num_keys, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat_interleave(num_groups, 1)[:, None]
    return AttentionPlan(
        num_rows=sum(counts),
        num_requests=batch,
        width=width,
        key_rows=own_rows.reshape(-1),
        num_keys=num_keys,
        query_index=query_index,
        row_index=row_index,
        mask=mask,
        packed_rows=packed_rows,
    )


def _causal(n: int, device: torch.device) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).tril_()


def tree_attention(query: torch.Tensor, pool: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """Attend from N packed rows to the keys laid out by `plan`; the rows' own K/V must be in the pool already.

    Grouped query heads ride along as extra query rows of their KV head, so no K/V is ever repeated.

    Args:
        query: (N, H, Dh).
        pool: (R, 2, Hkv, Dh) of this layer.
    Returns: (N, H, Dh).
    """
    if plan.parts is not None:
        out = torch.empty_like(query)
        for part in plan.parts:
            out.index_copy_(0, part.packed_rows, tree_attention(query, pool, part, scale))  # type: ignore[arg-type]
        return out
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = pool.shape[2]
    batch, width, groups = plan.num_requests, plan.width, num_heads // num_kv_heads
    if plan.key_slice is not None:
        kv = pool[plan.key_slice[0] : plan.key_slice[1]]
    else:
        kv = pool.index_select(0, plan.key_rows)  # type: ignore[arg-type]
    kv = kv.view(batch, plan.num_keys, 2, num_kv_heads, head_dim)
    if plan.query_index is not None:
        query = query.index_select(0, plan.query_index)
    folded = query.view(batch, width, num_kv_heads, groups, head_dim).transpose(1, 2)
    folded = folded.reshape(batch, num_kv_heads, width * groups, head_dim)
    out = scaled_dot_product_attention(
        folded, kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2), attn_mask=plan.mask, scale=scale
    )
    out = out.view(batch, num_kv_heads, width, groups, head_dim).transpose(1, 2).reshape(-1, num_heads, head_dim)
    return out if plan.row_index is None else out.index_select(0, plan.row_index)
