"""Native suffix automata: what growing texts hold and what they expect next, compiled.

serving/drafters/suffix_automaton.py says in Python what they compute; suffix.cpp what the records mean. Beside forwards, a
round's tokens of a request are taken in within 4 us and eight slots written within 5, where Python takes 14 and 73; a token
takes 56 to 81 bytes, where Python's takes 130.

Shape legend: F texts or leaves of a proposal, S draft slots, K candidates per slot.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import weakref
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_void_p

import torch

from paceline.kernels.cpu.library import held_library
from paceline.kernels.cpu.trees import Record


@functools.cache
def load_suffixes() -> ctypes.PyDLL | None:
    """The library with its functions of texts, or None where the CPU's native code is not used."""
    number, at = c_int64, c_void_p
    return held_library((
        ("suffix_new", at, (number, number)),
        ("suffix_free", None, (at,)),
        ("suffix_extend", number, (at, at, number)),
        ("suffix_longest", number, (at,)),
        ("suffix_slots", None, (at, at, number, number, at, at)),
    ))  # fmt: skip


class NativeAutomaton:
    """Every piece of one text, with counts of the short ones. Token ids below 0 separate texts and are never proposed."""

    def __init__(self, library: ctypes.PyDLL, max_length: int, seed: int) -> None:
        """max_length: longest context that is matched, in tokens. seed: of the table's places; changes no result."""
        self._extend = library.suffix_extend
        self.address = library.suffix_new(max_length, seed)
        # An engine's thread may still run when the interpreter ends.
        weakref.finalize(self, library.suffix_free, self.address).atexit = False
        self.num_tokens = self.num_matched = 0
        """num_matched: tokens of the longest end of the text that occurs with something behind it."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        added = array("q", token_ids)
        self.num_matched = self._extend(self.address, added.buffer_info()[0], len(added))
        self.num_tokens += len(added)


class NativeSuffixes:
    """Makes automata and asks them what comes next. One thread only."""

    max_step = 8192
    """About a millisecond."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        *,
        misses: Sequence[float],
        min_mass: float,
        min_context: int,
        max_blended: int,
        newest_bonus: int,
        max_next: int,
    ) -> None:
        """misses: by match length, as far as one is looked for. All as suffix_automaton.py has them."""
        self._library, self._max_length, self._seed = library, len(misses) - 1, secrets.randbits(62)
        self._misses, self._blend, self._ends = array("d", misses), Record("qd4q"), Record("5q")
        self._blend.fill(self._misses.buffer_info()[0], min_mass, min_context, max_blended, newest_bonus, max_next)

    def automaton(self) -> NativeAutomaton:
        """A new one, of an empty text."""
        return NativeAutomaton(self._library, self._max_length, self._seed)

    def longest(self, automata: Sequence[NativeAutomaton], token_ids: Sequence[int]) -> int:
        """Tokens of the longest end of these that occurs in one of the texts with something behind it."""
        kept = self._fill_ends(automata, token_ids, is_own_end=False)
        found: int = self._library.suffix_longest(self._ends.address)
        del kept
        return found

    def write_slots(
        self,
        automata: Sequence[NativeAutomaton],
        token_ids: Sequence[int],
        is_own_end: bool,
        proposal: tuple[torch.Tensor, torch.Tensor],
        row: int,
    ) -> None:
        """Write what is expected behind these tokens into a row of token ids and log-probabilities (F, S, K), contiguous.

        is_own_end: they are the end of the first automaton's text.
        """
        kept = self._fill_ends(automata, token_ids, is_own_end)
        ids, logprobs = proposal
        _, num_slots, num_candidates = ids.shape
        at = row * num_slots * num_candidates
        self._library.suffix_slots(
            self._ends.address, self._blend.address, num_slots, num_candidates, ids.data_ptr() + 8 * at,
            logprobs.data_ptr() + 4 * at,
        )  # fmt: skip
        del kept

    def _fill_ends(
        self, automata: Sequence[NativeAutomaton], token_ids: Sequence[int], is_own_end: bool
    ) -> tuple[array[int], array[int]]:
        """Fill the record; returns what must live until it was read."""
        kept = array("q", [automaton.address for automaton in automata]), array("q", token_ids)
        self._ends.fill(kept[0].buffer_info()[0], kept[1].buffer_info()[0], len(automata), len(token_ids), is_own_end)
        return kept
