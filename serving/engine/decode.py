"""Decode runner: one round of all running requests, i.e. draft, verify, accept, commit, emit.

Where tree rows write their K/V: a root is always accepted, so its K/V go straight to the row of its position and a plain
round moves nothing. Draft nodes of several requests go to scratch rows. A lone request's whole tree takes the rows behind
its context, which it holds in reserve anyway: its keys then lie in one piece, and a path along the first child of every
node moves nothing either.

Shape legend: B requests of the round, N packed tree rows (roots included), R new rows of a drafter, L longest context or
widest row table, V vocab, m tapped layers, Dm hidden size.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.contracts import RoundStats
from paceline.kernels.cpu.trees import copy_rows
from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import DraftInputs
from paceline.serving.drafters.slots import DrafterSlots
from paceline.serving.drafters.text import TextDrafter
from paceline.serving.engine.graphed import GraphedRounds, RoundResult
from paceline.serving.engine.output import RoundOutput, round_logprobs
from paceline.serving.engine.prefill import PromptRows
from paceline.serving.engine.running import RunningRequest, cut_tokens
from paceline.serving.engine.scheduler import Scheduler
from paceline.serving.loading.graphs import EngineGraphs
from paceline.serving.sampling.draw import SamplingBatch
from paceline.serving.target_model.device import CudaSpan, open_span, upload, upload_all
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput, forward_together
from paceline.serving.trees.policy import TreePolicy
from paceline.serving.trees.propose import DraftGroup, RoundDraft
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accept, verify

logger = logging.getLogger(__name__)


class RoundRows:
    """Places the rows of one round after the other; engine thread only."""

    def __init__(self, kv: KVPool) -> None:
        self._kv = kv
        self._scratch = kv.scratch_rows(kv.num_scratch_rows)  # (max rows of a round,) int64
        self._numbers = torch.arange(kv.num_scratch_rows, device=self._scratch.device)
        self._out_rows = self._scratch[:0]
        self._table = self._scratch[None, :0]
        self._is_behind_context = False

    def place(
        self, requests: list[RunningRequest], tree: TreeBatch, table: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """Pool rows (N,) int64 for the K/V of the round's packed rows.

        Args:
            table: (B, L) int64, pool row of each position, the next one of every request included.
            context_lens: (B,).
        Syncs: none.
        """
        num_rows, self._table = tree.token_ids.numel(), table
        self._is_behind_context = False
        if len(requests) == 1:
            start = requests[0].context_len
            self._is_behind_context = requests[0].row_capacity >= start + num_rows
            if self._is_behind_context:
                self._out_rows = table[0, start : start + num_rows]
                return self._out_rows
        roots = table.gather(1, context_lens[:, None]).view(-1)
        if num_rows == len(requests):
            self._out_rows = roots
        else:
            self._out_rows = self._scratch[:num_rows].index_copy(0, tree.cu_nodes[:-1], roots)
        return self._out_rows

    def commit(self, requests: list[RunningRequest], paths: list[list[int]], features: torch.Tensor | None) -> None:
        """Move accepted K/V to the rows of their positions and keep the tapped hidden states of all accepted rows.

        Args:
            paths: packed rows that each request keeps, its root first; call before context_len grows.
            features: (N, m * Dm) of the round's rows.
        """
        keeps_features = self._kv.features is not None and features is not None
        if self._out_rows.numel() == len(requests):
            if keeps_features:
                self._kv.features.index_copy_(0, self._out_rows, features)  # type: ignore[union-attr, arg-type]
            return
        moved: list[int] = []
        stays: list[int] = []  # packed rows
        moved_at: list[int] = []
        stays_at: list[int] = []  # where the table has the rows of their positions
        width = self._table.shape[1]
        for i, (r, path) in enumerate(zip(requests, paths, strict=True)):
            first, at, num_rows = 1, i * width + r.context_len, len(path)
            if self._is_behind_context:  # the head of the path that lies where it belongs
                while first < num_rows and path[first] == first:
                    first += 1
            moved += path[first:]
            moved_at += range(at + first, at + num_rows)
            if keeps_features:
                stays += path[:first]
                stays_at += range(at, min(at + first, at + num_rows))
        if not moved and not keeps_features:
            return
        device, num_moved = self._scratch.device, len(moved)
        if not moved and self._is_behind_context:  # all that stays is the head of the round's rows
            src, dst = self._numbers[: len(stays)], self._out_rows[: len(stays)]
        else:
            src = upload(moved + stays, device, torch.int64)
            dst = self._table.reshape(-1).index_select(0, upload(moved_at + stays_at, device, torch.int64))
        if moved:
            self._kv.commit(self._out_rows.index_select(0, src[:num_moved]), dst[:num_moved])
        if keeps_features and not copy_rows(self._kv.features, dst, features, src):  # type: ignore[arg-type]
            self._kv.features.index_copy_(0, dst, features.index_select(0, src))  # type: ignore[union-attr, arg-type]


MAX_APART = 8
"""Failures of passes of several versions of which the one at fault is looked for; behind them the slot is at fault."""
SlotKey = tuple[str, int]
"""A slot and, where its versions draft apart, the delta."""
MAX_BACKLOG_ROWS = 32
"""More new rows than this in one request are ingested before the drafting pass."""


def draft_inputs(
    requests: list[RunningRequest],
    slot_table: torch.Tensor,
    temperatures: torch.Tensor,
    features: torch.Tensor | None,
    stops: list[int] | None = None,
    starts: list[int] | None = None,
) -> DraftInputs:
    """Collect what the drafter has not seen: rows drafted_len..context_len-1 of each request, each with the next token.

    Args:
        slot_table: (B, L) int64, rows of these requests.
        temperatures: (B,) float32.
        features: (R, m * Dm) tapped hidden states by pool row; None when the drafter wants none.
        stops: end of the new rows per request, for ingesting only a part; context_len when None.
        starts: their beginning; drafted_len when None.
    Mutates: nothing; call `mark_ingested` when the drafter took the rows.
    """
    device = slot_table.device
    ends = [r.context_len for r in requests]
    stops = ends if stops is None else stops
    starts = [r.drafted_len for r in requests] if starts is None else starts
    offsets = [0]
    positions: list[int] = []
    token_ids: list[int] = []
    owners: list[int] = []
    for r, start, stop in zip(requests, starts, stops, strict=True):
        positions += range(start, stop)
        token_ids += r.tokens[start + 1 : stop + 1]
        offsets.append(len(positions))
    if len(requests) > 1:
        owners = [i for i, count in enumerate(itertools.pairwise(offsets)) for _ in range(count[1] - count[0])]
    anchors = [r.tokens[end] for r, end in zip(requests, ends, strict=True)]
    deltas = [r.delta for r in requests]
    has_deltas = max(deltas) >= 0
    new_positions, new_token_ids, context_lens, anchor_token_ids, cu_new, new_owners, own_deltas = upload_all(
        (positions, token_ids, ends, anchors, offsets, owners, deltas if has_deltas else []), device
    )
    if len(requests) == 1:
        new_slots = slot_table[0, starts[0] : starts[0] + len(positions)]
    else:
        new_slots = slot_table[new_owners, new_positions]
    return DraftInputs(
        request_ids=[r.request_id for r in requests],
        context_lens=context_lens,
        anchor_token_ids=anchor_token_ids,
        temperatures=temperatures,
        slot_table=slot_table,
        cu_new=cu_new,
        new_positions=new_positions,
        new_token_ids=new_token_ids,
        new_features=None if features is None else features.index_select(0, new_slots),
        new_slots=new_slots,
        histories=[r.tokens for r in requests],
        tenants=[r.request.tenant for r in requests],
        deltas=own_deltas if has_deltas else None,
    )


def mark_ingested(requests: list[RunningRequest], stops: list[int] | None = None) -> None:
    """The drafter has taken the rows that `draft_inputs` handed over."""
    for i, r in enumerate(requests):
        r.drafted_len = r.context_len if stops is None else stops[i]


def is_behind(request: RunningRequest) -> bool:
    """Whether its backlog is longer than a usual round leaves."""
    return request.context_len - request.drafted_len > MAX_BACKLOG_ROWS


def catch_up(
    requests: list[RunningRequest],
    chunk_rows: int,
    max_rows: int,
    ingest: Callable[[list[int], list[int]], None],
) -> int:
    """Ingest long backlogs (prompts, rounds without drafting), the first request's first; one row of each stays for `propose`.

    Without it a proposal's time would not be that of a typical round, and the rows of one drafter call would be
    unbounded.

    Args:
        chunk_rows: most rows of a call.
        max_rows: most rows of all calls: all requests of a round wait for them.
        ingest: takes the indices of some requests and where the next rows of each end.
    Returns: how many rows were taken.
    """
    num_done = 0
    while num_done < max_rows:
        room, rows, stops = min(chunk_rows, max_rows - num_done), list[int](), list[int]()
        for i, r in enumerate(requests):
            num_rows = max(0, min(room, r.context_len - 1 - r.drafted_len))
            if num_rows:
                room -= num_rows
                rows.append(i)
                stops.append(r.drafted_len + num_rows)
        if not rows:
            break
        own = [requests[i] for i in rows]
        num_done += sum(stops) - sum(r.drafted_len for r in own)
        ingest(rows, stops)
        mark_ingested(own, stops)
    return num_done


@dataclass(slots=True)
class _Batch:
    """What stays the same while the same requests run: tensors and groups are built once."""

    requests: list[RunningRequest]
    ids: list[str]
    buckets: list[str]
    groups: list[str]
    versions: list[str]
    """Drafter version of each request, '' for those that are not drafted for."""
    sampling: SamplingBatch
    """On the host, where captured work gets its numbers from."""
    keys: list[DraftKey | None]
    slots: list[str | None]
    num_failures: int
    has_drafters: bool
    table: torch.Tensor | None = None  # (B, at least the widest row capacity) int64
    host_table: torch.Tensor | None = None
    """`table` of several requests on the host."""
    lines: list[torch.Tensor | None] = field(default_factory=list)
    """The rows that each line of it was made of."""
    generation: int = -1  # of the scheduler when `table` was built
    device_sampling: SamplingBatch | None = None
    """`sampling` on the device, once a round has needed it there."""
    staged: int = -1  # of the scheduler when captured work was told of the row tables
    num_resting: int = 0
    """Rounds left in which nobody asks whether to draft."""


class DecodeRunner:
    """Runs decode rounds over one packed batch. Engine thread only."""

    def __init__(
        self,
        target: TargetModel,
        kv: KVPool,
        scheduler: Scheduler,
        slots: DrafterSlots,
        policy: TreePolicy,
        output: RoundOutput,
        *,
        chunk_rows: int,
        timer: Callable[[], float] = time.perf_counter,
        graphs: EngineGraphs | None = None,
    ) -> None:
        """graphs: rounds by graph where they fit, verify forwards where not; None = eagerly."""
        self._target = target
        self._forward = target.forward if graphs is None else graphs.target.forward
        self._graphed = None if graphs is None else GraphedRounds(graphs, policy, timer)
        self._accept = functools.partial(accept, kernels=target.kernels)
        self._kv = kv
        self._scheduler = scheduler
        self._slots = slots
        self._policy = policy
        self._output = output
        self._chunk_rows = chunk_rows
        self._timer = timer
        self._rows = RoundRows(kv)
        self._batch: _Batch | None = None
        self._is_apart, self._num_apart = False, 0  # versions of one slot draft apart now, and how often they came to
        self._catch_up_s, self._num_catch_up_rows = 0.0, 0
        self._catch_up_spans: list[CudaSpan] = []
        self._catching_up: list[int] = []
        self._commit_s = 0.0
        self.num_rounds = 0
        self.num_rows = 0
        """Tree rows of the latest round, roots included."""
        self.part_s = dict.fromkeys(("draft", "build", "verify", "accept", "commit", "host"), 0.0)
        """Seconds that all rounds together spent inside drafters, building trees, in the verify forward, accepting,
        copying rows, and in everything else."""

    def run(self, requests: list[RunningRequest], prompts: PromptRows | None = None) -> TargetOutput | None:
        """One round for all running requests; every one of them emits at least one token.

        Args:
            prompts: prompt rows that ride along in the forward; their output is returned, and what the forward takes beyond
                its tree rows alone is no part of the round's statistics.
        Syncs: one host read of the accepted paths (and what drafters and policy read).
        """
        start = self._timer()
        batch = self._prepare(requests)
        keys, by_slot, text_rows = self._wanted(batch)
        found = None
        if self._graphed is not None and not text_rows:  # no graph has their host work
            found = self._run_graphed(self._graphed, batch, keys, by_slot, prompts)
        if found is None:
            found = self._run_eagerly(batch, keys, by_slot, text_rows, prompts)
        if self._catch_up_spans:
            catch_up_s = sum(span.seconds() for span in self._catch_up_spans)
            self._catch_up_s += catch_up_s
            if not found.is_committed and found.draft.draft_s > 0:  # the drafting pass has waited for them
                found.draft.draft_s = max(found.draft.draft_s - catch_up_s, 0.0)
                found.draft.model_s = max(found.draft.model_s - catch_up_s, 0.0)
        draft, model_s, verify_s = found.draft, found.draft.model_s + self._catch_up_s, found.verify_s
        self.num_rows = draft.tree.token_ids.numel()
        if prompts is not None:
            costs = self._policy.budget.costs
            alone_s = costs.alone_s(verify_s, self.num_rows, prompts.num_rows, draft.context_rows, len(requests))
            start += verify_s - alone_s
            verify_s = alone_s
        self._finish_round(batch, found, start, model_s, verify_s)
        part_s = self.part_s
        build_s = draft.draft_s - draft.model_s
        part_s["draft"] += model_s
        part_s["build"] += build_s
        part_s["verify"] += verify_s
        part_s["accept"] += found.accept_s
        part_s["host"] += self._timer() - start - model_s - build_s - verify_s - found.accept_s - self._commit_s
        return found.prompt_out

    def _run_graphed(
        self,
        graphed: GraphedRounds,
        batch: _Batch,
        keys: list[DraftKey | None],
        by_slot: dict[SlotKey, list[int]],
        prompts: PromptRows | None,
    ) -> RoundResult | None:
        requests, groups, slots = batch.requests, [], []
        if self._is_apart:  # a drafter has one set of staged numbers
            return None
        for (slot, _), rows in by_slot.items():
            drafter = self._slots.drafter(slot)
            if drafter is None:
                return None
            if own := self._caught_up(batch, slot, rows):
                groups.append((drafter, own))
                slots.append(slot)
        found = graphed.run(
            requests, batch.sampling, groups, keys, prompts, has_new_rows=batch.staged != self._scheduler.generation
        )
        if found is None:
            return None
        batch.staged = self._scheduler.generation
        self._note_drafted(batch, found.draft, slots, [rows for _, rows in groups])
        return found

    def _run_eagerly(
        self,
        batch: _Batch,
        keys: list[DraftKey | None],
        by_slot: dict[SlotKey, list[int]],
        text_rows: list[int],
        prompts: PromptRows | None,
    ) -> RoundResult:
        requests, table = batch.requests, self._table(batch)
        lens, device = [r.context_len for r in requests], self._target.device
        anchors, context_lens = upload_all(([r.tokens[at] for r, at in zip(requests, lens, strict=True)], lens), device)
        num_keys = max(lens)
        committed = table[:, :num_keys]
        draft = self._draft(batch, keys, by_slot, text_rows, committed, anchors, sum(lens))
        draft.longest_context = num_keys
        tree = draft.tree

        verify_start = self._timer()
        span = open_span(self._target.device)
        if tree.token_ids.numel() == len(requests):
            positions = context_lens
        elif len(requests) == 1:
            positions = tree.depths + context_lens
        else:
            counts = tree.cu_nodes[1:] - tree.cu_nodes[:-1]
            positions = tree.depths + context_lens.repeat_interleave(counts, output_size=tree.token_ids.numel())
        rows = TargetBatch(
            token_ids=tree.token_ids,
            positions=positions,
            cu_rows=tree.cu_nodes,
            context_lens=context_lens,
            slot_table=committed,
            out_rows=self._rows.place(requests, tree, table, context_lens),
            ancestors=tree.ancestors,
            logit_rows=None,
        )
        prompt_out = None
        if prompts is None:
            out = self._forward(rows, self._kv)
        else:
            out, prompt_out = forward_together(self._target, self._kv, rows, prompts.batch(self._target.device))
        verify_s = self._timer() - verify_start
        if span is not None:
            span.close()
        plan = verify(tree, out.logits, self._sampling(batch), context_lens, self._accept)
        if span is not None:
            plan.on_host()  # the wait for the device; the host's clock saw only the launches
            verify_s = span.seconds()
        accept_s = self._timer() - verify_start - verify_s
        return RoundResult(draft, plan, out, verify_s, accept_s, is_committed=False, prompt_out=prompt_out)

    # ---- draft --------------------------------------------------------------------------------------------------
    def _prepare(self, requests: list[RunningRequest]) -> _Batch:
        batch = self._batch
        if batch is None or batch.requests != requests or batch.num_failures != self._slots.num_failures:
            params = [r.request.params for r in requests]
            slots = [r.slot if self._can_draft(r.slot, r.delta) else None for r in requests]
            batch = self._batch = _Batch(
                requests=list(requests),
                ids=[r.request_id for r in requests],
                buckets=[r.bucket for r in requests],
                groups=[r.request.counted_group for r in requests],
                versions=[r.version if slot is not None else "" for r, slot in zip(requests, slots, strict=True)],
                sampling=SamplingBatch.from_params(
                    params,
                    [r.seed for r in requests],
                    [r.counts for r in requests],
                    grammars=[r.grammar for r in requests],
                    limits=[r.limits for r in requests],
                ),
                keys=[
                    (r.version, r.bucket, r.is_greedy) if slot is not None else None
                    for r, slot in zip(requests, slots, strict=True)
                ],
                slots=slots,
                num_failures=self._slots.num_failures,
                has_drafters=any(slot is not None for slot in slots),
            )
        return batch

    def _table(self, batch: _Batch) -> torch.Tensor:
        """(B, at least the widest row capacity) int64, pool row of each position, on the device."""
        if batch.table is None or batch.generation != self._scheduler.generation:
            batch.generation, requests = self._scheduler.generation, batch.requests
            if len(requests) == 1:
                table = requests[0].rows[None]  # type: ignore[index]
            else:
                width = max(r.row_capacity for r in requests)
                if batch.host_table is None or batch.host_table.shape[1] < width:
                    batch.host_table = torch.zeros(len(requests), width + width // 4, dtype=torch.int64)
                    batch.lines = [None] * len(requests)
                table = batch.host_table
                for i, r in enumerate(requests):
                    if r.rows is not batch.lines[i]:  # few requests' rows change in a round
                        batch.lines[i] = r.rows
                        table[i, : r.row_capacity] = r.rows  # type: ignore[assignment]
            batch.table = table.to(self._target.device)
        return batch.table

    def _sampling(self, batch: _Batch) -> SamplingBatch:
        """Sampling settings on the device."""
        if batch.device_sampling is None:
            batch.device_sampling = batch.sampling.to(self._target.device)
        return batch.device_sampling

    def _can_draft(self, slot: str | None, delta: int) -> bool:
        drafter = self._slots.drafter(slot, delta)
        return drafter is not None and drafter.caps.num_slots > 0

    def _wanted(self, batch: _Batch) -> tuple[list[DraftKey | None], dict[SlotKey, list[int]], list[int]]:
        """The round's keys, and the requests that the policy wants drafted: by slot, and those from text."""
        requests = batch.requests
        self._catch_up_s, self._num_catch_up_rows, self._catch_up_spans, self._catching_up = 0.0, 0, [], []
        if not batch.has_drafters:
            return batch.keys, {}, []
        if batch.num_resting > 0:
            batch.num_resting -= 1
            self._policy.skip()
            return batch.keys, {}, []
        context_rows = sum(r.context_len for r in requests)
        # With one token left there is nothing to gain from a draft.
        keys = [
            k if r.token_limit - len(r.tokens) > 1 and not r.is_too_long_to_draft else None
            for k, r in zip(batch.keys, requests, strict=True)
        ]
        has_turn = [False] * len(keys)
        if self._policy.text is not None:
            text_keys = self._text_keys(batch, keys)
            keys = self._policy.turns(keys, text_keys, context_rows)
            has_turn = [own is not None and key == own for key, own in zip(keys, text_keys, strict=True)]
        backlogs = [
            0 if is_text else r.context_len - r.drafted_len for r, is_text in zip(requests, has_turn, strict=True)
        ]
        # An answer lasts about as long again as it has lasted, at least some sentences, and never beyond its limit.
        horizons = [min(r.token_limit - len(r.tokens), max(64, r.num_output)) for r in requests]
        wants = self._policy.wants_draft(keys, context_rows, backlogs, horizons)
        by_slot: dict[SlotKey, list[int]] = {}
        text_rows: list[int] = []
        if True not in wants:
            batch.num_resting = self._policy.rest(set(batch.keys), len(requests))
            return keys, by_slot, text_rows
        for i, is_wanted in enumerate(wants):
            if is_wanted and has_turn[i]:
                text_rows.append(i)
            elif is_wanted and self._may_draft(requests[i], batch.slots[i]):  # type: ignore[arg-type]
                apart = requests[i].delta if self._is_apart else -1
                by_slot.setdefault((batch.slots[i], apart), []).append(i)  # type: ignore[arg-type]
        return keys, by_slot, text_rows

    def _text_keys(self, batch: _Batch, keys: list[DraftKey | None]) -> list[DraftKey | None]:
        """(B,) the text drafter's key where it expects something, None where not. Takes in what is new in the texts."""
        found: list[DraftKey | None] = [None] * len(keys)
        text = self._policy.text
        if text is None:
            return found
        try:
            for i, (r, key) in enumerate(zip(batch.requests, keys, strict=True)):
                if key is not None and text.expects(r.request_id, r.tokens, r.request.tenant):
                    found[i] = (text.caps.name, r.bucket, r.is_greedy)
        except Exception as e:  # a broken drafter costs speed, never a request
            self._policy.drop_text(f"expects raised {type(e).__name__}: {e}")
            return [None] * len(keys)
        return found

    def _draft(
        self,
        batch: _Batch,
        keys: list[DraftKey | None],
        by_slot: dict[SlotKey, list[int]],
        text_rows: list[int],
        table: torch.Tensor,
        anchors: torch.Tensor,
        context_rows: int,
    ) -> RoundDraft:
        """Draft for the wanted requests, after the backlogs that no typical round has. anchors: (B,) newest tokens."""
        groups: list[DraftGroup] = []
        group_slots: list[str | None] = []
        if text_rows:
            groups.append(self._text_group(batch, text_rows, table))
            group_slots.append(None)
        for (slot, _), rows in by_slot.items():
            group = self._group(batch, slot, rows, table) if self._slots.drafter(slot) is not None else None
            if group is not None:
                groups.append(group)
                group_slots.append(slot)
        draft = self._policy.draft(groups, keys, anchors, context_rows)
        self._note_drafted(batch, draft, group_slots, [group.rows for group in groups])
        return draft

    def _note_drafted(
        self, batch: _Batch, draft: RoundDraft, slots: Sequence[str | None], rows: list[list[int]]
    ) -> None:
        """Mark what drafters have taken in, and those that failed. slots, rows: of each group; None is the text drafter."""
        for i, (slot, own) in enumerate(zip(slots, rows, strict=True)):
            reason = draft.failures.get(i)
            if i in draft.starved:
                self._starve([batch.requests[row] for row in own])
            elif slot is None:
                if reason is not None:
                    self._policy.drop_text(reason)
            elif reason is not None:
                self._blame(slot, {batch.requests[row].delta for row in own}, reason)
            elif draft.is_drafted[own[0]]:
                mark_ingested([batch.requests[row] for row in own])
        if any(slots) and not draft.failures and not draft.starved:
            self._is_apart = False

    def _starve(self, requests: list[RunningRequest]) -> None:
        """Draft no more for the longest of these, which a pass without a graph pads all others to: there was no memory."""
        longest = max(requests, key=lambda r: r.context_len)
        longest.is_too_long_to_draft = True
        logger.warning(
            "no memory to draft for %d request(s); the longest, %s, decodes plainly from now on, beside %d tokens of context",
            len(requests), longest.request_id, longest.context_len,
        )  # fmt: skip

    def _blame(self, slot: str, deltas: set[int], reason: str) -> None:
        """Stop using what a pass failed with. One of several versions may be at fault: they draft apart until a round in
        which none fails, and where that does not end it, it is the slot."""
        if len(deltas) == 1:
            self._slots.mark_failed(slot, reason, *deltas)
            self._num_apart = 0  # that was the one
        elif self._num_apart < MAX_APART:
            self._is_apart, self._num_apart = True, self._num_apart + 1
        else:
            self._slots.mark_failed(slot, reason)

    def _may_draft(self, request: RunningRequest, slot: str) -> bool:
        """False where a text drafter knows beforehand that nothing will come of it: such a round costs what a plain one does."""
        drafter = self._slots.drafter(slot)
        if drafter is None:  # it has failed for another request of this round
            return False
        if not isinstance(drafter, TextDrafter):
            return True
        if is_behind(request):
            return True  # takes it in first
        try:
            may_draft = drafter.expects(request.request_id, request.tokens, request.request.tenant)
        except Exception as e:  # a broken drafter costs speed, never a request
            self._slots.mark_failed(slot, f"expects raised {type(e).__name__}: {e}")
            return False
        if not may_draft:
            mark_ingested([request])
        return may_draft

    def _group(self, batch: _Batch, slot: str, rows: list[int], table: torch.Tensor) -> DraftGroup | None:
        """Inputs of one drafting pass; None while the drafter catches up with all of them, or when it fails there."""
        drafter = self._slots.drafter(slot)
        assert drafter is not None
        if not (rows := self._caught_up(batch, slot, rows)):
            return None
        requests = [batch.requests[i] for i in rows]
        features = self._kv.features if drafter.caps.needs_features else None
        inputs = draft_inputs(requests, *self._of(batch, rows, table), features)
        return DraftGroup(drafter=drafter, inputs=inputs, rows=rows)

    def _text_group(self, batch: _Batch, rows: list[int], table: torch.Tensor) -> DraftGroup:
        """Inputs of the text drafter, which has taken in the texts and reads no rows."""
        assert self._policy.text is not None
        requests = [batch.requests[i] for i in rows]
        starts = [r.context_len for r in requests]
        inputs = draft_inputs(requests, *self._of(batch, rows, table), None, starts=starts)
        return DraftGroup(drafter=self._policy.text, inputs=inputs, rows=rows)

    def _of(self, batch: _Batch, rows: list[int], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row tables (G, L) and temperatures (G,) of these requests of the round."""
        temperatures = self._sampling(batch).temperatures
        if len(rows) == len(batch.requests):
            return table, temperatures
        index = upload(rows, table.device)
        return table[index], temperatures[index]

    def _caught_up(self, batch: _Batch, slot: str, rows: list[int]) -> list[int]:
        """Those of a slot's requests with a usual round's backlog, when its drafter has taken in what a round may of longer
        ones: as much as takes no longer than a chunk of a prompt. None of them when it fails on the way."""
        drafter = self._slots.drafter(slot)
        assert drafter is not None
        features = self._kv.features if drafter.caps.needs_features else None
        if drafter.caps.needs_features and features is None:
            self._slots.mark_failed(slot, "it needs tapped hidden states, which this engine does not keep")
            return []
        behind = [i for i in rows if is_behind(batch.requests[i])]
        if not behind:
            return rows
        late = [batch.requests[i] for i in behind]
        start, span = self._timer(), open_span(self._target.device)
        graphed, longest = self._graphed, max(r.context_len for r in late)
        graph_rows = 0 if graphed is None else graphed.ingest_rows(drafter, behind, len(batch.requests), longest)
        chunk_rows = min(graph_rows, self._chunk_rows) if graph_rows else self._chunk_rows
        context_rows = sum(r.context_len for r in batch.requests)
        max_rows = self._policy.budget.catch_up_rows(self._chunk_rows, context_rows, len(batch.requests))
        max_rows = max(max_rows, MAX_BACKLOG_ROWS)  # more than a round adds

        def ingest(chosen: list[int], stops: list[int]) -> None:
            own = [behind[i] for i in chosen]
            if graphed is not None and graph_rows:
                graphed.ingest(drafter, batch.requests, own, stops)
            else:
                table, temperatures = self._of(batch, own, self._table(batch)[:, :longest])
                drafter.ingest(draft_inputs([late[i] for i in chosen], table, temperatures, features, stops))

        self._catching_up += behind
        try:
            self._num_catch_up_rows += catch_up(late, chunk_rows, max_rows - self._num_catch_up_rows, ingest)
        except torch.OutOfMemoryError:
            self._starve(late)
            return []
        except Exception as e:  # a broken drafter costs speed, never a request
            self._slots.mark_failed(slot, f"ingest raised {type(e).__name__}: {e}")
            return []
        if span is None:
            self._catch_up_s += self._timer() - start
        else:  # read behind the round: the host's clock saw only the launches
            span.close()
            self._catch_up_spans.append(span)
        return [i for i in rows if not is_behind(batch.requests[i])]

    # ---- after the verify forward -------------------------------------------------------------------------------
    def _finish_round(self, batch: _Batch, found: RoundResult, start: float, model_s: float, verify_s: float) -> None:
        requests, draft, plan, out = batch.requests, found.draft, found.plan, found.out
        num_requests = len(requests)
        rows: list[list[int]] = []
        tokens: list[list[int]] = []
        ends: list[tuple[str | None, str | None]] = []
        accepted: list[int] = []
        for r, (path, bonus), new in zip(requests, plan.on_host(), plan.accepted_tokens(), strict=True):
            new = [*new, bonus]
            room = r.row_capacity
            if room < r.token_limit:
                # Pages ran out. The path may be cut anywhere: an accepted node's token is what the target would have
                # drawn there, so the last one kept is the bonus token of a shorter path; the rest is drafted again.
                del new[room - r.context_len :]
            accepted.append(len(new) - 1)
            new, reason, match = cut_tokens(r, new)
            tokens.append(new)
            rows.append(path[: len(new)])
            ends.append((reason, match))
        commit_start = self._timer()
        if not found.is_committed:
            self._rows.commit(requests, rows, out.features)
        self._commit_s = self._timer() - commit_start
        self.part_s["commit"] += self._commit_s
        logprobs = round_logprobs(requests, out.logits, rows, tokens)
        if self._output.traces is not None:
            self._output.traces.deliver()
            rank = self._graphed.best_tokens if self._graphed is not None and found.is_committed else None
            self._output.traces.add(requests, rows, out.logits, rank)

        draft_ms, num_drafted = [0.0] * num_requests, sum(draft.is_drafted)
        if num_drafted:
            draft_ms = [model_s * 1e3 / num_drafted if is_drafted else 0.0 for is_drafted in draft.is_drafted]
        share = 1e3 / num_requests
        verify_ms = verify_s * share
        emit_start = self._timer()
        round_ms = (emit_start - start) * share
        for r, new, num_accepted_tokens, num_draft_tokens, own_draft_ms in zip(
            requests, tokens, accepted, draft.num_draft_tokens, draft_ms, strict=True
        ):
            r.append_output(new)
            num_new = len(new)
            r.context_len += num_new
            r.num_rounds += 1
            r.num_draft_tokens += num_draft_tokens
            r.num_accepted_tokens += num_accepted_tokens
            r.num_truncated_tokens += num_accepted_tokens + 1 - num_new
            r.draft_ms += own_draft_ms
            r.verify_ms += verify_ms
            r.round_ms += round_ms
        for i, (r, new, (reason, match)) in enumerate(zip(requests, tokens, ends, strict=True)):
            num_kept = min(accepted[i], len(new))
            self._output.emit(r, new, num_kept, logprobs[i] if logprobs else None, reason, match)
        self.num_rounds += 1
        round_s = self._timer() - start
        self._policy.observe(
            draft, plan, verify_s=verify_s, round_s=round_s - self._catch_up_s, catch_up_s=self._catch_up_s,
            num_catch_up_rows=self._num_catch_up_rows, catching_up=self._catching_up,
        )  # fmt: skip
        if self._output.feedback is not None:
            text, is_from_text = self._policy.text, [False] * num_requests
            if text is not None:
                is_from_text = [
                    is_drafted and key is not None and key[0] == text.caps.name
                    for key, is_drafted in zip(draft.keys, draft.is_drafted, strict=True)
                ]
            share_ms, ts, is_training = round_s * share, self._output.clock.now(), self._output.is_training
            self._output.record_rounds(
                RoundStats(
                    request_id=batch.ids,
                    bucket=batch.buckets,
                    group=batch.groups,
                    drafter_version=batch.versions,
                    is_greedy=batch.sampling.is_greedy,
                    round_index=[r.num_rounds for r in requests],
                    num_draft_tokens=draft.num_draft_tokens,
                    num_accepted_tokens=accepted,
                    num_emitted_tokens=[len(new) for new in tokens],
                    batch_size=[num_requests] * num_requests,
                    draft_ms=draft_ms,
                    verify_ms=[verify_ms] * num_requests,
                    share_ms=[share_ms] * num_requests,
                    is_training=[is_training] * num_requests,
                    ts=[ts] * num_requests,
                    is_from_text=is_from_text,
                )
            )
        end_ms = (self._timer() - emit_start) * share
        for r in requests:
            r.round_ms += end_ms  # reported with the next round
