"""Engine graphs: verify forwards and acceptance of the target, and the two blocks of every drafter an engine can hold.

Both adaptive slots and the hold-back's have graphs. New weights are copied into a slot in place, so they outlive versions.
A round's rows are copied into static tensors, padded, replayed. Padding rows come after the rows of the round: they hold
token 0 at position 0, belong to no request and write their K/V to scratch rows of their own, which nobody reads this
round. Padding requests have no rows and no context.

Shape legend: B requests, N packed tree rows, W widest tree, L columns of the slot table, V vocab, m tapped layers,
Dm hidden size; a bucket has at least as many of each as the round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch

from paceline.config import EngineConfig
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.target_model.graph_capture import (
    REFINING_RANK,
    CaptureJob,
    CudaGraphs,
    EagerGraphs,
    GraphBackend,
    GraphTable,
    Progress,
    capture_all,
    size_ladder,
)
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import AcceptPlan, accept, accept_rows

MAX_GRAPH_ROWS = 512
"""Larger rounds are bound by arithmetic: launches cost them little, and every row has its logits in a static tensor."""


class GraphedTarget:
    """Verify forwards and the acceptance behind them, by graph where one fits, else eagerly. Engine thread only."""

    def __init__(self, target: TargetModel, kv: KVPool, *, max_requests: int, max_width: int, max_context: int) -> None:
        """max_requests: B of a round. max_width: rows of one tree, root included. max_context: longest context."""
        self._target, self._kv = target, kv
        rows = min(kv.num_scratch_rows, MAX_GRAPH_ROWS)
        requests = min(max_requests, rows)
        self._max_width = max_width
        steps = size_ladder(requests)
        full = {b * max_width for b in steps if b * max_width <= rows}  # rounds of full trees need no padding
        self._ladders = (
            tuple(sorted({*size_ladder(rows, has_halves=True), *full})),
            steps,
            size_ladder(max_context, start=256, factor=4),
        )
        self._forwards = GraphTable(self._ladders)
        self._tails = GraphTable(self._ladders[:2])
        self._current: tuple[int, int, int] | None = None  # bucket of the round that the static tensors hold
        self._current_tokens: torch.Tensor | None = None  # its token_ids, by which a round is recognised

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        self._token_ids, self._positions = zeros(rows), zeros(rows)
        self._cu_rows, self._context_lens = zeros(requests + 1), zeros(requests)
        self._table = zeros(requests * max_context)  # taken as (B, L) of each bucket
        self._ancestors = zeros(rows, max_width, dtype=torch.bool)
        self._scratch = kv.scratch_rows(rows)
        self._out_rows = self._scratch.clone()
        self._logits = zeros(rows, target.vocab_size, dtype=torch.float32)
        has_taps = bool(target.tap_layers)
        self._features = zeros(rows, target.feature_size, dtype=target.dtype) if has_taps else None
        self._next_token_ids = zeros(rows)
        self._plan = {
            "path": zeros(requests, max_width),
            "path_token_ids": zeros(requests, max_width),
            "num_accepted_tokens": zeros(requests),
            "bonus_token_ids": zeros(requests),
        }

    @property
    def num_graphs(self) -> int:
        return len(self._forwards) + len(self._tails)

    def jobs(self) -> list[CaptureJob]:
        """Every graph worth having; those of plain decoding and full trees, which hold all others, come first."""
        rows, requests, widths = self._ladders
        jobs = []
        for i, b in enumerate(requests):
            fewer = requests[i - 1] if i else 0
            steps = [n for n in rows if fewer < n <= b * self._max_width]
            for n in steps:
                rank = i if n in (b, steps[-1]) else REFINING_RANK + i
                name = f"acceptance rows={n} requests={b}"
                jobs.append(CaptureJob(name=name, family="acceptance", rank=rank, run=self._tail_job(n, b)))
                for k, width in enumerate(widths):
                    name = f"verify rows={n} requests={b} context={width}"
                    run = self._forward_job(n, b, width)
                    jobs.append(CaptureJob(name=name, family="verify", rank=rank + k, run=run))
        return jobs

    def forward(self, batch: TargetBatch, kv: KVPool) -> TargetOutput:
        """`TargetModel.forward` for verify batches; of the scratch rows they may write to the first N only.

        The output is valid until the next call.  Syncs: none when a graph fits.
        """
        n, b = batch.token_ids.numel(), batch.context_lens.numel()
        self._current = self._current_tokens = None
        if batch.ancestors is None or batch.logit_rows is not None or batch.ancestors.shape[1] > self._max_width:
            return self._target.forward(batch, kv)
        sizes = self._forwards.fit(n, b, batch.slot_table.shape[1])
        if sizes is None:
            return self._target.forward(batch, kv)
        rows, requests, width = sizes
        self._token_ids[:n].copy_(batch.token_ids)
        self._token_ids[n:rows].zero_()
        self._positions[:n].copy_(batch.positions)
        self._positions[n:rows].zero_()
        self._out_rows[:n].copy_(batch.out_rows)
        self._out_rows[n:rows].copy_(self._scratch[n:rows])
        self._cu_rows[: b + 1].copy_(batch.cu_rows)
        self._cu_rows[b + 1 : requests + 1].fill_(n)
        self._context_lens[:b].copy_(batch.context_lens)
        self._context_lens[b:requests].zero_()
        self._table[: requests * width].view(requests, width)[:b, : batch.slot_table.shape[1]].copy_(batch.slot_table)
        self._ancestors[:rows].zero_()
        self._ancestors[:n, : batch.ancestors.shape[1]].copy_(batch.ancestors)
        self._forwards.replay(sizes)
        self._current, self._current_tokens = (rows, requests, width), batch.token_ids
        return TargetOutput(logits=self._logits[:n], features=None if self._features is None else self._features[:n])

    def accept(self, tree: TreeBatch, next_token_ids: torch.Tensor) -> AcceptPlan:
        """`verify.accept`, by graph for the trees of the latest `forward`; valid until the next call.  Syncs: none."""
        n, b = tree.token_ids.numel(), tree.num_requests
        # A round that ran elsewhere (beside prompt rows, say) left the static tensors as they were.
        sizes = self._tails.fit(n, b) if tree.token_ids is self._current_tokens else None
        if sizes is None:
            return accept(tree, next_token_ids, self._target.kernels)
        self._next_token_ids[:n].copy_(next_token_ids)
        if sizes != self._current[:2]:  # type: ignore[index]
            self._cu_rows[b + 1 : sizes[1] + 1].fill_(n)
            self._ancestors[n : sizes[0]].zero_()
        self._tails.replay(sizes)
        return AcceptPlan(**{name: static[:b] for name, static in self._plan.items()})  # type: ignore[arg-type]

    def _forward_job(self, rows: int, requests: int, width: int) -> Callable[[GraphBackend], None]:
        def capture(backend: GraphBackend) -> None:
            batch = TargetBatch(
                token_ids=self._token_ids[:rows],
                positions=self._positions[:rows],
                cu_rows=self._cu_rows[: requests + 1],
                context_lens=self._context_lens[:requests],
                slot_table=self._table[: requests * width].view(requests, width),
                out_rows=self._out_rows[:rows],
                ancestors=self._ancestors[:rows],
            )
            logits, features = self._logits[:rows], None if self._features is None else self._features[:rows]

            def run() -> None:
                out = self._target.forward(batch, self._kv)
                logits.copy_(out.logits)
                if features is not None and out.features is not None:
                    features.copy_(out.features)

            self._forwards.add((rows, requests, width), backend.capture(run))

        return capture

    def _tail_job(self, rows: int, requests: int) -> Callable[[GraphBackend], None]:
        def capture(backend: GraphBackend) -> None:
            token_ids, cu_rows = self._token_ids[:rows], self._cu_rows[: requests + 1]
            ancestors, drawn = self._ancestors[:rows], self._next_token_ids[:rows]

            def run() -> None:
                found = accept_rows(token_ids, cu_rows, ancestors, drawn, self._target.kernels)
                for name, static in self._plan.items():
                    static[:requests].copy_(getattr(found, name))

            self._tails.add((rows, requests), backend.capture(run))

        return capture


logger = logging.getLogger(__name__)

_RANK_OF_LATER_SLOTS = 6
"""Graphs of slots without traffic at the start come after the commonest ones of the target and the live drafter."""


def default_backend(target: TargetModel, config: EngineConfig) -> GraphBackend | None:
    """CUDA graphs where the target is on CUDA, its kernels can be captured and the configuration gives time for it."""
    if target.device.type != "cuda" or config.capture_s <= 0:
        return None
    if target.num_ranks > 1:
        logger.warning("graphs are made for one device; a target over %d runs without", target.num_ranks)
        return None
    if not target.kernels.is_capturable:
        logger.warning("kernel backend %s cannot be captured; rounds run without graphs", target.kernels.backend)
        return None
    return CudaGraphs(target.device)


class EngineGraphs:
    """The static tensors and graphs of one engine."""

    def __init__(
        self,
        backend: GraphBackend,
        target: TargetModel,
        kv: KVPool,
        slots: DrafterSlots,
        config: EngineConfig,
        max_context: int,
    ) -> None:
        """Allocate the static tensors. The drafters' KV is allocated anew: no request may have been served yet."""
        self._backend, self._budget_s = backend, config.capture_s
        self.target = GraphedTarget(
            target, kv, max_requests=config.max_running, max_width=config.tree.max_draft_tokens + 1,
            max_context=max_context,
        )  # fmt: skip
        self._jobs: list[CaptureJob] = self.target.jobs()
        self._drafters = []
        for i, (name, drafter) in enumerate(slots.prepare_all().items()):
            make = getattr(drafter, "make_graphs", None)
            if make is None:  # table lookups and scripted drafters have nothing to capture
                continue
            graphs = make(
                target.kernels, max_requests=config.max_running, max_leaves=config.tree.max_frontier,
                max_context=max_context,
            )  # fmt: skip
            self._drafters.append(graphs)
            self._jobs += graphs.jobs(f"drafter {name}", rank=_RANK_OF_LATER_SLOTS if i else 0)

    @property
    def num_graphs(self) -> int:
        return self.target.num_graphs + sum(d.num_graphs for d in self._drafters)

    def capture(
        self,
        timer: Callable[[], float] = time.perf_counter,
        progress: Progress | None = None,
        first: Sequence[CaptureJob] = (),
    ) -> int:
        """Do the jobs `first`, then make graphs, within the configured time; returns how many of both were done."""
        jobs = [*first, *self._jobs]
        self._jobs = []
        return capture_all(jobs, self._backend, budget_s=self._budget_s, timer=timer, progress=progress)


def prepare(
    graphs: EngineGraphs | None,
    first: Sequence[CaptureJob],
    timer: Callable[[], float],
    progress: Progress | None,
) -> None:
    """Do the jobs `first` and make the graphs; an engine without graphs does the jobs however long they take."""
    if graphs is not None:
        graphs.capture(timer, progress, first)
    elif first:
        capture_all(first, EagerGraphs(), budget_s=math.inf, timer=timer, progress=progress)
