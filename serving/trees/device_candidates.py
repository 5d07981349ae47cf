"""Device candidates: possible draft nodes as tensors of shapes that are known beforehand, so that nothing waits for the host.

What `candidates` and `product_table` are on the host; every request has as many candidates and leaves as the others, and
absent ones have score -inf.

Shape legend: G requests, C candidates of a request, M leaves of a request, F = G * M leaves, S draft slots, K candidates per
slot, R rank classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.trees.calibration import NUM_RANK_CLASSES

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
            return _chains(proposal.token_ids, logprobs, proposal.restart)
        at = proposal.restart or logprobs.shape[1]
        table = _best_of_levels(proposal.token_ids[:, :at], logprobs[:, :at], _rank_edges(proposal, kappa), max_nodes)
        if not proposal.restart:
            return table
        chain, base = _chains(proposal.token_ids[:, at:], logprobs[:, at:], 0), table.scores.shape[1]
        return DeviceCandidates(
            token_ids=torch.cat([table.token_ids, chain.token_ids], 1),
            parents=torch.cat([table.parents, torch.where(chain.parents < 0, -1, chain.parents + base)], 1),
            scores=torch.cat([table.scores, chain.scores], 1),
            depths=torch.cat([table.depths, chain.depths], 1),
            cells=torch.cat([table.cells, chain.cells + at * NUM_RANK_CLASSES], 1),
        )

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
        parents, depths, cells, _ = _layout(num_slots, num_candidates, 1, str(self.scores.device), proposal.restart)
        scores = _chain_scores(_slot_logprobs(proposal, kappa), proposal.restart).view(num_leaves, -1)
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
def _layout(num_slots: int, num_candidates: int, block: int, device: str, restart: int) -> tuple[torch.Tensor, ...]:
    """Parents (-1 = block entry), depths, cells and rank classes of a BLOCK proposal, candidate s * K + k."""
    slot = torch.arange(num_slots, device=device).repeat_interleave(num_candidates)
    rank = torch.arange(num_candidates, device=device).repeat(num_slots)
    parents = torch.where((slot > 0) & (slot != restart), (slot - 1) * num_candidates, -1)
    classes = rank.clamp(max=NUM_RANK_CLASSES - 1)
    cells = (block * num_slots + slot) * NUM_RANK_CLASSES + classes
    return parents, torch.where(slot < restart, slot, slot - restart) + 1, cells, classes[:num_candidates]


def _slot_logprobs(proposal: Proposal, kappa: torch.Tensor) -> torch.Tensor:
    """Conditional log-probabilities (F, S, K), calibrated, -inf beyond the widths. kappa: (F, S, R)."""
    num_slots, num_candidates = proposal.logprobs.shape[1:]
    classes = _layout(num_slots, num_candidates, 0, str(kappa.device), 0)[3]
    logprobs = (proposal.logprobs + kappa[:, :, classes]).clamp_(max=0.0)
    if proposal.widths is not None:
        columns = torch.arange(num_candidates, device=logprobs.device)
        logprobs = logprobs.masked_fill(columns >= proposal.widths[:, :, None], _ABSENT)
    return logprobs


def _chain_scores(logprobs: torch.Tensor, restart: int) -> torch.Tensor:
    """Path scores of a BLOCK proposal: candidates of slot s hang below the chain of first candidates."""
    if restart:
        return torch.cat([_chain_scores(logprobs[:, :restart], 0), _chain_scores(logprobs[:, restart:], 0)], 1)
    chain = logprobs[:, :, 0].cumsum(1).cummin(1).values  # cummin: a parallel scan may round upwards
    scores = logprobs.clone()
    scores[:, 1:] += chain[:, :-1, None]
    scores[:, :, 0] = chain
    return scores


def _chains(token_ids: torch.Tensor, logprobs: torch.Tensor, restart: int) -> DeviceCandidates:
    num_requests, num_slots, num_candidates = logprobs.shape
    parents, depths, cells, _ = _layout(num_slots, num_candidates, 0, str(logprobs.device), restart)
    return DeviceCandidates(
        token_ids=token_ids.reshape(num_requests, -1),
        parents=parents.expand(num_requests, -1),
        scores=_chain_scores(logprobs, restart).view(num_requests, -1),
        depths=depths.expand(num_requests, -1),
        cells=cells.expand(num_requests, -1),
    )


def _rank_edges(proposal: Proposal, kappa: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scores of the candidates of slots 1.. below each candidate of the slot before, best first, and their columns, both
    (G, S - 1, K, K); None when the proposal has no such scores. In a mixed draft S counts the table's own slots."""
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
