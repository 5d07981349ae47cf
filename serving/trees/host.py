"""Host trees: a round's trees built with NumPy, where an operator of a device costs more than its arithmetic.

The builder of every round on the CPU, of the gate's replay, and off the CPU of what the tree kernel does not take.

Bundles are JetSpec's tree: its algorithm pops the heaviest node of a heap and adds all of its W children at once, until
the budget is full. Scores never rise along a path, so nodes are popped in the order of their scores, and a node is added
when its parent is popped: sorting by (place of the parent in the order of scores, own place) gives the order of addition,
of which every beginning is the tree of that size. At equal size the heaviest nodes always have at least its mass.
Source of bundles: tree_speculation.md 1.7; its node budget counts the root, ours does not.

Shape legend: B requests of the round, G requests of one drafter, F leaves, S draft slots, R rank classes, W bundle width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.cpu.trees import ProposalFields, TreeMaker
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.trees.calibration import NUM_RANK_CLASSES, ScoreCalibration
from paceline.serving.trees.candidates import (
    DEPTH,
    OWNER,
    PARENT,
    TOKEN,
    Candidates,
    HostProposal,
    Ranked,
    pack_trees,
    table_candidates,
    write,
)
from paceline.serving.trees.propose import DraftGroup, RoundDraft, propose_blocks
from paceline.serving.trees.tree import TreeBatch


def rank_bundles(candidates: Candidates, width: int, limit: int) -> Ranked:
    """The first `limit` candidates of each request by order of addition, siblings with equal tokens merged.

    width: W, children that a node gets at once, at most.
    """
    keys = (candidates.columns[PARENT] << 32) + candidates.columns[TOKEN]
    if len(np.unique(keys)) < len(keys):
        candidates = candidates.merged()
    by_score, _ = candidates.best(len(candidates.scores))
    owners, _, parents, depths, _ = candidates.columns
    place = np.zeros(len(candidates.scores), dtype=np.int64)
    place[by_score] = np.arange(len(by_score))
    # Request after request; a root has no parent and comes first.
    above = np.where(depths[by_score] == 0, -1, place[parents[by_score]])
    order = by_score[np.lexsort((place[by_score], above, owners[by_score]))]
    above = np.where(depths[order] == 0, -1 - owners[order], parents[order])
    starts = np.flatnonzero(np.append(True, above[1:] != above[:-1]))
    number = np.arange(len(order)) - starts.repeat(np.diff(np.append(starts, len(order))))
    is_in = np.zeros(len(candidates.scores), dtype=bool)
    is_in[order] = number < width
    for _ in range(int(candidates.columns[DEPTH].max())):  # what hangs below a child that no bundle holds is not there
        is_in &= is_in[parents]
    order = order[is_in[order]]
    ordered = candidates.columns[OWNER, order]
    local = np.arange(len(order)) - ordered.searchsorted(np.arange(candidates.num_requests))[ordered]
    kept = local <= limit
    return candidates.take(order[kept], local[kept])


ChooseLeaves = Callable[[list[int], list[float]], Sequence[int]]
"""(request of each leaf, its path mass) -> indices of those to go on from."""


@dataclass(slots=True, kw_only=True)
class HostBlocks:
    """Candidates of one drafter's requests, block by block."""

    is_product: bool
    max_nodes: int
    max_frontier: int
    corrections: Callable[[int], np.ndarray | None]
    """Draft slots -> (2 blocks, G or 1, S, R) of ScoreCalibration; None = the drafter's own scores."""
    choose_leaves: ChooseLeaves | None = None
    """None = all leaves."""
    bundle_width: int | None = None
    """Grow by bundles of so many children; None = the heaviest nodes."""
    vocab_size: int | None = None
    maker: TreeMaker | None = None
    """Compiled code that gathers the blocks instead; a round of its own was begun."""
    is_empty: bool = False
    """The first block has no candidates: the trees are roots."""
    num_leaves: int = 0
    num_slots: int = 0
    frontier_mass: dict[int, float] = field(default_factory=dict)
    """Request -> path mass of its leaves that were gone on from."""
    _kappa: np.ndarray | None = None
    _leaves: np.ndarray | None = None
    _num_blocks: int = 0
    """Behind the first."""
    _candidates: Candidates | None = None
    _device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def candidates(self) -> Candidates:
        """Of all blocks so far."""
        assert self._candidates is not None, "no block yet"
        return self._candidates

    def begin(self, proposal: Proposal) -> None:
        """Take the first block. Raises: ValueError, as HostProposal.read."""
        if self.maker is not None:
            self.num_slots, self._device = proposal.logprobs.shape[1], proposal.logprobs.device
            proposal.check_form()
            found = self.maker.begin(
                _fields(proposal), self.vocab_size, self.corrections(self.num_slots),
                is_product=self.is_product, max_nodes=self.max_nodes, bundle_width=self.bundle_width,
            )  # fmt: skip
            if found is None:
                self._refuse(proposal)
            self.is_empty = not found
            return
        read, self._device = HostProposal.read(proposal, self.vocab_size), proposal.logprobs.device
        self.num_slots, self.is_empty = read.logprobs.shape[1], read.is_empty
        if self.is_empty:
            return
        self._kappa = self.corrections(self.num_slots)
        kappa = None if self._kappa is None else self._kappa[0]
        if self.is_product:
            self._candidates = table_candidates(read, self.max_nodes, kappa, self.bundle_width)
        else:
            self._candidates = Candidates.of(read, kappa)

    def frontier(self) -> Frontier | None:
        """The heaviest leaves of the latest block, those that `choose_leaves` takes."""
        if self.max_frontier == 0 or self.is_empty:
            return None
        limit = self.max_nodes if self.bundle_width is None else None  # bundles take light nodes, too
        if self.maker is None:
            leaves = self.candidates.leaves(self.max_frontier, limit)
            owners, masses = self.candidates.columns[OWNER, leaves].tolist(), self.candidates.masses(leaves).tolist()
        else:
            leaves, scores = self.maker.leaves(self.max_frontier, is_limited=limit is not None)
            owners, masses = leaves[0].tolist(), np.exp(scores).tolist()
        if not owners:
            return None
        if self.choose_leaves is not None:
            kept = sorted(self.choose_leaves(owners, masses))
            if len(kept) < len(owners):
                leaves, owners, masses = leaves[..., kept], [owners[i] for i in kept], [masses[i] for i in kept]
        if not sum(masses) > 0:
            return None
        for owner, mass in zip(owners, masses, strict=True):
            self.frontier_mass[owner] = self.frontier_mass.get(owner, 0.0) + mass
        self.num_leaves += len(owners)
        self._leaves = leaves
        self._num_blocks += 1
        if self.maker is None:
            return self.candidates.frontier(leaves, self._device)
        request, slot, token_ids, node, _ = (write(line, self._device) for line in leaves)
        return Frontier(request=request, slot=slot, token_ids=token_ids, node=node if self._num_blocks > 1 else None)

    def extend(self, proposal: Proposal) -> None:
        """Take the block below the latest frontier. Raises: ValueError, as HostProposal.read."""
        leaves, kappa = self._leaves, self._kappa
        assert leaves is not None
        if self.maker is not None:
            proposal.check_form()
            if not self.maker.extend(_fields(proposal), self.vocab_size, leaves[4]):
                self._refuse(proposal)
            return
        read = HostProposal.read(proposal, self.vocab_size)
        if kappa is not None:
            kappa = kappa[1] if kappa.shape[1] == 1 else kappa[1, self.candidates.columns[OWNER, leaves]]
        self._candidates = self.candidates.append(leaves, read, kappa)

    def _refuse(self, proposal: Proposal) -> NoReturn:
        """Say what is wrong with it."""
        HostProposal.read(proposal, self.vocab_size)
        raise ValueError(f"a block must have the first one's {self.num_slots} slots, got {proposal.logprobs.shape[1]}")

    def ranked(self, rows: Sequence[int] = ()) -> Ranked | None:
        """The largest trees, of which every beginning is a tree; None: compiled code keeps them for these rows (G,) of the
        round."""
        if self.maker is not None:
            self.maker.rank(rows)
            return None
        if self.bundle_width is not None:
            return rank_bundles(self.candidates, self.bundle_width, self.max_nodes)
        return self.candidates.ranked(self.max_nodes)


