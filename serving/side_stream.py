"""How is a CUDA device given work from a thread other than the engine's without holding the engine up?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def side_stream(device: torch.device | str | None) -> Iterator[None]:
    """Run the block's CUDA work on a stream of its own and return when it is done; nothing on other devices.

    The work begins after what the engine has queued so far: a round in flight may still read what will be overwritten.
    The calling thread waits for the event at the end, so whoever learns that the block is over may use its results from
    any stream; the engine's stream is never held up.
    Syncs: the calling thread, once.
    """
    if device is None or torch.device(device).type != "cuda":
        yield
        return
    stream, done = torch.cuda.Stream(device), torch.cuda.Event()
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
        done.record(stream)
    done.synchronize()
