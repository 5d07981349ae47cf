"""Covering designs: few of the combinations of several parameters, among which every two of their values meet."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any


def pairwise(*factors: Collection[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each factor; every pair of values of two factors is in one of them.

    Of two factors all combinations; of more, as many as the two longest have, or a few more. The same ones always.
    """
    rows = list(itertools.product(*(range(len(values)) for values in factors)))
    both = list(itertools.combinations(range(len(factors)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, row[i], row[j]) for i, j in both}

    left = set[tuple[int, int, int, int]]().union(*map(pairs, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        chosen.append(best)
    ordered = [list(values) for values in factors]
    return [tuple(values[i] for values, i in zip(ordered, row, strict=True)) for row in sorted(chosen)]