def _fields(proposal: Proposal) -> ProposalFields:
    return proposal.token_ids, proposal.logprobs, proposal.widths, proposal.edge_logprobs


class HostTrees:
    """Drafts rounds on the host for one TreePolicy, whose budget and calibration it shares."""

    def __init__(
        self,
        config: TreeConfig,
        budget: BudgetController,
        calibration: ScoreCalibration,
        timer: Callable[[], float],
        vocab_size: int | None,
    ) -> None:
        self._config, self._budget, self._calibration = config, budget, calibration
        self._timer, self._vocab_size = timer, vocab_size
        self._bundle_width = config.bundle_width if config.policy == "bundle" else None
        self._maker = TreeMaker.new()

    def propose(
        self, index: int, group: DraftGroup, keys: list[DraftKey | None], out: RoundDraft
    ) -> tuple[Ranked | None, list[int]] | None:
        """The group's largest trees and its rows; None when its drafter proposes nothing. Errors pass through."""
        if self._maker is not None and index == 0:
            self._maker.start(len(keys))
        config, own = self._config, [keys[r] for r in group.rows]

        def choose_leaves(owners: list[int], masses: list[float]) -> Sequence[int]:
            return self._budget.choose_leaves([own[r] for r in owners], masses, out.context_rows, len(keys))  # type: ignore[misc]

        caps = group.drafter.caps
        blocks = HostBlocks(
            is_product=caps.is_product,
            max_nodes=config.max_draft_tokens,
            max_frontier=config.max_frontier,
            corrections=lambda num_slots: self._calibration.corrections(own, num_slots),
            choose_leaves=choose_leaves,
            bundle_width=self._bundle_width,
            vocab_size=self._vocab_size,
            maker=self._maker,
        )
        if not propose_blocks(group.drafter, group.inputs, blocks, out, self._timer):
            return None
        ranked = (
            None if blocks.is_empty else (blocks.ranked(group.rows), group.rows)
        )  # what raises marks nothing as drafted
        if blocks.num_leaves:
            out.num_leaves += blocks.num_leaves
            out.frontier_mass = out.frontier_mass or [0.0] * len(keys)
            out.num_cells = out.num_cells or [0] * len(keys)
            for row in group.rows:
                out.num_cells[row] = blocks.num_slots * NUM_RANK_CLASSES
            for owner, mass in blocks.frontier_mass.items():
                out.frontier_mass[group.rows[owner]] += mass
        for row in group.rows:
            out.is_drafted[row] = True
        return ranked

    def assemble(
        self, out: RoundDraft, drafted: list[tuple[Ranked, list[int]]], anchor_token_ids: torch.Tensor
    ) -> None:
        """Cut all trees of the round to the budget and pack them."""
        limit, device = self._config.max_draft_tokens, anchor_token_ids.device
        if self._maker is None:
            masses = np.zeros((len(out.keys), limit + 1))
            for ranked, rows in drafted:
                owners = ranked.columns[OWNER]
                if rows != list(range(len(out.keys))):
                    owners = np.array(rows)[owners]
                masses[owners, ranked.local] = np.exp(ranked.scores.astype(np.float64))
            masses = masses[:, 1:]
        else:
            masses = np.exp(self._maker.scores(limit))
        nodes = self._budget.choose(masses, out.keys, out.context_rows, sum(out.is_drafted))
        if self._maker is None:
            out.tree = pack_trees(drafted, nodes, anchor_token_ids)
            out.num_draft_tokens = [count - 1 for count in out.tree.counts or ()]
            return
        columns, out.num_draft_tokens = self._maker.cut(nodes, anchor_token_ids)
        if device.type != "cpu":
            columns = tuple(column.to(device) for column in columns)
        token_ids, parents, depths, scores, cu_nodes, ancestors, cells = columns
        out.tree = TreeBatch(
            token_ids=token_ids, parents=parents, depths=depths, scores=scores, cu_nodes=cu_nodes, ancestors=ancestors,
            cells=cells, counts=[1 + count for count in out.num_draft_tokens],
        )  # fmt: skip
