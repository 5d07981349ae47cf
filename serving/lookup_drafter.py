"""What followed the last time this text occurred? (prompt-lookup drafter)

The newest earlier occurrence of the last n tokens (n = 4, 3, 2) gives the chain; older occurrences that agree with it
so far give alternatives, from which the drafter continues when it is re-entered. Host-side, no weights, no KV.
Source: prompt lookup decoding (transformers `prompt_lookup_num_tokens`), with several matches as one tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.serving.text_drafter import Slots, TextDrafter

_HIT_RATE = {4: 0.85, 3: 0.75, 2: 0.6}
"""Assumed chance that the next token of a match of this length is right; online calibration corrects it."""


class PromptLookupDrafter(TextDrafter):
    """Drafts from the request's own prompt and output."""

    def __init__(self, *, num_slots: int = 8, num_candidates: int = 3, max_matches: int = 8) -> None:
        super().__init__("lookup", num_slots=num_slots, num_candidates=num_candidates)
        self._max_matches = max_matches
        self._tables: dict[str, _Occurrences] = {}

    def follow(self, request_id: str, history: Sequence[int]) -> None:
        """Index what is new."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = _Occurrences()
        table.extend(history)

    def release(self, request_id: str) -> None:
        """Forget the request's occurrence table."""
        self._tables.pop(request_id, None)

    def slots(self, request_id: str, history: Sequence[int], path: Sequence[int]) -> Slots:
        """What followed the newest, longest match of the end of history + path."""
        longest = max(_HIT_RATE)
        suffix = [*history[-longest:], *path][-longest:]
        return self._slots(self._tables[request_id], history, suffix)

    def _slots(self, table: _Occurrences, history: Sequence[int], suffix: Sequence[int]) -> Slots:
        matches = table.find(suffix, self._max_matches)
        if not matches:
            return []
        length = matches[0][1]
        alive = [end for end, n in matches if n >= length - 1]
        slots: Slots = []
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
