"""How do the trees that the tree kernel builds become the packed trees of a round?

The kernel builds the largest tree that a request may get, once: the tree of n nodes is the first n + 1 rows of it. So the
scores of its rows are all that the budget has to know, and the round's trees are cut from it by gathers.

Shape legend: G requests of one drafter, C candidates, W rows of the largest tree (root included), N packed rows.

How are a round's trees drafted where every host read waits for the device?

The batch path of TreePolicy, on the CPU too where trees grow by bundles, with shapes that are known beforehand: every request has the same number of leaves (absent
ones have mass 0), equal siblings are always merged, and all that the budget and the checks have to know is read at once.
Re-entry is decided before the read, by the mass that the keys' leaves had in earlier rounds.

Shape legend: B requests of the round, G requests of one drafter, C candidates, M leaves per request, N packed tree rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference.tree_build import MAX_CANDIDATES, MAX_DEPTH, MAX_NODES, BuiltTrees, unpack_bits
from paceline.kernels.reference.tree_pack import pack_trees
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import Proposal
from paceline.serving.target_model.device import CudaSpan, open_span, upload
from paceline.serving.trees.builder import (
    NUM_RANK_CLASSES,
    Candidates,
    RankedCandidates,
    append_block,
    block_candidates,
    dense_frontier,
    merge_order,
    merge_trees,
    rank_merged,
    select_tree,
)
from paceline.serving.trees.bundle import BundleExpansion
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.reentry import block_place
from paceline.serving.trees.tree import TreeBatch

if TYPE_CHECKING:
    from paceline.serving.trees.policy import DraftGroup, RoundDraft


@dataclass(slots=True)
class LargestTrees:
    """The largest trees of a drafter's requests; what `RankedCandidates` are to torch's way of building."""

    built: BuiltTrees
    cells: torch.Tensor  # (G, C) int64, calibration cell of each candidate

    @property
    def scores(self) -> torch.Tensor:
        """(G, W - 1) float32 scores of the draft nodes, falling, -inf = absent."""
        return self.built.scores[:, 1:]

    def cut(self, num_nodes: Sequence[int]) -> tuple[TreeBatch, torch.Tensor]:
        """`tree_builder.select_tree`: the best `num_nodes[g]` candidates of each request, at most as many as it has.

        Returns the trees and the calibration cell of every row (N,) int64, -1 for roots.  Syncs: none.
        """
        built = self.built
        lengths = torch.tensor([0, *(n + 1 for n in num_nodes)])
        cu_nodes = upload(lengths.cumsum(0), built.token_ids.device)
        packed = pack_trees(built, cu_nodes, int(lengths.sum()))
        at = packed.request * built.token_ids.shape[1] + packed.local
        candidates = built.candidates.view(-1)[at]
        tree = TreeBatch(
            token_ids=packed.token_ids,
            parents=built.parents.view(-1)[at],
            depths=packed.depths,
            scores=built.scores.view(-1)[at],
            cu_nodes=cu_nodes,
            ancestors=unpack_bits(packed.ancestor_bits, max(num_nodes) + 1),
        )
        return tree, torch.where(candidates < 0, -1, self.cells[packed.request, candidates.clamp(min=0)])


def build_largest(
    kernels: Kernels, candidates: Candidates, anchor_token_ids: torch.Tensor, max_nodes: int, max_depth: int
) -> LargestTrees | None:
    """The trees of `max_nodes` nodes, siblings with equal tokens merged; None where the kernel does not take so much.

    candidates: scores of any float dtype. anchor_token_ids: (G,) int64. max_depth: of any candidate.  Syncs: none.
    """
    num_requests, num_candidates = candidates.scores.shape
    if num_candidates > MAX_CANDIDATES or max_nodes > MAX_NODES or max_depth > MAX_DEPTH:
        return None
    built = kernels.build_trees(
        scores=candidates.scores.float().contiguous(),
        parents=candidates.parents.contiguous(),
        token_ids=candidates.token_ids.long().contiguous(),
        depths=candidates.depths.contiguous(),
        anchor_token_ids=anchor_token_ids.contiguous(),
        num_nodes=anchor_token_ids.new_full((num_requests,), max_nodes),
        max_nodes=max_nodes,
        max_depth=max_depth,
    )
    return LargestTrees(built, candidates.cells)


logger = logging.getLogger(__name__)

_MASS_RATE = 0.2
_NUM_CHECKS = 3
"""Per proposal: largest log-probability, lowest and highest token id."""


@dataclass(slots=True)
class _Drafted:
    """One group on its way to the read."""

    index: int
    group: DraftGroup
    ranked: RankedCandidates | LargestTrees
    masses: torch.Tensor  # (G, limit) float64
    checks: list[torch.Tensor]  # (3,) float64 each
    leaf_mass: torch.Tensor | None  # (G,) float64
    is_expanded: bool
    num_slots: int
    span: CudaSpan | None  # of the re-entry


class DeviceDraft:
    """Drafts rounds off the CPU for one TreePolicy, whose budget and calibration it shares."""

    def __init__(
        self,
        config: TreeConfig,
        budget: BudgetController,
        calibration: ScoreCalibration,
        timer: Callable[[], float],
        vocab_size: int | None,
        bundle: BundleExpansion | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """bundle: what grows the trees; None = the heaviest nodes. kernels: that build those; None = torch operators, as
        with the references, which are slower."""
        self._first_block = block_candidates if bundle is None else bundle.first_block
        self._rank = rank_merged if bundle is None else bundle.rank
        self._kernels = None if bundle is not None or kernels is None or kernels.is_reference else kernels
        self._config, self._budget, self._calibration = config, budget, calibration
        self._timer, self._vocab_size = timer, vocab_size
        self._leaf_mass: dict[DraftKey, float] = {}

    def draft(
        self,
        out: RoundDraft,
        groups: Sequence[DraftGroup],
        keys: list[DraftKey | None],
        anchor_token_ids: torch.Tensor,
        context_rows: int,
    ) -> None:
        """Fill `out` as TreePolicy.draft does.  Syncs: one for all groups."""
        drafted: list[_Drafted] = []
        for index, group in enumerate(groups):
            try:
                found = self._propose(index, group, keys, out)
            except Exception as e:  # a drafter is untrusted code with untrusted weights; decoding must go on
                logger.exception("drafter %s failed; its requests decode plainly", group.drafter.caps.name)
                out.failures[index] = f"{type(e).__name__}: {e}"
                continue
            if found is not None:
                drafted.append(found)
        if not drafted:
            return
        masses = self._read(drafted, keys, out)
        built = [d for d in drafted if d.index not in out.failures]
        if not built:
            return
        nodes = self._budget.choose(masses, keys, context_rows, sum(out.is_drafted))
        counts = np.minimum(nodes, (masses > 0).sum(1))
        self._assemble(out, built, counts, anchor_token_ids)

    def rehearse(self, out: RoundDraft, group: DraftGroup, *, is_expanded: bool) -> None:
        """Fill `out`, whose keys are None, with the largest trees of a group, re-entered or not; nothing is learnt.

        Every kernel of such a round is compiled then, by the calls that rounds make.
        """
        found = self._propose(0, group, out.keys, out, is_expanded)
        if found is None:
            return
        masses = self._read([found], out.keys, out)
        if not out.failures:
            self._assemble(out, [found], (masses > 0).sum(1), group.inputs.anchor_token_ids)

    def _propose(
        self,
        index: int,
        group: DraftGroup,
        keys: list[DraftKey | None],
        out: RoundDraft,
        wants_expansion: bool | None = None,
    ) -> _Drafted | None:
        """wants_expansion: re-enter or not; None = where it pays."""
        drafter, inputs, limit = group.drafter, group.inputs, self._config.max_draft_tokens
        out.num_new_rows += inputs.new_token_ids.numel()
        start = self._timer()
        proposal = drafter.propose(inputs)
        out.model_s += self._timer() - start
        num_slots = proposal.logprobs.shape[1]
        if num_slots == 0:
            return None
        checks = [_facts(proposal)]
        group_keys = [keys[r] for r in group.rows]
        kappa = upload(self._calibration.table(group_keys, num_slots), proposal.logprobs.device)
        candidates = self._first_block(proposal, drafter.caps.is_product, limit, kappa[0])
        leaf_mass, is_expanded, span = None, False, None
        if drafter.caps.is_reentrant and self._config.max_frontier > 0:
            leaves = dense_frontier(candidates, self._config.max_frontier)
            leaf_mass = leaves.scores.double().exp().view(len(group.rows), -1).sum(1)
            if wants_expansion is None:
                wants_expansion = self._should_expand(group_keys, out.context_rows, len(keys))
            if wants_expansion:
                start, span = self._timer(), open_span(proposal.logprobs.device)
                for block in range(1, drafter.caps.num_blocks):
                    began = self._timer()
                    proposal = drafter.expand(inputs, proposal, leaves.frontier)
                    out.model_s += self._timer() - began
                    checks.append(_facts(proposal))
                    before, request = candidates, leaves.frontier.request
                    candidates = append_block(before, leaves, proposal, kappa[1][request])
                    if block + 1 < drafter.caps.num_blocks:
                        place = block_place(before, leaves, proposal)
                        leaves = dense_frontier(candidates, self._config.max_frontier, place)
                if span is None:
                    out.expand_s += self._timer() - start
                else:
                    span.close()
                is_expanded = True
        ranked = self._order(candidates, inputs.anchor_token_ids, drafter.caps.max_depth)
        return _Drafted(
            index=index, group=group, ranked=ranked, masses=ranked.scores[:, :limit].double().exp(), checks=checks,
            leaf_mass=leaf_mass, is_expanded=is_expanded, num_slots=num_slots, span=span,
        )  # fmt: skip

    def _order(
        self, candidates: Candidates, anchor_token_ids: torch.Tensor, max_depth: int
    ) -> RankedCandidates | LargestTrees:
        if self._kernels is not None:
            limit = self._config.max_draft_tokens
            trees = build_largest(self._kernels, candidates, anchor_token_ids, limit, max_depth)
            if trees is not None:
                return trees
        return self._rank(candidates, max_depth)

    def _should_expand(self, keys: list[DraftKey | None], context_rows: int, num_requests: int) -> bool:
        """Whether any leaf would earn its time, had each its share of the mass of the key's earlier rounds."""
        num_leaves = self._config.max_frontier
        known = [k for k in keys if k is not None for _ in range(num_leaves)]
        masses = [self._leaf_mass.get(k, 1.0) / num_leaves for k in known]
        return bool(known) and bool(self._budget.choose_leaves(known, masses, context_rows, num_requests))

    def _read(self, drafted: list[_Drafted], keys: list[DraftKey | None], out: RoundDraft) -> np.ndarray:
        """Bring checks and masses to the host in one read; returns (B, limit) masses, 0 for what failed."""
        parts = []
        for d in drafted:
            parts += [*d.checks, d.masses.flatten()]
            if d.leaf_mass is not None:
                parts.append(d.leaf_mass)
        start = self._timer()
        flat = torch.cat(parts).cpu().numpy()
        out.model_s += self._timer() - start  # the drafters' work that was queued
        out.expand_s += sum(d.span.seconds() for d in drafted if d.span is not None)
        masses = np.zeros((len(keys), self._config.max_draft_tokens))
        at = 0

        def take(count: int) -> np.ndarray:
            nonlocal at
            at += count
            return flat[at - count : at]

        for d in drafted:
            rows = d.group.rows
            errors = [self._error(take(_NUM_CHECKS)) for _ in d.checks]
            own = take(d.masses.numel()).reshape(len(rows), -1)
            leaf_mass = None if d.leaf_mass is None else take(len(rows))
            error = next((e for e in errors if e), None)
            if error is not None:
                out.failures[d.index] = error
                continue
            masses[np.ix_(rows, range(own.shape[1]))] = own
            for row in rows:
                out.is_drafted[row] = True
            if leaf_mass is not None:
                self._note_leaves(d, rows, leaf_mass, keys, out)
        return masses

    def _note_leaves(
        self, d: _Drafted, rows: list[int], leaf_mass: np.ndarray, keys: list[DraftKey | None], out: RoundDraft
    ) -> None:
        for row, mass in zip(rows, leaf_mass.tolist(), strict=True):
            key = keys[row]
            if key is not None:
                old = self._leaf_mass.get(key, mass)
                self._leaf_mass[key] = old + _MASS_RATE * (mass - old)
            if d.is_expanded:
                out.frontier_mass = out.frontier_mass or [0.0] * len(keys)
                out.frontier_mass[row] = mass
        if d.is_expanded:
            out.num_cells = d.num_slots * NUM_RANK_CLASSES
            out.num_leaves += len(rows) * self._config.max_frontier

    def _error(self, facts: np.ndarray) -> str | None:
        highest, low, high = facts.tolist()
        if not highest <= 1e-3:
            return f"ValueError: log-probabilities must be at most 0 (-inf = absent), got {highest}"
        if self._vocab_size is not None and (low < 0 or high >= self._vocab_size):
            return f"ValueError: proposed token ids must be in [0, {self._vocab_size}), got {low:.0f}..{high:.0f}"
        return None

    def _assemble(
        self, out: RoundDraft, built: list[_Drafted], counts: np.ndarray, anchor_token_ids: torch.Tensor
    ) -> None:
        num_requests, device = anchor_token_ids.numel(), anchor_token_ids.device
        parts, cells, bounds = [], [], []
        for d in built:
            rows = d.group.rows
            own = counts[rows].tolist()
            if isinstance(d.ranked, LargestTrees):
                tree, tree_cells = d.ranked.cut(own)
            else:
                is_whole = rows == list(range(num_requests))
                anchors = anchor_token_ids if is_whole else anchor_token_ids[upload(rows, device)]
                depth = min(d.group.drafter.caps.max_depth, max(own))
                tree, tree_cells = select_tree(d.ranked, anchors, own, present=own, max_depth=depth)
            parts.append((tree, rows))
            cells.append(tree_cells)
            bounds.append((_offsets(own), rows))
        rest = [i for i, drafted in enumerate(out.is_drafted) if not drafted]
        if rest:
            roots = TreeBatch.roots(anchor_token_ids[upload(rest, device)])
            parts.append((roots, rest))
            cells.append(roots.parents)
            bounds.append((_offsets([0] * len(rest)), rest))
        out.num_draft_tokens = [int(n) if d else 0 for n, d in zip(counts, out.is_drafted, strict=True)]
        if len(parts) == 1:
            out.tree, out.cells = parts[0][0], cells[0]
        else:
            index, cu_nodes = (upload(t, device) for t in merge_order(bounds, num_requests))
            out.tree = merge_trees(parts, num_requests, (index, cu_nodes))
            out.cells = torch.cat(cells)[index]
        out.tree.counts = [n + 1 for n in out.num_draft_tokens]

    def forget(self, version: str) -> None:
        """Drop what was learnt about a drafter version."""
        for key in [k for k in self._leaf_mass if k[0] == version]:
            del self._leaf_mass[key]


def _facts(proposal: Proposal) -> torch.Tensor:
    """(3,) float64: largest log-probability (NaN wins a maximum), lowest and highest token id. Raises: ValueError on a
    wrong form."""
    proposal.check_form()
    low, high = torch.aminmax(proposal.token_ids)
    return torch.stack((proposal.highest_logprob().double(), low.double(), high.double()))


def _offsets(counts: list[int]) -> torch.Tensor:
    """(B + 1,) int64 cu_nodes of trees with so many draft nodes, on the host."""
    return torch.tensor([0, *counts]).cumsum(0) + torch.arange(len(counts) + 1)
