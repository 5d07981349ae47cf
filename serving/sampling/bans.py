"""Bans: token sequences that an answer must not contain, and the tokens that would complete one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from paceline.errors import RequestError


class Bans:
    """The banned sequences of one request. Only the last token of a sequence is ever held back, behind the others of it."""

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Raises: RequestError where a token is not in the vocabulary."""
        self._after: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sequences:
            bad = next((t for t in (*before, last) if not 0 <= t < vocab_size), None)
            if bad is not None:
                raise RequestError(f"bad_words token ids must be in [0, {vocab_size}), got {bad}")
            self._after.setdefault(tuple(before), []).append(last)
        self.always = self._after.pop((), [])
        """Tokens that may come nowhere."""
        self.completing = sorted({t for ids in self._after.values() for t in ids})
        """Tokens that may not come behind some others."""
        self._lengths = sorted({len(before) for before in self._after})
        self.reach = max(self._lengths, default=0)
        """How many of the newest tokens tell what is held back; 0 = none of them."""

    def behind(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that would complete a sequence of several behind these, the newest ones of the answer."""
        found: list[int] = []
        for length in self._lengths:
            if length > len(token_ids):
                break
            found += self._after.get(tuple(token_ids[len(token_ids) - length :]), ())
        return found


@lru_cache(maxsize=4)
def bans_of(sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> Bans:
    """The bans of these sequences, made once for all choices of a body; raises RequestError like Bans."""
    return Bans(sequences, vocab_size)


def spellings(tokenizer: Any, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that a tokenizer writes words with, at the beginning of a text and behind a space.

    What it can only write with the token for unknown text is left out: no answer can have it.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids and tokenizer.unk_token_id not in token_ids:
                found[token_ids] = None
    return tuple(found)
