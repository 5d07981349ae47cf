"""Attention groups: the requests of a forward that share one padded attention call.

Padding every request to the widest tree and the longest context of the round costs arithmetic that nobody wants; a call of
its own costs operators. Requests are split where the first outweighs the second.
"""

from __future__ import annotations

from collections.abc import Sequence

CALL_PAIRS = 16_384
"""Padded (row, key) pairs that take about as long as one more attention call in every layer (measured on 2 CPU cores)."""
MAX_GROUPS = 6


def group_requests(num_rows: Sequence[int], num_keys: Sequence[int], call_pairs: int = CALL_PAIRS) -> list[list[int]]:
    """Split B requests into groups that are padded apart.

    Args:
        num_rows: (B,) rows of each request.
        num_keys: (B,) keys of each request, its own rows included.
    Returns: request indices by group, rising inside a group; one group when nothing is gained.
    """
    groups = [list(range(len(num_rows)))]
    while len(groups) < MAX_GROUPS:
        splits = [_best_split(group, num_rows, num_keys) for group in groups]
        best = max(range(len(groups)), key=lambda i: splits[i][0])
        saved, first, second = splits[best]
        if saved <= call_pairs:
            break
        groups[best : best + 1] = [first, second]
    return [sorted(group) for group in groups]


def _best_split(
    group: Sequence[int], num_rows: Sequence[int], num_keys: Sequence[int]
) -> tuple[int, list[int], list[int]]:
    """(pairs saved, first part, second part) of the best cut along the rows or along the keys."""
    widest, longest = max(num_rows[i] for i in group), max(num_keys[i] for i in group)
    whole = len(group) * widest * longest
    best: tuple[int, list[int], list[int]] = (0, [], [])
    for sizes in (num_rows, num_keys):
        order = sorted(group, key=sizes.__getitem__)
        rows_left, keys_left = [0], [0]  # largest of the first n
        for i in order:
            rows_left.append(max(rows_left[-1], num_rows[i]))
            keys_left.append(max(keys_left[-1], num_keys[i]))
        rows, keys = 0, 0
        for n in range(len(order) - 1, 0, -1):
            rows, keys = max(rows, num_rows[order[n]]), max(keys, num_keys[order[n]])
            saved = whole - n * rows_left[n] * keys_left[n] - (len(order) - n) * rows * keys
            if saved > best[0]:
                best = (saved, list(order[:n]), list(order[n:]))
    return best
