"""JetSpec and DFlash drafting: one call a round drafts a whole block against context keys and values written once.

Shape legend: B requests, R new rows, L longest context, S draft slots, N = 1 + S block rows, Lt layers, P pool rows,
Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim.
The drafter's KV of a pool row follows from the target's features at that row alone; block rows leave nothing behind.
Source: DFlash and JetSpec, tree_speculation.md 1.3, 1.9 and 4.7.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from paceline.errors import DrafterMismatchError
from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.forward import ScaleCache
from paceline.serving.drafters.graph_inputs import num_graph_rows
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.native import SPARE_ROWS, supports_native
from paceline.serving.drafters.pass_graphs import PassGraphs
from paceline.serving.parallel_head.forward import HeadForward
from paceline.serving.parallel_head.graphs import StaticHead
from paceline.serving.parallel_head.model import (
    DRAFTER_TYPES,
    ParallelHeadConfig,
    ParallelHeadModel,
    block_visibility,
)
from paceline.serving.parallel_head.native import NativeHead


class ParallelHeadDrafter(TrainedDrafter):
    """A product block proposer."""

    forward_class = HeadForward
    config: ParallelHeadConfig
    forward: HeadForward

    def _capabilities(self, num_candidates: int) -> DrafterCaps:
        c = self.config
        return DrafterCaps(
            name=c.drafter_type,
            num_slots=c.num_slots,
            num_candidates=num_candidates,
            max_depth=c.num_slots,
            is_reentrant=False,
            needs_features=True,
            is_product=True,
            is_row_local=True,
        )

    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        c = self.config
        return c.num_layers, num_rows, 2, c.num_kv_heads, c.head_dim

    def _prepare(self) -> None:
        self._hidden_rows = ~block_visibility(self.config.num_rows, self.config.is_causal, self.device)  # (N, N)
        self._lone_bias = torch.empty(0, 0)
        self._scale_cache = ScaleCache()
        self._graphs: PassGraphs | None = None
        self.is_graphed = False
        """Whether the latest `propose` was replayed."""
        self._native: NativeHead | None = None
        if supports_native(self.forward, self.config.feature_size):
            self.forward.is_native, self.kv_dtype = True, self.forward.target_dtype
            self._native = NativeHead(self.forward, self.kv_dtype)

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate zeroed drafter KV for pool rows 0..num_pool_rows-1; compiled drafting has spare rows behind them."""
        super().alloc(num_pool_rows + (0 if self._native is None else SPARE_ROWS))
        if self._native is not None:
            self._native.bind(self.pool, num_pool_rows)

    def make_graphs(self, kernels: Kernels, *, max_requests: int, max_leaves: int, max_context: int) -> PassGraphs:
        """Graphs of the block alone, which the caller has captured; before the first request, after `alloc`.

        max_leaves: of no use here.
        """
        static = self.make_static(kernels, max_requests=max_requests, max_context=max_context)
        self._graphs = PassGraphs(
            static, feature_size=self.config.feature_size, dtype=self.dtype, max_requests=max_requests, max_leaves=0,
            max_context=max_context, has_deltas=self.num_deltas > 0,
        )  # fmt: skip
        return self._graphs

    def make_static(self, kernels: Kernels, *, max_requests: int, max_context: int, max_leaves: int = 0) -> StaticHead:
        """The block as captured work; before the first request, after `alloc`. max_leaves: of no use here."""
        assert self._native is None, "compiled drafting takes one call a block: there is nothing to capture"
        self.forward.use_kernels(kernels)
        self.forward.angles(max_context + self.config.num_slots + 1)  # a larger table would take another's place
        padding = torch.full((num_graph_rows(max_requests, self.caps.max_depth),), -1, device=self.device)
        return StaticHead(
            self.caps, self.ingest, lambda inputs: self._draft(inputs, self.forward.scales(inputs.temperatures)), padding,
            context_row_bytes=self.kv_row_bytes,
        )  # fmt: skip

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """As TrainedDrafter.load_state; weights that were trained with the other kind of block do not fit either."""
        is_causal = state.get("is_causal")
        if is_causal is not None and bool(is_causal.all()) != self.config.is_causal:
            raise DrafterMismatchError(
                f"weights of a {self.caps.name} drafter must have is_causal {self.config.is_causal}, "
                f"got {bool(is_causal.all())}"
            )
        super().load_state(state)
        if self._native is not None:
            self._native.load(state)
        self._scale_cache.clear()

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows, which depend on nothing but their own features. Syncs: none on devices."""
        assert inputs.new_features is not None
        if inputs.new_positions.numel() == 0:
            return
        if self._native is not None:
            self._native.ingest(inputs)
            return
        is_host = self.forward.is_host
        length = int(inputs.new_positions.max()) + 1 if is_host else int(inputs.slot_table.shape[1])
        self.forward.ingest(self.pool, inputs.new_features, inputs.new_positions, inputs.new_slots, length)

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose S slots at each anchor. Syncs: none on devices."""
        if self._graphs is not None:
            proposal = self._graphs.propose(inputs)
            self.is_graphed = proposal is not None
            if proposal is not None:
                return proposal
        scales = self._scale_cache.get(inputs.temperatures, self.forward.scales)
        if self._native is not None:
            return self._native.propose(inputs, scales)
        return self._draft(inputs, scales)

    def _draft(self, inputs: DraftInputs, scales: torch.Tensor) -> Proposal:
        """`propose` by torch's operators or the kernels; off the host without a read or a shape that depends on data."""
        self.ingest(inputs)
        c, batch, rows = self.config, inputs.context_lens.numel(), self.config.num_rows
        is_host = self.forward.is_host
        longest = int(inputs.context_lens.max()) if is_host else int(inputs.slot_table.shape[1])
        positions = inputs.context_lens[:, None] + torch.arange(rows, device=self.device)
        angles = self.forward.angles(longest + rows).index_select(0, positions.flatten())
        keys = self._context(inputs, longest, rows)  # (Lt, B, L + N, 2, Hkv, Dh), the block's part to be filled
        bias = self._lone_mask(longest) if batch == 1 and is_host else self._mask(inputs.context_lens, longest)
        x, others = self.forward.block_rows(inputs.anchor_token_ids), self.forward.choose_deltas(inputs.deltas, rows)
        for i in range(c.num_layers):
            q, k, v = self.forward.enter(i, x, angles)
            layer = keys[i]
            layer[:, longest:, 0] = k.unflatten(0, (batch, rows))
            layer[:, longest:, 1] = v.unflatten(0, (batch, rows))
            x = self.forward.finish(x, self._attend(q, layer, bias), i, others)
        return self.forward.heads(self.forward.block_logits(x), scales, inputs.anchor_token_ids)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Never called: the head is not re-entrant."""
        raise NotImplementedError(f"{self.caps.name} drafts one block a round and is not re-entered")

    # ---- pieces

    def _context(self, inputs: DraftInputs, longest: int, rows: int) -> torch.Tensor:
        """Every layer's context keys and values, padded to the longest request, with room for the block's own."""
        batch, table = inputs.context_lens.numel(), inputs.slot_table[:, :longest]
        keys = self.pool.new_empty(self.pool.shape[0], batch, longest + rows, *self.pool.shape[2:])
        if batch == 1 and self.forward.is_host:
            first = int(table[0, 0])
            if torch.equal(table[0], torch.arange(first, first + longest)):
                keys[:, 0, :longest] = self.pool[:, first : first + longest]
                return keys
        known = torch.arange(longest, device=self.device) < inputs.context_lens[:, None]
        table = (table * known).clamp_(0, self.pool.shape[1] - 1)  # entries past a context are undefined
        keys[:, :, :longest] = self.pool.index_select(1, table.flatten()).unflatten(1, (batch, longest))
        return keys

    def _mask(self, context_lens: torch.Tensor, longest: int) -> torch.Tensor:
        """(B, 1, G * N, L + N) additive mask: a request's own context and the visible rows of its block."""
        rows = self._hidden_rows.shape[0]
        beyond = torch.arange(longest, device=self.device) >= context_lens[:, None, None]  # (B, 1, L)
        hidden = torch.cat((beyond.expand(-1, rows, -1), self._hidden_rows.expand(context_lens.numel(), -1, -1)), dim=2)
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return bias[:, None].repeat(1, 1, self.config.num_heads // self.config.num_kv_heads, 1)

    def _lone_mask(self, longest: int) -> torch.Tensor | None:
        """(G * N, L + N) additive mask of a lone request: a view of a buffer kept from round to round, None = all."""
        c, rows = self.config, self._hidden_rows.shape[0]
        if not c.is_causal:
            return None
        if self._lone_bias.shape[1] < longest + rows:
            one = torch.zeros(rows, max(2048, 2 * (longest + rows)), dtype=self.dtype)
            one[:, -rows:].masked_fill_(self._hidden_rows, float("-inf"))
            self._lone_bias = one.repeat(c.num_heads // c.num_kv_heads, 1)
        return self._lone_bias[:, -(longest + rows) :]

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """q (B * N, Hq, Dh), keys (B, L + N, 2, Hkv, Dh) -> (B * N, Hq * Dh); the G heads of a KV head share its rows."""
        c, batch = self.config, keys.shape[0]
        groups = c.num_heads // c.num_kv_heads
        q = q.view(batch, -1, c.num_kv_heads, groups, c.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = keys[:, :, 0].transpose(1, 2), keys[:, :, 1].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, bias, scale=1.0)  # (B, Hkv, G * N, Dh)
        return out.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).reshape(-1, c.num_heads * c.head_dim)


JETSPEC, DFLASH = (
    DrafterFamily(name=name, config=ParallelHeadConfig, model=ParallelHeadModel, drafter=ParallelHeadDrafter)
    for name in DRAFTER_TYPES
)
