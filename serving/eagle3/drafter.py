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
from dataclasses import dataclass

import torch

from paceline.serving.drafters.family import DrafterFamily, TrainedDrafter
from paceline.serving.drafters.forward import ScaleCache
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.native import SPARE_ROWS, supports_native
from paceline.serving.eagle3.forward import EagleForward
from paceline.serving.eagle3.model import EagleConfig, EagleModel
from paceline.serving.eagle3.native import NativeTree
from paceline.serving.eagle3.tree import DraftedRows, GatheredTree, StepRows


@dataclass(slots=True)
class _Block:
    """Where the candidates of a proposal can be re-entered."""

    hidden: torch.Tensor  # (F, S, H), the proposal's
    depths: torch.Tensor  # (F,) int64, depth of each node: its slot s proposes depth + s + 1
    seen: torch.Tensor  # (F, S, D), columns that a child of slot s sees


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

    # ---- weights and KV

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_state(state)
        if self._native is not None:
            self._native.load(state)
        self._scale_cache.clear()

    def alloc(self, num_pool_rows: int) -> None:
        super().alloc(num_pool_rows + (0 if self._native is None else SPARE_ROWS))
        self._tree.bind(self.pool, num_pool_rows)
        self._inputs: DraftInputs | None = None  # of the round
        self._blocks: list[_Block] = []  # of the round, each below the one before

    # ---- the drafter interface

    @torch.no_grad()
    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows."""
        self._tree.ingest(inputs)
        self._inputs, self._blocks = None, []

    @torch.no_grad()
    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and draft S tokens at each anchor.  Syncs: one."""
        self._inputs = inputs
        hidden, logits = self._tree.open(inputs)
        self._scales = self._scale_cache.get(inputs.temperatures, self.forward.scales)  # (B, steps)
        slots = self.forward.heads(logits, self._scales[:, :1])
        depths = torch.zeros_like(inputs.context_lens)
        rows = self._tree.rows(torch.arange(depths.numel(), device=self.device))
        proposal, block = self._unroll(rows, hidden, slots, depths, None)
        self._blocks = [block]
        return proposal

    @torch.no_grad()
    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Draft S tokens at candidates of a proposal of this round.

        A proposal that was expanded later than this one cannot be expanded any more.  Syncs: one when B > 1.
        """
        assert self._inputs is inputs, "expand follows propose on the same inputs"
        at = next((i for i, block in enumerate(self._blocks) if block.hidden is proposal.hidden), None)
        assert at is not None, "only proposals of this round can be expanded"
        block = self._blocks[at]
        self._tree.num_columns = block.seen.shape[2]
        node = frontier.request if frontier.node is None else frontier.node
        cell = node if self.caps.num_slots == 1 else node * self.caps.num_slots + frontier.slot
        rows = self._tree.rows(frontier.request)
        depths = rows.lay(block.depths.index_select(0, node) + (frontier.slot + 1))
        seen = torch.cat((rows.lay(block.seen.flatten(0, 1).index_select(0, cell)), rows.own), 1)
        hidden = rows.lay(block.hidden.flatten(0, 1).index_select(0, cell))
        hidden, slots = self._step(rows, hidden, rows.lay(frontier.token_ids), depths, seen)
        result, after = self._unroll(rows, hidden, slots, depths, seen)
        if rows.place is not None:
            result.token_ids, result.logprobs = result.token_ids[rows.place], result.logprobs[rows.place]
            after = _Block(after.hidden[rows.place], after.depths[rows.place], after.seen[rows.place])
            result.hidden = after.hidden
        self._blocks = [*self._blocks[: at + 1], after]
        return result

    # ---- pieces

    def _unroll(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[Proposal, _Block]:
        """Draft on below the first candidates of slot 0 until there are S slots.

        Args:
            rows: those that each step adds.
            hidden: (N, H) that proposed slot 0, with `slots`, its tokens and log-probabilities (N, K).
            depths: (N,) of the nodes that slot 0 hangs below.
            seen: (N, D) columns that a child of slot 0 sees; None = there are none.
        """
        tree, width, count = self._tree, rows.width, self.config.num_slots - 1
        if count == 0:
            seen = rows.own[:, :0] if seen is None else seen
            block = _Block(hidden[:, None], depths, seen[:, None])
            one = Proposal(token_ids=slots[0][:, None], logprobs=slots[1][:, None], widths=None, hidden=block.hidden)
            return one, block
        first = 0 if seen is None else seen.shape[1]
        shape = (hidden.shape[0], count + 1, first + count * width)
        mask = torch.full(shape, tree.visible, dtype=tree.mask_dtype, device=self.device)
        if seen is not None:
            mask[:, :, :first] = seen[:, None]
        mask[:, :, first:] = rows.own.repeat(1, count)[:, None]
        steps = torch.arange(count + 1, device=self.device)
        later = (steps[:-1] >= steps[:, None]).repeat_interleave(width, 1)  # (S, count * W): columns of later steps
        mask[:, :, first:].masked_fill_(later, tree.hidden)
        every_id, every_logprob, every_hidden = [slots[0]], [slots[1]], [hidden]
        for step in range(count):
            visible = None if seen is None else mask[:, step + 1, : first + (step + 1) * width]
            hidden, slots = self._step(rows, hidden.clone(), slots[0][:, 0], depths + (step + 1), visible)
            every_id.append(slots[0])
            every_logprob.append(slots[1])
            every_hidden.append(hidden)
        block = _Block(torch.stack(every_hidden, 1), depths, mask)
        ids, logprobs = torch.stack(every_id, 1), torch.stack(every_logprob, 1)
        return Proposal(token_ids=ids, logprobs=logprobs, widths=None, hidden=block.hidden), block

    def _step(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        depths: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One forward of drafted tokens, as `DraftedRows.step`: the rows' hidden states and their best candidates."""
        hidden, logits = self._tree.step(rows, hidden, token_ids, depths, seen)
        self.pool = self._tree.pool  # which may have grown
        steps = depths.clamp(max=self.config.num_steps - 1)
        return hidden, self.forward.heads(logits, self._scales[rows.owner, steps][:, None])


FAMILY = DrafterFamily(name=EagleModel.drafter_type, config=EagleConfig, model=EagleModel, drafter=EagleDrafter)
