"""Graph capture: work of fixed shapes as graphs that one call replays, the commonest shapes first.

A piece of work is a function without arguments that reads static tensors and writes static tensors. Captured once, it
can be replayed for every round that fits its sizes: the round's numbers are copied into the static tensors and padded.
What the host knows of a round goes there in one upload (`Staging`); captured work slices, pads and scatters it.
What a captured function must keep to: no host read, no shape that depends on data, no tensor that is not static.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from paceline.errors import RankError

logger = logging.getLogger(__name__)

_NUM_WARM_UPS = 2
"""Runs before a capture: libraries choose algorithms and compile kernels then, which a capture must not contain."""

REFINING_RANK = 100
"""Added to the rank of graphs that only save padding: without them a larger graph holds the round."""

Progress = Callable[[int, int], None]
"""Called with (jobs done, jobs planned)."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run the work again over the same tensors."""


class GraphBackend(Protocol):
    """Makes graphs."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run `run` at least once and return its graph."""


class CudaGraphs:
    """CUDA graphs in one shared memory pool; replays must follow one another on one stream.

    Graphs keep nothing but what they write into static tensors: the memory of their intermediates is used again by
    every other graph of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._broken: list[torch.cuda.CUDAGraph] = []
        """Kept: torch's allocators go on asking a capture that failed which memory is its own."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Warm up on a side stream, then capture; raises what the work or its capture raises.

        A capture that fails leaves torch on its stream, and its pool taken; torch's error says only that there was one. So
        the stream is set back, the next graph begins a new pool, and the work's own error is raised.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream()):
            current, cause = torch.cuda.current_stream(), list[Exception]()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_WARM_UPS):
                    run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: another thread of the process may allocate meanwhile (HTTP, traces)
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        run()
                    except Exception as e:
                        cause.append(e)
                        raise
            except Exception as e:
                self._broken.append(graph)
                with contextlib.suppress(RuntimeError):  # nothing is left to end where only Python has failed
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                self._pool = torch.cuda.graph_pool_handle()
                if cause:
                    raise cause[0] from e
                raise
        return graph


class EagerGraphs:
    """Graphs that run the same function again: on the CPU they show that padding and static tensors are right."""

    def capture(self, run: Callable[[], None]) -> Graph:
        run()
        return _EagerGraph(run)


@dataclass(frozen=True, slots=True)
class _EagerGraph:
    run: Callable[[], None]

    def replay(self) -> None:
        self.run()


class StagedField:
    """Some numbers of a `Staging`."""

    def __init__(self, staging: Staging, start: int, size: int, is_float: bool) -> None:
        self._staging, self._bounds, self._is_float = staging, slice(start, start + size), is_float

    @property
    def tensor(self) -> torch.Tensor:
        """(size,) int64 or float64 on the device, the same memory always."""
        tensor = self._staging.static[self._bounds]
        return tensor.view(torch.float64) if self._is_float else tensor

    def set(self, values: Sequence[int] | Sequence[float] | np.ndarray, padding: float = 0) -> None:
        """Numbers for the next upload; `padding` behind them."""
        host = self._staging.host[self._bounds]
        host = host.view(np.float64) if self._is_float else host
        host[: len(values)] = values
        host[len(values) :] = padding


