"""Score calibration: a drafter's claimed probabilities become the hit rates that the target shows.

Shape legend: G requests of one drafter, S draft slots per block, R rank classes, N packed tree rows, T tested nodes, Q cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.serving.budget.stats import DraftKey
from paceline.serving.trees.tree import TreeRows

NUM_RANK_CLASSES = 3
"""The first, the second and all later candidates of a slot are told apart."""


@dataclass(slots=True)
class _KeySums:
    """Decayed sums of one key by cell."""

    predicted: np.ndarray  # (Q,) float64
    hits: np.ndarray  # (Q,) float64
    kappa: np.ndarray  # (Q,) float64
    blocks: np.ndarray  # (2 blocks, 1, S, R) float32, kappa as drafting adds it

    @staticmethod
    def empty(num_slots: int) -> _KeySums:
        cells = np.zeros(2 * num_slots * NUM_RANK_CLASSES)
        blocks = cells.astype(np.float32).reshape(2, 1, num_slots, NUM_RANK_CLASSES)
        return _KeySums(cells, cells.copy(), cells.copy(), blocks)


class ScoreCalibration:
    """Makes predicted mass match realised hits: kappa per (key, block, slot, rank class).

    kappa = log((hits + e) / (predicted mass + e)), clipped; only nodes whose parent was accepted count, because only
    they were tested (tree_speculation.md 4.3).
    """

    PRIOR = 4.0
    DECAY = 1.0 - 1.0 / 256
    MAX_KEYS = 512

    def __init__(self) -> None:
        self._sums: dict[DraftKey, _KeySums] = {}

    def _of(self, key: DraftKey | None, num_slots: int) -> _KeySums:
        if key is None:
            return _KeySums.empty(num_slots)
        sums = self._sums.get(key)
        if sums is None or sums.blocks.shape[2] != num_slots:
            sums = self._sums[key] = _KeySums.empty(num_slots)
            if len(self._sums) > self.MAX_KEYS:
                self._sums.pop(next(iter(self._sums)))
        return sums

    def corrections(self, keys: Sequence[DraftKey | None], num_slots: int) -> np.ndarray:
        """(2 blocks, G, S, R) float32 to add to conditional log-probabilities, (2, 1, S, R) where all keys are the same;
        read only, until the next `observe`."""
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        if len(number) == 1:
            return self._of(keys[0], num_slots).blocks
        every = np.concatenate([self._of(key, num_slots).blocks for key in number], axis=1)
        return every[:, [number[key] for key in keys]]

    def observe(
        self, rows: TreeRows, keys: Sequence[DraftKey | None], is_drafted: Sequence[bool], is_accepted: np.ndarray
    ) -> None:
        """Fold the tested nodes of the requests that were drafted for, all of them with a key.

        keys, is_drafted: (B,). is_accepted: (N,) bool, of the packed rows, roots included.
        """
        assert rows.cells is not None
        is_tested = is_accepted[rows.above]
        is_tested[rows.roots] = False
        tested = is_tested.nonzero()[0]
        folded: dict[DraftKey, list[int]] = {}
        for request, (key, drafted) in enumerate(zip(keys, is_drafted, strict=True)):
            if drafted and key is not None and key in self._sums:
                folded.setdefault(key, []).append(request)
        for key, requests in folded.items():
            own = tested
            if len(requests) < len(keys):
                own = tested[np.isin(rows.owners[tested], requests)]
            self._fold(self._sums[key], rows, own, is_accepted[own], len(keys))

    def _fold(self, sums: _KeySums, rows: TreeRows, tested: np.ndarray, is_hit: np.ndarray, num_requests: int) -> None:
        """Add tested nodes (T,) int64 request after request; a request decays the cells that it tests once."""
        assert rows.cells is not None
        cells, num_cells = rows.cells[tested], len(sums.kappa)
        # The mass before calibration: kappa is still the one that the tree was drafted with.
        gains = np.minimum(rows.scores[tested] - rows.scores[rows.above[tested]], 0.0)
        predicted = np.minimum(np.exp(gains - sums.kappa[cells]), 1.0)
        if num_requests == 1:
            touched, weights = np.zeros(num_cells), None
            touched[cells] = 1.0
        else:
            owners = rows.owners[tested]
            tests = np.zeros((num_requests, num_cells))
            tests[owners, cells] = 1.0
            so_far = tests.cumsum(0)
            touched = so_far[-1]
            weights = self.DECAY ** (touched[cells] - so_far[owners, cells])  # decayed by the requests behind
        decay = self.DECAY**touched
        hits = is_hit.astype(np.float64)
        if weights is not None:
            predicted, hits = predicted * weights, hits * weights
        sums.predicted = sums.predicted * decay + np.bincount(cells, predicted, num_cells)
        sums.hits = sums.hits * decay + np.bincount(cells, hits, num_cells)
        ratio = (sums.hits + self.PRIOR) / (sums.predicted + self.PRIOR)
        sums.kappa = np.minimum(np.maximum(np.log(ratio), -3.0), 0.5)
        sums.blocks = sums.kappa.astype(np.float32).reshape(sums.blocks.shape)

    def forget(self, version: str) -> None:
        """Drop the sums of a drafter version."""
        for key in [k for k in self._sums if k[0] == version]:
            del self._sums[key]
