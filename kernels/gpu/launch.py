"""Launch: what must hold before a Triton kernel is launched, and the step of attention that kernels share.

Under TRITON_INTERPRET=1, set before triton is first imported, kernels run operation by operation in numpy on the CPU.
That proves what a kernel computes. It does not prove that the kernel compiles for a GPU, that threads of one program
are ordered where they must be, which rounding tensor cores use, or speed: tests marked `gpu` are for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

_INTERPRETER_PROCESSORS = 4
"""Processor count assumed for the interpreter, so that small shapes are split there as large ones are on a GPU."""


def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter (decided when triton was imported, not by today's environment)."""
    return not isinstance(tl.sum, triton.JITFunction)


def check_tensors(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless kernels can run on `device` and every tensor given lies there.

    Compiled kernels are launched on the current CUDA device, so tensors of another one are refused too.
    """
    if device.type == "cuda":
        if not is_interpreted() and device.index != torch.cuda.current_device():
            raise ValueError(f"device must be the current one (cuda:{torch.cuda.current_device()}), got {device}")
    elif device.type != "cpu" or not is_interpreted():
        raise ValueError(f"device must be cuda (or cpu with TRITON_INTERPRET=1 set before triton loads), got {device}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    is_contiguous: bool = True,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None = any size), one of these dtypes and this device.

    is_contiguous False: only the last dimension must lie at stride 1.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tensor.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if is_contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if not is_contiguous and tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got strides {tensor.stride()}")


def check_integers(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless every tensor is int64: row ids are multiplied by strides beyond 2**31."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {tensor.dtype}")


@triton.jit
def fold_keys(query, key, value, is_visible, acc, peak, total, scale):
    """One step of the online softmax: query (M, Dh), key and value (N, Dh), is_visible (M, N). Scores are log2.

    `peak` is -inf until a row has seen a key.
    """
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    scores = tl.where(is_visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return acc, new_peak, total * decay + tl.sum(weights, 1)


@lru_cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device: how many programs it runs at once, at the least."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
