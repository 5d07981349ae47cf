"""Device transfers: numbers of the host on the target's device, without waiting for it; and the room on the host.

A side stream takes work of threads other than the engine's without holding the engine up; device timers tell how long
work took on a device that runs behind the host.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

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


def upload_all(columns: Sequence[list[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """int64 tensors of these columns, parts of one that is uploaded.  Syncs: none."""
    whole = np.array(list(itertools.chain.from_iterable(columns)), dtype=np.int64)
    return upload(torch.from_numpy(whole), device).split([len(column) for column in columns])


_CGROUP = Path("/sys/fs/cgroup")


def available_ram_bytes(cgroup: Path = _CGROUP) -> int:
    """RAM that can be taken without swapping; in a container also not more than its memory limit leaves. What it holds of files,
    such as mapped weights, is given back for the asking."""
    import psutil  # a bare GPU machine may lack it, and is never asked

    available = psutil.virtual_memory().available
    for limit_file, used_file, prefix in (
        ("memory.max", "memory.current", ""),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),  # v1
    ):
        try:
            limit, used = ((cgroup / name).read_text().strip() for name in (limit_file, used_file))
        except OSError:  # another cgroup version, or no Linux
            continue
        if limit.isdigit() and used.isdigit():  # v2 writes 'max' where there is no limit
            held = int(used) - _file_bytes((cgroup / used_file).with_name("memory.stat"), prefix)
            available = min(available, max(0, int(limit) - max(held, 0)))
    return available


def _file_bytes(stat: Path, prefix: str) -> int:
    """Bytes that a container holds of files, by its memory.stat; 0 where that cannot be read."""
    try:
        words = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(words[f"{prefix}inactive_file"]) + int(words[f"{prefix}active_file"])
    except (OSError, ValueError, KeyError):
        return 0


@lru_cache
def _own_stream(device: str) -> torch.cuda.Stream:
    """The side stream of a device: memory that work on a stream gave back stays that stream's own in torch, so each load on
    another one (torch has 32) would take as much again."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def side_stream(device: torch.device | str | None) -> Iterator[None]:
    """Run the block's CUDA work on the device's side stream and return when it is done; nothing on other devices.

    The work begins after what the engine has queued so far: a round in flight may still read what will be overwritten.
    The calling thread waits for the event at the end, so whoever learns that the block is over may use its results from
    any stream; the engine's stream is never held up.
    Syncs: the calling thread, once.
    """
    if device is None or torch.device(device).type != "cuda":
        yield
        return
    stream, done = _own_stream(str(device)), torch.cuda.Event()
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
        done.record(stream)
    done.synchronize()


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
