"""How does a drafter compute its logits: in which number type, from which layout of the weights?

Shape legend: T drafter tokens, H drafter hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import torch

_MIN_HEAD_WEIGHTS = 2**18


def pack_head(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, Vd) -> the layout that oneDNN reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous().to(dtype), None)


def head_logits(z: torch.Tensor, head: torch.Tensor, head_dtype: torch.dtype) -> torch.Tensor:
    """Logits (T, Vd) float32 of normed hidden states z (T, H); a head of another dtype than z is a packed one."""
    if head_dtype == z.dtype:
        return torch.mm(z, head).float()
    return torch.ops.mkldnn._linear_pointwise(z.to(head_dtype), head, None, "none", [], "").float()


def choose_head_dtype(dtype: torch.dtype, device: torch.device, num_weights: int) -> torch.dtype:
    """The output head's dtype: bfloat16 for large heads where the CPU computes it natively, else the drafter's.

    The head is half of the weights that a round reads; rounding its logits moves no calibration noticeably.
    """
    is_native = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float32 and device.type == "cpu" and num_weights >= _MIN_HEAD_WEIGHTS and is_native:
        return torch.bfloat16
    return dtype
