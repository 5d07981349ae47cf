"""SpecBlock attention of eager drafting: rotated rows, gathered context, masks kept from round to round.

Shape legend: B requests, R new rows, L longest context, K draft slots, T query tokens, F leaves, W leaves of a request
(grid width), Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, C KV width of a slot (2 * Hkv * Dh: keys, then values).
Keys are the flattened slots of a request's rows: a query at (row j, slot k) sees flat keys 0 .. j * K + k; a leaf at slot s
of the anchor row j sees 0 .. j * K + s and its own block.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from paceline.serving.drafters.forward import leaf_grid
from paceline.serving.drafters.interface import DraftInputs, Frontier
from paceline.serving.drafters.network import rotate_pairs
from paceline.serving.specblock.forward import SlotForward

_SMALL_QUERIES = 64
"""Query counts up to this share one causal mask, of which a view is taken."""


class GatheredAttention:
    """Slot attention by torch operators; reads contexts' lengths on the host. Holds a round's contexts for its block 2."""

    def __init__(self, forward: SlotForward) -> None:
        c = self.config = forward.config
        self._forward, self.dtype, self.device = forward, forward.dtype, forward.device
        k = c.num_slots
        self._query_width, self._kv_width = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
        self._qkv_width = self._query_width + self._kv_width
        self._causal_bias = torch.empty(0)
        self._leaf_bias: dict[int, torch.Tensor] = {}
        neg = torch.full((k, k), float("-inf"), dtype=self.dtype, device=self.device)
        self._own_bias = neg.triu(1)  # row s: slots 0..s of the anchor row are visible to a leaf at slot s

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        """Take the pool (layers, rows, K, C), of which requests own the first `num_rows` rows."""
        self._pool, self._num_rows = pool, num_rows
        self._contexts: list[torch.Tensor] = []

    # ---- block 1

    def open_rows(self, inputs: DraftInputs, *, wants_block: bool) -> None:
        ends = self._ends = inputs.cu_new.tolist()
        self._batch, self._new_slots = len(ends) - 1, inputs.new_slots
        if wants_block:
            self._lengths = inputs.context_lens.tolist()
        else:
            self._lengths = [int(inputs.new_positions[e - 1]) + 1 for e in ends[1:]]
        longest = max(self._lengths)
        self._angles = self._angles_at(inputs.new_positions, longest)
        table = inputs.slot_table[:, :longest]
        first = int(table[0, 0])
        is_run = self._batch == 1 and torch.equal(table[0], torch.arange(first, first + longest, device=self.device))
        self._run = slice(first, first + longest) if is_run else None
        if self._batch > 1 and wants_block:  # entries past a context are undefined
            table = table * (torch.arange(longest, device=self.device) < inputs.context_lens[:, None])
        self._table = table
        self._contexts = []

    def write(self, i: int, qkv: torch.Tensor) -> None:
        self._turn(qkv)
        new = qkv[:, self._query_width :].unflatten(0, (-1, self.config.num_slots))
        self._pool[i].index_copy_(0, self._new_slots, new)

    def rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        self.write(i, qkv)
        return self._attend_rows(i, qkv, [e - s for s, e in itertools.pairwise(self._ends)])

    def newest_rows(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        self.write(i, qkv)
        return self._attend_rows(i, self.newest(qkv), [1] * self._batch)

    def newest(self, x: torch.Tensor) -> torch.Tensor:
        k, rows = self.config.num_slots, self._ends[-1]
        if rows == self._batch:
            return x
        if self._batch == 1:
            return x[-k:]
        pick = torch.tensor([e - 1 for e in self._ends[1:]], device=self.device)
        return x.unflatten(0, (rows, k)).index_select(0, pick).flatten(0, 1)

    def _attend_rows(self, i: int, qkv: torch.Tensor, counts: list[int]) -> torch.Tensor:
        (batch, longest), k = self._table.shape, self.config.num_slots
        if self._run is not None:
            context = self._pool[i, self._run][None]
        else:
            context = self._pool[i].index_select(0, self._table.reshape(-1).clamp_(0, self._num_rows - 1))
            context = context.view(batch, longest, k, -1)
        self._contexts.append(context)
        if batch == 1:
            return self._attend_one(qkv, context, self._causal_mask(qkv.shape[0], longest * k))
        return self._attend_ragged(qkv, context, counts, self._lengths)

    # ---- block 2

    def open_leaves(self, inputs: DraftInputs, frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor | None]:
        c, request = self.config, frontier.request
        is_one, longest = self._batch == 1, self._contexts[0].shape[1]
        lengths = inputs.context_lens if is_one else inputs.context_lens.index_select(0, request)
        at = (lengths - 1).expand(request.numel()) if c.compat_rope else lengths + frontier.slot
        self._angles = self._angles_at(at, longest)
        if is_one:
            self._bias = self._leaf_mask(frontier.slot, longest)
            return frontier.slot, None
        self._place, self._width, self._bias = self._leaf_layout(inputs, frontier, longest)
        return torch.add(frontier.slot, request, alpha=c.num_slots), request

    def leaves(self, i: int, qkv: torch.Tensor) -> torch.Tensor:
        k, batch = self.config.num_slots, self._batch
        self._turn(qkv)
        new = qkv[:, self._query_width :].view(-1, k, self._kv_width)
        if batch == 1:
            return self._attend_one(qkv, torch.cat((self._contexts[i], new[None]), dim=1), self._bias)
        cells = batch * self._width
        padded = new.new_zeros(cells, k, self._kv_width).index_copy_(0, self._place, new)
        kv = torch.cat((self._contexts[i], padded.view(batch, self._width, k, -1)), dim=1)
        q = qkv[:, : self._query_width].reshape(new.shape[0], -1)
        q = q.new_zeros(cells, q.shape[-1]).index_copy_(0, self._place, q)
        out = self._attend_many(q.view(batch, self._width * k, -1), kv, self._bias)
        return out.view(cells, k, -1)[self._place].flatten(0, 1)

    def _leaf_layout(
        self, inputs: DraftInputs, frontier: Frontier, rows: int
    ) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Place of each leaf in a (B, W) grid, W, and the (B, G * W * K, keys) additive mask."""
        c, k, batch = self.config, self.config.num_slots, self._batch
        place, width = leaf_grid(frontier.request, batch)
        limit = torch.zeros(batch * width, dtype=torch.int64, device=self.device)
        limit.index_copy_(0, place, (inputs.context_lens[frontier.request] - 1) * k + frontier.slot)
        seen = torch.arange(rows * k, device=self.device) <= limit.view(batch, width, 1, 1)  # (B, W, 1, keys)
        own = torch.block_diag(*[torch.ones(k, k, device=self.device).tril()] * width).bool()
        seen = torch.cat((seen.expand(-1, -1, k, -1).flatten(1, 2), own.expand(batch, -1, -1)), dim=2)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        return place, width, bias.repeat(1, c.num_heads // c.num_kv_heads, 1)

    # ---- pieces

    def _angles_at(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Rotations of the K slots of rows at these positions, (rows * K, 1, Dh / 2): complex64, or cos|sin stacked."""
        table = self._forward.angles(length + self.config.num_slots + 1)
        return table.index_select(0, rows).flatten(0, 1)

    def _turn(self, qkv: torch.Tensor) -> None:
        c = self.config
        rotate_pairs(qkv, self._angles, c.num_heads + c.num_kv_heads, c.head_dim)

    def _attend_one(self, qkv: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attention of one request without copying KV: qkv (T, ..), kv (1, rows, K, C), bias (T, keys) -> (T, Hq*Dh).

        The query heads of a KV head are laid over a batch dimension that keys and values share by a zero stride.
        """
        c = self.config
        groups, d, keys, start = (
            c.num_heads // c.num_kv_heads,
            c.head_dim,
            kv.shape[1] * c.num_slots,
            kv.storage_offset(),
        )
        q_shape, q_strides = (groups, c.num_kv_heads, qkv.shape[0], d), (d, groups * d, self._qkv_width, 1)
        shape, strides = (groups, c.num_kv_heads, keys, d), (0, d, self._kv_width, 1)
        out = F.scaled_dot_product_attention(
            qkv.as_strided(q_shape, q_strides, qkv.storage_offset()),
            kv.as_strided(shape, strides, start),
            kv.as_strided(shape, strides, start + c.num_kv_heads * d),
            bias if bias.is_cpu else bias.clone(),  # a view may begin where CUDA's kernels refuse a mask (16 bytes)
            scale=1.0,
        )  # (G, Hkv, T, Dh)
        return out.permute(2, 1, 0, 3).reshape(qkv.shape[0], -1)

    def _attend_many(self, q: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attention of B padded requests: q (B, T, Hq*Dh), kv (B, rows, K, C), bias (B, G*T, keys) -> (B, T, Hq*Dh)."""
        c = self.config
        batch, length = q.shape[:2]
        groups = c.num_heads // c.num_kv_heads
        q = q.view(batch, length, c.num_kv_heads, groups, c.head_dim).permute(0, 2, 3, 1, 4)
        flat = kv.view(batch, -1, 2, c.num_kv_heads, c.head_dim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q.reshape(batch, c.num_kv_heads, -1, c.head_dim), flat[0], flat[1], bias[:, None], scale=1.0)  # fmt: skip
        return out.view(batch, c.num_kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4).reshape(batch, length, -1)

    def _attend_ragged(
        self, qkv: torch.Tensor, context: torch.Tensor, counts: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """Causal attention of each request's last `counts` rows; qkv packed (T, ..) -> (T, Hq * Dh)."""
        c, k = self.config, self.config.num_slots
        batch, most = len(counts), max(counts)
        q = qkv[:, : self._query_width]
        is_even = all(n == most for n in counts)
        where = None
        if not is_even:
            where = torch.tensor([b * most + r for b, n in enumerate(counts) for r in range(n)], device=self.device)
            packed = q.reshape(-1, k * q.shape[1])
            q = q.new_zeros(batch * most, packed.shape[1]).index_copy_(0, where, packed)
        starts = torch.tensor([n - m for n, m in zip(lengths, counts, strict=True)], device=self.device) * k
        limit = starts[:, None] + torch.arange(most * k, device=self.device)  # (B, T): last visible flat key
        seen = torch.arange(context.shape[1] * k, device=self.device) <= limit[..., None]
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        groups = c.num_heads // c.num_kv_heads
        out = self._attend_many(q.reshape(batch, most * k, -1), context, bias.repeat(1, groups, 1))
        return out.flatten(0, 1) if where is None else out.view(batch * most, k, -1)[where].flatten(0, 1)

    def _causal_mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """(queries, keys) additive mask for queries that are the newest of the keys; a view for small counts."""
        size = max(num_queries, _SMALL_QUERIES)
        if num_queries > _SMALL_QUERIES:
            bias = torch.zeros(num_queries, num_keys, dtype=self.dtype, device=self.device)
            future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.device)
            return bias.masked_fill_(future.triu_(num_keys - num_queries + 1), float("-inf"))
        if self._causal_bias.numel() == 0 or self._causal_bias.shape[1] < num_keys + size:
            width = max(2048, 2 * (num_keys + size))
            bias = torch.zeros(size, width, dtype=self.dtype, device=self.device)
            future = torch.ones(size, width, dtype=torch.bool, device=self.device).triu_(width - size + 1)
            self._causal_bias = bias.masked_fill_(future, float("-inf"))
        start = self._causal_bias.shape[1] - size - (num_keys - num_queries)
        return self._causal_bias[:num_queries, start : start + num_keys]

    def _leaf_mask(self, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
        """(F * K, (rows + F) * K) additive mask of one request's leaves; a view of a buffer kept per F."""
        k, leaves = self.config.num_slots, slots.numel()
        tail, keys = (leaves + 1) * k, (num_rows + leaves) * k
        buffer = self._leaf_bias.get(leaves)
        if buffer is None or buffer.shape[1] < keys:
            buffer = torch.zeros(leaves * k, max(2048, 2 * keys), dtype=self.dtype, device=self.device)
            blocks = torch.block_diag(*[torch.ones(k, k, device=self.device).tril()] * leaves).bool()
            buffer[:, -leaves * k :].masked_fill_(~blocks, float("-inf"))
            self._leaf_bias[leaves] = buffer
        buffer[:, -tail : -leaves * k].unflatten(0, (leaves, k)).copy_(self._own_bias.index_select(0, slots)[:, None])
        return buffer[:, -keys:]
