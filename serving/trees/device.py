"""Device trees: a round's trees drafted where every host read waits for the device.

Shapes are known beforehand: every request has the same number of leaves (absent ones have mass 0), equal siblings are
always merged, and all that the budget and the checks have to know is read at once. Re-entry is decided before the read,
by the mass that the keys' leaves had in earlier rounds. The tree kernel builds the largest tree that a request may get:
the tree of n nodes is the first n + 1 rows of it, so the round's trees are cut from it by gathers.

Shape legend: B requests of the round, G requests of one drafter, C candidates and M leaves of a request, F = G * M leaves,
S draft slots, K candidates per slot, R rank classes, W rows of the largest tree (root included), N packed tree rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from paceline.config import TreeConfig
from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference.tree_build import (
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_NODES,
    BuiltTrees,
    pack_trees,
    unpack_bits,
)
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.stats import DraftKey
from paceline.serving.drafters.interface import DrafterCaps, Frontier, Proposal
from paceline.serving.target_model.device import CudaSpan, open_span, upload
from paceline.serving.trees.calibration import NUM_RANK_CLASSES, ScoreCalibration
from paceline.serving.trees.propose import DraftGroup, RoundDraft, propose_blocks
from paceline.serving.trees.tree import TreeBatch

_ABSENT = float("-inf")


@dataclass(kw_only=True, slots=True)
class Leaves:
    """The `M` heaviest leaves of each request, request after request."""

    frontier: Frontier
    candidates: torch.Tensor  # (F,) int64, candidate index of each leaf
    scores: torch.Tensor  # (F,) float32


@dataclass(kw_only=True, slots=True)
class DeviceCandidates:
    """Possible draft nodes; a parent has a lower index than its children."""

    token_ids: torch.Tensor  # (G, C) int64
    parents: torch.Tensor  # (G, C) int64, candidate index, -1 = root
    scores: torch.Tensor  # (G, C) float32, log of the estimated path mass; -inf = absent
    depths: torch.Tensor  # (G, C) int64, 1 for children of the root
    cells: torch.Tensor  # (G, C) int64, calibration cell: (block * S + slot) * R + rank class
    first: int = 0
    """Column of the latest block's first candidate."""
    shape: tuple[int, int] = (0, 0)
    """(S, K) of the latest block, where it is not the first."""

    @staticmethod
    def of(proposal: Proposal, is_product: bool, max_nodes: int, kappa: torch.Tensor) -> DeviceCandidates:
        """Candidates of the first block. max_nodes: of the largest tree wanted. kappa: (G, S, R) float32."""
        logprobs = _slot_logprobs(proposal, kappa)
        if not is_product:
            return _chain(proposal.token_ids, logprobs)
        return _best_of_levels(proposal.token_ids, logprobs, _rank_edges(proposal, kappa), max_nodes)

    def leaves(self, max_frontier: int) -> Leaves:
        """The latest block's heaviest candidates without candidates below them.  Syncs: none."""
        present = self.scores > _ABSENT
        num_children = torch.zeros(present.shape[0], present.shape[1] + 1, device=present.device)
        num_children.scatter_add_(1, self.parents + 1, present.float())
        leaf_scores = self.scores.masked_fill(num_children[:, 1:] > 0, _ABSENT)
        leaf_scores[:, : self.first] = _ABSENT
        scores, index = leaf_scores.topk(min(max_frontier, leaf_scores.shape[1]), dim=1)
        num_requests, width = index.shape
        request, leaf = torch.arange(num_requests, device=index.device).repeat_interleave(width), index.flatten()
        if self.first == 0:
            slot, node = self.cells.gather(1, index).flatten() // NUM_RANK_CLASSES, None
        else:
            num_slots, num_candidates = self.shape
            leaf = leaf.clamp(min=self.first)
            at = leaf - self.first
            slot = at % (num_slots * num_candidates) // num_candidates
            node = request * width + at // (num_slots * num_candidates)
        frontier = Frontier(request=request, slot=slot, token_ids=self.token_ids[request, leaf], node=node)
        return Leaves(frontier=frontier, candidates=leaf, scores=scores.flatten())

    def append(self, leaves: Leaves, proposal: Proposal, kappa: torch.Tensor) -> DeviceCandidates:
        """With the next block's BLOCK proposal (F leaves) added below its leaves. kappa: (F, S, R)."""
        num_requests, base = self.scores.shape
        num_leaves, num_slots, num_candidates = proposal.logprobs.shape
        width = num_slots * num_candidates
        parents, depths, cells, _ = _layout(num_slots, num_candidates, 1, str(self.scores.device))
        scores = _chain_scores(_slot_logprobs(proposal, kappa)).view(num_leaves, -1)
        column = torch.arange(num_leaves // num_requests, device=parents.device).repeat(num_requests)
        at = leaves.candidates[:, None]
        new_depths = depths + self.depths[leaves.frontier.request, leaves.candidates][:, None]

        def join(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:  # leaves come request by request
            return torch.cat([old, new.reshape(num_requests, -1)], 1)

        return DeviceCandidates(
            token_ids=join(self.token_ids, proposal.token_ids),
            parents=join(self.parents, torch.where(parents < 0, at, parents + (base + column * width)[:, None])),
            scores=join(self.scores, scores + leaves.scores[:, None]),
            depths=join(self.depths, new_depths),
            cells=join(self.cells, cells.expand(num_leaves, -1)),
            first=base,
            shape=(num_slots, num_candidates),
        )


@lru_cache(maxsize=64)
def _layout(num_slots: int, num_candidates: int, block: int, device: str) -> tuple[torch.Tensor, ...]:
    """Parents (-1 = block entry), depths, cells and rank classes of a BLOCK proposal, candidate s * K + k."""
    slot = torch.arange(num_slots, device=device).repeat_interleave(num_candidates)
    rank = torch.arange(num_candidates, device=device).repeat(num_slots)
    parents = torch.where(slot > 0, (slot - 1) * num_candidates, -1)
    classes = rank.clamp(max=NUM_RANK_CLASSES - 1)
    cells = (block * num_slots + slot) * NUM_RANK_CLASSES + classes
    return parents, slot + 1, cells, classes[:num_candidates]


def _slot_logprobs(proposal: Proposal, kappa: torch.Tensor) -> torch.Tensor:
    """Conditional log-probabilities (F, S, K), calibrated, -inf beyond the widths. kappa: (F, S, R)."""
    num_slots, num_candidates = proposal.logprobs.shape[1:]
    classes = _layout(num_slots, num_candidates, 0, str(kappa.device))[3]
    logprobs = (proposal.logprobs + kappa[:, :, classes]).clamp_(max=0.0)
    if proposal.widths is not None:
        columns = torch.arange(num_candidates, device=logprobs.device)
        logprobs = logprobs.masked_fill(columns >= proposal.widths[:, :, None], _ABSENT)
    return logprobs


def _chain_scores(logprobs: torch.Tensor) -> torch.Tensor:
    """Path scores of a BLOCK proposal: candidates of slot s hang below the chain of first candidates."""
    chain = logprobs[:, :, 0].cumsum(1).cummin(1).values  # cummin: a parallel scan may round upwards
    scores = logprobs.clone()
    scores[:, 1:] += chain[:, :-1, None]
    scores[:, :, 0] = chain
    return scores


def _chain(token_ids: torch.Tensor, logprobs: torch.Tensor) -> DeviceCandidates:
    num_requests, num_slots, num_candidates = logprobs.shape
    parents, depths, cells, _ = _layout(num_slots, num_candidates, 0, str(logprobs.device))
    return DeviceCandidates(
        token_ids=token_ids.reshape(num_requests, -1),
        parents=parents.expand(num_requests, -1),
        scores=_chain_scores(logprobs).view(num_requests, -1),
        depths=depths.expand(num_requests, -1),
        cells=cells.expand(num_requests, -1),
    )


def _rank_edges(proposal: Proposal, kappa: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scores of the candidates of slots 1.. below each candidate of the slot before, best first, and their columns, both
    (G, S - 1, K, K); None when the proposal has no such scores."""
    if proposal.edge_logprobs is None:
        return None
    scores, columns = proposal.edge_logprobs.sort(dim=-1, descending=True)
    rank, behind = torch.arange(scores.shape[3], device=scores.device), slice(1, 1 + scores.shape[1])
    scores = (scores + kappa[:, behind, None, rank.clamp(max=kappa.shape[2] - 1)]).clamp_(max=0.0)
    if proposal.widths is not None:
        scores = scores.masked_fill(rank >= proposal.widths[:, behind, None, None], _ABSENT)
    return scores, columns


@lru_cache(maxsize=64)
def _levels(num_slots: int, num_candidates: int, max_nodes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot of each of the C candidates, and the index at which the level before it begins (-1: the root's): (C,) int64."""
    slots: list[int] = []
    bases: list[int] = []
    count, base = 1, -1
    for slot in range(num_slots):
        count, before = min(max_nodes, count * num_candidates), len(slots)
        slots += [slot] * count
        bases += [base] * count
        base = before
    return torch.tensor(slots, device=device), torch.tensor(bases, device=device)


def _best_of_levels(
    token_ids: torch.Tensor, logprobs: torch.Tensor, edges: tuple[torch.Tensor, torch.Tensor] | None, max_nodes: int
) -> DeviceCandidates:
    """The best `max_nodes` candidates of each level of a product table.

    token_ids, logprobs: (G, S, K), calibrated, -inf = absent. edges: of `_rank_edges`; replaces logprobs behind the first
    slot.  Syncs: none.
    """
    num_slots, num_candidates = logprobs.shape[1:]
    front = logprobs.new_zeros(logprobs.shape[0], 1)
    paths: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    columns: list[torch.Tensor] = []
    for slot in range(num_slots):
        if slot == 0 or edges is None:
            scores = logprobs[:, slot, None]
        else:
            below = columns[-1][:, :, None].expand(-1, -1, num_candidates)
            scores = edges[0][:, slot - 1].gather(1, below)
        level = (front[:, :, None] + scores).flatten(1)
        front, place = level.topk(min(max_nodes, level.shape[1]), dim=1)
        paths.append(front)
        places.append(place)  # parent's place in the front before * K + rank below the parent
        if edges is not None:
            columns.append(place if slot == 0 else edges[1][:, slot - 1].gather(1, below).flatten(1).gather(1, place))
    slots, bases = _levels(num_slots, num_candidates, max_nodes, str(logprobs.device))
    every = torch.cat(places, 1)
    rank = every % num_candidates
    column = rank if edges is None else torch.cat(columns, 1)
    return DeviceCandidates(
        token_ids=token_ids.flatten(1).gather(1, column + slots * num_candidates),
        parents=every // num_candidates + bases,
        scores=torch.cat(paths, 1),
        depths=(slots + 1).expand_as(every),
        cells=rank.clamp(max=NUM_RANK_CLASSES - 1) + slots * NUM_RANK_CLASSES,
    )


_MASS_RATE = 0.2
_MAX_LOGPROB = 1e-3
_NUM_CHECKS = 3
"""Per request and proposal: largest log-probability, lowest and highest token id."""


@dataclass(slots=True, kw_only=True)
class DeviceBlocks:
    """Candidates of one drafter's requests, block by block; what `HostBlocks` are on the host."""

    is_product: bool
    max_nodes: int
    max_frontier: int
    corrections: Callable[[int], torch.Tensor]
    """Draft slots -> (2 blocks, G, S, R), on the device."""
    is_expanded: bool
    """Go on below the leaves; otherwise only their mass is found."""
    num_slots: int = 0
    is_timed: bool = True
    """Measure re-entry by the device's clock; captured work cannot be."""
    checks: list[torch.Tensor] = field(default_factory=list)  # (G, 3) float64 each
    leaf_mass: torch.Tensor | None = None  # (G,) float64, of the first block's leaves
    span: CudaSpan | None = None
    """Of the re-entry."""
    _kappa: torch.Tensor | None = None
    _leaves: Leaves | None = None
    _candidates: DeviceCandidates | None = None

    @property
    def candidates(self) -> DeviceCandidates:
        """Of all blocks so far."""
        assert self._candidates is not None, "no block yet"
        return self._candidates

    def begin(self, proposal: Proposal) -> None:
        """Take the first block. Raises: ValueError on a wrong form."""
        self.checks.append(_facts(proposal, len(proposal.logprobs)))
        self.num_slots = proposal.logprobs.shape[1]
        self._kappa = self.corrections(self.num_slots)
        self._candidates = DeviceCandidates.of(proposal, self.is_product, self.max_nodes, self._kappa[0])

    def frontier(self) -> Frontier | None:
        """The heaviest leaves of the latest block; None when re-entry does not pay."""
        if self.max_frontier == 0:
            return None
        self._leaves = self.candidates.leaves(self.max_frontier)
        if self.leaf_mass is None:
            num_requests = self.candidates.scores.shape[0]
            self.leaf_mass = self._leaves.scores.double().exp().view(num_requests, -1).sum(1)
            self.span = open_span(self._leaves.scores.device) if self.is_expanded and self.is_timed else None
        return self._leaves.frontier if self.is_expanded else None

    def extend(self, proposal: Proposal) -> None:
        """Take the block below the latest frontier. Raises: ValueError on a wrong form."""
        assert self._leaves is not None and self._kappa is not None
        self.checks.append(_facts(proposal, self.candidates.scores.shape[0]))
        kappa = self._kappa[1][self._leaves.frontier.request]
        self._candidates = self.candidates.append(self._leaves, proposal, kappa)


@dataclass(slots=True)
class LargestTrees:
    """The largest trees of a drafter's requests, from which those of the round are cut."""

    built: BuiltTrees
    cells: torch.Tensor  # (G, C) int64, calibration cell of each candidate

    @staticmethod
    def build(
        kernels: Kernels, candidates: DeviceCandidates, anchor_token_ids: torch.Tensor, max_nodes: int, max_depth: int
    ) -> LargestTrees:
        """The trees of `max_nodes` nodes, siblings with equal tokens merged.

        candidates: scores of any float dtype. anchor_token_ids: (G,) int64. max_depth: of any candidate.  Syncs: none.
        """
        built = kernels.build_trees(
            scores=candidates.scores.float().contiguous(),
            parents=candidates.parents.contiguous(),
            token_ids=candidates.token_ids.long().contiguous(),
            depths=candidates.depths.contiguous(),
            anchor_token_ids=anchor_token_ids.contiguous(),
            num_nodes=anchor_token_ids.new_full((len(candidates.scores),), max_nodes),
            max_nodes=max_nodes,
            max_depth=max_depth,
        )
        return LargestTrees(built, candidates.cells)

    @property
    def masses(self) -> torch.Tensor:
        """(G, W - 1) float64 path masses of the draft nodes, falling, 0 = absent."""
        return self.built.scores[:, 1:].double().exp()

    def cut(self, num_nodes: Sequence[int]) -> TreeBatch:
        """The best `num_nodes[g]` candidates of each request, at most as many as it has, packed.  Syncs: none."""
        built = self.built
        lengths = torch.tensor([0, *(n + 1 for n in num_nodes)])
        cu_nodes = upload(lengths.cumsum(0), built.token_ids.device)
        packed = pack_trees(built, cu_nodes, int(lengths.sum()))
        at = packed.request * built.token_ids.shape[1] + packed.local
        candidates = built.candidates.view(-1)[at]
        return TreeBatch(
            token_ids=packed.token_ids,
            parents=built.parents.view(-1)[at],
            depths=packed.depths,
            scores=built.scores.view(-1)[at],
            cu_nodes=cu_nodes,
            ancestors=unpack_bits(packed.ancestor_bits, max(num_nodes) + 1),
            cells=torch.where(candidates < 0, -1, self.cells[packed.request, candidates.clamp(min=0)]),
            counts=[n + 1 for n in num_nodes],
        )


@dataclass(slots=True)
class _Drafted:
    """One group on its way to the read."""

    index: int
    group: DraftGroup
    blocks: DeviceBlocks
    trees: LargestTrees
    masses: torch.Tensor  # (G, limit) float64


class DeviceTrees:
    """Drafts rounds off the CPU for one TreePolicy, whose budget and calibration it shares."""

    def __init__(
        self,
        config: TreeConfig,
        budget: BudgetController,
        calibration: ScoreCalibration,
        timer: Callable[[], float],
        vocab_size: int | None,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._config, self._budget, self._calibration = config, budget, calibration
        self._timer, self._vocab_size = timer, vocab_size
        self._leaf_mass: dict[DraftKey, float] = {}
        self._masses: dict[DraftKey, np.ndarray] = {}  # (M,) of the largest trees' nodes, smoothed

    def takes(self, caps: DrafterCaps) -> bool:
        """Whether the tree kernel takes so many candidates and nodes; trees of other drafters are built on the host."""
        limit, block = self._config.max_draft_tokens, caps.num_slots * caps.num_candidates
        num_candidates = block + caps.num_slots * limit * caps.is_product
        if caps.is_reentrant:
            num_candidates += (caps.num_blocks - 1) * self._config.max_frontier * block
        return num_candidates <= MAX_CANDIDATES and limit <= MAX_NODES and caps.max_depth <= MAX_DEPTH

    def rehearse(self, out: RoundDraft, group: DraftGroup, *, is_expanded: bool) -> None:
        """Fill `out`, whose keys are None, with the largest trees of a group, re-entered or not; nothing is learnt.

        Every kernel of such a round is compiled then, by the calls that rounds make.
        """
        found = self.propose(0, group, out.keys, out, is_expanded)
        if found is None:
            return
        masses = self._read([found], out)
        if not out.failures:
            self._pack(out, [found], (masses > 0).sum(1), group.inputs.anchor_token_ids)

    def propose(
        self,
        index: int,
        group: DraftGroup,
        keys: list[DraftKey | None],
        out: RoundDraft,
        is_expanded: bool | None = None,
    ) -> _Drafted | None:
        """The group's largest trees, not read yet; None when its drafter proposes nothing. Errors pass through.

        is_expanded: re-enter or not; None = where it pays.  Syncs: none.
        """
        caps, inputs, limit = group.drafter.caps, group.inputs, self._config.max_draft_tokens
        own, device = [keys[r] for r in group.rows], inputs.anchor_token_ids.device
        if is_expanded is None:
            is_expanded = self.should_expand(own, out.context_rows, len(keys), caps)
        blocks = DeviceBlocks(
            is_product=caps.is_product,
            max_nodes=limit,
            max_frontier=self._config.max_frontier,
            corrections=lambda num_slots: self._corrections(own, num_slots, device),
            is_expanded=is_expanded,
        )
        expand_s = out.expand_s
        if not propose_blocks(group.drafter, inputs, blocks, out, self._timer):
            return None
        if blocks.span is not None:  # the device's clock is read later; the host's saw only the launches
            blocks.span.close()
            out.expand_s = expand_s
        trees = LargestTrees.build(self._kernels, blocks.candidates, inputs.anchor_token_ids, limit, caps.max_depth)
        return _Drafted(index, group, blocks, trees, trees.masses)

    def assemble(self, out: RoundDraft, drafted: list[_Drafted], anchor_token_ids: torch.Tensor) -> None:
        """Cut all trees of the round to the budget and pack them.  Syncs: one for all groups."""
        masses = self._read(drafted, out)
        built = [d for d in drafted if d.index not in out.failures]
        if not built:
            return
        nodes = self._budget.choose(masses, out.keys, out.context_rows, sum(out.is_drafted))
        self._pack(out, built, np.minimum(nodes, (masses > 0).sum(1)), anchor_token_ids)

    def _corrections(self, keys: list[DraftKey | None], num_slots: int, device: torch.device) -> torch.Tensor:
        found = self._calibration.corrections(keys, num_slots)
        shape = (2, len(keys), *found.shape[2:])
        return upload(torch.from_numpy(np.broadcast_to(found, shape).copy()), device)

    def should_expand(
        self, keys: list[DraftKey | None], context_rows: int, num_requests: int, caps: DrafterCaps
    ) -> bool:
        """Whether any leaf would earn its time, had each its share of the mass of the key's earlier rounds."""
        num_leaves = self._config.max_frontier
        if not caps.is_reentrant or num_leaves == 0:
            return False
        known = [k for k in keys if k is not None for _ in range(num_leaves)]
        masses = [self._leaf_mass.get(k, 1.0) / num_leaves for k in known]
        return bool(known) and bool(self._budget.choose_leaves(known, masses, context_rows, num_requests))

    def _read(self, drafted: list[_Drafted], out: RoundDraft) -> np.ndarray:
        """Bring checks and masses to the host in one read; returns (B, limit) masses, 0 for what failed."""
        parts = []
        for d in drafted:
            parts += [*(check.flatten() for check in d.blocks.checks), d.masses.flatten()]
            if d.blocks.leaf_mass is not None:
                parts.append(d.blocks.leaf_mass)
        start = self._timer()
        flat = torch.cat(parts).cpu().numpy()
        out.model_s += self._timer() - start  # the drafters' work that was queued
        out.expand_s += sum(d.blocks.span.seconds() for d in drafted if d.blocks.span is not None)
        masses = np.zeros((len(out.keys), self._config.max_draft_tokens))
        at = 0

        def take(count: int) -> np.ndarray:
            nonlocal at
            at += count
            return flat[at - count : at]

        for d in drafted:
            rows = d.group.rows
            errors = [self._error(take(_NUM_CHECKS * len(rows)).reshape(-1, _NUM_CHECKS)) for _ in d.blocks.checks]
            own = take(d.masses.numel()).reshape(len(rows), -1)
            leaf_mass = None if d.blocks.leaf_mass is None else take(len(rows))
            error = next((e for e in errors if e), None)
            if error is not None:
                out.failures[d.index] = error
                continue
            masses[np.ix_(rows, range(own.shape[1]))] = own
            self._note_masses(rows, masses, out)
            if leaf_mass is not None:
                self._note_leaves(rows, leaf_mass, d.blocks.is_expanded, d.blocks.num_slots, out)
                out.num_leaves += len(rows) * self._config.max_frontier * d.blocks.is_expanded
        return masses

    def _note_masses(self, rows: Sequence[int], masses: np.ndarray, out: RoundDraft) -> None:
        """Learn the masses (B, M) of requests that were drafted for."""
        for row in rows:
            out.is_drafted[row] = True
            key = out.keys[row]
            if key is not None:
                old = self._masses.get(key, masses[row])
                self._masses[key] = old + _MASS_RATE * (masses[row] - old)

    def _note_leaves(
        self, rows: Sequence[int], leaf_mass: np.ndarray, is_expanded: bool, num_slots: int, out: RoundDraft
    ) -> None:
        """Learn the mass of the first block's leaves, (G,) of the round's requests `rows`."""
        for row, mass in zip(rows, leaf_mass.tolist(), strict=True):
            key = out.keys[row]
            if key is not None:
                old = self._leaf_mass.get(key, mass)
                self._leaf_mass[key] = old + _MASS_RATE * (mass - old)
            if is_expanded:
                out.frontier_mass = out.frontier_mass or [0.0] * len(out.keys)
                out.frontier_mass[row] = mass
                out.num_cells = out.num_cells or [0] * len(out.keys)
                out.num_cells[row] = num_slots * NUM_RANK_CLASSES

    # ---- rounds that are read once they are verified ------------------------------------------------------------
    def plan_nodes(
        self, keys: list[DraftKey | None], rows: Sequence[int], context_rows: int
    ) -> tuple[list[int], list[int], int]:
        """How many nodes each request may have at most, how many it gets at least, and how many all get together.

        rows: the requests, of the B, that are drafted for. The masses are those of the keys' earlier rounds; a key without
        any gets all that there are.
        """
        most, masses = self._config.max_draft_tokens, np.zeros((len(keys), self._config.max_draft_tokens))
        for row in rows:
            masses[row] = self._masses.get(keys[row], 1.0)  # type: ignore[arg-type]
        nodes = self._budget.choose(masses, keys, context_rows, len(rows))
        floors, drafted = self._budget.floors(keys), set(rows)
        limits = [most if i in drafted else 0 for i in range(len(keys))]
        return limits, [min(a, b) for a, b in zip(floors, limits, strict=True)], int(nodes.sum())

    def settle(
        self,
        out: RoundDraft,
        index: int,
        rows: Sequence[int],
        caps: DrafterCaps,
        *,
        is_expanded: bool,
        masses: np.ndarray,
        leaf_mass: np.ndarray,
        facts: np.ndarray,
    ) -> None:
        """Fill in what became of a group's drafts, and learn from it.

        Args:
            index: of the group. rows: its requests.
            masses: (B, M) float64. leaf_mass: (B,). facts: (B, 3), as `joined_facts`.
        """
        own = list(rows)
        error = self._error(facts[own])
        if error is not None:
            out.failures[index] = error
            return
        self._note_masses(own, masses, out)
        if caps.is_reentrant and self._config.max_frontier:
            # Its time is part of the drafting pass, which is one piece: what re-entry costs is known from calibration.
            self._note_leaves(own, leaf_mass[own], is_expanded, caps.num_slots, out)

    def _error(self, facts: np.ndarray) -> str | None:
        """What is wrong with a proposal. facts: (G, 3) of `_facts`."""
        highest, low, high = float(facts[:, 0].max()), facts[:, 1].min(), facts[:, 2].max()
        if not highest <= _MAX_LOGPROB:
            return f"ValueError: log-probabilities must be at most 0 (-inf = absent), got {highest}"
        if self._vocab_size is not None and (low < 0 or high >= self._vocab_size):
            return f"ValueError: proposed token ids must be in [0, {self._vocab_size}), got {low:.0f}..{high:.0f}"
        return None

    def _pack(
        self, out: RoundDraft, built: list[_Drafted], num_nodes: np.ndarray, anchor_token_ids: torch.Tensor
    ) -> None:
        num_requests, device = anchor_token_ids.numel(), anchor_token_ids.device
        out.num_draft_tokens = [int(n) if d else 0 for n, d in zip(num_nodes, out.is_drafted, strict=True)]
        parts = [(d.trees.cut(num_nodes[d.group.rows].tolist()), d.group.rows) for d in built]
        rest = [i for i, drafted in enumerate(out.is_drafted) if not drafted]
        if rest:
            roots = TreeBatch.roots(anchor_token_ids[upload(rest, device)])
            roots.cells = roots.parents
            parts.append((roots, rest))
        out.tree = parts[0][0] if len(parts) == 1 else _in_request_order(parts, num_requests)

    def forget(self, version: str) -> None:
        """Drop what was learnt about a drafter version."""
        for known in (self._leaf_mass, self._masses):
            for key in [k for k in known if k[0] == version]:
                del known[key]


def _facts(proposal: Proposal, num_requests: int) -> torch.Tensor:
    """(G, 3) float64: largest log-probability (NaN wins a maximum), lowest and highest token id of each request. Raises:
    ValueError on a wrong form."""
    proposal.check_form()
    highest = proposal.logprobs.reshape(num_requests, -1).amax(1)
    if proposal.edge_logprobs is not None:
        highest = torch.maximum(highest, proposal.edge_logprobs.reshape(num_requests, -1).amax(1))
    low, high = torch.aminmax(proposal.token_ids.reshape(num_requests, -1), dim=1)
    return torch.stack((highest.double(), low.double(), high.double()), 1)


def joined_facts(checks: Sequence[torch.Tensor]) -> torch.Tensor:
    """(G, 3) of all blocks, from those of each."""
    highest, low, high = checks[0].unbind(1)
    for check in checks[1:]:
        highest, low, high = (
            torch.maximum(highest, check[:, 0]), torch.minimum(low, check[:, 1]), torch.maximum(high, check[:, 2])
        )  # fmt: skip
    return torch.stack((highest, low, high), 1)


def broken_requests(facts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(G,) bool, requests with a score that is none or a token that does not exist: they get no draft."""
    return ~((facts[:, 0] <= _MAX_LOGPROB) & (facts[:, 1] >= 0) & (facts[:, 2] < vocab_size))


def _in_request_order(parts: Sequence[tuple[TreeBatch, Sequence[int]]], num_requests: int) -> TreeBatch:
    """One batch from parts with known counts, each with the round's request of each of its trees; every request occurs
    once.  Syncs: none."""
    device, base = parts[0][0].token_ids.device, 0
    starts, counts = np.zeros(num_requests, dtype=np.int64), np.zeros(num_requests, dtype=np.int64)
    for tree, requests in parts:
        own = np.array(tree.counts)
        starts[list(requests)], counts[list(requests)] = base + own.cumsum() - own, own
        base += int(own.sum())
    bounds = np.append(0, counts.cumsum())
    order = (starts - bounds[:-1]).repeat(counts) + np.arange(base)
    index, cu_nodes = (upload(torch.from_numpy(t), device) for t in (order, bounds))
    width = max(tree.ancestors.shape[1] for tree, _ in parts)
    pad = torch.nn.functional.pad
    ancestors = torch.cat([pad(tree.ancestors, (0, width - tree.ancestors.shape[1])) for tree, _ in parts])

    def join(name: str) -> torch.Tensor:
        return torch.cat([getattr(tree, name) for tree, _ in parts])[index]

    return TreeBatch(
        token_ids=join("token_ids"),
        parents=join("parents"),
        depths=join("depths"),
        scores=join("scores"),
        cu_nodes=cu_nodes,
        ancestors=ancestors[index],
        cells=join("cells"),
        counts=counts.tolist(),
    )
