"""SpecBlock rows: the blocks of packed rows of logged requests, one after the other, with gradients.

Shape legend: B requests of a batch, T rows (padded at the end), A selected rows of a request, K draft slots, H drafter
hidden size, F feature size, k logged target log-probs a token, N selected rows, V vocabulary.
Row j of a request is (feature at j, token at j + 1); slot s of a block whose inherited slots add up to `offset` predicts
the token at j + 2 + offset + s. Source: SpecBlock (arXiv 2605.07243). Block >= 2 sees what it sees in serving: the own
row's slots up to the inherited one, its own block, and block 1 of earlier rows; rotary positions advance with the offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.adapt.families.row_batch import RowBatch
from paceline.serving.drafters.network import rope_cos_sin
from paceline.serving.specblock.model import SpecBlockModel


@dataclass(kw_only=True, slots=True)
class BlockState:
    """Hidden states of one block for selected rows, with what later blocks need."""

    hidden: torch.Tensor  # (B, A, K, H) before the final norm
    cond: torch.Tensor  # (B, A, H) what the block was conditioned on
    kv: list[tuple[torch.Tensor, torch.Tensor]]  # per layer (B, Hkv, A * K, Dh)


def block1_forward(model: SpecBlockModel, batch: RowBatch, embed: torch.Tensor) -> BlockState:
    """Block 1 of every row: causal over the flattened slots. embed: (V, E), the target's token embedding."""
    c = model.config
    _b, t = batch.features.shape[:2]
    weight = model.cond_proj.weight
    cond = F.linear(batch.features.to(weight.dtype), weight)
    x = model.fuse(cond, F.embedding(batch.token_ids[:, 1:], embed).to(cond.dtype))
    slots = torch.arange(c.num_slots, device=x.device)
    positions = (torch.arange(t, device=x.device)[:, None] + 1 + slots).flatten()
    cos, sin = rope_cos_sin(positions[None], c.head_dim, c.rope_theta)
    kv = []
    x = x.flatten(1, 2)
    for i, layer in enumerate(model.block_layers()):
        if i > 0:
            x = model.shift(i - 1, x.unflatten(1, (t, c.num_slots))).flatten(1, 2)
        q, k, v = layer.qkv(x, cos, sin)
        kv.append((k, v))
        out = F.scaled_dot_product_attention(
            q, k, v.to(k.dtype), is_causal=True, enable_gqa=c.num_heads != c.num_kv_heads
        )
        x = layer.finish(x, out)
    return BlockState(hidden=x.unflatten(1, (t, c.num_slots)), cond=cond, kv=kv)


def next_block_forward(
    model: SpecBlockModel,
    embed: torch.Tensor,
    first: BlockState,
    previous: Sequence[tuple[BlockState, torch.Tensor]],
    *,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    cond: torch.Tensor,
    token_ids: torch.Tensor,
) -> BlockState:
    """One later block of selected rows.

    Args:
        first: block 1 of all rows (keys of earlier rows and of the own row).
        previous: (block, starts) of the blocks between block 1 and this one, for the same rows, oldest first.
        rows: (B, A) int64 row numbers; padding may repeat any row.
        starts: (B, A) int64, M of block 1: how many of its slots lie on the path (1..K).
        offsets: (B, A) int64, slots on the path over all blocks so far.
        cond: (B, A, H) hidden state of the inherited slot.
        token_ids: (B, A) int64, token on the path behind the inherited slot.
    """
    c = model.config
    k = c.num_slots
    b, a = rows.shape
    x = model.fuse(cond, F.embedding(token_ids, embed).to(cond.dtype)).flatten(1, 2)
    slots = torch.arange(k, device=rows.device)
    advance = torch.zeros_like(offsets) if c.compat_rope else offsets
    cos, sin = rope_cos_sin(((rows + 1 + advance)[..., None] + slots).flatten(1), c.head_dim, c.rope_theta)
    keys = torch.arange(first.kv[0][0].shape[2], device=rows.device)
    visible = keys <= (rows * k + starts - 1)[..., None]  # (B, A, T * K): a prefix of the flattened slots of block 1
    parts = [visible[:, :, None].expand(-1, -1, k, -1).flatten(1, 2)]
    same = torch.eye(a, dtype=torch.bool, device=rows.device)
    for _, count in previous:
        own = same[None, :, :, None] & (slots < count[:, None, :, None])  # (B, A, A, K)
        parts.append(own.flatten(2)[:, :, None].expand(-1, -1, k, -1).flatten(1, 2))
    causal = torch.ones(k, k, dtype=torch.bool, device=rows.device).tril()
    current = same[:, None, :, None] & causal[None, :, None, :]  # (A, K, A, K)
    if c.block2_mask == "train_compat":
        earlier = (rows[:, :, None] > rows[:, None, :])[:, :, None, :, None]
        current = current | earlier.expand(-1, -1, k, -1, k)  # (B, A, K, A, K)
    parts.append(current.reshape(-1, a * k, a * k).expand(b, -1, -1))
    mask = torch.cat(parts, dim=2)[:, None]  # (B, 1, A * K, keys)
    kv = []
    for i, layer in enumerate(model.block_layers()):
        if i > 0:
            x = model.shift(i - 1, x.unflatten(1, (a, k))).flatten(1, 2)
        q, key, value = layer.qkv(x, cos, sin)
        kv.append((key, value))
        every_k = torch.cat([first.kv[i][0], *(p.kv[i][0] for p, _ in previous), key], dim=2)
        every_v = torch.cat([first.kv[i][1], *(p.kv[i][1] for p, _ in previous), value], dim=2).to(every_k.dtype)
        out = F.scaled_dot_product_attention(q, every_k, every_v, mask, enable_gqa=c.num_heads != c.num_kv_heads)
        x = layer.finish(x, out)
    return BlockState(hidden=x.unflatten(1, (a, k)), cond=cond, kv=kv)


class RowGrid:
    """Selected rows of a batch laid out as (B, A): row n sits at [request[n], column[n]]; the rest is zero."""

    def __init__(self, request: torch.Tensor, num_requests: int) -> None:
        counts = torch.bincount(request, minlength=num_requests)
        self.request = request  # (N,) int64, rising
        self.column = torch.arange(request.numel(), device=request.device) - (counts.cumsum(0) - counts)[request]
        self.shape = (num_requests, int(counts.max()))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (B, A, ...)."""
        grid = values.new_zeros(*self.shape, *values.shape[1:])
        return grid.index_put((self.request, self.column), values)

    def regrid(self, state: BlockState, columns: torch.Tensor) -> BlockState:
        """Move a block's rows from their old columns to this grid's."""
        slots = state.hidden.shape[2]

        def move(x: torch.Tensor) -> torch.Tensor:
            rows = x.unflatten(2, (-1, slots))[self.request, :, columns]  # (N, Hkv, K, Dh)
            return self.spread(rows).transpose(1, 2).flatten(2, 3)

        return BlockState(
            hidden=self.spread(state.hidden[self.request, columns]),
            cond=self.spread(state.cond[self.request, columns]),
            kv=[(move(k), move(v)) for k, v in state.kv],
        )
