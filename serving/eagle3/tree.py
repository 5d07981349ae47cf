"""Tree rows of EAGLE-3: where a round's rows attend, by torch operators over a copy of the requests' contexts.

A step adds W columns to every request: a row of them for each of its leaves.
Shape legend: B requests, R new rows, L longest context, N rows of a step, W of a request at most (grid width), F leaves,
D columns of tree rows so far, H drafter hidden size, Hq/Hkv query/KV heads, Dh head dim, C KV width of a row (2 * Hkv * Dh:
keys, then values), Vd draft vocabulary, Q = (Hq + 2 * Hkv) * Dh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from paceline.serving.drafters.forward import leaf_grid
from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.eagle3.forward import EagleForward


@dataclass(slots=True)
class StepRows:
    """Rows that a step adds."""

    owner: torch.Tensor  # (N,) int64, request of each
    column: torch.Tensor  # (N,) int64, which of the W columns is its own
    own: torch.Tensor  # (N, W), which of the columns it sees, as `DraftedRows.visible` and `hidden`
    place: torch.Tensor | None = None  # (F,) int64, row of each leaf; None = theirs
    order: torch.Tensor | None = None  # (N,) int64, leaf of each row; None = there are rows without one
    cu: torch.Tensor | None = None  # (B + 1,) int64, offsets of each request's rows; None = each has W

    @property
    def width(self) -> int:
        """W."""
        return self.own.shape[1]

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the leaves (F, ...) -> of the rows (N, ...), zeros where a request has fewer leaves."""
        if self.place is None:
            return values
        if self.order is not None:
            return values.index_select(0, self.order)
        return values.new_zeros(self.owner.numel(), *values.shape[1:]).index_copy_(0, self.place, values)


