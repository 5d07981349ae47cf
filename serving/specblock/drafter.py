"""SpecBlock drafting: one packed refresh + block-1 forward and one packed block-2 forward per round.

Shape legend: B requests, R new rows, L longest context, K draft slots, T = rows * K drafter tokens, F leaves, H drafter
hidden size, Hq/Hkv query/KV heads, G = Hq / Hkv, Dh head dim, C KV width of a slot (2 * Hkv * Dh: keys, then values).
Drafter KV of pool row r is the K slots of the row at that position; block 1 is causal over the flattened slots, so a
query (row j, slot k) sees flat keys 0 .. j * K + k, and a leaf at slot s of the anchor row j sees 0 .. j * K + s.
Source: SpecBlock (arXiv 2605.07243); aligned refresh: the a + 1 rows that a round committed, at their own positions.
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
from paceline.serving.drafters.pass_graphs import PassGraphs
from paceline.serving.specblock.attention import GatheredAttention
from paceline.serving.specblock.forward import SlotForward
from paceline.serving.specblock.graphs import StaticSpecBlock
from paceline.serving.specblock.model import SpecBlockConfig, SpecBlockModel
from paceline.serving.specblock.native import NativeSpecBlock


class SpecBlockDrafter(TrainedDrafter):
    """A re-entrant block proposer, eager or by graphs."""

    forward_class = SlotForward
    config: SpecBlockConfig
    forward: SlotForward

    def _capabilities(self, num_candidates: int) -> DrafterCaps:
        k = self.config.num_slots
        return DrafterCaps(
            name=SpecBlockModel.drafter_type,
            num_slots=k,
            num_candidates=num_candidates,
            max_depth=2 * k,
            is_reentrant=True,
            needs_features=True,
            is_row_local=True,
        )

    def _pool_shape(self, num_rows: int) -> tuple[int, ...]:
        c = self.config
        return c.num_layers, num_rows, c.num_slots, 2 * c.num_kv_heads * c.head_dim

    def _prepare(self) -> None:
        self._attention = GatheredAttention(self.forward)
        self._scale_cache = ScaleCache()
        self._native: NativeSpecBlock | None = None
        if supports_native(self.forward):
            self.kv_dtype = self.forward.target_dtype
            self._native = NativeSpecBlock(self.forward, self.kv_dtype)

    # ---- weights and KV

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state(state)
        if self._native is not None:
            self._native.load(state)
        self._scale_cache.clear()

    def alloc(self, num_pool_rows: int) -> None:
        super().alloc(num_pool_rows + (0 if self._native is None else SPARE_ROWS))
        self._attention.bind(self.pool, num_pool_rows)
        self._num_rows = num_pool_rows
        if self._native is not None:
            self._native.bind(self.pool, num_pool_rows)
        self._round: tuple[DraftInputs, torch.Tensor] | None = None  # inputs and scales of the latest eager `propose`
        self._graphs: PassGraphs | None = None
        self._is_graphed = False  # the latest `propose` was replayed

    def make_graphs(self, kernels: Kernels, *, max_requests: int, max_leaves: int, max_context: int) -> PassGraphs:
        """Graphs of the blocks alone, which the caller has captured; before the first request, after `alloc`.

        max_leaves: of one request.
        """
        limits = {"max_requests": max_requests, "max_leaves": max_leaves, "max_context": max_context}
        self._graphs = PassGraphs(
            self.make_static(kernels, **limits), feature_size=self.config.feature_size, dtype=self.dtype,
            has_deltas=self.num_deltas > 0, **limits,
        )  # fmt: skip
        return self._graphs

    def make_static(self, kernels: Kernels, *, max_requests: int, max_leaves: int, max_context: int) -> StaticSpecBlock:
        """Both blocks as captured work; before the first request, after `alloc`. Arguments as for `make_graphs`."""
        num_rows = self._make_room(max_requests)
        return StaticSpecBlock(
            self.caps, self.forward, self.pool, kernels, first_spare=num_rows, max_leaves=max_leaves,
            max_context=max_context,
        )  # fmt: skip

    def _make_room(self, max_requests: int) -> int:
        """Allocate the pool anew, with spare rows for padding behind those that it has; returns how many it has."""
        num_rows = self._num_rows
        was_native = self._native is not None
        self._native, self.kv_dtype = None, self.dtype  # its keys are turned otherwise
        if was_native and self.num_deltas:  # torch's form has no room for them yet
            self.hold_deltas(self.num_deltas, self.delta_rank)
        self.pool = self.pool.new_empty(0)  # the old one goes before the new one comes
        self._attention.bind(self.pool, 0)
        self.alloc(num_rows + num_graph_rows(max_requests, self.caps.max_depth))
        self._attention.bind(self.pool, num_rows)
        self._num_rows = num_rows
        return num_rows

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows. Rows before them must have been ingested."""
        if self._native is not None:
            self._native.ingest(inputs)
        else:
            self.forward.ingest(self._attention, inputs)
        self._round = None

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and propose block 1 at each anchor. Syncs: none by graph, else small read-backs."""
        if self._graphs is not None:
            proposal = self._graphs.propose(inputs)
            self._is_graphed, self._round = proposal is not None, None
            if proposal is not None:
                return proposal
        scales = self._scale_cache.get(inputs.temperatures, self.forward.scales)
        self._round = (inputs, scales)
        if self._native is not None:
            return self._native.block1(inputs, scales)
        return self.forward.block1(self._attention, inputs, scales)

    @torch.no_grad()
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Propose block 2 at the leaves; `inputs` must be those of the latest `propose`. Writes no KV."""
        if self._graphs is not None and self._is_graphed:
            return self._graphs.expand(inputs, frontier)
        assert self._round is not None and self._round[0] is inputs, "expand follows propose on the same inputs"
        assert proposal.hidden is not None
        if self._native is not None:
            return self._native.block2(inputs, proposal.hidden, frontier, self._round[1])
        return self.forward.block2(self._attention, inputs, proposal.hidden, frontier, self._round[1])


FAMILY = DrafterFamily(
    name=SpecBlockModel.drafter_type, config=SpecBlockConfig, model=SpecBlockModel, drafter=SpecBlockDrafter
)
