"""What does a SpecBlock drafting pass look like when its shapes follow from its tensors' shapes alone?

The slots of the drafter's pool are taken as K/V rows of their own, K per pool row, so that the paged attention of the
target's kernels serves the drafter as well: nothing is gathered, nothing is read on the host. Block 1 is causal over the
flattened slots; in block 2 a request's rows are the K slots of its anchor row, of which a leaf at slot s sees 0..s, and
the K slots of each leaf, which see themselves only.

Shape legend: B requests, R new rows, L columns of the slot table, K draft slots, F leaves, M leaves per request, G leaf
cells and the anchor of a request (M + 1), H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim.
Padding: rows from cu_new[-1] on write to spare pool rows; requests without rows have context 0; leaves of request >= B
are computed and belong to nobody.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.kernels.dispatch import Kernels
from paceline.serving.drafter import Proposal
from paceline.serving.specblock_forward import SlotForward


class StaticSpecBlock:
    """Both blocks of one drafter over one pool; numerically equal to SpecBlockDrafter's passes."""

    def __init__(
        self,
        forward: SlotForward,
        pool: torch.Tensor,
        kernels: Kernels,
        *,
        first_spare: int,
        max_leaves: int,
        max_context: int,
    ) -> None:
        """Bind to storage that must not move.

        Args:
            pool: (layers, pool rows, K, 2 * Hkv * Dh), keys, then values.
            first_spare: pool rows from here on belong to no request: B * M of them take the K/V of leaves.
            max_leaves: M.
        """
        c = self._config = forward.config
        self._forward, self._kernels = forward, kernels
        shape = (c.num_layers, pool.shape[1] * c.num_slots, 2, c.num_kv_heads, c.head_dim)
        self._pools = pool.view(shape).unbind(0)
        self._num_pool_rows, self._first_spare, self._max_leaves = pool.shape[1], first_spare, max_leaves
        self._angles = forward.angle_table(max_context + c.num_slots + 1)
        self._query_size = c.num_heads * c.head_dim

    def propose(
        self,
        features: torch.Tensor,  # (R, fused feature size)
        token_ids: torch.Tensor,  # (R,) int64
        positions: torch.Tensor,  # (R,) int64
        slots: torch.Tensor,  # (R,) int64, pool rows, all different
        cu_new: torch.Tensor,  # (B + 1,) int64
        context_lens: torch.Tensor,  # (B,) int64
        table: torch.Tensor,  # (B, L) int64, entries past a context are not read
        temperatures: torch.Tensor,  # (B,) float32
    ) -> Proposal:
        """Write the new rows' K/V and propose block 1 at the newest row of each request.  Syncs: none."""
        c, k, forward = self._config, self._config.num_slots, self._forward
        num_requests = context_lens.numel()
        cond = torch.mm(features.to(forward.dtype), forward.weights["cond"])
        x = forward.fuse(cond, token_ids)  # (R * K, H)
        angles = self._angles.index_select(0, positions).flatten(0, 1)
        own, keys = self._flat(slots).flatten(), self._flat(table).flatten(1)
        counts = cu_new[1:] - cu_new[:-1]
        newest = (cu_new[1:] - 1).clamp(min=0)
        every = self._plan(cu_new * k, (context_lens - counts) * k, keys, own, None)
        steps = torch.arange(num_requests + 1, device=table.device) * k
        before = (context_lens - 1).clamp(min=0) * k
        last = self._plan(steps, before, keys, self._flat(slots.index_select(0, newest)).flatten(), None)
        for i in range(c.num_layers):
            x, qkv = forward.enter(i, x, angles)
            self._write(i, own, qkv[:, self._query_size :])
            plan = every
            if i == c.num_layers - 1:  # only the newest row of each request drafts
                x, qkv = (t.unflatten(0, (-1, k)).index_select(0, newest).flatten(0, 1) for t in (x, qkv))
                plan = last
            x = forward.finish(i, x, self._attend(i, qkv[:, : self._query_size], plan))
        return forward.heads(x, forward.scales(temperatures)[0], cond.index_select(0, newest))

    def expand(
        self,
        hidden: torch.Tensor,  # (B, K, H), of the proposal
        request: torch.Tensor,  # (F,) int64, F = B * M; at most M of each request
        slot: torch.Tensor,  # (F,) int64
        token_ids: torch.Tensor,  # (F,) int64
        context_lens: torch.Tensor,  # (B,) int64
        table: torch.Tensor,  # (B, L) int64
        temperatures: torch.Tensor,  # (B,) float32
    ) -> Proposal:
        """Propose block 2 at the leaves; their K/V go to spare rows.  Syncs: none."""
        c, k, forward = self._config, self._config.num_slots, self._forward
        num_requests, num_leaves = context_lens.numel(), request.numel()
        owner = request.clamp(max=num_requests - 1)
        place = self._place(request, num_requests)  # (F,) leaf cell, the last one for padding
        x = forward.fuse(hidden.flatten(0, 1).index_select(0, owner * k + slot), token_ids)
        lengths = context_lens.index_select(0, owner)
        at = (lengths - 1).clamp(min=0) if c.compat_rope else lengths + slot
        angles = self._angles.index_select(0, at).flatten(0, 1)
        spare = self._flat(self._first_spare + torch.arange(num_leaves, device=table.device))  # (F cells, K)
        plan = self._leaf_plan(context_lens, table, slot, place, spare)
        cells = torch.arange(num_leaves, device=table.device)
        cell_rows = cells + cells // self._max_leaves + 1  # the anchor stands before its request's leaves
        query_cell = torch.cat((cell_rows, cell_rows[:1])).index_select(0, place)
        for i in range(c.num_layers):
            x, qkv = forward.enter(i, x, angles)
            blocks = qkv.unflatten(0, (num_leaves, k))
            laid = blocks.new_zeros(num_leaves + 1, k, qkv.shape[1]).index_copy_(0, place, blocks)[:num_leaves]
            self._write(i, spare.flatten(), laid[..., self._query_size :].flatten(0, 1))
            query = laid[..., : self._query_size].view(num_requests, self._max_leaves, k, -1)
            query = torch.cat((query.new_zeros(num_requests, 1, k, self._query_size), query), 1)
            out = self._attend(i, query.view(-1, self._query_size), plan).view(-1, k, self._query_size)
            x = forward.finish(i, x, out.index_select(0, query_cell).flatten(0, 1))
        return forward.heads(x, forward.scales(temperatures)[1].index_select(0, owner))

    # ---- pieces

    def _flat(self, rows: torch.Tensor) -> torch.Tensor:
        """(...) pool rows -> (..., K) rows of the flattened slots."""
        return rows[..., None] * self._config.num_slots + self._forward.slot_ids

    def _plan(
        self,
        cu_rows: torch.Tensor,
        context_lens: torch.Tensor,
        keys: torch.Tensor,
        own: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> Any:
        """The backend's plan, of a type that only it knows."""
        c = self._config
        return self._kernels.plan_attention(
            cu_rows=cu_rows,
            context_lens=context_lens,
            slot_table=keys,
            out_rows=own,
            ancestors=ancestors,
            num_groups=c.num_heads // c.num_kv_heads,
            dtype=self._forward.dtype,
        )

    def _place(self, request: torch.Tensor, num_requests: int) -> torch.Tensor:
        """(F,) cell of each leaf: request * M + its running number; cell F takes the padding."""
        one_hot = request[:, None] == torch.arange(num_requests, device=request.device)
        order = (one_hot.long().cumsum(0) * one_hot).sum(1) - 1
        return torch.where(request < num_requests, request * self._max_leaves + order, request.numel())

    def _leaf_plan(
        self,
        context_lens: torch.Tensor,
        table: torch.Tensor,
        slot: torch.Tensor,
        place: torch.Tensor,
        spare: torch.Tensor,
    ) -> Any:
        k, m, num_requests, device = self._config.num_slots, self._max_leaves, context_lens.numel(), table.device
        newest = (context_lens - 1).clamp(min=0)
        anchor = table.gather(1, newest[:, None])[:, 0]
        anchor = torch.where(context_lens > 0, anchor, self._first_spare).clamp(0, self._num_pool_rows - 1)
        own = torch.cat((self._flat(anchor)[:, None], spare.view(num_requests, m, k)), 1)  # (B, G, K)
        entry = slot.new_zeros(slot.numel() + 1).index_copy_(0, place, slot)[:-1].view(num_requests, m)
        lane, cell = self._forward.slot_ids, torch.arange(m + 1, device=device)
        is_own = (cell[:, None] == cell)[:, None, :, None] & (lane[:, None] >= lane)[None, :, None, :]  # (G, K, G, K)
        sees_anchor = (lane <= entry[..., None])[:, :, None, :].expand(-1, -1, k, -1)  # (B, M, K, K)
        ancestors = is_own.expand(num_requests, -1, -1, -1, -1).clone()
        ancestors[:, 1:, :, 0] = sees_anchor
        width = (m + 1) * k
        return self._plan(
            torch.arange(num_requests + 1, device=device) * width,
            newest * k,
            self._flat(table).flatten(1),
            own.flatten(),
            ancestors.view(num_requests * width, width),
        )

    def _write(self, i: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """K/V (T, 2 * Hkv * Dh) to rows (T,) of the flattened slots."""
        c = self._config
        pairs = kv.reshape(-1, 2, c.num_kv_heads, c.head_dim)
        self._kernels.scatter_rows(self._pools[i], rows, pairs[:, 0], pairs[:, 1])

    def _attend(self, i: int, query: torch.Tensor, plan: Any) -> torch.Tensor:
        """Queries (T, Hq * Dh), the softmax scale folded in -> (T, Hq * Dh)."""
        c = self._config
        out = self._kernels.tree_attention(query.reshape(-1, c.num_heads, c.head_dim), self._pools[i], plan, 1.0)
        return out.reshape(-1, self._query_size)
