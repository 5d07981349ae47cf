"""TreeBatch: the draft trees of one round, packed, roots included.

Shape legend: B requests, N packed tree rows (all requests, roots included), W widest tree of the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@dataclass(kw_only=True, slots=True)
class TreeRows:
    """The packed rows on the host, and what follows from them; read only."""

    token_ids: np.ndarray  # (N,) int64
    depths: np.ndarray  # (N,) int64
    scores: np.ndarray  # (N,) float32 or float64
    cells: np.ndarray | None  # (N,) int64
    above: np.ndarray  # (N,) int64, packed row of the parent; a root stands above itself
    owners: np.ndarray  # (N,) int64, request of the row
    roots: np.ndarray  # (B,) int64, packed row of each root
    max_depth: int


@dataclass(kw_only=True, slots=True)
class TreeBatch:
    """Packed trees; within a request row 0 is the root (anchor) and a parent comes before its children."""

    token_ids: torch.Tensor  # (N,) int64
    parents: torch.Tensor  # (N,) int64, index within the request's own tree; -1 for the root
    depths: torch.Tensor  # (N,) int64, 0 for the root
    scores: torch.Tensor  # (N,) float32, log of the estimated path mass; 0 for the root
    cu_nodes: torch.Tensor  # (B + 1,) int64
    ancestors: torch.Tensor  # (N, W) bool, [i, j]: j (own tree) is i or an ancestor of i
    cells: torch.Tensor | None = None  # (N,) int64, calibration cell of each row, -1 for roots; None = not told
    rows: TreeRows | None = None
    """Set by builders on the host and by `on_host`."""
    counts: list[int] | None = None
    """(B,) rows of each request, where the host knows them without asking the device."""

    @property
    def num_requests(self) -> int:
        return self.cu_nodes.numel() - 1

    def cell_list(self) -> list[int]:
        """Cells of all rows, which must have some.  Syncs: as `on_host`."""
        cells: np.ndarray | torch.Tensor | None = self.cells
        if self.rows is not None or not self.token_ids.is_cpu:
            cells = self.on_host().cells
        assert cells is not None
        return cells.tolist()

    def on_host(self) -> TreeRows:
        """The rows as NumPy arrays.  Syncs: off the CPU, the first time; one read where `counts` is known."""
        if self.rows is None:
            columns = [self.token_ids, self.parents, self.depths, self.scores]
            if self.cells is not None:
                columns.append(self.cells)
            if self.token_ids.device.type == "cpu":
                read = [column.numpy() for column in columns]
            else:  # one read; float64 holds the indices exactly
                block = torch.stack([column.double() for column in columns]).cpu().numpy()
                read = [row if i == 3 else row.astype(np.int64) for i, row in enumerate(block)]
            counts = self.cu_nodes.diff().cpu().numpy() if self.counts is None else np.array(self.counts)
            roots, owners = counts.cumsum() - counts, np.arange(len(counts)).repeat(counts)
            self.rows = TreeRows(
                token_ids=read[0],
                depths=read[2],
                scores=read[3],
                cells=read[4] if self.cells is not None else None,
                above=roots[owners] + read[1].clip(0),
                owners=owners,
                roots=roots,
                max_depth=int(read[2].max(initial=0)),
            )
        return self.rows

    @staticmethod
    def roots(anchor_token_ids: torch.Tensor) -> TreeBatch:
        """One-node trees: plain decoding."""
        n = anchor_token_ids.numel()
        parents, depths, scores, cu_nodes, ancestors = _columns_of_roots(n, str(anchor_token_ids.device))
        return TreeBatch(
            token_ids=anchor_token_ids,
            parents=parents,
            depths=depths,
            scores=scores,
            cu_nodes=cu_nodes,
            ancestors=ancestors,
            counts=[1] * n,
        )


@lru_cache(maxsize=64)
def _columns_of_roots(n: int, device: str) -> tuple[torch.Tensor, ...]:
    """What all plain rounds of n requests share; read only."""
    zeros = torch.zeros(n, dtype=torch.int64, device=device)
    ancestors = torch.ones(n, 1, dtype=torch.bool, device=device)
    return zeros - 1, zeros, zeros.float(), torch.arange(n + 1, device=device), ancestors
