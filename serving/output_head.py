"""How does a drafter compute its logits: in which number type, from which layout of the weights?

And how do its best tokens follow from them. Shape legend: T drafter tokens, H drafter hidden size, Vd draft vocabulary,
K tokens kept of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.kernels.dispatch import Kernels
from paceline.kernels.topk_lse_ref import MAX_K

Ranking = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""(logits (T, Vd), which may be overwritten; factors (T, 1) float32; K) -> the K best log-probabilities of the products,
(T, K) float32, falling, and their ids (T, K) int64."""

_MIN_HEAD_WEIGHTS = 2**18


def pack_head(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(H, Vd) -> the layout that oneDNN reads fastest."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.T.contiguous().to(dtype), None)


def head_logits(z: torch.Tensor, head: torch.Tensor, head_dtype: torch.dtype) -> torch.Tensor:
    """Logits (T, Vd) of normed hidden states z (T, H), in the head's dtype; one of another dtype than z is a packed one."""
    if head_dtype == z.dtype:
        return torch.mm(z, head)
    return torch.ops.mkldnn._linear_pointwise(z.to(head_dtype), head, None, "none", [], "")


def rank_by_softmax(logits: torch.Tensor, factors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A `Ranking` of torch operators."""
    top = torch.log_softmax(logits.float().mul_(factors), dim=-1).topk(count, dim=-1)
    return top.values, top.indices


def choose_ranking(kernels: Kernels) -> Ranking:
    """The `Ranking` of a drafter whose device has these kernels: on the CPU torch's operators are the faster ones."""
    if kernels.is_reference:
        return rank_by_softmax

    def rank(logits: torch.Tensor, factors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if count > MAX_K:
            return rank_by_softmax(logits, factors, count)
        # One pass over the logits as the head leaves them: neither float32 ones nor a softmax of them are stored.
        values, ids, lse = kernels.topk_lse(logits, count, scale=factors[:, 0].contiguous())
        return values - lse[:, None], ids

    return rank


def choose_head_dtype(dtype: torch.dtype, device: torch.device, num_weights: int) -> torch.dtype:
    """The output head's dtype: bfloat16 for large heads where the CPU computes it natively, else the drafter's.

    The head is half of the weights that a round reads; rounding its logits moves no calibration noticeably.
    """
    is_native = torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float32 and device.type == "cpu" and num_weights >= _MIN_HEAD_WEIGHTS and is_native:
        return torch.bfloat16
    return dtype