class Staging:
    """Numbers that the host tells captured work, in one static buffer.

    All fields are reserved before the first is read or set.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._buffers: tuple[np.ndarray, torch.Tensor] | None = None

    def reserve(self, size: int, *, is_float: bool = False) -> StagedField:
        """Room for so many numbers, int64 or float64."""
        assert self._buffers is None, "a field is reserved before any is used"
        self._size += size
        return StagedField(self, self._size - size, size, is_float)

    def _both(self) -> tuple[np.ndarray, torch.Tensor]:
        if self._buffers is None:
            static = torch.zeros(self._size, dtype=torch.int64, device=self._device)
            self._buffers = np.zeros(self._size, dtype=np.int64), static
        return self._buffers

    @property
    def host(self) -> np.ndarray:
        """(size of all fields,) int64, what the next upload brings."""
        return self._both()[0]

    @property
    def static(self) -> torch.Tensor:
        """(size of all fields,) int64 on the device."""
        return self._both()[1]

    def send(self) -> None:
        """Upload every field, from pinned memory of its own to a device.  Syncs: none."""
        host, static = self._both()
        numbers = torch.from_numpy(host)
        static.copy_(numbers.pin_memory() if static.device.type == "cuda" else numbers, non_blocking=True)


class GraphTable:
    """Graphs by their sizes; the cheapest one that every size of a round fits into is used."""

    def __init__(self, ladders: Sequence[Sequence[int]]) -> None:
        """ladders: for each size, the rising steps that graphs may have."""
        self._ladders = [tuple(steps) for steps in ladders]
        self._graphs: dict[tuple[int, ...], Graph] = {}
        self._found: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def add(self, sizes: tuple[int, ...], graph: Graph) -> None:
        """Put in a graph; `sizes` are steps of the ladders."""
        self._graphs[sizes] = graph
        self._found.clear()

    def fit(self, *sizes: int) -> tuple[int, ...] | None:
        """Sizes of the cheapest graph that holds `sizes`; None when there is none."""
        steps = []
        for size, ladder in zip(sizes, self._ladders, strict=True):
            step = smallest_step(ladder, size)
            if step is None:
                return None
            steps.append(step)
        key = tuple(steps)
        if key not in self._found:
            fitting = [s for s in self._graphs if all(a >= b for a, b in zip(s, key, strict=True))]
            self._found[key] = min(fitting) if fitting else None  # the first size counts most
        return self._found[key]

    def replay(self, sizes: tuple[int, ...]) -> None:
        self._graphs[sizes].replay()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureJob:
    """One graph to make."""

    name: str
    family: str
    """Jobs that do the same at other sizes: when one of them cannot be captured, none is tried again."""
    rank: int
    """Jobs of lower rank are made first."""
    run: Callable[[GraphBackend], Any]


def size_ladder(limit: int, *, start: int = 1, factor: int = 2, has_halves: bool = False) -> tuple[int, ...]:
    """Steps from `start` by `factor` up to `limit`, which is the last; `has_halves` adds 1.5 times each even step."""
    steps, size = [], start
    while size < limit:
        steps.append(size)
        if has_halves and size % 2 == 0 and size + size // 2 < limit:
            steps.append(size + size // 2)
        size *= factor
    return (*steps, limit)


def smallest_step(ladder: Sequence[int], size: int) -> int | None:
    """The smallest step that holds `size`; None above the last."""
    return next((step for step in ladder if step >= size), None)


def capture_all(
    jobs: Iterable[CaptureJob],
    backend: GraphBackend,
    *,
    budget_s: float,
    timer: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> int:
    """Make graphs in the order of their ranks until the time is over; returns how many were made.

    Whatever has no graph runs eagerly. A job that fails ends its family: what one shape cannot do no other can.
    Raises: RankError, after which nothing of the target can run.
    """
    ordered = sorted(jobs, key=lambda job: job.rank)
    start, done = timer(), 0
    failed: set[str] = set()
    for job in ordered:
        if timer() - start >= budget_s:
            break
        if job.family in failed:
            continue
        try:
            job.run(backend)
        except RankError:
            raise
        except Exception as e:  # of torch, of Triton's compiler, of a launcher's checks; eager rounds need no graph
            logger.exception("graph %s could not be captured; %s runs eagerly: %s", job.name, job.family, e)
            failed.add(job.family)
            continue
        done += 1
        if progress is not None:
            progress(done, len(ordered))
    logger.info("graphs captured num=%d planned=%d s=%.1f", done, len(ordered), timer() - start)
    return done
