"""Dense layer: what a decoder layer does between its matrix products and its attention; plain torch reference.

Shape legend: N rows, Dm hidden size, I width of the gated layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to the residual stream in place and return the RMS norm of the sum (arXiv 1910.07467).

    The sum is rounded to x's dtype, normalised in float32, rounded, and then multiplied, as transformers does.

    Args:
        x: (N, Dm), overwritten. delta: (N, Dm), or None to leave x as it is.
        weight: (Dm,) of x's dtype.
    Returns: (N, Dm) of x's dtype.
    """
    if delta is not None:
        x += delta
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second half (SwiGLU, arXiv 2002.05202).

    Args:
        gate_up: (N, 2 I).
    Returns: (N, I) of the same dtype; SiLU is rounded to it before the product, as in transformers.
    """
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
