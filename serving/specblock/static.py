"""What does a SpecBlock drafting pass look like when its shapes follow from its tensors' shapes alone?

Everything is left to the target's kernels, so that nothing is gathered and nothing read on the host. Rotation and the K/V
write are one kernel. In block 1 the slots of the drafter's pool are taken as K/V rows of their own, K per pool row: all
new rows are one causal tree attention over the flattened slots. The last layer, where only the newest row of a request
drafts, and block 2 are slot attention: a leaf at slot s of the anchor row sees the rows before it, slots 0..s of it, and
its own K slots, whose K/V no later call needs and which never get to the pool.

Shape legend: B requests, R new rows, L columns of the slot table, K draft slots, F leaves, M leaves per request, H drafter
hidden size, Hq/Hkv query/KV heads, Dh head dim, T = rows or leaves * K drafter tokens.
Padding: rows from cu_new[-1] on write to spare pool rows; requests without rows have context 0; leaves of request >= B
are computed and belong to nobody.
"""

from __future__ import annotations

import torch

from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.interface import Proposal
from paceline.serving.drafters.ops import choose_ranking
from paceline.serving.specblock.forward import SlotForward


class StaticSpecBlock:
    """Both blocks of one drafter over one pool; numerically equal to SpecBlockDrafter's passes."""

    def __init__(
        self, forward: SlotForward, pool: torch.Tensor, kernels: Kernels, *, max_leaves: int, max_context: int
    ) -> None:
        """Bind to storage that must not move.

        Args:
            pool: (layers, pool rows, K, 2 * Hkv * Dh), keys, then values.
            max_leaves: M.
        """
        c = self._config = forward.config
        self._forward, self._kernels, self._rank = forward, kernels, choose_ranking(kernels)
        shape = (c.num_layers, pool.shape[1] * c.num_slots, 2, c.num_kv_heads, c.head_dim)
        self._rows = pool.unbind(0)  # (pool rows, K, 2 * Hkv * Dh) each
        self._slots = pool.view(shape).unbind(0)  # (pool rows * K, 2, Hkv, Dh) each
        self._max_leaves = max_leaves
        self._cos, self._sin = forward.pair_tables(max_context + 2 * c.num_slots + 1)
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
        cond = torch.mm(features.to(forward.dtype), forward.weights["cond"])
        x = forward.fuse(cond, token_ids)  # (R * K, H)
        own, places = self._flat(slots).flatten(), self._places(positions)
        newest = (cu_new[1:] - 1).clamp(min=0)
        newest_slots, before = slots.index_select(0, newest), (context_lens - 1)[:, None]
        plan = None
        if c.num_layers > 1:
            starts = context_lens - (cu_new[1:] - cu_new[:-1])
            plan = self._kernels.plan_attention(
                cu_rows=cu_new * k,
                context_lens=starts * k,
                slot_table=self._flat(table).flatten(1),
                out_rows=own,
                ancestors=None,
                num_groups=c.num_heads // c.num_kv_heads,
                dtype=forward.dtype,
            )
        for i in range(c.num_layers):
            x, qkv = forward.project(i, x)
            query = self._turn(qkv, self._slots[i], own, places)
            if i < c.num_layers - 1:
                attended = self._kernels.tree_attention(query, self._slots[i], plan, 1.0)
            else:  # only the newest row of each request drafts
                x, query = (t.unflatten(0, (-1, k)).index_select(0, newest) for t in (x, query))
                x, query = x.flatten(0, 1), query[:, None]
                current = self._rows[i].index_select(0, newest_slots)[:, None]
                attended = self._attend(i, query, current, table, before, torch.zeros_like(before))
            x = forward.finish(i, x, attended.reshape(-1, self._query_size))
        anchor_cond = cond.index_select(0, newest)
        return forward.heads(x, forward.scales(temperatures)[0], anchor_cond, self._rank)

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
        """Propose block 2 at the leaves.  Syncs: none."""
        c, k, forward = self._config, self._config.num_slots, self._forward
        num_requests, num_leaves, m = context_lens.numel(), request.numel(), self._max_leaves
        owner = request.clamp(max=num_requests - 1)
        place = self._place(request, num_requests)  # (F,) leaf cell, the last one for padding
        x = forward.fuse(hidden.flatten(0, 1).index_select(0, owner * k + slot), token_ids)
        lengths = context_lens.index_select(0, owner)
        places = self._places((lengths - 1).clamp(min=0) if c.compat_rope else lengths + slot)
        # The cells (B, M) of no leaf are padding blocks: -1 rows before them.
        before = slot.new_full((num_leaves + 1,), -1).index_copy_(0, place, lengths - 1)[:-1].view(num_requests, m)
        seen = slot.new_zeros(num_leaves + 1).index_copy_(0, place, slot + 1)[:-1].view(num_requests, m)
        own = torch.where(place[:, None] < num_leaves, self._flat(place), -1).flatten()  # rows of `current`
        cell = place.clamp(max=num_leaves - 1)
        for i in range(c.num_layers):
            x, qkv = forward.project(i, x)
            current = qkv.new_empty(num_leaves * k, 2, c.num_kv_heads, c.head_dim)
            query = self._turn(qkv, current, own, places).view(num_leaves, -1)
            laid = query.new_zeros(num_leaves + 1, query.shape[1]).index_copy_(0, place, query)[:-1]
            query = laid.view(num_requests, m, k, c.num_heads, c.head_dim)
            out = self._attend(i, query, current.view(num_requests, m, k, -1), table, before, seen)
            out = out.reshape(num_leaves, -1).index_select(0, cell)
            x = forward.finish(i, x, out.view(-1, self._query_size))
        return forward.heads(x, forward.scales(temperatures)[1].index_select(0, owner), rank=self._rank)

    # ---- pieces

    def _flat(self, rows: torch.Tensor) -> torch.Tensor:
        """(...) pool rows -> (..., K) rows of the flattened slots."""
        return rows[..., None] * self._config.num_slots + self._forward.slot_ids

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        """(rows,) positions of rows -> (rows * K,) RoPE positions of their slots."""
        return (positions[:, None] + 1 + self._forward.slot_ids).flatten()

    def _place(self, request: torch.Tensor, num_requests: int) -> torch.Tensor:
        """(F,) cell of each leaf: request * M + its running number; cell F takes the padding."""
        one_hot = request[:, None] == torch.arange(num_requests, device=request.device)
        order = (one_hot.long().cumsum(0) * one_hot).sum(1) - 1
        return torch.where(request < num_requests, request * self._max_leaves + order, request.numel())

    def _turn(self, qkv: torch.Tensor, rows: torch.Tensor, own: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Projections (T, ..) -> rotated queries (T, Hq, Dh), softmax scale included; rotated K, and V, to rows[own]."""
        c = self._config
        query, key, value = qkv.unflatten(1, (-1, c.head_dim)).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        return self._kernels.rope_scatter(query, key, value, rows, own, places, self._cos, self._sin, is_adjacent=True)

    def _attend(
        self,
        i: int,
        query: torch.Tensor,
        current: torch.Tensor,
        table: torch.Tensor,
        before: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Blocks (B, ., K, Hq, Dh) with their own K/V attend to `before` whole rows and `seen` slots of the next one."""
        return self._kernels.slot_attention(
            query=query,
            current=current,
            pool=self._rows[i],
            slot_table=table,
            context_rows=before,
            own_slots=seen,
            scale=1.0,
        )
