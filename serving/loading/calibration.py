"""Calibration: what a verify forward and a drafting pass of each size cost here, measured before the first request.

Kernels that only live rounds would launch run here first: compiling them takes seconds, which no round may be charged.

Shape legend: B requests, N packed rows, L context rows.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier
from paceline.serving.target_model.graph_capture import CaptureJob, GraphBackend, size_ladder
from paceline.serving.target_model.kv_cache import KVPool
from paceline.serving.target_model.model import TargetBatch, TargetModel, TargetOutput
from paceline.serving.trees.draft_graphs import DraftGraphs
from paceline.serving.trees.policy import TreePolicy, plain_round
from paceline.serving.trees.propose import DraftGroup
from paceline.serving.trees.verify import accept_rows

logger = logging.getLogger(__name__)

MAX_ROWS = 513
MAX_REQUESTS = 64
LIMIT_S = 5.0
"""Time for measuring the verify forward; larger sizes are extrapolated when it is over."""
_WIDE_TREE = 16
"""Nodes of a tree that is wide in a large batch: more rows than one such has belong to several requests there."""
_CONTEXT = 64
_DEPTH = 8
_PADDED_REQUESTS, _EVEN_ROWS, _PADDING_REPEATS = 8, 9, 6
"""Of the rounds that tell what padding costs."""
_NUM_NEW = 2
"""New rows of a request in a usual round."""
_NUM_REQUESTS = 2
"""Of a round that only compiles: no kernel is compiled for a number of requests."""


class EngineProbe:
    """Runs forwards and drafting passes of chosen sizes over unused pool rows and times them."""

    def __init__(
        self,
        target: TargetModel,
        kv: KVPool,
        *,
        timer: Callable[[], float] = time.perf_counter,
        forward: Callable[[TargetBatch, KVPool], TargetOutput] | None = None,
    ) -> None:
        """forward: how rounds run the target; its own forward when None."""
        self._forward = forward or target.forward
        self._target, self._kv, self._timer = target, kv, timer
        self._device = target.device

    def kernel_jobs(self, policy: TreePolicy, drafter: Drafter | None) -> list[CaptureJob]:
        """Work after which the kernels of eager acceptance and of trees are compiled; none where references run."""
        if self._target.kernels.is_reference:
            return []
        jobs = [_job("acceptance", lambda: self.accept(policy.config.max_draft_tokens + 1))]
        for own in (drafter, policy.text):
            if policy.device_trees is None or own is None or own.caps.num_slots == 0:
                continue
            jobs.append(_job("trees", functools.partial(self.build, policy, own, is_expanded=False)))
            if own.caps.is_reentrant and policy.config.max_frontier > 0:
                jobs.append(_job("re-entered trees", functools.partial(self.build, policy, own, is_expanded=True)))
        return jobs

    def accept(self, max_width: int) -> None:
        """Eager acceptance of one request's trees of every width that rounds can have, padded to powers of two."""
        for width in size_ladder(max_width):
            rows = torch.arange(width, device=self._device)
            is_seen = (rows[:, None] == rows) | (rows == 0)  # all hang below the root
            bounds = torch.tensor([0, width], device=self._device)
            accept_rows(rows, bounds, is_seen, torch.zeros_like(rows), self._target.kernels)

    def build(self, policy: TreePolicy, drafter: Drafter, *, is_expanded: bool) -> None:
        """Draft, build and cut the trees of a round off the CPU, re-entered or not; the policy learns nothing."""
        assert policy.device_trees is not None
        inputs = self._inputs(drafter, _NUM_REQUESTS)
        out = plain_round([None] * _NUM_REQUESTS, inputs.anchor_token_ids, context_rows=0)
        group = DraftGroup(drafter=drafter, inputs=inputs, rows=list(range(_NUM_REQUESTS)))
        try:
            policy.device_trees.rehearse(out, group, is_expanded=is_expanded)
        finally:
            for request_id in inputs.request_ids:
                drafter.release(request_id)

    def calibrate_verify(self, policy: TreePolicy, max_requests: int) -> None:
        """Measure the prior of the policy's verify cost; the pool must be unused."""
        max_rows = min(MAX_ROWS, self._kv.num_scratch_rows)
        max_requests = min(max_requests, MAX_REQUESTS)
        policy.budget.costs.verify.calibrate(
            self.verify, max_rows=max_rows, max_requests=max_requests, limit_s=LIMIT_S,
            tree_rows=min(policy.config.max_draft_tokens, _WIDE_TREE) + 1,
        )  # fmt: skip
        if self._target.pads_requests:
            costs = policy.budget.costs
            costs.uneven_s, costs.pair_s = self.padding_s(min(max_requests, _PADDED_REQUESTS), max_rows)

    def padding_s(self, num_requests: int, max_rows: int) -> tuple[float, float]:
        """Seconds of a round because its requests differ in width at all, and of one padded (row, key) pair of attention.

        An even round against one that is nearly even and one with a wide request, of as many rows; zeros for fewer than
        two requests, and where there is no room for trees.
        """
        if num_requests < 2 or max_rows < 4 * num_requests:
            return 0.0, 0.0
        even = min(_EVEN_ROWS, max_rows // num_requests)
        rows, widths = num_requests * even, (even, even + 1, 2 * even - 1)
        times: list[list[float]] = [[], [], []]
        for _ in range(_PADDING_REPEATS):
            for found, width in zip(times, widths, strict=True):  # in turn: the machine's speed drifts
                found.append(self.verify(rows, num_requests, width))
            if len(times[0]) > 1 and sum(map(sum, times)) > LIMIT_S / 5:
                break
        alike, near, wide = (min(found[1:]) for found in times)  # the first of each is warm-up
        pairs = [(num_requests * width - rows) * (width + _CONTEXT) for width in widths]
        pair_s = max(wide - near, 0.0) / (pairs[2] - pairs[1])
        return max(near - alike - pair_s * pairs[1], 0.0), pair_s

    def calibrate_draft(
        self, policy: TreePolicy, drafter: Drafter, max_requests: int, graphs: DraftGraphs | None = None
    ) -> None:
        """Measure the priors of the policy's drafting costs; passes on what the drafter raises.

        graphs: by which whole rounds are drafted; None = call by call.
        """
        if drafter.caps.num_slots == 0:
            return
        budget, max_requests = policy.budget, min(max_requests, MAX_REQUESTS)
        budget.costs.draft.calibrate(lambda n: self.draft(drafter, n, 0, graphs), max_size=max_requests)
        num_rows = min(256, self._kv.scratch_start)
        self.ingest(drafter, num_rows)  # warm-up
        budget.costs.ingest_row_s = self.ingest(drafter, num_rows) / num_rows
        frontier = policy.config.max_frontier
        if drafter.caps.is_reentrant and frontier > 0:
            budget.costs.expand.calibrate(
                lambda n: self.draft(drafter, -(-n // frontier), n, graphs), max_size=max_requests
            )

    def verify(self, num_rows: int, num_requests: int, widest: int | None = None) -> float:
        """Seconds of one forward over num_rows scratch rows of so many requests. widest: rows of the first of them, the
        others share the rest; None = all have as many."""
        device = self._device
        bounds = torch.linspace(0, num_rows, num_requests + 1, device=device).long()
        if widest is not None:
            bounds[1:] = torch.linspace(widest, num_rows, num_requests, device=device).long()
        sizes = bounds[1:] - bounds[:-1]
        width = int(sizes.max())
        local = torch.arange(num_rows, device=device) - bounds[:-1].repeat_interleave(sizes)
        context = min(_CONTEXT, self._kv.scratch_start) if num_requests > 1 else 0
        depth = min(_DEPTH, self._target.context_tokens)
        context = min(context, self._target.context_tokens - depth)
        batch = TargetBatch(
            token_ids=torch.zeros_like(local),
            positions=local % depth + context,
            cu_rows=bounds,
            context_lens=torch.full((num_requests,), context, device=device),
            slot_table=torch.arange(context, device=device).expand(num_requests, -1),
            out_rows=self._kv.scratch_rows(num_rows),
            ancestors=local[:, None] >= torch.arange(width, device=device),
            logit_rows=None,
        )
        return self._timed(lambda: self._forward(batch, self._kv))

    def draft(self, drafter: Drafter, num_requests: int, num_leaves: int, graphs: DraftGraphs | None = None) -> float:
        """Seconds of a first block for so many requests, or, with num_leaves > 0, of the second block at the leaves."""
        if graphs is not None and graphs.rehearse(num_requests, _NUM_NEW, is_expanded=num_leaves > 0):
            first_s, whole_s = (
                self._timed(functools.partial(graphs.rehearse, num_requests, _NUM_NEW, is_expanded=is_expanded))
                for is_expanded in (False, num_leaves > 0)
            )
            return max(whole_s - first_s, 0.0) if num_leaves > 0 else whole_s
        inputs = self._inputs(drafter, num_requests)
        try:
            if num_leaves == 0:
                return self._timed(lambda: drafter.propose(inputs))
            proposal = drafter.propose(inputs)
            leaf = torch.arange(num_leaves, device=self._device)
            frontier = Frontier(
                request=leaf * num_requests // num_leaves,
                slot=leaf % max(proposal.logprobs.shape[1], 1),
                token_ids=torch.zeros_like(leaf),
            )
            return self._timed(lambda: drafter.expand(inputs, proposal, frontier))
        finally:
            for request_id in inputs.request_ids:
                drafter.release(request_id)

    def ingest(self, drafter: Drafter, num_rows: int) -> float:
        """Seconds to ingest the first rows of one request."""
        inputs = self._inputs(drafter, 1, num_new=num_rows, length=num_rows)
        try:
            return self._timed(lambda: drafter.ingest(inputs))
        finally:
            drafter.release(inputs.request_ids[0])

    def _inputs(
        self, drafter: Drafter, num_requests: int, *, num_new: int = _NUM_NEW, length: int = _CONTEXT
    ) -> DraftInputs:
        """Requests of a short context that all lie on the same pool rows; the last num_new rows of each are new."""
        device = self._device
        length = min(length, self._kv.scratch_start)
        rows = torch.arange(length, device=device)
        num_new = min(num_new, length)
        new = rows[-num_new:].repeat(num_requests)
        features = self._kv.features if drafter.caps.needs_features else None
        return DraftInputs(
            request_ids=[f"probe-{i}" for i in range(num_requests)],
            context_lens=torch.full((num_requests,), length, device=device),
            anchor_token_ids=torch.zeros(num_requests, dtype=torch.int64, device=device),
            temperatures=torch.zeros(num_requests, device=device),
            slot_table=rows.expand(num_requests, -1),
            cu_new=torch.arange(num_requests + 1, device=device) * num_new,
            new_positions=new,
            new_token_ids=torch.zeros_like(new),
            new_features=None if features is None else features[new],
            new_slots=new,
            histories=[[0] * (length + 1) for _ in range(num_requests)],
        )

    def _timed(self, run: Callable[[], object]) -> float:
        start = self._timer()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._timer() - start


def _job(name: str, run: Callable[[], None]) -> CaptureJob:
    """Work before all graphs, whose failure is left to the rounds, which know what to do without a drafter."""

    def compile_kernels(_backend: GraphBackend) -> None:
        try:
            run()
        except Exception:
            logger.exception("kernels of %s could not be run before the first round", name)

    return CaptureJob(name=name, family=name, rank=-1, run=compile_kernels)
