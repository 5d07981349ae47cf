"""How do numbers of the host get onto the target's device without waiting for it?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(
    values: Sequence[int] | Sequence[float] | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of these values on the device.

    To CUDA the copy goes through pinned memory: a copy from ordinary memory would wait for all work that is queued.
    Syncs: none.
    """
    if isinstance(values, torch.Tensor):
        tensor = values
    elif len(values) and type(values[0]) is int and dtype in (None, torch.int64):
        tensor = torch.from_numpy(np.array(values, dtype=np.int64))  # a third of torch.tensor's time
    else:
        tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
