"""Slot attention: the slots of a draft block over committed rows, their own row and each other; plain torch reference.

Shape legend: B requests, F blocks of a request (padded), K draft slots, L positions of a slot table, P pool rows,
H query heads, Hkv KV heads, G = H / Hkv, Dh head dim, C KV width of a slot (2 * Hkv * Dh: keys, then values).
Drafter KV of a pool row is the K slots of the row at that position. A block sees, in this order:
cross: all slots of the first n rows; own row: the first s slots of row n; current block: its own slots, causally.
Block 1 at row j: n = j, s = 0 (its own slots are the current block). A leaf at slot s of the anchor row j: n = j, s + 1.
Source: SpecBlock (arXiv 2605.07243), the mask of specblock.md 1.3 (inference).
"""

from __future__ import annotations

import torch


def slot_attention(
    *,
    query: torch.Tensor,
    current: torch.Tensor,
    pool: torch.Tensor,
    slot_table: torch.Tensor,
    context_rows: torch.Tensor,
    own_slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with one softmax over the three parts.

    Args:
        query: (B, F, K, H, Dh), rotated.
        current: (B, F, K, C), the blocks' own keys (rotated) and values; they need not be in the pool.
        pool: (P, K, C), one layer of the drafter KV.
        slot_table: (B, L) int64, pool row of each position; entries from the last visible row on are not read.
        context_rows: (B, F) int64, n; negative = padding block, whose result is 0.
        own_slots: (B, F) int64 in [0, K], s.
        scale: of the scores.
    Returns: (B, F, K, H, Dh), dtype of query.
    """
    batch, blocks, slots, heads, dim = query.shape
    kv_heads = pool.shape[2] // (2 * dim)
    out = torch.zeros_like(query)
    for b in range(batch):
        for f in range(blocks):
            rows = int(context_rows[b, f])
            if rows < 0:
                continue
            own = int(own_slots[b, f])
            visible = slot_table[b, : rows + (own > 0)]
            committed = pool[visible].flatten(0, 1)[: rows * slots + own]
            for k in range(slots):
                kv = torch.cat((committed, current[b, f, : k + 1])).float().view(-1, 2, kv_heads, dim)
                keys, values = kv.repeat_interleave(heads // kv_heads, dim=2).unbind(1)  # (keys, H, Dh)
                scores = torch.einsum("hd,nhd->hn", query[b, f, k].float(), keys) * scale
                out[b, f, k] = torch.einsum("hn,nhd->hd", scores.softmax(1), values).to(query.dtype)
    return out
