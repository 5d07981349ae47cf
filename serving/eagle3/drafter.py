"""EAGLE-3 drafting: true-feature rows of the context, and below them a tree of rows that exist for one round.

Shape legend: B requests, S draft slots of a call, K candidates, F leaves, N rows of a step, W of a request at most, D columns
of tree rows so far, H drafter hidden size, Hkv KV heads, Dh head dim, Vd draft vocabulary.
The row at position j holds the target's feature at j and the token at j + 1, and its output proposes the token at j + 2.
A drafted token's row holds the drafter's hidden state that proposed it; it sees the context and its own ancestors. Tree
rows live in a buffer of the round and never among the text's, where the accepted tokens' rows are written later with true
features. A call adds S tokens below each node greedily, one forward a token; `expand` re-enters at any candidate.
Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.forward import ScaleCache
from paceline.serving.drafters.graph_inputs import num_graph_rows
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.native import SPARE_ROWS, supports_native
from paceline.serving.eagle3.forward import EagleForward
from paceline.serving.eagle3.levels import Levels, StaticEagle
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.eagle3.native import NativeTree
from paceline.serving.eagle3.tree import DraftedRows, GatheredTree


class EagleDrafter(TrainedDrafter):
    """A re-entrant drafter that drafts level by level or S tokens a call."""

    forward_class = EagleForward
    config: EagleConfig
    forward: EagleForward

    def _capabilities(self, num_candidates: int) -> DrafterCaps:
        c = self.config
        return DrafterCaps(
            name=EagleModel.drafter_type,
            num_slots=c.num_slots,
            num_candidates=num_candidates,
            max_depth=c.num_slots * (c.max_depth // c.num_slots),
            num_blocks=c.max_depth // c.num_slots,
            is_reentrant=c.max_depth >= 2 * c.num_slots,
            needs_features=True,
            is_row_local=True,
        )

    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        return num_rows, 2 * self.config.num_kv_heads * self.config.head_dim

    def _prepare(self) -> None:
        self._scale_cache = ScaleCache()
        self._native: NativeTree | None = None
        if supports_native(self.forward, self.config.feature_size, self.config.embed_size):
            self.forward.is_native, self.kv_dtype = True, self.forward.target_dtype
            self._native = NativeTree(self.forward, self.kv_dtype)
        self._tree: DraftedRows = self._native or GatheredTree(self.forward, self.caps.max_depth)
        self._levels = Levels(
            self.caps, self.forward, self._tree, lambda temps: self._scale_cache.get(temps, self.forward.scales)
        )

    # ---- weights and KV

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state(state)
        if self._native is not None:
            self._native.load(state)
        self._scale_cache.clear()

    def alloc(self, num_pool_rows: int) -> None:
        super().alloc(num_pool_rows + (0 if self._native is None else SPARE_ROWS))
        self._tree.bind(self.pool, num_pool_rows)
        self._num_rows = num_pool_rows
        self._levels.forget()

    def make_static(self, kernels: Kernels, *, max_requests: int, max_context: int, max_leaves: int = 0) -> StaticEagle:
        """A round as captured work; before the first request, after `alloc`. max_leaves: of no use here.

        The pool is allocated anew, with spare rows for padding behind those that it has.
        """
        assert self._native is None, "compiled drafting has nothing to capture"
        num_rows, forward = self._num_rows, self.forward
        forward.use_kernels(kernels)
        forward.angles(max_context + self.caps.max_depth + 1)  # a larger table would take another's place
        self.alloc(num_rows + num_graph_rows(max_requests, self.caps.max_depth))
        tree = GatheredTree(forward, self.caps.max_depth, is_static=True)
        tree.bind(self.pool, num_rows)
        self._num_rows = num_rows
        padding = torch.arange(num_rows, self.pool.shape[0], device=self.device)
        levels = Levels(self.caps, forward, tree, forward.scales)
        return StaticEagle(levels, padding, context_row_bytes=self.kv_row_bytes)

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows."""
        self._levels.ingest(inputs)

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and draft S tokens at each anchor.  Syncs: one."""
        proposal = self._levels.propose(inputs)
        self.pool = self._tree.pool  # which may have grown
        return proposal

    @torch.no_grad()
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Draft S tokens at candidates of a proposal of this round.

        A proposal that was expanded later than this one cannot be expanded any more.  Syncs: one when B > 1.
        """
        result = self._levels.expand(inputs, proposal, frontier)
        self.pool = self._tree.pool
        return result


FAMILY = DrafterFamily(name=EagleModel.drafter_type, config=EagleConfig, model=EagleModel, drafter=EagleDrafter)
