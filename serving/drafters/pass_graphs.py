"""Pass graphs: a drafter's proposals alone as captured work, for trees that are built elsewhere.

A round's inputs are copied into static tensors, padded, replayed. Leaves of no request are computed and belong to nobody.
Shape legend: B requests, R new rows, L columns of the slot table, M leaves per request, F = B * M leaves; a graph has at
least as many of each as the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from paceline.serving.drafters.graph_inputs import GraphInputs
from paceline.serving.drafters.interface import DraftInputs, Frontier, Proposal, StaticDrafter
from paceline.serving.target_model.graph_capture import CaptureJob, GraphBackend, GraphTable


class PassGraphs:
    """The graphs of one drafter. Its weights may change in place; its pool must not move."""

    def __init__(
        self,
        drafter: StaticDrafter,
        *,
        feature_size: int,
        dtype: torch.dtype,
        max_requests: int,
        max_leaves: int,
        max_context: int,
        has_deltas: bool = False,
    ) -> None:
        """max_leaves: M; 0 leaves second blocks out. has_deltas: whether requests may draft with deltas."""
        self._drafter, self._max_requests, self._max_leaves = drafter, max_requests, max_leaves
        self._static = GraphInputs(
            feature_size=feature_size, dtype=dtype, padding_slots=drafter.padding_slots, max_requests=max_requests,
            max_context=max_context, max_depth=drafter.caps.max_depth, has_deltas=has_deltas,
        )  # fmt: skip
        self._first, self._second = GraphTable(self._static.ladders), GraphTable(self._static.ladders[1:])
        self._sizes: tuple[int, ...] | None = None  # (B, L) of what the request tensors hold
        self._inputs: DraftInputs | None = None  # of the latest `propose`
        self._block1: Proposal | None = None  # static, of as many nodes as there are at most
        self._block2: Proposal | None = None
        leaves = torch.zeros(3, max_requests * max_leaves, dtype=torch.int64, device=drafter.padding_slots.device)
        self._leaves = dict(zip(("request", "slot", "token_ids"), leaves, strict=True))

    @property
    def num_graphs(self) -> int:
        return len(self._first) + len(self._second)

    def jobs(self, name: str, rank: int = 0) -> list[CaptureJob]:
        """Every graph worth having; those with most rows, which hold all others, come first. rank: added to all ranks."""
        _, requests, widths = self._static.ladders
        jobs = []
        for i, b in enumerate(requests):
            for k, width in enumerate(widths):
                if not self._drafter.takes(b, width):
                    continue
                at = rank + i + k
                if self._max_leaves:
                    title = f"{name} block 2 requests={b} context={width}"
                    run = self._second_job(b, width)
                    jobs.append(CaptureJob(name=title, family=f"{name} block 2", rank=at, run=run))
                for n in self._static.steps(b):
                    title = f"{name} block 1 rows={n} requests={b} context={width}"
                    own, run = self._static.rank(at, n, b), self._first_job(n, b, width)
                    jobs.append(CaptureJob(name=title, family=f"{name} block 1", rank=own, run=run))
        return jobs

    def propose(self, inputs: DraftInputs) -> Proposal | None:
        """The first block, valid until the next call; None when no graph holds the round.  Syncs: none."""
        n, b = inputs.new_token_ids.numel(), inputs.context_lens.numel()
        columns = inputs.slot_table.shape[1]
        sizes = self._first.fit(n, b, columns)
        if sizes is None or (self._max_leaves and self._second.fit(b, columns) is None):
            return None
        self._static.load(inputs, sizes)
        self._sizes = sizes[1:]
        self._first.replay(sizes)
        self._inputs = inputs
        return _rows_of(self._block1, b)

    def expand(self, inputs: DraftInputs, frontier: Frontier) -> Proposal:
        """Block 2 at at most M leaves per request of the latest `propose`; valid until the next call.  Syncs: none."""
        assert self._inputs is inputs, "expand follows propose on the same inputs"
        f, b, columns = frontier.token_ids.numel(), inputs.context_lens.numel(), inputs.slot_table.shape[1]
        sizes = self._second.fit(b, columns)
        if sizes is None or f > b * self._max_leaves:
            raise ValueError(f"a frontier must have at most {self._max_leaves} leaves per request, got {f} for {b}")
        requests, width = sizes
        if sizes != self._sizes:
            self._static.load_requests(inputs, requests, width)
            self._sizes = sizes
        padded = requests * self._max_leaves
        for name, static in self._leaves.items():
            static[:f].copy_(getattr(frontier, name))
            static[f:padded].fill_(requests if name == "request" else 0)
        self._second.replay(sizes)
        return _rows_of(self._block2, f)

    def _first_job(self, rows: int, requests: int, width: int) -> Callable[[GraphBackend], None]:
        inputs = self._static.view(rows, requests, width)

        def run() -> None:
            self._block1 = _kept(self._block1, self._drafter.propose(inputs), self._max_requests)

        return lambda backend: self._first.add((rows, requests, width), backend.capture(run))

    def _second_job(self, requests: int, width: int) -> Callable[[GraphBackend], None]:
        leaves = {name: static[: requests * self._max_leaves] for name, static in self._leaves.items()}
        inputs, frontier = self._static.view(0, requests, width), Frontier(**leaves)

        def run() -> None:
            if self._block1 is None:  # the proposal that block 2 goes on from is static, and comes with the first block
                rows = self._static.ladders[0][-1]
                first = self._drafter.propose(self._static.view(rows, self._max_requests, width))
                self._block1 = _kept(None, first, self._max_requests)
            found = self._drafter.expand(inputs, _rows_of(self._block1, requests), frontier)
            self._block2 = _kept(self._block2, found, self._max_requests * self._max_leaves)

        return lambda backend: self._second.add((requests, width), backend.capture(run))


def _kept(static: Proposal | None, value: Proposal, num_nodes: int) -> Proposal:
    """The static tensors, of so many nodes, with the value in front; made where there are none."""
    tensors = {f.name: t for f in fields(value) if isinstance(t := getattr(value, f.name), torch.Tensor)}
    if static is None:
        made = {name: t.new_zeros(num_nodes, *t.shape[1:]) for name, t in tensors.items()}
        static = Proposal(**{"widths": None, **made})  # type: ignore[arg-type]
    for name, tensor in tensors.items():
        getattr(static, name)[: tensor.shape[0]].copy_(tensor)
    return static


def _rows_of(static: Proposal | None, num: int) -> Proposal:
    assert static is not None, "the first block comes before the second"
    cut = {f.name: t[:num] for f in fields(static) if isinstance(t := getattr(static, f.name), torch.Tensor)}
    return Proposal(**{"widths": None, **cut})  # type: ignore[arg-type]
