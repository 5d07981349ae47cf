"""Which keys does a SpecBlock query see, and how do packed queries of several requests attend?

Shape legend: B requests, K draft slots, T query tokens, F leaves, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim,
C KV width of a slot (2 * Hkv * Dh: keys, then values). Keys are the flattened slots of a request's rows: a query at
(row j, slot k) sees flat keys 0 .. j * K + k; a leaf at slot s of the anchor row j sees 0 .. j * K + s and its own block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.serving.drafters.interface import DraftInputs, Frontier
from paceline.serving.specblock.model import SpecBlockConfig

_SMALL_QUERIES = 64
"""Query counts up to this share one causal mask, of which a view is taken."""


class SlotAttention:
    """Attention over slot KV with masks that are kept from round to round."""

    def __init__(self, config: SpecBlockConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        k = config.num_slots
        self._kv_width = 2 * config.num_kv_heads * config.head_dim
        self._qkv_width = config.num_heads * config.head_dim + self._kv_width
        self._causal_bias = torch.empty(0)
        self._leaf_bias: dict[int, torch.Tensor] = {}
        neg = torch.full((k, k), float("-inf"), dtype=dtype, device=device)
        self._own_bias = neg.triu(1)  # row s: slots 0..s of the anchor row are visible to a leaf at slot s

    def attend_one(self, qkv: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
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
            bias,
            scale=1.0,
        )  # (G, Hkv, T, Dh)
        return out.permute(2, 1, 0, 3).reshape(qkv.shape[0], -1)

    def attend_many(self, q: torch.Tensor, kv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attention of B padded requests: q (B, T, Hq*Dh), kv (B, rows, K, C), bias (B, G*T, keys) -> (B, T, Hq*Dh)."""
        c = self.config
        batch, length = q.shape[:2]
        groups = c.num_heads // c.num_kv_heads
        q = q.view(batch, length, c.num_kv_heads, groups, c.head_dim).permute(0, 2, 3, 1, 4)
        flat = kv.view(batch, -1, 2, c.num_kv_heads, c.head_dim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q.reshape(batch, c.num_kv_heads, -1, c.head_dim), flat[0], flat[1], bias[:, None], scale=1.0)  # fmt: skip
        return out.view(batch, c.num_kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4).reshape(batch, length, -1)

    def attend_ragged(
        self, qkv: torch.Tensor, context: torch.Tensor, counts: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """Causal attention of each request's last `counts` rows; qkv packed (T, ..) -> (T, Hq * Dh)."""
        c, k = self.config, self.config.num_slots
        batch, most = len(counts), max(counts)
        q = qkv[:, : c.num_heads * c.head_dim]
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
        out = self.attend_many(q.reshape(batch, most * k, -1), context, bias.repeat(1, groups, 1))
        return out.flatten(0, 1) if where is None else out.view(batch * most, k, -1)[where].flatten(0, 1)

    def causal_mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
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

    def leaf_mask(self, slots: torch.Tensor, num_rows: int) -> torch.Tensor:
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

    def leaf_layout(self, inputs: DraftInputs, frontier: Frontier, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Place of each leaf in a (B, width) grid, and the (B, G * width * K, keys) additive mask."""
        c, k = self.config, self.config.num_slots
        batch, leaves = len(inputs.request_ids), frontier.request.numel()
        one_hot = frontier.request[:, None] == torch.arange(batch, device=self.device)  # (F, B)
        order = (one_hot.long().cumsum(0) - 1).gather(1, frontier.request[:, None])[:, 0]
        width = int(order.max()) + 1 if leaves else 1
        place = frontier.request * width + order
        limit = torch.zeros(batch * width, dtype=torch.int64, device=self.device)
        limit.index_copy_(0, place, (inputs.context_lens[frontier.request] - 1) * k + frontier.slot)
        seen = torch.arange(rows * k, device=self.device) <= limit.view(batch, width, 1, 1)  # (B, width, 1, keys)
        own = torch.block_diag(*[torch.ones(k, k, device=self.device).tril()] * width).bool()
        seen = torch.cat(
            (seen.expand(-1, -1, k, -1).flatten(1, 2), own.expand(batch, -1, -1)), dim=2
        )  # (B, width * K, keys)
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))
        return place, bias.repeat(1, c.num_heads // c.num_kv_heads, 1)
