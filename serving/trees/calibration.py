"""How do a drafter's claimed probabilities become the hit rates that the target shows?

Shape legend: G requests of one drafter, S draft slots per block, R rank classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.serving.budget.stats import DraftKey
from paceline.serving.trees.builder import NUM_RANK_CLASSES

if TYPE_CHECKING:
    from paceline.serving.trees.policy import RoundDraft


@dataclass(slots=True)
class _KeySums:
    """Decayed sums of one key by cell; plain lists, because a round touches only a few cells."""

    predicted: list[float]
    hits: list[float]
    kappa: list[float]


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

    def row(self, key: DraftKey | None, num_cells: int) -> list[float]:
        """(2 blocks * S * R,) corrections to add to conditional log-probabilities; read only."""
        if key is None:
            return [0.0] * num_cells
        sums = self._sums.get(key)
        if sums is None or len(sums.kappa) != num_cells:
            sums = self._sums[key] = _KeySums([0.0] * num_cells, [0.0] * num_cells, [0.0] * num_cells)
            if len(self._sums) > self.MAX_KEYS:
                self._sums.pop(next(iter(self._sums)))
        return sums.kappa

    def array(self, keys: Sequence[DraftKey | None], num_slots: int) -> np.ndarray:
        """(2 blocks, G, S, R) float32 to add to conditional log-probabilities."""
        num_cells, number = 2 * num_slots * NUM_RANK_CLASSES, {key: i for i, key in enumerate(dict.fromkeys(keys))}
        rows = np.array([self.row(key, num_cells) for key in number], dtype=np.float32)
        blocks = rows.reshape(len(number), 2, num_slots, NUM_RANK_CLASSES).swapaxes(0, 1)
        if len(number) == 1:
            return blocks.repeat(len(keys), axis=1)
        return blocks[:, [number[key] for key in keys]]

    def table(self, keys: Sequence[DraftKey | None], num_slots: int) -> torch.Tensor:
        """`array` as a tensor."""
        return torch.from_numpy(self.array(keys, num_slots))

    def observe(self, draft: RoundDraft, paths: Sequence[Sequence[int]]) -> list[int]:
        """Fold the tested nodes; paths: accepted packed rows of each request, root first.

        Returns accepted tokens per request that came from re-entered blocks.
        """
        tree, host = draft.tree, draft.tree.host
        if host is not None:
            parents, scores, cells, bounds = host.parents, host.scores, host.cells, [0, len(host.parents)]
        else:
            assert draft.cells is not None
            if tree.parents.device.type == "cpu":
                parents, scores, cells = tree.parents.tolist(), tree.scores.tolist(), draft.cells.tolist()
                bounds = tree.cu_nodes.tolist()
            else:  # one read; float64 holds the indices exactly
                columns = torch.stack((tree.parents.double(), tree.scores.double(), draft.cells.double())).cpu()
                parents, scores, cells = columns[0].long().tolist(), columns[1].tolist(), columns[2].long().tolist()
                bounds = [0, *accumulate(n + 1 for n in draft.num_draft_tokens)]
        touched: set[tuple[DraftKey, int]] = set()
        reentered = [0] * len(paths)
        for i, path in enumerate(paths):
            key, start = draft.keys[i], bounds[i]
            accepted = set(path)
            if draft.frontier_mass:
                reentered[i] = sum(cells[row] >= draft.num_cells for row in path)
            sums = self._sums.get(key) if key is not None and draft.is_drafted[i] else None
            if key is None or sums is None:
                continue
            own: set[int] = set()
            for row in range(start + 1, bounds[i + 1]):
                parent = start + parents[row]
                if parent not in accepted:
                    continue
                cell = cells[row]
                if cell not in own:
                    own.add(cell)
                    sums.predicted[cell] *= self.DECAY
                    sums.hits[cell] *= self.DECAY
                # The mass before calibration: kappa is still the one that the tree was drafted with.
                sums.predicted[cell] += min(math.exp(min(scores[row] - scores[parent], 0.0) - sums.kappa[cell]), 1.0)
                sums.hits[cell] += row in accepted
            touched.update((key, cell) for cell in own)
        for key, cell in touched:
            sums = self._sums[key]
            ratio = (sums.hits[cell] + self.PRIOR) / (sums.predicted[cell] + self.PRIOR)
            sums.kappa[cell] = min(max(math.log(ratio), -3.0), 0.5)
        return reentered

    def forget(self, version: str) -> None:
        """Drop the sums of a drafter version."""
        for key in [k for k in self._sums if k[0] == version]:
            del self._sums[key]
