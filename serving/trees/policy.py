"""Which draft tree does each request of a round get?

Shape legend: B requests of the round, G requests of one drafter, C candidates, N packed tree rows (roots included).
The policy ties drafter, builder and budget together: ask `wants_draft`, build `DraftInputs` for those requests, call
`draft`, verify, then `observe`. It never sees the verification's random numbers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.stats import DraftKey, RoundObservation
from paceline.serving.drafters.interface import Drafter, DraftInputs
from paceline.serving.drafters.mixed import MixedDrafter
from paceline.serving.drafters.text import make_text_drafter
from paceline.serving.trees.builder import (
    NUM_RANK_CLASSES,
    block_candidates,
    rank_candidates,
    select_tree,
)
from paceline.serving.trees.bundle import BundleExpansion
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.device import DeviceDraft
from paceline.serving.trees.host_batch import BatchCandidates, RankedBatch, check_proposal, pack_trees
from paceline.serving.trees.host_tree import HostCandidates, HostProposal
from paceline.serving.trees.reentry import reenter
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import AcceptPlan

logger = logging.getLogger(__name__)

_FAILED = "drafter %s failed; these requests decode plainly: %s"


@dataclass(kw_only=True, slots=True)
class DraftGroup:
    """The requests of a round that share one drafter."""

    drafter: Drafter
    inputs: DraftInputs
    rows: list[int]
    """(G,) index of each request of `inputs` into the round's B requests."""


@dataclass(kw_only=True, slots=True)
class RoundDraft:
    """The trees of a round and what `observe` needs to learn from them."""

    tree: TreeBatch
    keys: list[DraftKey | None]  # (B,)
    num_draft_tokens: list[int]  # (B,)
    is_drafted: list[bool]  # (B,) whether a drafter was called for the request and succeeded
    draft_s: float = 0.0
    """Seconds spent in drafters and in building trees."""
    model_s: float = 0.0
    """Part of draft_s spent inside drafters."""
    expand_s: float = 0.0
    """Part of draft_s spent in re-entry."""
    num_leaves: int = 0
    """Leaves at which drafters were re-entered."""
    failures: dict[int, str] = field(default_factory=dict)
    """Index into `groups` -> reason, for drafters that raised or proposed invalid log-probabilities; their requests got
    roots."""
    context_rows: int = 0
    longest_context: int | None = None
    """Rows of the request with most of them; None: not told."""
    num_new_rows: int = 0
    cells: torch.Tensor | None = None  # (N,) int64, calibration cell of each row, -1 for roots; None with tree.host
    num_cells: int = 0
    """Cells of the first block: cells beyond belong to re-entered blocks."""
    frontier_mass: list[float] = field(default_factory=list)  # (B,) or empty


