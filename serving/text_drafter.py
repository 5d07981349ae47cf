"""What do drafters share that draft from text alone: no weights, no KV, no features?

They work on the host, one request after another, and keep something per request that grows with its text.

Shape legend: B requests, F frontier leaves, S draft slots, K candidates per slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.serving.drafter import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.upload import upload

Slots = list[list[tuple[int, float]]]
"""Per slot the distinct (token, log-probability), best first; the first ones are the chain."""


class TextDrafter:
    """Base: a subclass says how it follows a text and what it expects next."""

    def __init__(self, name: str, *, num_slots: int, num_candidates: int) -> None:
        self.caps = DrafterCaps(
            name=name,
            num_slots=num_slots,
            num_candidates=num_candidates,
            max_depth=2 * num_slots,
            is_reentrant=True,
            needs_features=False,
        )

    def alloc(self, num_pool_rows: int) -> None:
        """Nothing to allocate."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Take in the requests' texts, so that long ones do not make a proposal slow."""
        for request_id, history in zip(inputs.request_ids, inputs.histories, strict=True):
            self.follow(request_id, history)

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Slots below each anchor."""
        self.ingest(inputs)
        pairs = zip(inputs.request_ids, inputs.histories, strict=True)
        return self._pack([self.slots(request_id, history, ()) for request_id, history in pairs], inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Slots below each leaf: what follows the text with the leaf's path as its end."""
        chains = proposal.token_ids[:, :, 0].tolist()
        rows = []
        for request, slot, token in zip(
            frontier.request.tolist(), frontier.slot.tolist(), frontier.token_ids.tolist(), strict=True
        ):
            path = [*chains[request][:slot], token]
            rows.append(self.slots(inputs.request_ids[request], inputs.histories[request], path))
        return self._pack(rows, inputs)

    def release(self, request_id: str) -> None:
        """Forget what is kept for the request."""
        raise NotImplementedError

    def follow(self, request_id: str, history: Sequence[int]) -> None:
        """Take in what is new in the text of a request; `history` has only grown since the last call."""
        raise NotImplementedError

    def slots(self, request_id: str, history: Sequence[int], path: Sequence[int]) -> Slots:
        """What is expected after history + path, at most S slots of K tokens; call `follow` first."""
        raise NotImplementedError

    def _pack(self, rows: list[Slots], inputs: DraftInputs) -> Proposal:
        shape = (len(rows), self.caps.num_slots, self.caps.num_candidates)
        token_ids = torch.zeros(shape, dtype=torch.int64)
        logprobs = torch.full(shape, float("-inf"))
        flat = [
            (f, s, k, t, p) for f, row in enumerate(rows) for s, slot in enumerate(row) for k, (t, p) in enumerate(slot)
        ]
        if flat:
            f, s, k, t, p = zip(*flat, strict=True)
            at = (torch.tensor(f), torch.tensor(s), torch.tensor(k))
            token_ids[at] = torch.tensor(t)
            logprobs[at] = torch.tensor(p)
        device = inputs.anchor_token_ids.device
        return Proposal(token_ids=upload(token_ids, device), logprobs=upload(logprobs, device), widths=None)
