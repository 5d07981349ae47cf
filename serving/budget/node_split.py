"""Node split: how many of a round's draft nodes each request gets.

For every total, the heaviest nodes of all requests are the best split: path masses fall along a request's list, so the
merged order of all lists takes prefixes of each (tree_speculation.md 4.5). Which total is best follows from the rate.
Attention that pads every request to the widest one makes uneven splits dearer: there, the best split below every width
limit is compared too (of more than MAX_LIMITS limits, some).

Shape legend: B requests, M best candidates of a request, K width limits, n candidates of all requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MAX_LIMITS = 24
"""Width limits that are compared; more candidates a request than that are limited in larger steps."""


@dataclass(frozen=True, slots=True)
class Padding:
    """What a forward takes longer because all requests are padded to the widest and the longest."""

    uneven_s: float
    """Seconds of what requests of different widths need at all: their rows are gathered into padded ones and back."""
    pair_s: float
    """Seconds of one padded (row, key) pair in all layers."""
    keys: float
    """Committed rows of the longest request."""
    max_s: float
    """Pairs are never dearer: requests that differ more are attended to apart."""

    def seconds(self, num_requests: int, width: int, rows: int) -> float:
        """Of B requests of `rows` packed rows in all, the widest of which has `width`."""
        num_padded = num_requests * width - rows
        if num_padded == 0:
            return 0.0
        return self.uneven_s + min(num_padded * (self.keys + width) * self.pair_s, self.max_s)


def best_split(
    masses: np.ndarray,
    num_available: np.ndarray,
    times: Callable[[int, int], np.ndarray],
    padding: Padding | None = None,
) -> np.ndarray:
    """Nodes per request with the most expected tokens (one a request, and the masses) per second.

    Args:
        masses: (B, M) float64, estimated path masses, falling along a row, 0 = absent.
        num_available: (B,) int64, how many of each row are not absent.
        times: seconds of whole rounds of start, start + 1, ..., stop - 1 packed rows, roots included.
    Returns: (B,) int64.
    """
    num_requests, num_columns = masses.shape
    num_candidates = int(num_available.sum())
    if num_candidates == 0:
        return np.zeros(num_requests, dtype=np.int64)
    flat = masses.ravel()
    order = (-flat).argsort(kind="stable")[:num_candidates]
    seconds = times(num_requests, num_requests + num_candidates + 1)
    idle_rate = num_requests / seconds[0]
    if padding is None:
        rates = (flat[order].cumsum() + num_requests) / seconds[1:]
        stop = int(rates.argmax())
        taken = order[: stop + 1]
        rate = rates[stop]
    else:
        # Few operators: on small arrays each costs as much as all of its arithmetic.
        limits = _limits(int(num_available.max()))  # (K, 1)
        is_within = order % num_columns < limits  # (K, n); the heaviest candidate, a first one, is within all
        counts = is_within.cumsum(1)
        num_padded = num_requests * limits - counts
        whole = np.minimum(num_padded * ((padding.keys + 1 + limits) * padding.pair_s), padding.max_s)
        whole += seconds[counts] + (num_padded > 0) * padding.uneven_s
        rates = ((is_within * flat[order]).cumsum(1) + num_requests) / whole
        best, stop = divmod(int(rates.argmax()), num_candidates)
        taken = order[: stop + 1][is_within[best, : stop + 1]]
        rate = rates[best, stop]
    if idle_rate >= rate:
        return np.zeros(num_requests, dtype=np.int64)
    return np.bincount(taken // num_columns, minlength=num_requests)


@functools.lru_cache(maxsize=256)
def _limits(widest: int) -> np.ndarray:
    """(K, 1) int64 numbers of nodes, falling from the widest: it wins ties. Read-only."""
    limits = np.arange(widest, 0, -widest // MAX_LIMITS)[:, None]
    limits.setflags(write=False)
    return limits
