"""How long did work take on a device that runs behind the host?"""

from __future__ import annotations

import torch


class CudaSpan:
    """Seconds between two points of the current stream."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def close(self) -> None:
        """Mark the end, behind all work queued so far."""
        self._end.record()

    def seconds(self) -> float:
        """The duration; call it once something behind the end has been read, then it waits for nothing."""
        return self._start.elapsed_time(self._end) / 1e3


def open_span(device: torch.device) -> CudaSpan | None:
    """Begin to measure on CUDA; None elsewhere, where the host's own timer tells the truth."""
    return CudaSpan() if device.type == "cuda" else None
