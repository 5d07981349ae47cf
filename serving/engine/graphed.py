"""Graphed rounds: rounds that stay on the device from the staged numbers to the results, which are the one host read.

Launches of a round: one upload, one replay for each drafter, three for the target, one download.
Nothing of a round's drafts is known before it is verified, so its size follows from what the drafts of earlier rounds were
like; which requests get the nodes is decided on the device.

Shape legend: B requests of the round, G requests of one drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import Drafter
from paceline.serving.engine.prefill import PromptRows
from paceline.serving.engine.running import RunningRequest
from paceline.serving.loading.graphs import EngineGraphs
from paceline.serving.loading.target_graphs import FILTERED, GREEDY, MAX_PROMPTS, SAMPLED
from paceline.serving.sampling.draw import SamplingBatch
from paceline.serving.target_model.device import open_span
from paceline.serving.target_model.model import TargetOutput
from paceline.serving.trees.draft_graphs import DraftGraphs
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import RoundDraft
from paceline.serving.trees.verify import AcceptPlan


@dataclass(slots=True)
class RoundResult:
    """What a round has brought."""

    draft: RoundDraft
    plan: AcceptPlan
    out: TargetOutput
    verify_s: float
    accept_s: float
    is_committed: bool
    """Whether accepted K/V and hidden states are where they belong."""
    prompt_out: TargetOutput | None = None
    """Of prompt rows that rode along; without features these are in the pool."""


@dataclass(slots=True)
class _Group:
    drafter: Drafter
    rows: list[int]  # (G,) of the round's requests
    graphs: DraftGraphs
    sizes: tuple[int, ...]


def draw_kind(sampling: SamplingBatch) -> int | None:
    """Which captured draw these requests need; None when their draws need the host."""
    if sampling.is_all_greedy:
        return GREEDY
    needs_host = (*sampling.biases, *sampling.limits)
    if sampling.has_grammars or any(sampling.is_penalised) or any(each is not None for each in needs_host):
        return None
    return FILTERED if any(sampling.is_filtered) else SAMPLED


class GraphedRounds:
    """Runs rounds by the graphs of one engine. Engine thread only."""

    def __init__(self, graphs: EngineGraphs, policy: TreePolicy, timer: Callable[[], float]) -> None:
        self._graphs, self._policy, self._timer = graphs, policy, timer

    def run(
        self,
        requests: list[RunningRequest],
        sampling: SamplingBatch,
        groups: list[tuple[Drafter, list[int]]],
        keys: list[DraftKey | None],
        prompts: PromptRows | None = None,
        *,
        has_new_rows: bool,
    ) -> RoundResult | None:
        """A round; None when no graph holds it, then nothing has happened.

        Args:
            sampling: on the host.
            groups: drafters and the requests (of the B) that each drafts for; their backlogs are those of usual rounds.
            keys: (B,).
            prompts: rows that ride along.
            has_new_rows: whether any row table is another one than in the latest round.
        Syncs: one.
        """
        target, b, kind = self._graphs.target, len(requests), draw_kind(sampling)
        lens = [r.context_len for r in requests]
        context_rows, longest = sum(lens), max(lens)
        found = self._fit(requests, groups, keys, context_rows)
        chunks = [] if prompts is None else prompts.chunks
        if kind is None or found is None or (prompts is not None and prompts.scoring) or len(chunks) > MAX_PROMPTS:
            return None
        draft = RoundDraft.planned(keys, context_rows, longest)
        limits, floors, num_nodes = self._policy.plan_nodes(keys, [row for g in found for row in g.rows], context_rows)
        widest = max([longest, *(r.context_len for r, _ in chunks)])
        sizes = target.fit(b + num_nodes, b, widest, kind, sum(num for _, num in chunks))
        if sizes is None:
            return None
        start = self._timer()
        device = target.device
        is_new = has_new_rows or target.tables.is_dirty
        tables = {i: r.rows for i, r in enumerate(requests)} if is_new else {}
        tables |= {target.prompt_line + i: r.rows for i, (r, _) in enumerate(chunks)}
        target.stage(tables, lens, [r.row_capacity for r in requests], sampling)  # type: ignore[arg-type]
        target.stage_prompts(
            [r.context_len for r, _ in chunks], [r.tokens[r.context_len : r.context_len + num] for r, num in chunks]
        )
        target.trees.decide([r.tokens[r.context_len] for r in requests], limits, floors, num_nodes)
        for g in found:
            own = [requests[row] for row in g.rows]
            g.graphs.stage(
                g.rows, [r.drafted_len for r in own], [r.context_len for r in own], [r.tokens for r in own],
                [r.request.params.temperature for r in own],
                self._policy.corrections([keys[row] for row in g.rows], g.drafter.caps.num_slots),
                [r.delta for r in own],
            )  # fmt: skip
        target.staging.send()
        draft_span = open_span(device) if found else None
        for g in found:
            g.graphs.replay(g.sizes)
        if draft_span is not None:
            draft_span.close()
        verify_start = self._timer()
        verify_span = open_span(device)
        target.run(sizes)
        if verify_span is not None:
            verify_span.close()
        verify_s = self._timer() - verify_start
        target.finish(sizes)
        results = target.read(sizes, b)
        if not results.is_right:
            target.judge_again(results, sampling)
        end = self._timer()
        draft.draft_s = verify_start - start if found else 0.0
        if verify_span is not None:  # the device's clock: the host's saw only the launches
            verify_s = verify_span.seconds()
        if draft_span is not None:
            draft.draft_s = draft_span.seconds()
        draft.model_s = draft.draft_s
        draft.tree = results.tree
        draft.num_draft_tokens = [count - 1 for count in results.tree.counts or ()]
        for index, g in enumerate(found):
            draft.num_new_rows += sum(requests[row].context_len - requests[row].drafted_len for row in g.rows)
            self._policy.settle(
                draft, index, g.rows, g.drafter.caps, is_expanded=g.graphs.goes_on(g.sizes), masses=results.masses,
                leaf_mass=results.leaf_mass, facts=results.facts,
            )  # fmt: skip
        out = target.output(len(results.tree.token_ids))
        prompt_out = None
        if prompts is not None:
            prompt_out = target.prompt_output([i for i, (r, _) in enumerate(chunks) if r in prompts.drawing])
        accept_s = max(end - verify_start - verify_s, 0.0)
        return RoundResult(draft, results.plan, out, verify_s, accept_s, is_committed=True, prompt_out=prompt_out)

    def ingest_rows(self, drafter: Drafter, rows: list[int], num_requests: int, longest: int) -> int:
        """Rows of a backlog that a drafter takes at once for these requests of a round of so many; 0 = it has no graph for them."""
        graphs = self._graphs.drafting(drafter)
        if graphs is None or num_requests > self._graphs.target.max_requests:
            return 0
        return graphs.ingest_rows(len(rows), longest)

    def ingest(self, drafter: Drafter, requests: list[RunningRequest], rows: list[int], stops: list[int]) -> None:
        """Take in rows drafted_len..stop-1 of some requests (`rows`) of a round.  Syncs: none."""
        graphs, own = self._graphs.drafting(drafter), [requests[row] for row in rows]
        assert graphs is not None
        self._graphs.target.tables.note(range(len(requests)), [r.rows for r in requests])  # type: ignore[misc]
        graphs.ingest(rows, [r.drafted_len for r in own], stops, [r.tokens for r in own], [r.delta for r in own])

    def best_tokens(self, rows: list[int]) -> torch.Tensor | None:
        """Of rows of the latest round, as `GraphedTarget.best_tokens`."""
        return self._graphs.target.best_tokens(rows)

    def _fit(
        self,
        requests: list[RunningRequest],
        groups: list[tuple[Drafter, list[int]]],
        keys: list[DraftKey | None],
        context_rows: int,
    ) -> list[_Group] | None:
        """The groups with graphs that hold them; None when one has none."""
        found = []
        for drafter, rows in groups:
            graphs, own = self._graphs.drafting(drafter), [requests[row] for row in rows]
            if graphs is None:
                return None
            is_expanded = self._policy.should_expand([keys[row] for row in rows], context_rows, len(keys), drafter.caps)
            num_rows, longest = sum(r.context_len - r.drafted_len for r in own), max(r.context_len for r in own)
            sizes = graphs.fit(num_rows, len(rows), longest, is_expanded=is_expanded)
            if sizes is None:
                return None
            found.append(_Group(drafter, rows, graphs, sizes))
        return found
