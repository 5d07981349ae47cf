"""TreeBatch: the draft trees of one round, packed, roots included.

Shape legend: B requests, N packed tree rows (all requests, roots included), W widest tree of the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(kw_only=True, slots=True)
class HostTree:
    """The same tree as Python numbers, for a lone request on the CPU."""

    token_ids: list[int]  # (N,)
    parents: list[int]  # (N,)
    depths: list[int]  # (N,)
    scores: list[float]  # (N,)
    cells: list[int]  # (N,) calibration cell of each row, -1 for the root


@dataclass(kw_only=True, slots=True)
class TreeBatch:
    """Packed trees; within a request row 0 is the root (anchor) and a parent comes before its children."""

    token_ids: torch.Tensor  # (N,) int64
    parents: torch.Tensor  # (N,) int64, index within the request's own tree; -1 for the root
    depths: torch.Tensor  # (N,) int64, 0 for the root
    scores: torch.Tensor  # (N,) float32, log of the estimated path mass; 0 for the root
    cu_nodes: torch.Tensor  # (B + 1,) int64
    ancestors: torch.Tensor  # (N, W) bool, [i, j]: j (own tree) is i or an ancestor of i
    host: HostTree | None = None
    """Set when there is one request and the tree was built on the host."""
    counts: list[int] | None = None
    """(B,) rows of each request, where the host knows them without asking the device."""

    @property
    def num_requests(self) -> int:
        return self.cu_nodes.numel() - 1

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
