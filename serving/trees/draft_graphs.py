"""Draft graphs: all that a drafter does in a round as one captured piece of work, from staged numbers to built trees.

Shape legend: G requests of one drafter, R new rows, L columns of the slot table; a graph has at least as many as the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels
from paceline.serving.drafters.graph_inputs import StagedInputs, num_graph_rows
from paceline.serving.drafters.interface import StaticDrafter
from paceline.serving.target_model.graph_capture import (
    REFINING_RANK,
    CaptureJob,
    GraphBackend,
    GraphTable,
    Staging,
    size_ladder,
)
from paceline.serving.target_model.kv_cache import RowTables
from paceline.serving.trees.calibration import NUM_RANK_CLASSES
from paceline.serving.trees.device import DeviceBlocks, LargestTrees, broken_requests, joined_facts
from paceline.serving.trees.round_trees import RoundTrees


class DraftGraphs:
    """The graphs of one drafter. Its weights may change in place; its pool must not move."""

    def __init__(
        self,
        drafter: StaticDrafter,
        staging: Staging,
        tables: RowTables,
        trees: RoundTrees,
        features: torch.Tensor | None,
        kernels: Kernels,
        config: TreeConfig,
        *,
        vocab_size: int,
        max_requests: int,
        max_context: int,
        has_deltas: bool = False,
    ) -> None:
        """has_deltas: whether requests may draft with deltas."""
        self._drafter, self._tables, self._trees, self._kernels = drafter, tables, trees, kernels
        self._staging = staging
        self._config, self._vocab_size, caps = config, vocab_size, drafter.caps
        rows = num_graph_rows(max_requests, caps.max_depth)
        self._inputs = StagedInputs(
            staging, tables, features, max_requests=max_requests, max_rows=rows, num_slots=caps.num_slots,
            num_ranks=NUM_RANK_CLASSES, has_deltas=has_deltas,
        )  # fmt: skip
        self._is_reentrant = caps.is_reentrant and config.max_frontier > 0
        self._ladders = (
            size_ladder(rows, has_halves=True), size_ladder(max_requests),
            size_ladder(max_context, start=256, factor=4), (0, 1) if self._is_reentrant else (0,),
        )  # fmt: skip
        self._graphs = GraphTable(self._ladders)
        self._ingests = GraphTable((size_ladder(rows, start=64, factor=4), (1, max_requests), self._ladders[2]))

    @property
    def num_graphs(self) -> int:
        return len(self._graphs) + len(self._ingests)

    def jobs(self, name: str, rank: int = 0) -> list[CaptureJob]:
        """Every graph worth having; those that hold all others come first. rank: added to all ranks."""
        rows, requests, widths, blocks = self._ladders
        jobs = [
            CaptureJob(
                name=f"{name} backlog rows={n} requests={b} context={width}", family=f"{name} backlog",
                rank=rank + len(requests) + k, run=self._ingest_job(n, b, width),
            )
            for b in sorted({1, requests[-1]})
            for k, width in enumerate(widths)
            for n in size_ladder(rows[-1], start=64, factor=4)
        ]  # fmt: skip
        for i, b in enumerate(requests):
            most = max(32, b * (self._drafter.caps.max_depth + 1))  # of a usual round
            steps = [n for n in rows if b <= n <= most or n == rows[-1] < b]
            for k, width in enumerate(widths):
                if not self._drafter.takes(b, width):
                    continue
                for n in steps:
                    for goes_on in blocks:
                        is_largest = n == steps[-1] and goes_on == blocks[-1]
                        jobs.append(
                            CaptureJob(
                                name=f"{name} rows={n} requests={b} context={width} re-entry={goes_on}",
                                family=name,
                                rank=rank + i + k + (0 if is_largest else REFINING_RANK),
                                run=self._job(n, b, width, bool(goes_on)),
                            )
                        )
        return jobs

    def fit(self, num_rows: int, num_requests: int, longest: int, *, is_expanded: bool) -> tuple[int, ...] | None:
        """Sizes of a graph that holds such a round; None when there is none."""
        return self._graphs.fit(num_rows, num_requests, longest, int(is_expanded and self._is_reentrant))

    def goes_on(self, sizes: tuple[int, ...]) -> bool:
        """Whether the graph of these sizes re-enters."""
        return bool(sizes[3])

    def stage(
        self,
        lines: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        histories: Sequence[list[int]],
        temperatures: Sequence[float],
        kappa: np.ndarray,
        deltas: Sequence[int] = (),
    ) -> None:
        """As `StagedInputs.stage`."""
        self._inputs.stage(lines, starts, stops, histories, temperatures, kappa, deltas)

    def rehearse(self, num_requests: int, num_rows: int, *, is_expanded: bool) -> bool:
        """Draft for so many requests with so many new rows each, over the pool's first row; False when no graph holds it.

        Nothing is learnt; the pool must be unused.
        """
        sizes = self.fit(num_requests * num_rows, num_requests, num_rows, is_expanded=is_expanded)
        if sizes is None or self.goes_on(sizes) != is_expanded:
            return False
        lines, ends = [self._trees.padding_line] * num_requests, [num_rows] * num_requests
        slots = self._drafter.caps.num_slots
        kappa = np.zeros((2, 1, slots, NUM_RANK_CLASSES))
        self.stage(lines, [0] * num_requests, ends, [[0] * (num_rows + 1)] * num_requests, [0.0] * num_requests, kappa)
        self._staging.send()
        self.replay(sizes)
        return True

    def replay(self, sizes: tuple[int, ...]) -> None:
        """Draft; the trees are then in the round's.  Syncs: none."""
        self._graphs.replay(sizes)

    def ingest_rows(self, num_requests: int, longest: int) -> int:
        """Rows of a backlog that one `ingest` of so many requests takes, at most; 0 = there is no graph."""
        sizes = self._ingests.fit(1, num_requests, longest)
        steps = [n for n in self._ladders[0] if sizes and self._ingests.fit(n, num_requests, longest)]
        return max(steps, default=0)

    def ingest(
        self,
        lines: Sequence[int],
        starts: Sequence[int],
        stops: Sequence[int],
        histories: Sequence[list[int]],
        deltas: Sequence[int],
    ) -> None:
        """Take in rows starts..stops-1 of requests, as many as `ingest_rows` allows.  Syncs: none."""
        sizes = self._ingests.fit(sum(stops) - sum(starts), len(lines), max(stops))
        assert sizes is not None
        shape = (2, 1, self._drafter.caps.num_slots, NUM_RANK_CLASSES)
        self.stage(lines, starts, stops, histories, [0.0] * len(lines), np.zeros(shape), deltas)
        self._staging.send()
        self._ingests.replay(sizes)

    def _ingest_job(self, rows: int, requests: int, width: int) -> Callable[[GraphBackend], None]:
        @torch.no_grad()
        def run() -> None:
            self._tables.apply()
            self._drafter.ingest(self._inputs.inputs(rows, requests, width, self._drafter.padding_slots))

        return lambda backend: self._ingests.add((rows, requests, width), backend.capture(run))

    def _job(self, rows: int, requests: int, width: int, goes_on: bool) -> Callable[[GraphBackend], None]:
        def capture(backend: GraphBackend) -> None:
            self._graphs.add(
                (rows, requests, width, int(goes_on)),
                backend.capture(lambda: self._run(rows, requests, width, goes_on)),
            )

        return capture

    @torch.no_grad()
    def _run(self, rows: int, requests: int, width: int, goes_on: bool) -> None:
        drafter, config = self._drafter, self._config
        self._tables.apply()
        inputs = self._inputs.inputs(rows, requests, width, drafter.padding_slots)
        blocks = DeviceBlocks(
            is_product=drafter.caps.is_product,
            max_nodes=config.max_draft_tokens,
            max_frontier=config.max_frontier,
            corrections=lambda _: self._inputs.kappa(requests),
            is_expanded=goes_on,
            is_timed=False,
        )
        proposal = drafter.propose(inputs)
        blocks.begin(proposal)
        for _ in range(drafter.caps.num_blocks - 1 if self._is_reentrant else 0):
            frontier = blocks.frontier()
            if frontier is None:
                break
            proposal = drafter.expand(inputs, proposal, frontier)
            blocks.extend(proposal)
        facts, candidates = joined_facts(blocks.checks), blocks.candidates
        is_broken = broken_requests(facts, self._vocab_size)[:, None]
        candidates.scores = candidates.scores.masked_fill(is_broken, float("-inf"))
        largest = LargestTrees.build(
            self._kernels, candidates, inputs.anchor_token_ids, config.max_draft_tokens, drafter.caps.max_depth
        )
        self._trees.put(self._inputs.lines(requests), largest, blocks.leaf_mass, facts)
