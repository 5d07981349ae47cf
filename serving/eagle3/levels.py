"""Levels: a round of EAGLE-3, each call S tokens below nodes of the one before, over whatever holds its tree rows.

Shape legend: as drafter.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.serving.drafters.graph_inputs import MAX_GATHERED_BYTES
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.eagle3.forward import EagleForward
from paceline.serving.eagle3.tree import DraftedRows, StepRows


@dataclass(slots=True)
class _Block:
    """Where the candidates of a proposal can be re-entered."""

    hidden: torch.Tensor  # (F, S, H), the proposal's
    depths: torch.Tensor  # (F,) int64, depth of each node: its slot s proposes depth + s + 1
    seen: torch.Tensor  # (F, S, D), columns that a child of slot s sees


class Levels:
    """The calls of a round, which remembers where it can go on until the next one begins."""

    def __init__(
        self,
        caps: DrafterCaps,
        forward: EagleForward,
        tree: DraftedRows,
        scales: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """scales: temperatures (B,) -> factors on the logits of each step (B, steps)."""
        self.caps, self._forward, self._tree, self._find_scales = caps, forward, tree, scales
        self.forget()

    def forget(self) -> None:
        """There is no round."""
        self._inputs: DraftInputs | None = None
        self._blocks: list[_Block] = []  # each below the one before

    def ingest(self, inputs: DraftInputs) -> None:
        """Write drafter KV for the new rows."""
        self._tree.ingest(inputs)
        self.forget()

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Ingest the new rows and draft S tokens at each anchor.  Syncs: one."""
        self._inputs = inputs
        hidden, logits = self._tree.open(inputs)
        self._scales = self._find_scales(inputs.temperatures)  # (B, steps)
        slots = self._forward.heads(logits, self._scales[:, :1])
        depths = torch.zeros_like(inputs.context_lens)
        rows = self._tree.rows(torch.arange(depths.numel(), device=self._forward.device))
        proposal, block = self._unroll(rows, hidden, slots, depths, None)
        self._blocks = [block]
        return proposal

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
        tree, width, count = self._tree, rows.width, self._forward.config.num_slots - 1
        if count == 0:
            seen = rows.own[:, :0] if seen is None else seen
            block = _Block(hidden[:, None], depths, seen[:, None])
            one = Proposal(token_ids=slots[0][:, None], logprobs=slots[1][:, None], widths=None, hidden=block.hidden)
            return one, block
        first = 0 if seen is None else seen.shape[1]
        shape = (hidden.shape[0], count + 1, first + count * width)
        mask = torch.full(shape, tree.visible, dtype=tree.mask_dtype, device=self._forward.device)
        if seen is not None:
            mask[:, :, :first] = seen[:, None]
        mask[:, :, first:] = rows.own.repeat(1, count)[:, None]
        steps = torch.arange(count + 1, device=self._forward.device)
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
        steps = depths.clamp(max=self._forward.config.num_steps - 1)
        return hidden, self._forward.heads(logits, self._scales[rows.owner, steps][:, None])


class StaticEagle:
    """A round as captured work. The drafter's weights may change in place; its pool must not move."""

    def __init__(self, levels: Levels, padding_slots: torch.Tensor, *, context_row_bytes: int) -> None:
        """levels: over rows that are `is_static`. context_row_bytes: of a row of the drafter's K/V."""
        self.caps, self.padding_slots = levels.caps, padding_slots
        self._context_row_bytes = context_row_bytes
        self.ingest, self.propose, self.expand = levels.ingest, levels.propose, levels.expand

    def takes(self, num_requests: int, width: int) -> bool:
        """Whether the contexts that it gathers are small enough."""
        return num_requests * width * self._context_row_bytes <= MAX_GATHERED_BYTES
