"""Does a tensor have the shape, dtype, device and layout that a kernel assumes?"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
