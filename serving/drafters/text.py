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

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from paceline.errors import ConfigError
from paceline.paths import TEXT_DRAFTERS
from paceline.serving.drafters.interface import DrafterCaps, DraftInputs, Frontier, Proposal
from paceline.serving.drafters.suffix_automaton import Match, SuffixAutomaton
from paceline.serving.target_model.device import upload

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
        for i, (request_id, history) in enumerate(zip(inputs.request_ids, inputs.histories, strict=True)):
            self.follow(request_id, history, inputs.tenant(i))

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

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
        """Take in what is new in the text of a request; `history` has only grown since the last call."""
        raise NotImplementedError

    def slots(self, request_id: str, history: Sequence[int], path: Sequence[int]) -> Slots:
        """What is expected after history + path, at most S slots of K tokens; call `follow` first."""
        raise NotImplementedError

    def expects(self, request_id: str, history: Sequence[int], tenant: str = "") -> bool:
        """Whether a proposal may hold anything: far cheaper than to make one. Takes in what is new in the text."""
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


_HIT_RATE = {4: 0.85, 3: 0.75, 2: 0.6}
"""Assumed chance that the next token of a match of this length is right; online calibration corrects it."""


class PromptLookupDrafter(TextDrafter):
    """Drafts from the request's own prompt and output."""

    def __init__(self, *, num_slots: int = 8, num_candidates: int = 3, max_matches: int = 8) -> None:
        super().__init__("lookup", num_slots=num_slots, num_candidates=num_candidates)
        self._max_matches = max_matches
        self._tables: dict[str, _Occurrences] = {}

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
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


MAX_CONTEXT = 16
"""Tokens of the longest match that is looked for."""
MIN_CONTEXT = 2
"""Tokens of the shortest match that counts."""
_MAX_STEP = 1024
"""Tokens of one request that are counted in one call: some milliseconds, for which a round may wait."""
_RECENT_STEP = 32
"""Tokens of ended requests that are counted for each request and round: more than a round writes, and well below 1 ms."""
MAX_TENANTS = 16
"""Tenants whose recent answers are kept, those that wrote last."""
_MAX_BLENDED = 3
_NEWEST_BONUS = 2
"""Occurrences that the newest one counts for beyond itself: what was written last is most likely to come again."""
_MAX_NEXT = 8
"""Tokens after one context that are looked at, the most frequent ones."""
_MIN_MASS = 0.02
"""The chain ends where its mass falls below this."""
_MISS = [0.55 * 0.9 ** (n - MIN_CONTEXT) for n in range(MAX_CONTEXT + 1)]
"""Assumed chance, by match length, that what follows is not what followed the one earlier occurrence; it falls with the
root of their number, up to 4. Near the rates of ordinary code and prose; online calibration corrects it."""


@dataclass(slots=True)
class _Text:
    automaton: SuffixAutomaton
    start: int
    """Tokens that the text had when the request was first seen: its prompt, mostly."""
    tenant: str
    num_seen: int = 0