class TreePolicy:
    """Plans, builds and learns; one per engine, used by the engine's thread only."""

    def __init__(
        self,
        config: TreeConfig,
        *,
        cost: CostModel | None = None,
        timer: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """timer: seconds, monotonic. vocab_size: when given, proposals outside [0, vocab_size) count as failures.
        kernels: of the target's device, for trees off the CPU; None = torch operators."""
        self.config = config
        self.budget = BudgetController(config, cost)
        self._bundle = BundleExpansion(config.bundle_width) if config.policy == "bundle" else None
        self._calibration = ScoreCalibration()
        self._timer = timer
        self._vocab_size = vocab_size
        self.device_draft = DeviceDraft(
            config, self.budget, self._calibration, timer, vocab_size, self._bundle, kernels
        )
        """Drafts rounds off the CPU, and batches whose trees grow by bundles."""
        self._text = None if config.mix == "none" else make_text_drafter(config.mix)

    def mixed(self, drafter: Drafter) -> Drafter:
        """The drafter as rounds use it: with a text drafter at its side if the configuration asks for one.

        A mixed draft has two blocks, so a drafter that goes on level by level (EAGLE-3) stays alone: it would lose its depth.
        """
        if self._text is None or drafter.caps.num_slots == 0 or drafter.caps.num_blocks > 2:
            return drafter
        return MixedDrafter(drafter, self._text)

    def release(self, request_id: str) -> None:
        """Forget what is kept for a request that has ended."""
        if self._text is not None:
            self._text.release(request_id)

    def wants_draft(
        self,
        keys: list[DraftKey | None],
        context_rows: int,
        backlogs: list[int] | None = None,
        horizons: list[int] | None = None,
    ) -> list[bool]:
        """Whether to call the drafter for each of the round's B requests.

        keys: None for requests without a (working) drafter. context_rows: sum of their context_lens. Call exactly once
        per round and before `draft`: it moves the probing state. backlogs: rows that the drafter has not ingested yet.
        horizons: tokens that each request is expected to get still.
        """
        return self.budget.wants_draft(keys, context_rows, backlogs, horizons)

    def draft(
        self,
        groups: list[DraftGroup],
        keys: list[DraftKey | None],
        anchor_token_ids: torch.Tensor,
        context_rows: int,
    ) -> RoundDraft:
        """Propose, build, maybe re-enter, and cut all trees of the round to the budget that maximises tokens per second.

        Args:
            groups: the requests for which wants_draft said True, by drafter.
            keys: (B,), as for wants_draft.
            anchor_token_ids: (B,) int64, of all B requests.
        Returns: trees of the B requests in round order. A drafter that raises or proposes invalid log-probabilities
        is reported in `failures` (the caller stops using it); its requests decode plainly. So are all drafters of the
        round when their proposals cannot be made into trees.  Syncs: a few per group on the CPU, else
        one for all.
        """
        out = plain_round(keys, anchor_token_ids, context_rows)
        if not groups:
            return out
        start = self._timer()
        try:
            self._draft_groups(out, groups, keys, anchor_token_ids, context_rows)
        except Exception as e:  # what they proposed may be at fault, and drafting again could fail again
            names = ", ".join(sorted({g.drafter.caps.name for g in groups}))
            logger.exception(_FAILED, names, ", ".join(i for g in groups for i in g.inputs.request_ids))
            failures = {i: f"{type(e).__name__}: {e}" for i in range(len(groups))} | out.failures
            model_s, out = out.model_s, plain_round(keys, anchor_token_ids, context_rows)
            out.failures, out.model_s = failures, model_s
        out.draft_s = self._timer() - start
        return out

    def _draft_groups(
        self,
        out: RoundDraft,
        groups: list[DraftGroup],
        keys: list[DraftKey | None],
        anchor_token_ids: torch.Tensor,
        context_rows: int,
    ) -> None:
        """Fill `out`, which has roots only."""
        num_requests = anchor_token_ids.numel()
        if num_requests == 1 and self._draft_one(out, groups[0], keys, anchor_token_ids):
            return
        if anchor_token_ids.device.type != "cpu" or self._bundle is not None:
            self.device_draft.draft(out, groups, keys, anchor_token_ids, context_rows)
            return
        limit = self.config.max_draft_tokens
        built: list[tuple[RankedBatch, list[int]]] = []
        masses = np.zeros((num_requests, limit))
        for index, group in enumerate(groups):
            try:
                candidates = self._propose(group, keys, out)
            except Exception as e:  # a drafter is untrusted code with untrusted weights; decoding must go on
                logger.exception(_FAILED, group.drafter.caps.name, ", ".join(group.inputs.request_ids))
                out.failures[index] = f"{type(e).__name__}: {e}"
                continue
            if candidates is None:
                continue
            ranked = candidates.ranked(limit)
            masses[np.array(group.rows)[ranked.owners], ranked.ranks] = np.exp(ranked.scores.astype(np.float64))
            built.append((ranked, group.rows))
            for row in group.rows:
                out.is_drafted[row] = True
        if built:
            nodes = self.budget.choose(masses, keys, context_rows, sum(out.is_drafted))
            out.tree, out.cells = pack_trees(built, nodes, anchor_token_ids)
            out.num_draft_tokens = [count - 1 for count in out.tree.counts or ()]

    def _draft_one(
        self, out: RoundDraft, group: DraftGroup, keys: list[DraftKey | None], anchor_token_ids: torch.Tensor
    ) -> bool:
        """The round of a lone request in Python numbers; False when the batch path has to draft it: off the CPU and
        for product tables."""
        drafter, inputs, limit = group.drafter, group.inputs, self.config.max_draft_tokens
        if drafter.caps.is_product or anchor_token_ids.device.type != "cpu":
            return False
        try:
            found = self._candidates_of_one(out, drafter, inputs, keys)
        except Exception as e:  # a drafter is untrusted code with untrusted weights; decoding must go on
            logger.exception(_FAILED, drafter.caps.name, ", ".join(inputs.request_ids))
            out.failures[0] = f"{type(e).__name__}: {e}"
            return True
        if found is None:
            return True
        order = found.ranked(limit) if self._bundle is None else self._bundle.order_of_one(found, limit)
        if found.has_duplicates(order):
            found.merge_duplicates()
            order = found.ranked(limit)
        masses = [math.exp(found.scores[i]) for i in order]
        num_nodes = self.budget.choose_one(masses, keys[0], out.context_rows)
        out.is_drafted[0] = True
        out.tree = found.tree(order[:num_nodes], int(anchor_token_ids[0]))
        out.num_draft_tokens[0] = num_nodes
        return True

    def _candidates_of_one(
        self, out: RoundDraft, drafter: Drafter, inputs: DraftInputs, keys: list[DraftKey | None]
    ) -> HostCandidates | None:
        key = keys[0]
        out.num_new_rows = inputs.new_token_ids.numel()
        start = self._timer()
        proposal = drafter.propose(inputs)
        out.model_s = self._timer() - start
        num_slots = proposal.logprobs.shape[1]
        if num_slots == 0:
            return None
        cells = num_slots * NUM_RANK_CLASSES
        kappa = self._calibration.row(key, 2 * cells)
        found = HostCandidates()
        found.add_block(HostProposal.of(proposal, self._vocab_size), 0, kappa)
        if key is None or not drafter.caps.is_reentrant or self.config.max_frontier == 0:
            return found
        first, late = 0, kappa[cells:]
        entries: list[int] = []
        for _ in range(drafter.caps.num_blocks - 1):
            leaves = found.leaves(self.config.max_frontier, first)
            masses = [math.exp(found.scores[i]) for i in leaves]
            kept = self.budget.choose_leaves([key] * len(leaves), masses, out.context_rows, 1)
            leaves, mass = [leaves[i] for i in kept], sum(masses[i] for i in kept)
            if not mass > 0:
                break
            start = self._timer()
            proposal = drafter.expand(inputs, proposal, found.frontier(leaves, entries, cells))
            out.model_s += self._timer() - start
            read = HostProposal.of(proposal, self._vocab_size)
            floor = found.floor(self.config.max_draft_tokens) if self._bundle is None else -math.inf
            first, entries = len(found.scores), leaves
            for node, leaf in enumerate(leaves):
                found.add_block(read, node, late, entry=leaf, first_cell=cells, floor=floor)
            out.expand_s, out.num_cells = out.expand_s + self._timer() - start, cells
            out.frontier_mass = [mass + sum(out.frontier_mass)]
            out.num_leaves += len(leaves)
        return found

    def _propose(self, group: DraftGroup, keys: list[DraftKey | None], out: RoundDraft) -> BatchCandidates | None:
        drafter, inputs = group.drafter, group.inputs
        out.num_new_rows += inputs.new_token_ids.numel()
        start = self._timer()
        proposal = drafter.propose(inputs)
        out.model_s += self._timer() - start
        num_slots = proposal.logprobs.shape[1]
        if num_slots == 0:
            return None
        check_proposal(proposal, self._vocab_size)
        group_keys: list = [keys[r] for r in group.rows]  # of requests that draft: never None
        kappa = self._calibration.array(group_keys, num_slots)  # (2, G, S, R)
        limit = self.config.max_draft_tokens
        candidates = BatchCandidates.of(proposal, drafter.caps.is_product, limit, kappa[0])
        if not drafter.caps.is_reentrant or self.config.max_frontier == 0:
            return candidates
        for _ in range(drafter.caps.num_blocks - 1):
            leaves = candidates.leaves(self.config.max_frontier)
            owners, leaf_masses = candidates.owners_and_masses(leaves)
            owner, masses = owners.tolist(), leaf_masses.tolist()
            kept = self.budget.choose_leaves([group_keys[r] for r in owner], masses, out.context_rows, len(keys))
            if not sum(masses[i] for i in kept) > 0:
                break
            if len(kept) < len(owner):
                kept.sort()
                leaves, owners = leaves[kept], owners[kept]
            start = self._timer()
            proposal = drafter.expand(inputs, proposal, candidates.frontier(leaves))
            out.model_s += self._timer() - start
            check_proposal(proposal, self._vocab_size)
            candidates = candidates.append(leaves, proposal, kappa[1][owners])
            out.expand_s += self._timer() - start
            out.num_cells = num_slots * NUM_RANK_CLASSES
            out.frontier_mass = out.frontier_mass or [0.0] * len(keys)
            out.num_leaves += len(kept)
            for i in kept:
                out.frontier_mass[group.rows[owner[i]]] += masses[i]
        return candidates

    def observe(
        self,
        draft: RoundDraft,
        plan: AcceptPlan,
        *,
        verify_s: float,
        round_s: float,
        catch_up_s: float = 0.0,
        num_catch_up_rows: int = 0,
    ) -> None:
        """Learn from a verified round.

        verify_s: seconds of the verify forward. round_s: seconds of the whole round without prefill and without
        catch_up_s, which drafters spent on num_catch_up_rows that earlier plain rounds had left behind.
        """
        paths = plan.on_host()
        num_accepted_tokens = [len(rows) - 1 for rows, _ in paths]
        reentered = [0] * len(num_accepted_tokens)
        if any(draft.is_drafted) and (draft.cells is not None or draft.tree.host is not None):
            reentered = self._calibration.observe(draft, [rows for rows, _ in paths])
        self.budget.observe(
            RoundObservation(
                keys=draft.keys,
                is_drafted=draft.is_drafted,
                num_nodes=draft.num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                context_rows=draft.context_rows,
                longest_context=draft.longest_context,
                draft_s=draft.draft_s,
                verify_s=verify_s,
                round_s=round_s,
                num_new_rows=draft.num_new_rows,
                expand_s=draft.expand_s,
                num_leaves=draft.num_leaves,
                catch_up_s=catch_up_s,
                num_catch_up_rows=num_catch_up_rows,
                frontier_mass=draft.frontier_mass,
                num_accepted_tokens_reentered=reentered,
            )
        )

    def forget(self, version: str) -> None:
        """Drop what was learnt about a drafter version that is no longer loaded."""
        self.budget.forget(version)
        self._calibration.forget(version)
        self.device_draft.forget(version)


def plain_round(keys: list[DraftKey | None], anchor_token_ids: torch.Tensor, context_rows: int) -> RoundDraft:
    """A round of roots only. keys, anchor_token_ids: (B,)."""
    num_requests = anchor_token_ids.numel()
    return RoundDraft(
        tree=TreeBatch.roots(anchor_token_ids),
        keys=keys,
        num_draft_tokens=[0] * num_requests,
        is_drafted=[False] * num_requests,
        context_rows=context_rows,
    )


def draft_fixed(drafter: Drafter, inputs: DraftInputs, num_nodes: int, max_frontier: int = 4) -> TreeBatch:
    """Trees with `num_nodes` draft nodes (fewer only where candidates run out): no cost model, no learning.

    For shadow scoring and tests; every request of `inputs` gets a tree, in order. Re-entrant drafters are re-entered
    when max_frontier > 0. Errors of the drafter pass through.
    """
    proposal = drafter.propose(inputs)
    if proposal.logprobs.shape[1] == 0 or num_nodes == 0:
        return TreeBatch.roots(inputs.anchor_token_ids)
    candidates = block_candidates(proposal, drafter.caps.is_product, num_nodes)
    candidates = reenter(drafter, inputs, proposal, candidates, max_frontier)
    ranked = rank_candidates(candidates, num_nodes)
    return select_tree(ranked, inputs.anchor_token_ids, [num_nodes] * inputs.anchor_token_ids.numel())[0]
