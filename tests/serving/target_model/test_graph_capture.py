"""Graphs are made in order until the time is over, and the cheapest one that fits is used."""

import contextlib

import pytest
import torch

from paceline.serving.target_model.graph_capture import (
    CaptureJob,
    CudaGraphs,
    EagerGraphs,
    GraphTable,
    capture_all,
    size_ladder,
    smallest_step,
)


def jobs(made, ranks, failing=(), error=RuntimeError):
    def make(rank):
        def run(_backend):
            if rank in failing:
                raise error("cannot be captured")
            made.append(rank)

        return run

    return [
        CaptureJob(name=str(rank), family="odd" if rank % 2 else "even", rank=rank, run=make(rank)) for rank in ranks
    ]


def test_steps_rise_to_the_limit_and_the_smallest_that_holds_a_size_is_taken():
    assert size_ladder(20, has_halves=True) == (1, 2, 3, 4, 6, 8, 12, 16, 20)
    assert size_ladder(9000, start=256, factor=4) == (256, 1024, 4096, 9000)
    assert size_ladder(100, start=256) == (100,)
    assert [smallest_step((1, 4, 8), n) for n in (0, 1, 2, 8, 9)] == [1, 1, 4, 8, None]


def test_the_cheapest_captured_graph_that_holds_every_size_is_used():
    table = GraphTable([(1, 2, 4, 8), (1, 2, 4)])
    replayed = []
    for sizes in ((8, 4), (4, 1), (4, 4)):
        table.add(sizes, EagerGraphs().capture(lambda sizes=sizes: replayed.append(sizes)))
    assert table.fit(1, 1) == (4, 1) and table.fit(3, 2) == (4, 4) and table.fit(5, 1) == (8, 4)
    assert table.fit(9, 1) is None and table.fit(1, 5) is None
    replayed.clear()
    table.replay(table.fit(3, 2))
    assert replayed == [(4, 4)] and len(table) == 3
    table.add((2, 2), EagerGraphs().capture(lambda: None))
    assert table.fit(1, 1) == (2, 2), "a graph made later is found too"


def test_capturing_stops_when_its_time_is_over():
    made, seen, now = [], [], iter(range(100))
    count = capture_all(
        jobs(made, [3, 1, 2, 0]), EagerGraphs(), budget_s=2.5, timer=lambda: next(now),
        progress=lambda done, planned: seen.append((done, planned)),
    )  # fmt: skip
    assert made == [0, 1] and count == 2, "the most useful first, none begun after the budget"
    assert seen == [(1, 4), (2, 4)]
    assert capture_all(jobs(made, [5]), EagerGraphs(), budget_s=0.0) == 0


class CompilerError(Exception):
    """As Triton's own: OutOfResources and CompilationError are no RuntimeErrors."""


@pytest.mark.parametrize("error", [RuntimeError, ValueError, CompilerError])
def test_a_failed_capture_ends_its_family_only_and_says_why(error, caplog):
    made = []
    assert capture_all(jobs(made, [0, 1, 2, 3, 4], [1], error), EagerGraphs(), budget_s=60.0) == 3
    assert made == [0, 2, 4]
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        "graph 1 could not be captured; odd runs eagerly: cannot be captured"
    ]


def test_strict_graphs_refuse_host_reads_and_shapes_that_depend_on_data():
    from tests.helpers.static_kernels import StrictGraphs

    x, out = torch.arange(4.0), torch.zeros(4)
    graph = StrictGraphs().capture(lambda: out.copy_(x * 2))
    x += 1
    graph.replay()
    assert out.tolist() == [2.0, 4.0, 6.0, 8.0]
    for bad in (lambda: out.fill_(float(x.max())), lambda: x.nonzero(), lambda: x.tolist(), lambda: x[x > 1]):
        with pytest.raises(RuntimeError):
            StrictGraphs().capture(bad)


class FakeCuda:
    """torch.cuda as far as a capture needs it; one that fails leaves its stream the current one and its pool taken."""

    def __init__(self, monkeypatch):
        self.current, self.captured, self.taken, self.is_invalid = "default", [], set(), False
        self.num_pools = 0
        for name in ("Stream", "stream", "current_stream", "device", "graph", "CUDAGraph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _, pool: self.taken.remove(pool))

    class CUDAGraph:
        pass

    def Stream(self, _):
        return FakeStream()

    def current_stream(self):
        return self.current

    def graph_pool_handle(self):
        self.num_pools += 1
        return self.num_pools

    @contextlib.contextmanager
    def device(self, _):
        yield

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        if pool in self.taken:
            raise RuntimeError("already recording to this pool")
        self.taken.add(pool)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            if self.is_invalid:  # as cudaStreamEndCapture says it: nothing behind it is done
                self.is_invalid = False
                raise RuntimeError("capture invalidated")
        self.taken.remove(pool)
        self.current = before
        self.captured.append(graph)


class FakeStream:
    def wait_stream(self, _):
        pass


def test_a_failed_cuda_capture_leaves_stream_and_allocator_to_the_next_and_says_its_own_error(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(cuda, "current", FakeStream())
    backend, before = CudaGraphs(torch.device("cuda", 0)), cuda.current

    def reads():
        if cuda.current is not before and len(runs) == 2:  # behind the warm-ups
            cuda.is_invalid = True
            raise ValueError("a host read")
        runs.append(cuda.current)

    runs = []
    with pytest.raises(ValueError, match="a host read"):
        backend.capture(reads)
    assert cuda.current is before and not cuda.taken
    graph = backend.capture(lambda: None)
    assert cuda.captured == [graph] and cuda.current is before and not cuda.taken
    cuda.is_invalid = True  # by a call that raised nothing
    with pytest.raises(RuntimeError, match="invalidated"):
        backend.capture(lambda: None)
    assert cuda.current is before and len({id(g) for g in backend._broken}) == 2
