"""Text drafters: they draft from text alone, without weights, KV or features.

They work on the host, one request after another, and keep something per request that grows with its text.

Shape legend: B requests, F frontier leaves, S draft slots, K candidates per slot.

Prompt lookup: the newest earlier occurrence of the last n tokens (n = 4, 3, 2) gives the chain; older occurrences that agree with it
so far give alternatives, from which the drafter continues when it is re-entered. Host-side, no weights, no KV.
Source: prompt lookup decoding (transformers `prompt_lookup_num_tokens`), with several matches as one tree.

Suffix drafter: where prompt lookup takes the newest match, this one counts all matches, of any length up to 16 tokens, in the request's
own prompt and output and, if asked, in recent answers to the same tenant by the same replica; the newest counts more. The
estimate of the longest match is blended with those of shorter ones, which occurred more often: a tree of candidates with
frequencies for scores. Host-side, no weights, no KV; memory is bounded. Others' answers only change how fast a text comes;
but whoever measures times closely could tell that such a text was written before, so a tenant's stay with the tenant.
Source: the idea of SuffixDecoding (arXiv 2411.04975) on suffix automata (as SAM Decoding, arXiv 2411.10666); blending as
in prediction by partial matching.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.suffix_automaton import (
    MAX_CONTEXT,
    MIN_CONTEXT,
    Automaton,
    Slots,
    Suffixes,
    make_suffixes,
    write,
)
from paceline.serving.target_model.device import upload


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
        for i, (request_id, history) in enumerate(zip(inputs.request_ids, inputs.histories, strict=True)):
            self.follow(request_id, history, inputs.tenant(i))

    def propose(self, inputs: DraftInputs) -> Proposal:
        """Slots below each anchor."""
        self.ingest(inputs)
        return self._pack([(i, ()) for i in range(len(inputs.request_ids))], inputs)

    def expand(self, inputs: DraftInputs, proposal: Proposal, frontier: Frontier) -> Proposal:
        """Slots below each leaf: what follows the text with the leaf's path as its end."""
        chains = proposal.token_ids[:, :, 0].tolist()
        rows: list[tuple[int, Sequence[int]]] = []
        for request, slot, token in zip(
            frontier.request.tolist(), frontier.slot.tolist(), frontier.token_ids.tolist(), strict=True
        ):
            rows.append((request, [*chains[request][:slot], token]))
        return self._pack(rows, inputs)

    def release(self, request_id: str) -> None:
        """Forget what is kept for the request."""
        raise NotImplementedError

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
        """Take in what is new in the text of a request; `history` has only grown since the last call."""
        raise NotImplementedError

    def write_slots(
        self,
        request_id: str,
        history: Sequence[int],
        path: Sequence[int],
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write what is expected after history + path into a row of token ids and log-probabilities (F, S, K), contiguous,
        which hold zeros and -inf; call `follow` first."""
        raise NotImplementedError

    def expects(self, request_id: str, history: Sequence[int], tenant: str = "") -> bool:
        """Whether a proposal may hold anything: far cheaper than to make one. Takes in what is new in the text."""
        raise NotImplementedError

    def _pack(self, rows: list[tuple[int, Sequence[int]]], inputs: DraftInputs) -> Proposal:
        """What comes after (request, path) in each row."""
        shape = (len(rows), self.caps.num_slots, self.caps.num_candidates)
        proposal = torch.zeros(shape, dtype=torch.int64), torch.full(shape, float("-inf"))
        for row, (i, path) in enumerate(rows):
            self.write_slots(inputs.request_ids[i], inputs.histories[i], path, proposal, row)
        device = inputs.anchor_token_ids.device
        return Proposal(token_ids=upload(proposal[0], device), logprobs=upload(proposal[1], device), widths=None)


_HIT_RATE = {4: 0.85, 3: 0.75, 2: 0.6}
"""Assumed chance that the next token of a match of this length is right; online calibration corrects it."""


class PromptLookupDrafter(TextDrafter):
    """Drafts from the request's own prompt and output."""

    def __init__(self, *, num_slots: int = 8, num_candidates: int = 3, max_matches: int = 8) -> None:
        super().__init__("lookup", num_slots=num_slots, num_candidates=num_candidates)
        self._max_matches = max_matches
        self._tables: dict[str, _Occurrences] = {}

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
        """Index what is new, of long texts a part in every call."""
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = _Occurrences()
        table.extend(history)

    def release(self, request_id: str) -> None:
        """Forget the request's occurrence table."""
        self._tables.pop(request_id, None)

    def write_slots(
        self,
        request_id: str,
        history: Sequence[int],
        path: Sequence[int],
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write what followed the newest, longest match of the end of history + path."""
        longest = max(_HIT_RATE)
        suffix = [*history[-longest:], *path][-longest:]
        write(self._slots(self._tables[request_id], history, suffix), proposal, row)

    def expects(self, request_id: str, history: Sequence[int], tenant: str = "") -> bool:
        """Whether an end of the text occurred before."""
        self.follow(request_id, history, tenant)
        return bool(self._tables[request_id].find(history[-max(_HIT_RATE) :], 1))

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


_MAX_STEP = 1024
"""Tokens of a text that are indexed at once, some milliseconds: a round waits for it."""


class _Occurrences:
    """Where each n-gram of one text ends: positions of the token after it, oldest first."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._length = 0

    def extend(self, history: Sequence[int]) -> None:
        """Index what is new, at most _MAX_STEP of it; an n-gram is indexed once a token follows it."""
        stop = min(len(history), self._length + _MAX_STEP)
        for end in range(max(self._length, 1), stop):
            for n in _HIT_RATE:
                if end >= n:
                    self._ends.setdefault(tuple(history[end - n : end]), []).append(end)
        self._length = stop

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


_RECENT_SHARE = 32
"""Part of a step by which recent texts grow for each request and call: more tokens than rounds write between two calls."""
MAX_TENANTS = 16
"""Tenants whose recent answers are kept, those that wrote last."""


@dataclass(slots=True)
class _Text:
    automaton: Automaton
    start: int
    """Tokens that the text had when the request was first seen: its prompt, mostly."""
    tenant: str
    num_seen: int = 0


class SuffixDrafter(TextDrafter):
    """Drafts from counts over the request's own text, and over its tenant's recent answers when recent_tokens > 0."""

    def __init__(
        self, *, num_slots: int = 8, num_candidates: int = 4, max_text: int = 16384, recent_tokens: int = 0
    ) -> None:
        """max_text: tokens of a request that are counted; beyond, the older half is forgotten (about 60 bytes a token, twice
        that in Python).
        recent_tokens: tokens of ended requests' answers that are kept of a tenant; 0 = none.
        """
        super().__init__(
            "suffix-recent" if recent_tokens else "suffix", num_slots=num_slots, num_candidates=num_candidates
        )
        self._suffixes, self._max_text = make_suffixes(), max_text
        self._texts: dict[str, _Text] = {}
        self._recent_tokens = recent_tokens
        self._recent: OrderedDict[str, RecentTexts] = OrderedDict()
        """Of each tenant, the one that wrote last at the end."""
        self._histories: dict[str, Sequence[int]] = {}  # only with recent texts

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
        """Count what is new, of long texts a part in every call."""
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text(self._suffixes.automaton(), len(history), tenant)
            if self._recent_tokens:
                self._histories[request_id] = history
        recent = self._recent.get(text.tenant)
        if recent is not None:
            recent.take_in(self._suffixes.max_step // _RECENT_SHARE)
        if text.automaton.num_tokens + len(history) - text.num_seen > self._max_text:
            text.automaton = self._suffixes.automaton()
            text.num_seen = len(history) - self._max_text // 2
        new = history[text.num_seen : text.num_seen + self._suffixes.max_step]
        text.automaton.extend(new)
        text.num_seen += len(new)

    def release(self, request_id: str) -> None:
        """Forget the request; what it wrote joins the recent texts."""
        text = self._texts.pop(request_id, None)
        if text is None or not self._recent_tokens:
            return
        answer = self._histories.pop(request_id)[text.start :]
        if len(answer) <= MIN_CONTEXT:
            return
        recent = self._recent.setdefault(text.tenant, RecentTexts(self._suffixes, self._recent_tokens))
        self._recent.move_to_end(text.tenant)
        if len(self._recent) > MAX_TENANTS:
            self._recent.popitem(last=False)
        recent.add(answer)

    def write_slots(
        self,
        request_id: str,
        history: Sequence[int],
        path: Sequence[int],
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write the most frequent tokens after the end of history + path, and after the chain of the best ones."""
        text = self._texts[request_id]
        end = [*history[-MAX_CONTEXT:], *path][-MAX_CONTEXT:]
        is_own_end = not path and text.num_seen == len(history)
        self._suffixes.write_slots([text.automaton, *self._others(text)], end, is_own_end, proposal, row)

    def expects(self, request_id: str, history: Sequence[int], tenant: str = "") -> bool:
        """Whether an end of the text occurred before, here or in recent texts."""
        self.follow(request_id, history, tenant)
        text = self._texts[request_id]
        automata = self._others(text)
        if text.num_seen < len(history):
            automata = (text.automaton, *automata)
        elif text.automaton.num_matched >= MIN_CONTEXT:
            return True
        return bool(automata) and self._suffixes.longest(automata, history[-MAX_CONTEXT:]) >= MIN_CONTEXT

    def _others(self, text: _Text) -> tuple[Automaton, ...]:
        """What the tenant's recent answers hold."""
        recent = self._recent.get(text.tenant)
        return () if recent is None else recent.automata


class RecentTexts:
    """Counts over the newest answers: two automata, of which the older is dropped when the newer is full."""

    def __init__(self, suffixes: Suffixes, max_tokens: int) -> None:
        self._suffixes, self._half = suffixes, max(max_tokens // 2, 1)
        self._new, self._old = self._suffixes.automaton(), self._suffixes.automaton()
        self._waiting: deque[Sequence[int]] = deque()
        """Texts that are yet to be counted, the first of them from `_next` on."""
        self._next, self._num_texts = 0, 0

    @property
    def automata(self) -> tuple[Automaton, Automaton]:
        return self._new, self._old

    @property
    def num_tokens(self) -> int:
        return self._new.num_tokens + self._old.num_tokens

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep the end of one text, at most a quarter of what is kept, to be counted by `take_in`."""
        self._waiting.append(token_ids[-(self._half // 2) :])
        while sum(map(len, self._waiting)) > self._half:  # more is written than counted
            self._end_text()

    def take_in(self, max_tokens: int) -> None:
        """Count so many of the tokens that wait: a few in every round, for which streams may not wait."""
        while max_tokens > 0 and self._waiting:
            text = self._waiting[0]
            if self._next == 0 and self._new.num_tokens + len(text) >= self._half:
                self._new, self._old = self._suffixes.automaton(), self._new
            part = text[self._next : self._next + max_tokens]
            self._new.extend(part)
            max_tokens, self._next = max_tokens - len(part), self._next + len(part)
            if self._next == len(text):
                self._end_text()

    def _end_text(self) -> None:
        self._waiting.popleft()
        self._next = 0
        self._num_texts += 1
        self._new.extend((-self._num_texts,))  # occurs nowhere else, so nothing matches across two texts


RECENT_TOKENS = 65536
"""Tokens of a tenant's answers that `suffix-recent` keeps, about 60 bytes each, twice that in Python."""


def make_text_drafter(name: str) -> TextDrafter:
    """A new one. Raises: ConfigError for other names than TEXT_DRAFTERS."""
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "suffix":
        return SuffixDrafter()
    if name == "suffix-recent":
        return SuffixDrafter(recent_tokens=RECENT_TOKENS)
    raise ConfigError(f"a drafter without weights must be one of {', '.join(TEXT_DRAFTERS)}, got {name!r}")
