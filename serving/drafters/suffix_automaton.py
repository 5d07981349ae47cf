"""Suffix automaton: how often and when last every short piece of a growing text occurred, and what may come next.

A suffix automaton (Blumer et al. 1985) holds all pieces of a text in fewer than 2 n states and 3 n transitions, and takes
each new token in O(1) amortised time. Occurrence counts are kept up to date as well, for pieces of at most max_length + 1
tokens: behind each token that costs one visit for every state that ends there, at most max_length + 1, mostly a few.
Arrays hold a state's first transition, because most states have no other.

What may come next is estimated from the longest match of a text's end, blended with shorter ones, which occurred more often.
This module says so in Python; where there is native code, kernels/cpu/suffix.py computes the same numbers.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch

from paceline.kernels.cpu.suffix import NativeSuffixes, load_suffixes

Match = tuple[int, int]
"""(state, length): the last `length` tokens of a text, found in `state`; (0, 0) = nothing matches."""
Slots = list[list[tuple[int, float]]]
"""Per slot the distinct (token, log-probability), best first; the first ones are the chain."""

MAX_CONTEXT = 16
"""Tokens of the longest match that is looked for."""
MIN_CONTEXT = 2
"""Tokens of the shortest match that counts."""
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


class Suffixes(Protocol):
    """Makes automata and asks them what comes next."""

    max_step: int
    """Tokens by which a text may grow at once: a round waits for it."""

    def automaton(self) -> Automaton:
        """A new one, of an empty text."""

    def longest(self, automata: Sequence[Any], token_ids: Sequence[int]) -> int:
        """Tokens of the longest end of these that occurs in one of the texts with something behind it."""

    def write_slots(
        self,
        automata: Sequence[Any],
        token_ids: Sequence[int],
        is_own_end: bool,
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write what is expected behind these tokens into a row of token ids and log-probabilities (F, S, K), contiguous.

        is_own_end: they are the end of the first automaton's text.
        """