class DraftedRows(Protocol):
    """Context and tree rows of a round."""

    num_columns: int
    """D."""
    pool: torch.Tensor

    @property
    def visible(self) -> float | bool:
        """Says in a mask that a row sees a column."""

    @property
    def hidden(self) -> float | bool:
        """Says that it does not."""

    @property
    def mask_dtype(self) -> torch.dtype:
        """Of masks."""

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        """Take the pool (rows, C), of which requests own the first `num_rows` rows."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Write the KV of the new rows to the pool."""

    def open(self, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Ingest, begin a round without tree rows: hidden states (B, H) and logits (B, Vd) of the newest rows."""

    def rows(self, request: torch.Tensor) -> StepRows:
        """Rows for leaves of these requests (F,)."""

    def step(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward of drafted tokens, whose KV takes W more columns: the rows' own hidden states (N, H), logits (N, Vd).

        Args:
            hidden: (N, H) that proposed the tokens (N,), which lie at `depths` (N,); may be overwritten.
            seen: (N, D + W) columns that each row sees, the new ones included; None = all of them.
        """


_SPARE_LEAVES = 8


class GatheredTree:
    """Tree rows by torch operators, every request's as many: a grid."""

    visible, hidden = 0.0, float("-inf")  # added to scores

    def __init__(self, forward: EagleForward, max_depth: int, *, is_static: bool = False) -> None:
        """is_static: no host read and no shape that depends on data; leaves are then as many of every request, in the order
        of requests, and inputs are padded."""
        self._is_static = is_static
        self._forward, self._max_depth = forward, max_depth
        self.mask_dtype, self._device = forward.dtype, forward.device
        c = forward.config
        self._kv_width = 2 * c.num_kv_heads * c.head_dim

    def bind(self, pool: torch.Tensor, num_rows: int) -> None:
        self.pool, self.num_columns = pool, 0

    def ingest(self, inputs: DraftInputs) -> None:
        length = inputs.slot_table.shape[1] if self._is_static else int(inputs.new_positions.max()) + 1
        self._write_rows(inputs, length)

    def open(self, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
        batch, forward = inputs.context_lens.numel(), self._forward
        length = inputs.slot_table.shape[1] if self._is_static else int(inputs.context_lens.max())
        hidden, qkv = self._write_rows(inputs, length)
        if hidden.shape[0] > batch or self._is_static:  # only the newest row of each request drafts
            newest = (inputs.cu_new[1:] - 1).clamp(min=0)
            hidden, qkv = hidden.index_select(0, newest), qkv.index_select(0, newest)
        self._newest, self._length, self.num_columns = inputs.context_lens - 1, length, 0
        self._gather(inputs)
        self._deltas = inputs.deltas
        hidden = forward.finish(hidden, self._attend(qkv, None), others=forward.choose_deltas(inputs.deltas))
        return hidden, forward.logits(forward.norm(hidden))

    def rows(self, request: torch.Tensor) -> StepRows:
        batch = self._newest.numel()
        if batch == 1 or self._is_static:
            place, width = None, max(1, request.numel() // batch)
        else:
            place, width = leaf_grid(request, batch)
        cells = torch.arange(batch * width, device=self._device)
        own = torch.full((width, width), self.hidden, dtype=self.mask_dtype, device=self._device)
        own.fill_diagonal_(self.visible)
        return StepRows(cells // width, cells % width, own.repeat(batch, 1), place)

    def step(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward, batch, width = self._forward, self._newest.numel(), rows.width
        positions = self._newest.index_select(0, rows.owner) + depths
        qkv = forward.enter(hidden, token_ids, self._angles.index_select(0, positions))
        self._columns(width).copy_(qkv[:, -self._kv_width :].view(batch, width, -1))
        tree = None if seen is None else seen.reshape(batch, width, -1)
        deltas = None if self._deltas is None else self._deltas.index_select(0, rows.owner)
        hidden = forward.finish(hidden, self._attend(qkv, tree), others=forward.choose_deltas(deltas))
        return hidden, forward.logits(forward.norm(hidden))

    # ---- pieces

    def _write_rows(self, inputs: DraftInputs, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fused features (R, H) and projections (R, Q) of the new rows, whose KV is written to the pool."""
        assert inputs.new_features is not None
        forward = self._forward
        self._angles = forward.angles(length + self._max_depth + 1)
        hidden = torch.mm(inputs.new_features.to(forward.dtype), forward.weights["fc"])
        qkv = forward.enter(hidden, inputs.new_token_ids, self._angles.index_select(0, inputs.new_positions))
        self.pool.index_copy_(0, inputs.new_slots, qkv[:, -self._kv_width :])
        return hidden, qkv

    def _gather(self, inputs: DraftInputs) -> None:
        """Every request's context, (B, >= L + D, C) with room for tree rows, and what masks its end."""
        batch, length = inputs.context_lens.numel(), self._length
        room = length + self._forward.config.num_slots * (1 + _SPARE_LEAVES)
        self._kv = torch.empty(batch, room, self._kv_width, dtype=self._forward.dtype, device=self._device)
        table = inputs.slot_table[:, :length]
        self._context_bias = torch.zeros(batch, 1, length, dtype=self._forward.dtype, device=self._device)
        if self._is_padded:  # entries past a context are undefined
            present = torch.arange(length, device=self._device) < inputs.context_lens[:, None]
            self._context_bias.masked_fill_(~present[:, None], float("-inf"))
            table = table * present
        rows = self.pool.index_select(0, table.reshape(-1).clamp(0, self.pool.shape[0] - 1))
        self._kv[:, :length] = rows.view(batch, length, -1)

    @property
    def _is_padded(self) -> bool:
        """Whether some request has less than `_length` rows."""
        return self._is_static or self._newest.numel() > 1

    def _columns(self, count: int) -> torch.Tensor:
        """Room for `count` more tree rows of each request, (B, count, C)."""
        start = self._length + self.num_columns
        if start + count > self._kv.shape[1]:
            wider = self._kv.new_empty(self._kv.shape[0], 2 * (start + count), self._kv.shape[2])
            wider[:, :start] = self._kv[:, :start]
            self._kv = wider
        self.num_columns += count
        return self._kv[:, start : start + count]

    def _attend(self, qkv: torch.Tensor, tree_bias: torch.Tensor | None) -> torch.Tensor:
        """Queries (B * W, Q) over context and tree rows -> (B * W, Hq * Dh). tree_bias: (B, W, D); None = all are seen."""
        c, batch = self._forward.config, self._newest.numel()
        groups, width, end = c.num_heads // c.num_kv_heads, qkv.shape[0] // batch, self._length + self.num_columns
        q = qkv[:, : c.num_heads * c.head_dim].reshape(batch, width, c.num_kv_heads, groups, c.head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, c.num_kv_heads, groups * width, c.head_dim)
        kv = self._kv[:, :end].unflatten(2, (2, c.num_kv_heads, c.head_dim)).permute(2, 0, 3, 1, 4)
        bias: torch.Tensor | None = None
        if tree_bias is not None:
            bias = torch.cat((self._context_bias.expand(-1, width, -1), tree_bias), 2).repeat(1, groups, 1)[:, None]
        elif self._is_padded:
            bias = F.pad(self._context_bias, (0, self.num_columns)).expand(-1, groups * width, -1)[:, None]
        out = F.scaled_dot_product_attention(q, kv[0], kv[1], bias, scale=1.0)
        out = out.view(batch, c.num_kv_heads, groups, width, c.head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(batch * width, -1)
