"""SpecBlock graphs: both blocks as captured work.

Attention is by kernels whose shapes follow from tensors' shapes alone: nothing is gathered, nothing read on the host.
Rotation and the K/V write are one kernel. In block 1 the slots of the drafter's pool are taken as K/V rows of their own, K
per pool row: all new rows are one causal tree attention over the flattened slots. The last layer, where only the newest row
of a request drafts, and block 2 are slot attention: a leaf at slot s of the anchor row sees the rows before it, slots 0..s
of it, and its own K slots, whose K/V no later call needs and which never get to the pool.

Shape legend: B requests, R new rows, L columns of the slot table, K draft slots, C candidates per slot, M leaves per
request, F = B * M leaves, H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim, T = rows or leaves * K drafter tokens;
a bucket has at least as many of each as the round.
Padding: rows from cu_new[-1] on write to spare pool rows; requests without rows have context 0; leaves of request >= B
are computed and belong to nobody.
"""

from __future__ import annotations

import torch

from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.forward import choose_ranking
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.specblock.forward import SlotForward


class KernelAttention:
    """Slot attention over one pool that must not move; numerically equal to GatheredAttention.  Syncs: none."""

    def __init__(
        self, forward: SlotForward, pool: torch.Tensor, kernels: Kernels, *, max_leaves: int, max_context: int
    ) -> None:
        """pool: (layers, pool rows, K, 2 * Hkv * Dh), keys, then values. max_leaves: M."""
        c = self._config = forward.config
        self._forward, self._kernels = forward, kernels
        shape = (c.num_layers, pool.shape[1] * c.num_slots, 2, c.num_kv_heads, c.head_dim)
        self._pool = pool.unbind(0)  # (pool rows, K, 2 * Hkv * Dh) each
        self._slots = pool.view(shape).unbind(0)  # (pool rows * K, 2, Hkv, Dh) each
        self._max_leaves = max_leaves
        self._cos, self._sin = forward.pair_tables(max_context + 2 * c.num_slots + 1)
        self._query_size = c.num_heads * c.head_dim

    # ---- block 1

    def open_rows(self, inputs: DraftInputs, *, wants_block: bool) -> None:
        c, k, cu_new = self._config, self._config.num_slots, inputs.cu_new
        self._table = inputs.slot_table
        self._own, self._places = self._flat(inputs.new_slots).flatten(), self._slot_places(inputs.new_positions)
        self._newest = (cu_new[1:] - 1).clamp(min=0)
        self._newest_slots = inputs.new_slots.index_select(0, self._newest)
        self._before = (inputs.context_lens - 1)[:, None]
        if c.num_layers > 1:
            starts = inputs.context_lens - (cu_new[1:] - cu_new[:-1])
            self._plan = self._kernels.plan_attention(
                cu_rows=cu_new * k,
                context_lens=starts * k,
                slot_table=self._flat(self._table).flatten(1),
                out_rows=self._own,
                ancestors=None,
                num_groups=c.num_heads // c.num_kv_heads,
                dtype=self._forward.dtype,
            )

    def write(self, i: int, qkv: torch.Tensor) -> None:
        self._turn(qkv, self._slots[i])

    def rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        query = self._turn(qkv, self._slots[i])
        return self._kernels.tree_attention(query, self._slots[i], self._plan, 1.0).reshape(-1, self._query_size)

    def newest_rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        query = self._turn(qkv, self._slots[i])
        query = query.unflatten(0, (-1, self._config.num_slots)).index_select(0, self._newest)[:, None]
        current = self._pool[i].index_select(0, self._newest_slots)[:, None]
        attended = self._attend(i, query, current, self._before, torch.zeros_like(self._before))
        return attended.reshape(-1, self._query_size)

    def newest(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, self._config.num_slots)).index_select(0, self._newest).flatten(0, 1)

    # ---- block 2

    def open_leaves(self, inputs: DraftInputs, frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor | None]:
        c, request, slot = self._config, frontier.request, frontier.slot
        num_requests, num_leaves, m = inputs.context_lens.numel(), request.numel(), self._max_leaves
        self._table = inputs.slot_table
        owner = request.clamp(max=num_requests - 1)
        place = self._place = self._cell(request, num_requests)  # (F,) leaf cell, the last one for padding
        lengths = inputs.context_lens.index_select(0, owner)
        self._places = self._slot_places((lengths - 1).clamp(min=0) if c.compat_rope else lengths + slot)
        # The cells (B, M) of no leaf are padding blocks: -1 rows before them.
        before = slot.new_full((num_leaves + 1,), -1).index_copy_(0, place, lengths - 1)
        seen = slot.new_zeros(num_leaves + 1).index_copy_(0, place, slot + 1)
        self._before, self._seen = (t[:-1].view(num_requests, m) for t in (before, seen))
        self._own = torch.where(place[:, None] < num_leaves, self._flat(place), -1).flatten()  # rows of `current`
        return owner * c.num_slots + slot, owner

    def leaves(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        c, k, (num_requests, m) = self._config, self._config.num_slots, self._seen.shape
        num_leaves = num_requests * m
        current = qkv.new_empty(num_leaves * k, 2, c.num_kv_heads, c.head_dim)
        query = self._turn(qkv, current).view(num_leaves, -1)
        laid = query.new_zeros(num_leaves + 1, query.shape[1]).index_copy_(0, self._place, query)[:-1]
        query = laid.view(num_requests, m, k, c.num_heads, c.head_dim)
        out = self._attend(i, query, current.view(num_requests, m, k, -1), self._before, self._seen)
        cell = self._place.clamp(max=num_leaves - 1)
        return out.reshape(num_leaves, -1).index_select(0, cell).view(-1, self._query_size)

    # ---- pieces

    def _flat(self, rows: torch.Tensor) -> torch.Tensor:
        """(...) pool rows -> (..., K) rows of the flattened slots."""
        return rows[..., None] * self._config.num_slots + self._forward.slot_ids

    def _slot_places(self, positions: torch.Tensor) -> torch.Tensor:
        """(rows,) positions of rows -> (rows * K,) RoPE positions of their slots."""
        return (positions[:, None] + 1 + self._forward.slot_ids).flatten()

    def _cell(self, request: torch.Tensor, num_requests: int) -> torch.Tensor:
        """(F,) cell of each leaf: request * M + its running number; cell F takes the padding."""
        one_hot = request[:, None] == torch.arange(num_requests, device=request.device)
        order = (one_hot.long().cumsum(0) * one_hot).sum(1) - 1
        return torch.where(request < num_requests, request * self._max_leaves + order, request.numel())

    def _turn(self, qkv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Projections (T, ..) -> rotated queries (T, Hq, Dh), softmax scale included; rotated K, and V, to rows[own]."""
        c = self._config
        query, key, value = qkv.unflatten(1, (-1, c.head_dim)).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
        own, places = self._own, self._places
        return self._kernels.rope_scatter(query, key, value, rows, own, places, self._cos, self._sin, is_adjacent=True)

    def _attend(
        self, i: int, query: torch.Tensor, current: torch.Tensor, before: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Blocks (B, ., K, Hq, Dh) with their own K/V attend to `before` whole rows and `seen` slots of the next one."""
        return self._kernels.slot_attention(
            query=query,
            current=current,
            pool=self._pool[i],
            slot_table=self._table,
            context_rows=before,
            own_slots=seen,
            scale=1.0,
        )


class StaticSpecBlock:
    """Both blocks as captured work. The drafter's weights may change in place; its pool must not move."""

    def __init__(
        self,
        caps: DrafterCaps,
        forward: SlotForward,
        pool: torch.Tensor,
        kernels: Kernels,
        *,
        first_spare: int,
        max_leaves: int,
        max_context: int,
    ) -> None:
        """pool: (layers, pool rows, K, ..), the rows from `first_spare` on take padding. max_leaves: M."""
        self.caps, self._forward, self._rank = caps, forward, choose_ranking(kernels)
        self.padding_slots = torch.arange(first_spare, pool.shape[1], device=forward.device)
        self._attention = KernelAttention(forward, pool, kernels, max_leaves=max_leaves, max_context=max_context)

    def takes(self, num_requests: int, width: int) -> bool:
        """Any round: nothing is gathered."""
        return True

    def ingest(self, inputs: DraftInputs) -> None:
        """K/V of the new rows."""
        self._forward.ingest(self._attention, inputs)

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Block 1."""
        return self._forward.block1(self._attention, inputs, self._forward.scales(inputs.temperatures), self._rank)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Block 2."""
        scales = self._forward.scales(inputs.temperatures)
        assert proposal.hidden is not None
        return self._forward.block2(self._attention, inputs, proposal.hidden, frontier, scales, self._rank)
