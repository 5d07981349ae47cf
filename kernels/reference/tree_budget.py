"""How many draft nodes does each request get, decided jointly over the batch? Plain torch reference.

Shape legend: B requests, M masses of a request, G row counts of the cost table.
Source: the rate argmax of tree_speculation.md 4.5: over all totals Q of verified rows, maximise
(B + the Q - B largest masses) / (fixed seconds + verify seconds of Q rows). Every total is evaluated, so a staircase of
captured graph sizes is handled exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True, slots=True)
class NodeBudget:
    """Draft nodes of every request and where its rows start."""

    num_nodes: torch.Tensor  # (B,) int64, root excluded
    cu_nodes: torch.Tensor  # (B + 1,) int64 offsets of each request's rows, root included; the last one is the total

    @staticmethod
    def empty(num_requests: int, device: torch.device) -> NodeBudget:
        """Buffers whose content is undefined."""
        return NodeBudget(
            num_nodes=torch.empty(num_requests, dtype=torch.int64, device=device),
            cu_nodes=torch.empty(num_requests + 1, dtype=torch.int64, device=device),
        )


def seconds_of_rows(
    rows: torch.Tensor, table_rows: torch.Tensor, table_seconds: torch.Tensor, is_stepped: bool
) -> torch.Tensor:
    """Seconds of a verify forward of `rows` rows by the table, float64.

    Stepped: the smallest table entry with at least as many rows (captured graphs); inf beyond the last one.
    Otherwise: linear between entries, constant below the first, in proportion to rows beyond the last.
    """
    grid, curve = table_rows.double(), table_seconds.double()
    last = grid.numel() - 1
    if is_stepped:
        index = torch.searchsorted(grid, rows.double())
        return torch.where(index > last, float("inf"), curve[index.clamp(max=last)])
    low = (torch.searchsorted(grid, rows.double(), right=True) - 1).clamp(0, last)
    high = (low + 1).clamp(max=last)
    width = (grid[high] - grid[low]).clamp(min=1)
    inner = curve[low] + (curve[high] - curve[low]) * (rows - grid[low]).clamp(min=0) / width
    beyond = curve[last] + (rows - grid[last]) * curve[last] / grid[last]
    return torch.where(rows > grid[last], beyond, inner)


def choose_budget(
    *,
    masses: torch.Tensor,
    table_rows: torch.Tensor,
    table_seconds: torch.Tensor,
    fixed_seconds: torch.Tensor,
    min_nodes: torch.Tensor,
    max_rows: int,
    is_stepped: bool,
) -> NodeBudget:
    """Split the best total of verified rows over the requests.

    Equal masses go to the lower request first, equal rates to the smaller total. When no total has a finite time (more
    requests than the stepped table has rows), nobody drafts.

    Args:
        masses: (B, M) float32, path masses of a request's nodes, falling; 0, negative and NaN = absent.
        table_rows: (G,) int64, rising, at least 1. table_seconds: (G,) float32, above 0.
        fixed_seconds: (1,) float32, seconds of a round outside the verify forward.
        min_nodes: (B,) int64, nodes a request gets even if they do not pay (as far as it has them), after the split;
            lower requests first where max_rows runs out.
        max_rows: most rows of a round, roots included.
        is_stepped: how the table is read, see `seconds_of_rows`.
    Raises: ValueError when max_rows cannot hold the roots.
    """
    num_requests, width = masses.shape
    if max_rows < num_requests:
        raise ValueError(f"max_rows must be at least the number of requests ({num_requests}), got {max_rows}")
    out = NodeBudget.empty(num_requests, masses.device)
    clean = torch.where(masses > 0, masses, 0.0).double()
    available = (clean > 0).sum(1)
    order = clean.flatten().argsort(descending=True, stable=True)
    taken = min(int(available.sum()), max_rows - num_requests)
    gains = clean.flatten()[order[:taken]].cumsum(0)
    gains = torch.cat([gains.new_zeros(1), gains])
    totals = torch.arange(num_requests, num_requests + taken + 1, device=masses.device)
    seconds = fixed_seconds.double() + seconds_of_rows(totals, table_rows, table_seconds, is_stepped)
    best = int(((num_requests + gains) / seconds).argmax()) if num_requests else 0
    nodes = torch.bincount(order[:best] // max(width, 1), minlength=num_requests)
    spare = max_rows - num_requests - best
    for b in range(num_requests):
        extra = min(max(min(int(min_nodes[b]), int(available[b])) - int(nodes[b]), 0), spare)
        nodes[b] += extra
        spare -= extra
    out.num_nodes.copy_(nodes)
    out.cu_nodes[0] = 0
    out.cu_nodes[1:] = (nodes + 1).cumsum(0)
    return out
