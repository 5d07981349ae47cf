"""Score calibration: a drafter's claimed probabilities become the hit rates that the target shows.

Shape legend: G requests of one drafter, S draft slots per block, R rank classes, N packed tree rows, T tested nodes, Q cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.kernels.cpu.trees import KeySums
from paceline.serving.budget.stats import DraftKey
from paceline.serving.trees.tree import TreeBatch, TreeRows

NUM_RANK_CLASSES = 3
"""The first, the second and all later candidates of a slot are told apart."""


class ScoreCalibration:
    """Makes predicted mass match realised hits: kappa per (key, block, slot, rank class).

    kappa = log((hits + e) / (predicted mass + e)), clipped; only nodes whose parent was accepted count, because only
    they were tested (tree_speculation.md 4.3).
    """

    PRIOR = 4.0
    DECAY = 1.0 - 1.0 / 256
    MAX_KEYS = 512

    def __init__(self) -> None:
        self._sums: dict[DraftKey, KeySums] = {}

    def _of(self, key: DraftKey | None, num_slots: int) -> KeySums:
        if key is None:
            return KeySums(num_slots, NUM_RANK_CLASSES)
        sums = self._sums.pop(key, None)
        if sums is None or sums.blocks.shape[2] != num_slots:
            sums = KeySums(num_slots, NUM_RANK_CLASSES)
        self._sums[key] = sums  # the latest one last
        if len(self._sums) > self.MAX_KEYS:
            del self._sums[next(iter(self._sums))]
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
        self, tree: TreeBatch, keys: Sequence[DraftKey | None], is_drafted: Sequence[bool], accepted: np.ndarray
    ) -> None:
        """Fold the tested nodes of the requests that were drafted for, all of them with a key.

        keys, is_drafted: (B,). accepted: (M,) int64, packed rows of the accepted paths, roots included.
        """
        assert tree.cells is not None
        folded: dict[DraftKey, list[int]] = {}
        for request, (key, drafted) in enumerate(zip(keys, is_drafted, strict=True)):
            if drafted and key is not None and key in self._sums:
                folded.setdefault(key, []).append(request)
        for key, requests in folded.items():
            is_folded = np.zeros(len(keys), dtype=np.int64)
            is_folded[requests] = 1
            sums, columns = self._sums[key], (tree.parents, tree.cells, tree.scores, tree.cu_nodes)
            if tree.parents.is_cpu and sums.fold_natively(columns, accepted, is_folded, self.DECAY, self.PRIOR):
                continue
            rows = tree.on_host()
            is_accepted = np.zeros(len(rows.owners), dtype=bool)
            is_accepted[accepted] = True
            is_tested = is_accepted[rows.above] & (is_folded[rows.owners] > 0)
            is_tested[rows.roots] = False
            tested = is_tested.nonzero()[0]
            self._fold(sums, rows, tested, is_accepted[tested], len(keys))

    def _fold(self, sums: KeySums, rows: TreeRows, tested: np.ndarray, is_hit: np.ndarray, num_requests: int) -> None:
        """Add tested nodes (T,) int64 request after request; a request decays the cells that it tests once."""
        assert rows.cells is not None
        cells, num_cells = rows.cells[tested], len(sums.kappa)
        # The mass before calibration: kappa is still the one that the tree was drafted with.
        gains = np.minimum(rows.scores[tested] - rows.scores[rows.above[tested]], 0.0)
        predicted = np.minimum(np.exp(gains - sums.kappa[cells]), 1.0)
        owners = rows.owners[tested]
        tests = np.zeros((num_requests, num_cells))
        tests[owners, cells] = 1.0
        so_far = tests.cumsum(0)
        touched = so_far[-1]
        weights = self.DECAY ** (touched[cells] - so_far[owners, cells])  # decayed by the requests behind
        decay = self.DECAY**touched
        sums.predicted[:] = sums.predicted * decay + np.bincount(cells, predicted * weights, num_cells)
        sums.hits[:] = sums.hits * decay + np.bincount(cells, is_hit * weights, num_cells)
        ratio = (sums.hits + self.PRIOR) / (sums.predicted + self.PRIOR)
        sums.kappa[:] = np.minimum(np.maximum(np.log(ratio), -3.0), 0.5)
        sums.blocks[:] = sums.kappa.reshape(sums.blocks.shape)

    def forget(self, version: str) -> None:
        """Drop the sums of a drafter version."""
        for key in [k for k in self._sums if k[0] == version]:
            del self._sums[key]