class Automaton(Protocol):
    """Every piece of one text, with counts of the short ones. Token ids below 0 separate texts and are never proposed."""

    num_tokens: int

    @property
    def num_matched(self) -> int:
        """Tokens of the longest end of the text that occurs with something behind it."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""


class SuffixAutomaton:
    """Every piece of one text, with counts of the short ones. Token ids below 0 separate texts and are never proposed."""

    def __init__(self, max_length: int) -> None:
        """max_length: longest context that is matched, in tokens."""
        self.max_length = max_length
        self.num_tokens = 0
        self._first_token, self._first_target = (
            array("i", [0]),
            array("i", [0]),
        )  # target 0 = none: no way leads to the root
        self._more: dict[int, dict[int, int]] = {}
        self._link, self._length = array("i", [-1]), array("i", [0])
        self._count, self._latest = array("i", [0]), array("i", [0])  # occurrences, end of the newest one
        self._last = 0
        self._tail, self._tail_length = 0, 0  # state of the newest max_length + 1 tokens, and how many they are

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in token_ids:
            self._append(token)

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """What followed a state that `match` or `advance` gave: (token, occurrences, end of the newest one in the text)."""
        if not self._first_target[state]:
            return []
        targets = [(self._first_token[state], self._first_target[state]), *self._more.get(state, {}).items()]
        return [(token, self._count[target], self._latest[target]) for token, target in targets if token >= 0]

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest end of these tokens, at most max_length of them, that occurs with something behind it."""
        found = (0, 0)
        for token in token_ids[-self.max_length :]:
            found = self.advance(found, token)
        return self.continued(found)

    def ending(self) -> Match:
        """`match` of the text's own end."""
        state, length = self.continued((self._tail, self._tail_length))
        # The tail is one token longer than what is matched.
        while state and self._length[self._link[state]] >= self.max_length:
            state = self._link[state]
        return state, min(length, self.max_length)

    @property
    def num_matched(self) -> int:
        """Tokens of `ending`."""
        return self.ending()[1]

    def advance(self, found: Match, token: int) -> Match:
        """The longest end of the matched tokens and one more that occurs."""
        state, length = found
        link, lengths = self._link, self._length
        target = self._target(state, token)
        while not target:
            if state == 0:
                return 0, 0
            state = link[state]
            length, target = lengths[state], self._target(state, token)
        length = min(length + 1, self.max_length)
        while lengths[link[target]] >= length:
            target = link[target]
        return target, length

    def continued(self, found: Match) -> Match:
        """The longest end of the matched tokens with something behind it: only a text's own end has nothing."""
        state, length = found
        while state and not self._first_target[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def shorter(self, found: Match) -> Match:
        """The longest end of the matched tokens that occurs more often."""
        state = self._link[found[0]] if found[0] else 0
        return state, self._length[state]

    def _target(self, state: int, token: int) -> int:
        if self._first_token[state] == token:
            return self._first_target[state]
        more = self._more.get(state)
        return more.get(token, 0) if more is not None else 0

    def _set(self, state: int, token: int, target: int) -> None:
        if self._first_token[state] == token or not self._first_target[state]:
            self._first_token[state], self._first_target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _new(self, length: int) -> int:
        for values, value in (
            (self._first_token, 0), (self._first_target, 0), (self._link, 0), (self._length, length), (self._count, 0),
            (self._latest, 0),
        ):  # fmt: skip
            values.append(value)
        return len(self._link) - 1

    def _append(self, token: int) -> None:
        link, lengths, counts, latest = self._link, self._length, self._count, self._latest
        new, state = self._new(lengths[self._last] + 1), self._last
        while state >= 0 and not self._target(state, token):
            self._set(state, token, new)
            state = link[state]
        if state >= 0:
            link[new] = self._split(state, token)
        self._last = new
        self.num_tokens += 1
        # Splitting may have moved the tail's short strings to the state that it now links to.
        tail = self._tail
        while tail and lengths[link[tail]] >= self._tail_length:
            tail = link[tail]
        tail = self._target(tail, token)
        self._tail_length = min(self._tail_length + 1, self.max_length + 1)
        while lengths[link[tail]] >= self._tail_length:
            tail = link[tail]
        self._tail = state = tail
        while state:
            counts[state] += 1
            latest[state] = self.num_tokens
            state = link[state]

    def _split(self, state: int, token: int) -> int:
        """The state of the longest string of `state` and the token, made by splitting if it lies inside another."""
        link, lengths = self._link, self._length
        whole = self._target(state, token)
        if lengths[state] + 1 == lengths[whole]:
            return whole
        part = self._new(lengths[state] + 1)
        self._first_token[part], self._first_target[part] = self._first_token[whole], self._first_target[whole]
        if whole in self._more:
            self._more[part] = dict(self._more[whole])
        link[part], self._count[part], self._latest[part] = link[whole], self._count[whole], self._latest[whole]
        while state >= 0 and self._target(state, token) == whole:
            self._set(state, token, part)
            state = link[state]
        link[whole] = part
        return part


class HostSuffixes:
    """The reference: automata in Python."""

    max_step = 1024
    """Some milliseconds."""

    def automaton(self) -> SuffixAutomaton:
        """A new one, of an empty text."""
        return SuffixAutomaton(MAX_CONTEXT)

    def longest(self, automata: Sequence[SuffixAutomaton], token_ids: Sequence[int]) -> int:
        """Tokens of the longest end of these that occurs in one of the texts with something behind it."""
        return max((automaton.match(token_ids)[1] for automaton in automata), default=0)

    def write_slots(
        self,
        automata: Sequence[SuffixAutomaton],
        token_ids: Sequence[int],
        is_own_end: bool,
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write the most frequent tokens behind these, and behind the chain of the best ones."""
        found = [
            (automaton, automaton.ending() if is_own_end and i == 0 else automaton.match(token_ids))
            for i, automaton in enumerate(automata)
        ]
        _, num_slots, num_candidates = proposal[0].shape
        slots: Slots = []
        mass = 1.0
        while len(slots) < num_slots and mass >= _MIN_MASS:
            expected = _expected(found)[:num_candidates]
            if not expected:
                break
            slots.append([(token, math.log(p)) for token, p in expected])
            token, p = expected[0]
            mass *= p
            found = [(automaton, automaton.continued(automaton.advance(m, token))) for automaton, m in found]
        write(slots, proposal, row)


def _expected(found: list[tuple[SuffixAutomaton, Match]]) -> list[tuple[int, float]]:
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
    return sorted(masses.items(), key=lambda pair: -pair[1])


def write(slots: Slots, proposal: tuple[torch.Tensor, torch.Tensor], row: int) -> None:
    """Write slots into a row of token ids and log-probabilities (F, S, K)."""
    flat = [(s, k, t, p) for s, slot in enumerate(slots) for k, (t, p) in enumerate(slot)]
    if flat:
        s, k, t, p = zip(*flat, strict=True)
        at = (torch.tensor(s), torch.tensor(k))
        proposal[0][row][at] = torch.tensor(t)
        proposal[1][row][at] = torch.tensor(p)


def make_suffixes() -> Suffixes:
    """The compiled ones, or those in Python where there is no native code."""
    library = load_suffixes()
    if library is None:
        return HostSuffixes()
    return NativeSuffixes(
        library, misses=_MISS, min_mass=_MIN_MASS, min_context=MIN_CONTEXT, max_blended=_MAX_BLENDED,
        newest_bonus=_NEWEST_BONUS, max_next=_MAX_NEXT,
    )  # fmt: skip
