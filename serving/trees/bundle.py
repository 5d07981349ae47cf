"""Bundle expansion: JetSpec's tree, grown by whole sets of children, as an order of candidates.

The algorithm pops the heaviest node of a heap and adds all of its W children at once, until the budget is full. Scores
never rise along a path, so nodes are popped in the order of their scores, and a node is added when its parent is popped:
sorting by (place of the parent in the order of scores, own place) gives the order of addition, of which every beginning
is the tree of that size. A policy for comparison: at equal size the heaviest nodes always have at least its mass.
Source: JetSpec's tree construction, tree_speculation.md 1.7; its node budget counts the root, ours does not.

Shape legend: C candidates of all requests (roots included), W bundle width.
"""

from __future__ import annotations

import numpy as np

from paceline.serving.trees.candidates import DEPTH, OWNER, PARENT, TOKEN, Candidates, Ranked


def rank_bundles(candidates: Candidates, width: int, limit: int) -> Ranked:
    """The first `limit` candidates of each request by order of addition, siblings with equal tokens merged.

    width: W, children that a node gets at once, at most.
    """
    keys = (candidates.columns[PARENT] << 32) + candidates.columns[TOKEN]
    if len(np.unique(keys)) < len(keys):
        candidates = candidates.merged()
    by_score, _ = candidates.best(len(candidates.scores))
    owners, _, parents, depths, _ = candidates.columns
    place = np.zeros(len(candidates.scores), dtype=np.int64)
    place[by_score] = np.arange(len(by_score))
    # Request after request; a root has no parent and comes first.
    above = np.where(depths[by_score] == 0, -1, place[parents[by_score]])
    order = by_score[np.lexsort((place[by_score], above, owners[by_score]))]
    above = np.where(depths[order] == 0, -1 - owners[order], parents[order])
    starts = np.flatnonzero(np.append(True, above[1:] != above[:-1]))
    number = np.arange(len(order)) - starts.repeat(np.diff(np.append(starts, len(order))))
    is_in = np.zeros(len(candidates.scores), dtype=bool)
    is_in[order] = number < width
    for _ in range(int(candidates.columns[DEPTH].max())):  # what hangs below a child that no bundle holds is not there
        is_in &= is_in[parents]
    order = order[is_in[order]]
    ordered = candidates.columns[OWNER, order]
    local = np.arange(len(order)) - ordered.searchsorted(np.arange(candidates.num_requests))[ordered]
    kept = local <= limit
    return candidates.take(order[kept], local[kept])
