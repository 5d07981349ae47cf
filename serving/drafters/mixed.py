"""Mixed drafts: candidates of a model drafter and of one without weights in one tree.

Each proposes below every node as it would alone; the second proposal is a second chain of the same block
(`Proposal.restart`). The tree builder merges equal (parent, token) into the heavier one, and the budget takes the
heaviest nodes, whoever proposed them. Online calibration keeps the two apart, because they sit in different slots.
Losing nothing is not at stake: the target verifies all of them alike.
Source: mixed drafting, tree_speculation.md 4.5.

Shape legend: B requests, F frontier leaves, S1 and S2 slots of model and text drafter, S = S1 + S2, K candidates per slot.
"""

from __future__ import annotations

import torch

from paceline.serving.drafters.interface import Drafter, DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.text import TextDrafter


class MixedDrafter:
    """A model drafter (or any other) with a text drafter at its side; both belong to the caller."""

    def __init__(self, model: Drafter, text: TextDrafter) -> None:
        self.model, self.text = model, text
        own, other = model.caps, text.caps
        self._split = own.num_slots
        self.caps = DrafterCaps(
            name=f"{own.name}+{other.name}",
            num_slots=own.num_slots + other.num_slots,
            num_candidates=max(own.num_candidates, other.num_candidates),
            max_depth=max(own.max_depth, own.num_slots + other.num_slots, other.max_depth),
            is_reentrant=own.is_reentrant,
            needs_features=own.needs_features,
            is_product=own.is_product,
            is_row_local=own.is_row_local,
        )

    def alloc(self, num_pool_rows: int) -> None:
        """Allocate the model drafter's KV."""
        self.model.alloc(num_pool_rows)

    def ingest(self, inputs: DraftInputs) -> None:
        """Both take in what is new."""
        self.model.ingest(inputs)
        self.text.ingest(inputs)

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Both propose below each anchor."""
        own, other = self.model.propose(inputs), self.text.propose(inputs)
        out = self._empty(own, len(inputs.request_ids))
        self._put(out, own, slice(None), 0)
        self._put(out, other, slice(None), self._split)
        out.hidden = own.hidden
        if own.edge_logprobs is not None:  # the text's chain has none: it is no table
            out.edge_logprobs = self._widened(own.edge_logprobs, own.widths)
        return out

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Both continue below the model drafter's leaves. Below its own leaves the text drafter continues alone: the model
        has no hidden state on that path. Syncs: one."""
        is_own = frontier.slot < self._split
        own_rows, text_rows = is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]
        out = self._empty(proposal, frontier.slot.numel())
        first, second = self._part(proposal, 0, self._split), self._part(proposal, self._split, None)
        first.hidden = proposal.hidden
        if own_rows.numel() > 0:
            leaves = _take(frontier, own_rows, 0)
            self._put(out, self.model.expand(inputs, first, leaves), own_rows, 0)
            self._put(out, self.text.expand(inputs, first, leaves), own_rows, self._split)
        if text_rows.numel() > 0:
            leaves = _take(frontier, text_rows, self._split)
            self._put(out, self.text.expand(inputs, second, leaves), text_rows, self._split)
        return out

    def release(self, request_id: str) -> None:
        """Both forget the request."""
        self.model.release(request_id)
        self.text.release(request_id)

    def _empty(self, like: Proposal, num_nodes: int) -> Proposal:
        shape, device = (num_nodes, self.caps.num_slots, self.caps.num_candidates), like.logprobs.device
        return Proposal(
            token_ids=torch.zeros(shape, dtype=torch.int64, device=device),
            logprobs=torch.full(shape, float("-inf"), device=device),
            widths=None,
            restart=self._split,
        )

    def _put(self, out: Proposal, part: Proposal, rows: slice | torch.Tensor, slot: int) -> None:
        num_slots, width = part.logprobs.shape[1:]
        logprobs = part.logprobs
        if part.widths is not None:  # the other drafter has none
            columns = torch.arange(width, device=logprobs.device)
            logprobs = logprobs.masked_fill(columns >= part.widths[:, :, None], float("-inf"))
        out.token_ids[rows, slot : slot + num_slots, :width] = part.token_ids
        out.logprobs[rows, slot : slot + num_slots, :width] = logprobs

    def _widened(self, edges: torch.Tensor, widths: torch.Tensor | None) -> torch.Tensor:
        """A product table's scores below each parent (F, S1 - 1, K, K), with room for candidates that only text has."""
        if widths is not None:
            rank = edges.argsort(dim=-1, descending=True).argsort(dim=-1)
            edges = edges.masked_fill(rank >= widths[:, 1:, None, None], float("-inf"))
        room = self.caps.num_candidates - edges.shape[3]
        return torch.nn.functional.pad(edges, (0, room, 0, room), value=float("-inf"))

    @staticmethod
    def _part(proposal: Proposal, start: int, stop: int | None) -> Proposal:
        return Proposal(
            token_ids=proposal.token_ids[:, start:stop], logprobs=proposal.logprobs[:, start:stop], widths=None
        )


def _take(frontier: Frontier, rows: torch.Tensor, first_slot: int) -> Frontier:
    return Frontier(
        request=frontier.request[rows], slot=frontier.slot[rows] - first_slot, token_ids=frontier.token_ids[rows]
    )
