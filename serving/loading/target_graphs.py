"""Target graphs: a round's cut trees, verify forward, draws, acceptance and commit as captured work.

A round that a drafter's graphs have drafted stays on the device until its results are read: its trees are cut from the
static ones, verified, judged, their accepted K/V and hidden states moved to the rows of their positions, and everything that
the host wants to know lies in one tensor. Rounds that the host has drafted use the forward alone.
Padding rows come after the rows of the round: they hold token 0 at position 0, belong to no request and write their K/V to
scratch rows of their own, which nobody reads this round. Padding requests have no rows and no context.

Shape legend: B requests, N packed tree rows, W widest tree, L columns of the slot table, V vocab, m tapped layers,
Dm hidden size; a bucket has at least as many of each as the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from paceline.serving.drafters.forward import best_tokens, choose_ranking
from paceline.serving.sampling.draw import SamplingBatch, draw_captured, draw_tokens
from paceline.serving.target_model.device import upload
from paceline.serving.target_model.graph_capture import (
    REFINING_RANK,
    CaptureJob,
    GraphBackend,
    GraphTable,
    Staging,
    size_ladder,
)
from paceline.serving.target_model.kv_cache import KVPool, RowTables
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput
from paceline.serving.trees.round_trees import RoundTrees
from paceline.serving.trees.tree import TreeBatch, TreeRows
from paceline.serving.trees.verify import AcceptPlan, accepted_rows, plan_of

MAX_GRAPH_ROWS = 512
"""Larger rounds are bound by arithmetic: launches cost them little, and every row has its logits in a static tensor."""
MAX_PROMPT_ROWS, MAX_PROMPTS = 512, 8
"""Prompt rows beside a round, and requests that they are of; rounds with more run eagerly."""
GREEDY, SAMPLED, FILTERED = 0, 1, 2
"""Draws that a graph can make; it can make those of lower number, too."""


_RANK_OF_PROMPTS = 12
"""Graphs of rounds with prompt rows come after the commonest ones without."""


@dataclass(slots=True)
class RoundResults:
    """What the host reads of a round."""

    tree: TreeBatch  # on the host
    plan: AcceptPlan
    masses: np.ndarray  # (B, W - 1) float64 path masses of the largest trees' nodes, 0 = absent
    leaf_mass: np.ndarray  # (B,) float64 of the first block's leaves
    facts: np.ndarray  # (B, 3) float64 of the proposals, as trees/device.py checks them
    is_right: bool
    """False: some draw needs more of the vocabulary than the graph looks at; the plan means nothing."""


class GraphedTarget:
    """Everything of a round behind its drafts, by graph where one fits. Engine thread only."""

    def __init__(
        self,
        target: TargetModel,
        kv: KVPool,
        *,
        max_requests: int,
        max_width: int,
        max_context: int,
        max_prompt_rows: int = 0,
        num_traced: int = 0,
    ) -> None:
        """max_requests: B of a round. max_width: rows of one tree, root included. max_context: longest context.

        max_prompt_rows: that ride along in a forward; 0 = none do.
        num_traced: best tokens of a row that traces hold; 0 = there are no traces.
        """
        self._target, self._kv = target, kv
        rows, device = min(kv.num_scratch_rows, MAX_GRAPH_ROWS), target.device
        requests = self.max_requests = min(max_requests, rows)
        self._max_width = max_width
        steps = size_ladder(requests)
        full = {b * max_width for b in steps if b * max_width <= rows}  # rounds of full trees need no padding
        self._ladders = (
            tuple(sorted({*size_ladder(rows, has_halves=True), *full})),
            steps,
            size_ladder(max_context, start=256, factor=4),
        )
        self._cuts, self._forwards = GraphTable(self._ladders[:2]), GraphTable(self._ladders)
        self._ends = GraphTable((*self._ladders[:2], (GREEDY, SAMPLED, FILTERED)))
        self._rankings = GraphTable((self._ladders[0],))
        self.staging, self._ranked = Staging(device), Staging(device)
        self._prompt_ladder = size_ladder(min(max_prompt_rows, MAX_PROMPT_ROWS), start=64) if max_prompt_rows else ()
        self._mixed = GraphTable((*self._ladders, self._prompt_ladder))
        self._first_prompt, num_prompts = requests, MAX_PROMPTS if max_prompt_rows else 0
        self.tables = RowTables(
            self.staging, max_requests=requests + num_prompts, max_context=max_context, max_growth=max_width,
            page_tokens=kv.page_tokens, device=device,
        )  # fmt: skip
        self.trees = RoundTrees(
            self.staging, max_requests=requests, padding_line=self.tables.padding_line, max_nodes=max(max_width - 1, 1),
            device=device,
        )  # fmt: skip
        self._prompt_starts, self._prompt_stops = (self.staging.reserve(num_prompts) for _ in range(2))
        self._prompt_token_ids = self.staging.reserve(max(self._prompt_ladder, default=0))
        self._context_lens, self._capacities, self._top_ks, self._seeds = (
            self.staging.reserve(requests) for _ in range(4)
        )
        self._temperatures, self._top_ps, self._min_ps = (
            self.staging.reserve(requests, is_float=True) for _ in range(3)
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids, self._positions = zeros(rows), zeros(rows)
        self._cu_rows = zeros(requests + 1)
        self._ancestors = zeros(rows, max_width, dtype=torch.bool)
        self._scratch = kv.scratch_rows(rows)
        self._out_rows = self._scratch.clone()
        self._logits = zeros(rows, target.vocab_size, dtype=torch.float32)
        has_taps = bool(target.tap_layers)
        self._features = zeros(rows, target.feature_size, dtype=target.dtype) if has_taps else None
        self._prompt_logits = zeros(num_prompts, target.vocab_size, dtype=torch.float32)
        self._parents, self._depths, self._cells, self._owners = (zeros(rows) for _ in range(4))
        self._scores = zeros(rows, dtype=torch.float32)
        self._num_traced, self._ranked_rows = min(num_traced, target.vocab_size), self._ranked.reserve(rows)
        self._ranking = choose_ranking(target.kernels)
        self._best = zeros(rows, 2, self._num_traced, dtype=torch.int32)
        self._results = zeros(8 * rows + requests * (max_width + 6) + 2)

    @property
    def device(self) -> torch.device:
        """Of the target."""
        return self._target.device

    @property
    def num_graphs(self) -> int:
        return sum(map(len, (self._cuts, self._forwards, self._mixed, self._ends, self._rankings)))

    def jobs(self) -> list[CaptureJob]:
        """Every graph worth having; those of plain decoding and full trees, which hold all others, come first."""
        rows, requests, widths = self._ladders
        jobs = []
        for i, b in enumerate(requests):
            fewer = requests[i - 1] if i else 0
            steps = [n for n in rows if fewer < n <= b * self._max_width]
            for n in steps:
                rank = i if n in (b, steps[-1]) else REFINING_RANK + i
                name = f"rows={n} requests={b}"
                jobs.append(CaptureJob(name=f"cut {name}", family="cut", rank=rank, run=self._cut_job(n, b)))
                for kind in (GREEDY, SAMPLED, FILTERED):
                    run, own = self._end_job(n, b, kind), rank + kind * (kind == FILTERED)
                    jobs.append(CaptureJob(name=f"end {name} draws={kind}", family="end", rank=own, run=run))
                for k, width in enumerate(widths):
                    run = self._forward_job(n, b, width)
                    jobs.append(
                        CaptureJob(name=f"verify {name} context={width}", family="verify", rank=rank + k, run=run)
                    )
            for k, width in enumerate(widths):
                for p in self._prompt_ladder:
                    for n in sorted({b, steps[-1]}):
                        name, run = f"rows={n}+{p} requests={b} context={width}", self._mixed_job(n, b, width, p)
                        rank = _RANK_OF_PROMPTS + i + k
                        jobs.append(CaptureJob(name=f"mixed {name}", family="mixed", rank=rank, run=run))
        for i, n in enumerate(rows if self._num_traced else ()):
            jobs.append(CaptureJob(name=f"traces rows={n}", family="traces", rank=i, run=self._ranking_job(n)))
        return jobs

    # ---- rounds that the host has drafted -----------------------------------------------------------------------
    def forward(self, batch: TargetBatch, kv: KVPool) -> TargetOutput:
        """`TargetModel.forward` for verify batches; of the scratch rows they may write to the first N only.

        The output is valid until the next call.  Syncs: none when a graph fits.
        """
        n, b = batch.token_ids.numel(), batch.context_lens.numel()
        if batch.ancestors is None or batch.logit_rows is not None or batch.ancestors.shape[1] > self._max_width:
            return self._target.forward(batch, kv)
        sizes = self._forwards.fit(n, b, batch.slot_table.shape[1])
        if sizes is None:
            return self._target.forward(batch, kv)
        rows, requests, _ = sizes
        self._token_ids[:n].copy_(batch.token_ids)
        self._token_ids[n:rows].zero_()
        self._positions[:n].copy_(batch.positions)
        self._positions[n:rows].zero_()
        self._out_rows[:n].copy_(batch.out_rows)
        self._out_rows[n:rows].copy_(self._scratch[n:rows])
        self._cu_rows[: b + 1].copy_(batch.cu_rows)
        self._cu_rows[b + 1 : requests + 1].fill_(n)
        context_lens = self._context_lens.tensor
        context_lens[:b].copy_(batch.context_lens)
        context_lens[b:requests].zero_()
        self.tables.overwrite(batch.slot_table)
        self._ancestors[:rows].zero_()
        self._ancestors[:n, : batch.ancestors.shape[1]].copy_(batch.ancestors)
        self._forwards.replay(sizes)
        return TargetOutput(logits=self._logits[:n], features=None if self._features is None else self._features[:n])

    # ---- rounds that stay on the device -------------------------------------------------------------------------
    def fit(
        self, num_rows: int, num_requests: int, longest: int, kind: int, num_prompt_rows: int = 0
    ) -> tuple[tuple[int, ...], ...] | None:
        """Sizes of the graphs that hold a round of at most so many rows: cut, forward, end; None when one is missing.

        longest: context of any request. kind: GREEDY, SAMPLED or FILTERED.
        """
        forward = self._forwards.fit(num_rows, num_requests, longest)
        if num_prompt_rows:
            has_prompts = bool(self._prompt_ladder)
            forward = self._mixed.fit(num_rows, num_requests, longest, num_prompt_rows) if has_prompts else None
        if forward is None:
            return None
        both = forward[:2]
        cut, end = self._cuts.fit(*both), self._ends.fit(*both, kind)
        return (both, forward, end) if cut == both and end is not None and end[:2] == both else None

    def stage(
        self,
        tables: dict[int, torch.Tensor],
        context_lens: Sequence[int],
        capacities: Sequence[int],
        sampling: SamplingBatch,
    ) -> None:
        """Numbers of the next upload, of the round's requests (B,).

        tables: row tables on the host that have changed, by line; prompts' lines begin at `prompt_line`. capacities:
        positions that have rows. sampling: on the host.
        """
        self.tables.note(list(tables), list(tables.values()))
        self._context_lens.set(context_lens)
        self._capacities.set(capacities)
        for field, values in (
            (self._temperatures, sampling.temperatures), (self._top_ks, sampling.top_ks), (self._seeds, sampling.seeds),
            (self._top_ps, sampling.top_ps), (self._min_ps, sampling.min_ps),
        ):  # fmt: skip
            field.set(values.numpy())

    @property
    def prompt_line(self) -> int:
        """Line of the first prompt that rides along."""
        return self._first_prompt

    def stage_prompts(self, starts: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Numbers of the next upload, of prompts that ride along: where each goes on, and its next tokens."""
        self._prompt_starts.set(starts)
        self._prompt_stops.set([start + len(tokens) for start, tokens in zip(starts, token_ids, strict=True)])
        self._prompt_token_ids.set([token for tokens in token_ids for token in tokens])

    def run(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        """Cut and verify the round's trees, and compute the prompt rows beside them.  Syncs: none."""
        cut, forward, _ = sizes
        self._cuts.replay(cut)
        if len(forward) == 3:
            self._forwards.replay(forward)
        else:
            self._mixed.replay(forward)

    def prompt_output(self, prompts: Sequence[int]) -> TargetOutput:
        """Logits of the last rows of these prompts, until the next round; their hidden states are in the pool."""
        if not prompts:
            return TargetOutput(logits=self._prompt_logits[:0], features=None)
        index = upload(list(prompts), self.device, torch.int64)
        return TargetOutput(logits=self._prompt_logits.index_select(0, index), features=None)

    def finish(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        """Draw, accept, commit, and lay out what the host reads.  Syncs: none."""
        self._ends.replay(sizes[2])

    def output(self, num_rows: int) -> TargetOutput:
        """Logits and features of the round's rows, until the next round."""
        features = None if self._features is None else self._features[:num_rows]
        return TargetOutput(logits=self._logits[:num_rows], features=features)

    def read(self, sizes: tuple[tuple[int, ...], ...], num_requests: int) -> RoundResults:
        """What the round has brought.  Syncs: one, the round's only one."""
        rows, requests, _ = sizes[2]
        width = self._max_width
        lengths = [requests + 1, 7 * rows, rows, requests * max(width - 1, 1), requests, 3 * requests, 1]
        words = self._results[: sum(lengths)].cpu().numpy()
        cu, ints, scores, masses, leaf_mass, facts, is_right = np.split(words, np.cumsum(lengths)[:-1])
        n, b = int(cu[num_requests]), num_requests
        token_ids, parents, depths, cells, owners, is_accepted, drawn = ints.reshape(7, rows)[:, :n]
        roots = cu[:b].copy()
        found = TreeRows(
            token_ids=token_ids, depths=depths, scores=scores.view(np.float64)[:n], cells=cells,
            above=roots[owners] + parents.clip(0), owners=owners, roots=roots, max_depth=int(depths.max(initial=0)),
        )  # fmt: skip
        columns = {
            name: torch.from_numpy(values)
            for name, values in {
                "token_ids": token_ids, "parents": parents, "depths": depths, "scores": found.scores, "cells": cells,
                "cu_nodes": cu[: b + 1],
            }.items()
        }  # fmt: skip
        tree = TreeBatch(
            **columns, ancestors=torch.empty(n, 0, dtype=torch.bool), rows=found, counts=np.diff(cu[: b + 1]).tolist()
        )
        return RoundResults(
            tree=tree,
            plan=plan_of(found, is_accepted.nonzero()[0], drawn),
            masses=masses.view(np.float64).reshape(requests, -1)[:b],
            leaf_mass=leaf_mass.view(np.float64)[:b],
            facts=facts.view(np.float64).reshape(requests, 3)[:b],
            is_right=bool(is_right[0]),
        )

    def best_tokens(self, rows: list[int]) -> torch.Tensor | None:
        """Best tokens of these rows of the round on the host, as `best_tokens`; None when no graph holds so many.

        Syncs: none: they arrive with the work queued before the next read.
        """
        sizes = self._rankings.fit(len(rows))
        if sizes is None:
            return None
        self._ranked_rows.set(rows)
        self._ranked.send()
        self._rankings.replay(sizes)
        best = self._best[: len(rows)]
        return torch.empty(best.shape, dtype=best.dtype, pin_memory=best.is_cuda).copy_(best, non_blocking=True)

    def judge_again(self, results: RoundResults, sampling: SamplingBatch) -> None:
        """Draw once more, with as much of the vocabulary as it takes, and commit. sampling: on the host.

        Mutates: results.plan.  Syncs: some; hardly any round needs it.
        """
        rows, device = results.tree.on_host(), self.device
        n, owners = len(rows.owners), rows.owners.tolist()
        drawn = draw_tokens(
            self._logits[:n], self._owners[:n], self._positions[:n] + 1, sampling.to(device), owner_list=owners
        ).cpu().numpy()  # fmt: skip
        found = accepted_rows(rows, rows.token_ids == drawn[rows.above])
        results.plan = plan_of(rows, found, drawn)
        is_accepted = torch.zeros(n, dtype=torch.bool, device=device)
        is_accepted[upload(found.tolist(), device, torch.int64)] = True
        self._commit(n, is_accepted & (self._positions[:n] < self._capacities.tensor[self._owners[:n]]))

    # ---- captured -----------------------------------------------------------------------------------------------
    def _cut_job(self, rows: int, requests: int) -> Callable[[GraphBackend], None]:
        def run() -> None:
            self.tables.apply()
            cut, lens = self.trees.cut(rows, requests), self._context_lens.tensor
            at = lens[cut.owners]
            is_root = cut.is_row & (cut.depths == 0)
            roots = self.tables.lines[cut.owners, at]
            for static, value in (
                (self._token_ids, cut.token_ids), (self._parents, cut.parents), (self._depths, cut.depths),
                (self._cells, cut.cells), (self._owners, cut.owners), (self._scores, cut.scores),
                (self._positions, torch.where(cut.is_row, at + cut.depths, 0)), (self._ancestors, cut.ancestors),
                (self._out_rows, torch.where(is_root, roots, self._scratch[:rows])),
            ):  # fmt: skip
                static[:rows].copy_(value)
            self._cu_rows[: requests + 1].copy_(cut.cu_rows)

        return lambda backend: self._cuts.add((rows, requests), backend.capture(run))

    def _forward_job(self, rows: int, requests: int, width: int) -> Callable[[GraphBackend], None]:
        def capture(backend: GraphBackend) -> None:
            batch = TargetBatch(
                token_ids=self._token_ids[:rows],
                positions=self._positions[:rows],
                cu_rows=self._cu_rows[: requests + 1],
                context_lens=self._context_lens.tensor[:requests],
                slot_table=self.tables.lines[:requests, :width],
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

    def _mixed_job(self, rows: int, requests: int, width: int, num_prompt_rows: int) -> Callable[[GraphBackend], None]:
        """One forward of the round's rows, then the padding rows as a request of their own, then the prompts'."""

        def run() -> None:
            starts, stops = self._prompt_starts.tensor, self._prompt_stops.tensor
            lines, first, device = self.tables.lines, self._first_prompt, starts.device
            cu = pad((stops - starts).cumsum(0), (1, 0))
            row = torch.arange(num_prompt_rows, device=device)
            owner = torch.searchsorted(cu[1:], row, right=True).clamp(max=starts.numel() - 1)
            is_row, local = row < cu[-1], row - cu[owner]
            positions = torch.where(is_row, starts[owner] + local, 0)
            slots = lines[first + owner, positions]
            ancestors = torch.zeros(rows + num_prompt_rows, max(self._max_width, num_prompt_rows), dtype=torch.bool,
                                    device=device)  # fmt: skip
            ancestors[:rows, : self._max_width] = self._ancestors[:rows]
            causal = torch.arange(num_prompt_rows, device=device) <= local[:, None]
            ancestors[rows:, :num_prompt_rows] = causal & is_row[:, None]
            nobody = torch.zeros_like(starts[:1])
            batch = TargetBatch(
                token_ids=torch.cat((self._token_ids[:rows], self._prompt_token_ids.tensor[:num_prompt_rows])),
                positions=torch.cat((self._positions[:rows], positions)),
                cu_rows=torch.cat((self._cu_rows[: requests + 1], nobody + rows, cu[1:] + rows)),
                context_lens=torch.cat((self._context_lens.tensor[:requests], nobody, starts)),
                slot_table=torch.cat(
                    (lines[:requests, :width], lines[-1:, :width], lines[first : first + starts.numel(), :width])
                ),
                out_rows=torch.cat((self._out_rows[:rows], torch.where(is_row, slots, -1))),
                ancestors=ancestors,
                logit_rows=torch.cat((torch.arange(rows, device=device), rows + (cu[1:] - 1).clamp(min=0))),
            )
            out = self._target.forward(batch, self._kv)
            self._logits[:rows].copy_(out.logits[:rows])
            self._prompt_logits.copy_(out.logits[rows:])
            if self._features is not None and out.features is not None:
                self._features[:rows].copy_(out.features[:rows])
                if self._kv.features is not None:  # padding writes what the first row does
                    source = torch.where(is_row, row, 0)
                    self._kv.features.index_copy_(0, slots[source], out.features[rows:].index_select(0, source))

        return lambda backend: self._mixed.add((rows, requests, width, num_prompt_rows), backend.capture(run))

    def _end_job(self, rows: int, requests: int, kind: int) -> Callable[[GraphBackend], None]:
        def run() -> None:
            owners, positions, cu_rows = self._owners[:rows], self._positions[:rows], self._cu_rows[: requests + 1]
            is_row = torch.arange(rows, device=owners.device) < cu_rows[-1]
            drawn, is_right = self._draw(rows, requests, kind)
            found = self._target.kernels.accept_rows(
                token_ids=self._token_ids[:rows],
                cu_rows=cu_rows,
                ancestors=self._ancestors[:rows],
                next_token_ids=drawn,
            )
            # Paths of requests without rows mean nothing; the cell behind the rows takes what is no row.
            path = torch.where((cu_rows[1:] > cu_rows[:-1])[:, None] & (found.path >= 0), found.path, rows)
            marks = torch.zeros(rows + 1, dtype=torch.int64, device=owners.device)
            is_accepted = marks.index_fill_(0, path.flatten(), 1)[:rows]
            self._commit(rows, is_accepted.bool() & (positions < self._capacities.tensor[owners]))
            parts = [cu_rows, self._token_ids[:rows], self._parents[:rows], self._depths[:rows], self._cells[:rows],
                     owners, is_accepted, drawn]  # fmt: skip
            told = [self._scores[:rows].double(), *self.trees.told(requests)]
            parts += [numbers.view(torch.int64) for numbers in told] + [(is_right | ~is_row).all().long()[None]]
            size = sum(part.numel() for part in parts)
            torch.cat(parts, out=self._results[:size])

        return lambda backend: self._ends.add((rows, requests, kind), backend.capture(run))

    def _ranking_job(self, rows: int) -> Callable[[GraphBackend], None]:
        def run() -> None:
            logits = self._logits.index_select(0, self._ranked_rows.tensor[:rows])
            self._best[:rows].copy_(best_tokens(logits, self._ranking, self._num_traced))

        return lambda backend: self._rankings.add((rows,), backend.capture(run))

    def _draw(self, rows: int, requests: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (N,) that follow the rows, and whether each is right."""
        logits, owners = self._logits[:rows], self._owners[:rows]
        if kind == GREEDY:
            return logits.argmax(-1), torch.ones_like(owners, dtype=torch.bool)
        nothing: list = []
        off = torch.empty(0, device=logits.device)
        batch = SamplingBatch(
            temperatures=self._temperatures.tensor.float(), top_ks=self._top_ks.tensor, top_ps=self._top_ps.tensor,
            min_ps=self._min_ps.tensor.float(), seeds=self._seeds.tensor, repetition=off, presence=off, frequency=off,
            counts=nothing, is_greedy=nothing, is_filtered=nothing, is_penalised=nothing, biases=nothing,
            limits=nothing,
            grammars=nothing, has_grammars=False, reads_paths=False, is_all_greedy=False,
        )  # fmt: skip
        return draw_captured(logits, owners, self._positions[:rows] + 1, batch, has_filters=kind == FILTERED)

    def _commit(self, rows: int, is_kept: torch.Tensor) -> None:
        """Move the K/V of the rows that are kept (N,) to the rows of their positions, and keep their hidden states."""
        lines = self.tables.lines
        # Trees may reach beyond the longest context, where nothing is kept; an index of there would end a CUDA process.
        at = lines[self._owners[:rows], self._positions[:rows].clamp(max=lines.shape[1] - 1)]
        is_moved = is_kept & (self._depths[:rows] > 0)
        self._kv.commit_padded(torch.where(is_moved, self._out_rows[:rows], -1), torch.where(is_moved, at, -1))
        if self._kv.features is not None and self._features is not None:
            # What is not kept writes what the first row does, a root, which always is.
            source = torch.where(is_kept, torch.arange(rows, device=at.device), 0)
            self._kv.features.index_copy_(0, at[source], self._features.index_select(0, source))
