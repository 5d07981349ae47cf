"""Suffix automaton: how often and when last every short piece of a growing text occurred, and what came next.

A suffix automaton (Blumer et al. 1985) holds all pieces of a text in fewer than 2 n states and 3 n transitions, and takes
each new token in O(1) amortised time. Occurrence counts are kept up to date as well, for pieces of at most max_length + 1
tokens: behind each token that costs one visit for every state that ends there, at most max_length + 1, mostly a few.
Arrays hold a state's first transition, because most states have no other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

Match = tuple[int, int]
"""(state, length): the last `length` tokens of a text, found in `state`; (0, 0) = nothing matches."""


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