class SuffixDrafter(TextDrafter):
    """Drafts from counts over the request's own text, and over its tenant's recent answers when recent_tokens > 0."""

    def __init__(
        self, *, num_slots: int = 8, num_candidates: int = 4, max_text: int = 16384, recent_tokens: int = 0
    ) -> None:
        """max_text: tokens of a request that are counted; beyond, the older half is forgotten (about 130 bytes a token).
        recent_tokens: tokens of ended requests' answers that are kept of a tenant; 0 = none.
        """
        super().__init__(
            "suffix-recent" if recent_tokens else "suffix", num_slots=num_slots, num_candidates=num_candidates
        )
        self._max_text = max_text
        self._texts: dict[str, _Text] = {}
        self._recent_tokens = recent_tokens
        self._recent: OrderedDict[str, RecentTexts] = OrderedDict()
        """Of each tenant, the one that wrote last at the end."""
        self._histories: dict[str, Sequence[int]] = {}  # only with recent texts

    def follow(self, request_id: str, history: Sequence[int], tenant: str = "") -> None:
        """Count what is new, of long texts a part in every call."""
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text(SuffixAutomaton(MAX_CONTEXT), len(history), tenant)
            if self._recent_tokens:
                self._histories[request_id] = history
        recent = self._recent.get(text.tenant)
        if recent is not None:
            recent.take_in(_RECENT_STEP)
        if text.automaton.num_tokens + len(history) - text.num_seen > self._max_text:
            text.automaton = SuffixAutomaton(MAX_CONTEXT)
            text.num_seen = len(history) - self._max_text // 2
        new = history[text.num_seen : text.num_seen + _MAX_STEP]
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
        recent = self._recent.setdefault(text.tenant, RecentTexts(self._recent_tokens))
        self._recent.move_to_end(text.tenant)
        if len(self._recent) > MAX_TENANTS:
            self._recent.popitem(last=False)
        recent.add(answer)

    def slots(self, request_id: str, history: Sequence[int], path: Sequence[int]) -> Slots:
        """The most frequent tokens after the end of history + path, and after the chain of the best ones."""
        found = self._matches(request_id, history, path)
        out: Slots = []
        mass = 1.0
        while len(out) < self.caps.num_slots and mass >= _MIN_MASS:
            expected = self._expected(found)
            if not expected:
                break
            out.append([(token, math.log(p)) for token, p in expected])
            token, p = expected[0]
            mass *= p
            found = [(automaton, automaton.continued(automaton.advance(m, token))) for automaton, m in found]
        return out

    def expects(self, request_id: str, history: Sequence[int], tenant: str = "") -> bool:
        """Whether an end of the text occurred before, here or in recent texts."""
        self.follow(request_id, history, tenant)
        return any(match[1] >= MIN_CONTEXT for _, match in self._matches(request_id, history, ()))

    def _matches(
        self, request_id: str, history: Sequence[int], path: Sequence[int]
    ) -> list[tuple[SuffixAutomaton, Match]]:
        """The longest end of history + path in everything that is counted, the request's own text first."""
        text = self._texts[request_id]
        end = [*history[-MAX_CONTEXT:], *path][-MAX_CONTEXT:]
        is_own_end = not path and text.num_seen == len(history)
        found = [(text.automaton, text.automaton.ending() if is_own_end else text.automaton.match(end))]
        recent = self._recent.get(text.tenant)
        if recent is not None:
            found += [(automaton, automaton.match(end)) for automaton in recent.automata]
        return found

    def _expected(self, found: list[tuple[SuffixAutomaton, Match]]) -> list[tuple[int, float]]:
        """(token, estimated probability) of what comes next, most probable first."""
        contexts = []
        for automaton, match in found:
            for _ in range(_MAX_BLENDED):
                if match[1] < MIN_CONTEXT:
                    break
                contexts.append((match[1], automaton, match[0]))
                match = automaton.shorter(match)
        contexts.sort(key=lambda context: -context[0])  # of equally long ones the request's own first
        masses: dict[int, float] = {}
        rest = 1.0
        for length, automaton, state in contexts[:_MAX_BLENDED]:
            followers = automaton.followers(state)
            if not followers:
                continue
            num_seen = sum([count for _, count, _ in followers])
            share = rest * (1.0 - _MISS[length] / math.sqrt(min(num_seen, 4)))
            rest -= share
            newest = max([end for _, _, end in followers]) if len(followers) > 1 else followers[0][2]
            share /= num_seen + _NEWEST_BONUS
            weights = [(token, count + _NEWEST_BONUS * (end == newest)) for token, count, end in followers]
            if len(weights) > _MAX_NEXT:
                weights = heapq.nlargest(_MAX_NEXT, weights, key=itemgetter(1))
            for token, weight in weights:
                masses[token] = masses.get(token, 0.0) + share * weight
        return sorted(masses.items(), key=lambda pair: -pair[1])[: self.caps.num_candidates]


class RecentTexts:
    """Counts over the newest answers: two automata, of which the older is dropped when the newer is full."""

    def __init__(self, max_tokens: int) -> None:
        self._half = max(max_tokens // 2, 1)
        self._new, self._old = SuffixAutomaton(MAX_CONTEXT), SuffixAutomaton(MAX_CONTEXT)
        self._waiting: deque[Sequence[int]] = deque()
        """Texts that are yet to be counted, the first of them from `_next` on."""
        self._next, self._num_texts = 0, 0

    @property
    def automata(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
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
                self._new, self._old = SuffixAutomaton(MAX_CONTEXT), self._new
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
"""Tokens of a tenant's answers that `suffix-recent` keeps, 128 bytes each."""


def make_text_drafter(name: str) -> TextDrafter:
    """A new one. Raises: ConfigError for other names than TEXT_DRAFTERS."""
    if name == "lookup":
        return PromptLookupDrafter()
    if name == "suffix":
        return SuffixDrafter()
    if name == "suffix-recent":
        return SuffixDrafter(recent_tokens=RECENT_TOKENS)
    raise ConfigError(f"a drafter without weights must be one of {', '.join(TEXT_DRAFTERS)}, got {name!r}")
