"""Top-k with log-sum-exp: the k largest logits, and what turns a logit into a log-probability; plain torch reference.

Shape legend: N rows, V vocab.
"""

from __future__ import annotations

import torch

MAX_K = 32


def topk_lse(
    logits: torch.Tensor, k: int, *, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest values of each row, their ids, and the row's log-sum-exp; log p = value - lse.

    With a scale all three are those of the float32 products logits * scale.

    Equal values (0.0 and -0.0 too): lower id first. NaN is larger than every number, as in torch.topk, and makes its
    row's lse NaN. A row of -inf has values -inf, ids 0..k-1 and lse -inf; +inf anywhere without NaN gives lse +inf.

    Args:
        logits: (N, V) float32, bfloat16 or float16.
        k: 1 <= k <= min(V, MAX_K).
        scale: (N,) float32, factors on the rows' logits; None = 1.
    Returns: values (N, k) float32 in falling order, ids (N, k) int64, lse (N,) float32.
    Raises: ValueError when k is out of range.
    """
    if not 1 <= k <= min(logits.shape[1], MAX_K):
        raise ValueError(f"k must be in [1, {min(logits.shape[1], MAX_K)}], got {k}")
    scaled = logits.float() if scale is None else logits.float() * scale[:, None]
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), ids[:, :k].contiguous(), torch.logsumexp(scaled.double(), -1).float()
