"""What followed the last time this text occurred? (prompt-lookup drafter)

Shape legend: B requests, F frontier leaves, S draft slots, K candidates per slot.
The newest earlier occurrence of the last n tokens (n = 4, 3, 2) gives the chain; older occurrences that agree with it
so far give alternatives, from which the drafter continues when it is re-entered. Host-side, no weights, no KV.
Source: prompt lookup decoding (transformers `prompt_lookup_num_tokens`), with several matches as one tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.serving.drafter import DrafterCaps, DraftInputs, Frontier, Proposal

_HIT_RATE = {4: 0.85, 3: 0.75, 2: 0.6}
"""Assumed chance that the next token of a match of this length is right; online calibration corrects it."""


class PromptLookupDrafter:
    """Drafts from the request's own prompt and output."""

    def __init__(self, *, num_slots: int = 8, num_candidates: int = 3, max_matches: int = 8) -> None:
        self.caps = DrafterCaps(
            name="lookup",
            num_slots=num_slots,
            num_candidates=num_candidates,
            max_depth=2 * num_slots,
            is_reentrant=True,
            needs_features=False,
        )
        self._max_matches = max_matches
        self._tables: dict[str, _Occurrences] = {}

    def alloc(self, num_pool_rows: int) -> None:
        """Nothing to allocate."""

    def ingest(self, inputs: DraftInputs) -> None:
        """Nothing to do: histories carry the text."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Slots below each anchor."""
        rows = []
        for request_id, history in zip(inputs.request_ids, inputs.histories, strict=True):
            table = self._tables.get(request_id)
            if table is None:
                table = self._tables[request_id] = _Occurrences()
            table.extend(history)
            rows.append(self._slots(table, history, history[-max(_HIT_RATE) :]))
        return self._pack(rows)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Slots below each leaf: the history with the leaf's path as its end."""
        chains = proposal.token_ids[:, :, 0].tolist()
        rows = []
        for request, slot, token in zip(
            frontier.request.tolist(), frontier.slot.tolist(), frontier.token_ids.tolist(), strict=True
        ):
            history = inputs.histories[request]
            longest = max(_HIT_RATE)
            suffix = (history[-longest:] + chains[request][:slot] + [token])[-longest:]
            rows.append(self._slots(self._tables[inputs.request_ids[request]], history, suffix))
        return self._pack(rows)

    def release(self, request_id: str) -> None:
        """Forget the request's occurrence table."""
        self._tables.pop(request_id, None)

    def _slots(
        self, table: _Occurrences, history: Sequence[int], suffix: Sequence[int]
    ) -> list[list[tuple[int, float]]]:
        """Per slot the distinct (token, log-probability), best first."""
        matches = table.find(suffix, self._max_matches)
        if not matches:
            return []
        length = matches[0][1]
        alive = [end for end, n in matches if n >= length - 1]
        slots: list[list[tuple[int, float]]] = []
        for depth in range(self.caps.num_slots):
            following = [history[end + depth] for end in alive if end + depth < len(history)]
            if not following:
                break
            distinct = list(dict.fromkeys(following))[: self.caps.num_candidates]
            hit = _HIT_RATE[length]
            first = hit if len(distinct) == 1 else hit * 0.75
            rest = [(hit - first) * 0.5**i for i in range(1, len(distinct))]
            slots.append([(t, math.log(p)) for t, p in zip(distinct, [first, *rest], strict=True)])
            alive = [end for end in alive if end + depth < len(history) and history[end + depth] == distinct[0]]
        return slots

    def _pack(self, rows: list[list[list[tuple[int, float]]]]) -> Proposal:
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
        return Proposal(token_ids=token_ids, logprobs=logprobs, widths=None)


class _Occurrences:
    """Where each n-gram of one text ends: positions of the token after it, oldest first."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._length = 0

    def extend(self, history: Sequence[int]) -> None:
        """Index what is new; an n-gram is indexed once a token follows it."""
        for end in range(max(self._length, 1), len(history)):
            for n in _HIT_RATE:
                if end >= n:
                    self._ends.setdefault(tuple(history[end - n : end]), []).append(end)
        self._length = len(history)

    def find(self, suffix: Sequence[int], max_matches: int) -> list[tuple[int, int]]:
        """(position after the match, match length), longest and then newest first."""
        out: list[tuple[int, int]] = []
        seen: set[int] = set()
        for n in _HIT_RATE:
            if len(suffix) < n:
                continue
            for end in reversed(self._ends.get(tuple(suffix[-n:]), [])[-max_matches:]):
                if end not in seen:
                    seen.add(end)
                    out.append((end, n))
        return out[:max_matches]
