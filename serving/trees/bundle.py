"""Which tree does JetSpec's bundle expansion grow, and how does it become a sorting of candidates?

The algorithm pops the heaviest node of a heap and adds all of its W children at once, until the budget is full. Scores
never rise along a path, so nodes are popped in the order of their scores, and a node is added when its parent is popped:
sorting by (place of the parent in the order of scores, own place) gives the order of addition, of which every beginning
is the tree of that size. A policy for comparison: at equal size the heaviest nodes always have at least its mass.
Source: JetSpec's tree construction, tree_speculation.md 1.7; its node budget counts the root, ours does not.

Shape legend: B requests, C candidates of a request, M heaviest nodes of a level, S draft slots, K candidates per slot,
W bundle width, R rank classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.serving.drafters.interface import Proposal
from paceline.serving.trees.builder import (
    NUM_RANK_CLASSES,
    Candidates,
    RankedCandidates,
    block_candidates,
    rank_candidates,
    slot_logprobs,
    with_chain,
)
from paceline.serving.trees.host_tree import HostCandidates
from paceline.serving.trees.product_table import rank_edges

_ABSENT = float("-inf")


class BundleExpansion:
    """Candidates and their order where trees grow by bundles."""

    def __init__(self, width: int) -> None:
        """width: W, children that a node gets at once, at most."""
        self.width = width

    def first_block(
        self, proposal: Proposal, is_product: bool, max_nodes: int, kappa: torch.Tensor | None = None
    ) -> Candidates:
        """`tree_builder.block_candidates`, without leaving out light nodes that come in the bundles of heavy ones."""
        if not is_product:
            return block_candidates(proposal, False, max_nodes, kappa)
        calibrated = slot_logprobs(proposal, kappa)
        logprobs = calibrated[:, : proposal.restart or None, : self.width]
        num_requests, num_slots, width = logprobs.shape
        edges = rank_edges(proposal, kappa)
        front = logprobs.new_zeros(num_requests, 1)  # nodes of a level that can still be popped: its heaviest
        above = torch.full_like(front, -1, dtype=torch.int64)
        held = above  # column of each of them in its slot
        base, columns = 0, []
        for slot in range(num_slots):
            size = front.shape[1] * width
            rank = torch.arange(width, device=logprobs.device).repeat(front.shape[1]).expand(num_requests, -1)
            if slot == 0 or edges is None:
                below, which = logprobs[:, slot, None, :], rank
            else:  # the best W below each node that can be popped, by its own scores
                rows = held[:, :, None].expand(-1, -1, width)
                below, which = (e[:, slot - 1, :, :width].gather(1, rows) for e in edges)
                which = which.flatten(1)
            scores = (front[:, :, None] + below).flatten(1)
            token_ids = proposal.token_ids[:, slot].gather(1, which)
            cells = slot * NUM_RANK_CLASSES + rank.clamp(max=NUM_RANK_CLASSES - 1)
            columns.append(
                (token_ids, above.repeat_interleave(width, 1), scores, torch.full_like(rank, slot + 1), cells)
            )
            front, at = scores.topk(min(max_nodes, size), dim=1)
            above, held, base = base + at, which.gather(1, at), base + size
        token_ids, parents, scores, depths, cells = (torch.cat(c, 1) for c in zip(*columns, strict=True))
        whole = Candidates(token_ids=token_ids, parents=parents, scores=scores, depths=depths, cells=cells)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        table = _first(whole, _by_bundle(whole, order, self.width)[0], max_nodes)
        return with_chain(table, proposal, calibrated) if proposal.restart else table

    def rank(self, candidates: Candidates, max_depth: int) -> RankedCandidates:
        """Siblings with equal tokens merged, then all candidates by order of addition; those that no bundle holds are
        absent and come last. Syncs: two or three."""
        ranked = rank_candidates(candidates, candidates.scores.shape[1])
        order, scores = _by_bundle(ranked.candidates, ranked.order, self.width)
        return RankedCandidates(candidates=ranked.candidates, order=order, scores=scores)

    def order_of_one(self, found: HostCandidates, limit: int) -> list[int]:
        """The first `limit` candidates of a lone request by order of addition; merges siblings with equal tokens."""
        everything = len(found.scores)
        if found.has_duplicates(range(everything)):
            found.merge_duplicates()
        popped = found.ranked(everything)
        children: dict[int, list[int]] = {}
        for i in popped:
            children.setdefault(found.parents[i], []).append(i)
        out: list[int] = []
        taken = {-1}
        for node in (-1, *popped):
            if node in taken:
                bundle = children.get(node, ())[: self.width]
                out += bundle
                taken.update(bundle)
                if len(out) >= limit:
                    break
        return out[:limit]


def _by_bundle(candidates: Candidates, by_score: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of addition (B, C) and the scores in it, -inf where no bundle of `width` holds the candidate.

    by_score: (B, C) the order of falling scores, parents first.
    """
    num_candidates = by_score.shape[1]
    columns = torch.arange(1, num_candidates + 1, device=by_score.device)
    place = torch.empty_like(by_score).scatter_(1, by_score, columns.expand_as(by_score))  # 1 = heaviest, 0 = root
    parents = candidates.parents
    above = torch.where(parents < 0, 0, place.gather(1, parents.clamp(min=0)))
    is_in = candidates.scores > _ABSENT
    above = torch.where(is_in, above, num_candidates + 1)
    order = (above * (num_candidates + 2) + place).argsort(1)
    sorted_above = above.gather(1, order)
    is_first = torch.ones_like(is_in)
    is_first[:, 1:] = sorted_above[:, 1:] != sorted_above[:, :-1]
    start = torch.where(is_first, columns, 0).cummax(1).values
    number = torch.empty_like(order).scatter_(1, order, columns - start)  # among its siblings, 0 = heaviest
    is_in &= number < width
    if num_candidates and bool((number >= width).any()):  # what hangs below a child that no bundle holds is not there
        padded = torch.nn.functional.pad(is_in, (1, 0), value=True)
        for _ in range(int(candidates.depths.max())):
            padded[:, 1:] &= padded.gather(1, parents + 1)
        is_in = padded[:, 1:]
    kept = is_in.gather(1, order)
    order = order.gather(1, (~kept).int().sort(dim=1, stable=True).indices)
    return order, candidates.scores.masked_fill(~is_in, _ABSENT).gather(1, order)


def _first(candidates: Candidates, order: torch.Tensor, num: int) -> Candidates:
    """The first `num` candidates of an order in which parents come first."""
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    kept = order[:, :num]
    parents = candidates.parents.gather(1, kept)
    columns: Sequence[torch.Tensor] = [
        x.gather(1, kept) for x in (candidates.token_ids, candidates.scores, candidates.depths, candidates.cells)
    ]
    return Candidates(
        token_ids=columns[0],
        parents=torch.where((parents < 0) | (columns[1] == _ABSENT), -1, place.gather(1, parents.clamp(min=0))),
        scores=columns[1],
        depths=columns[2],
        cells=columns[3],
    )
