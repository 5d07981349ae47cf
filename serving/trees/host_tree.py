"""How is one request's tree built from plain Python numbers?

With one request of some tens of candidates a tensor operator costs more than all of its arithmetic, so a lone request on
the CPU takes this path; results equal those of `host_batch` and `verify.accept`, which serve batches.

Shape legend: S draft slots, K candidates per slot, R rank classes, F frontier leaves, N rows of the tree (root included).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.serving.drafters.interface import Frontier, Proposal
from paceline.serving.trees.builder import NUM_RANK_CLASSES
from paceline.serving.trees.host_batch import check_proposal
from paceline.serving.trees.tree import HostTree, TreeBatch


@dataclass(slots=True)
class HostProposal:
    """A BLOCK proposal as lists."""

    token_ids: list[list[list[int]]]  # (F, S, K)
    logprobs: list[list[list[float]]]  # (F, S, K)
    widths: list[list[int]] | None  # (F, S)
    restart: int = 0

    @staticmethod
    def of(proposal: Proposal, vocab_size: int | None) -> HostProposal:
        """Read a proposal. Raises: what `check_proposal` does."""
        check_proposal(proposal, vocab_size)
        widths = None if proposal.widths is None else proposal.widths.tolist()
        return HostProposal(proposal.token_ids.tolist(), proposal.logprobs.tolist(), widths, proposal.restart)


class HostCandidates:
    """Present candidates of one request; a parent has a lower index than its children."""

    __slots__ = ("cells", "depths", "has_child", "parents", "scores", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.depths: list[int] = []
        self.cells: list[int] = []
        self.has_child: list[bool] = []

    def add_block(
        self,
        proposal: HostProposal,
        node: int,
        kappa: Sequence[float],
        *,
        entry: int = -1,
        first_cell: int = 0,
        floor: float = -math.inf,
    ) -> None:
        """Hang node `node` of a proposal below candidate `entry` (-1 = root): alternatives branch off the chain of
        first candidates, and of the second chain if there is one.

        Args:
            kappa: at least S * R corrections of the conditional log-probabilities, slot after slot.
            first_cell: calibration cell of the block's first slot and rank class.
            floor: candidates that score lower are left out.
        """
        above, parent, depth = (0.0, -1, 0) if entry < 0 else (self.scores[entry], entry, self.depths[entry])
        if above < floor:
            return
        widths = None if proposal.widths is None else proposal.widths[node]
        scores, last_class = self.scores, NUM_RANK_CLASSES - 1
        top, is_alive = (above, parent, depth), True
        for slot, logprobs in enumerate(proposal.logprobs[node]):
            if slot == proposal.restart:
                (above, parent, depth), is_alive = top, True
            if not is_alive:
                continue
            depth += 1
            if widths is not None:
                logprobs = logprobs[: widths[slot]]
            token_ids, at, chain = proposal.token_ids[node][slot], slot * NUM_RANK_CLASSES, -1
            num_before = len(scores)
            for rank, logprob in enumerate(logprobs):
                cell = at + (rank if rank < last_class else last_class)
                gain = logprob + kappa[cell]
                score = above + gain if gain < 0.0 else above
                if score < floor or score == -math.inf:
                    continue
                if rank == 0:
                    chain = num_before
                self.token_ids.append(token_ids[rank])
                scores.append(score)
                self.cells.append(first_cell + cell)
            num_added = len(scores) - num_before
            self.parents += [parent] * num_added
            self.depths += [depth] * num_added
            self.has_child += [False] * num_added
            if parent >= 0 and num_added:
                self.has_child[parent] = True
            if chain < 0:
                is_alive = False
            else:
                parent, above = chain, scores[chain]

    def leaves(self, max_frontier: int, first: int = 0) -> list[int]:
        """The heaviest candidates from `first` on without candidates below them, heaviest first."""
        free = [i for i, inner in enumerate(self.has_child) if not inner and i >= first]
        return sorted(free, key=self.scores.__getitem__, reverse=True)[:max_frontier]

    def frontier(self, leaves: Sequence[int], entries: Sequence[int] = (), first_cell: int = 0) -> Frontier:
        """Where the next block continues.

        entries: the leaves that the latest block hangs below, () for the first; first_cell: that block's.
        """
        token_ids = [self.token_ids[i] for i in leaves]
        if not entries:
            slots = [self.cells[i] // NUM_RANK_CLASSES for i in leaves]
            columns = torch.from_numpy(np.array([[0] * len(leaves), slots, token_ids]))
            return Frontier(request=columns[0], slot=columns[1], token_ids=columns[2])
        node_of, nodes, slots = {entry: node for node, entry in enumerate(entries)}, [], []
        for i in leaves:
            entry = self.parents[i]
            while entry not in node_of:
                entry = self.parents[entry]
            nodes.append(node_of[entry])
            slots.append((self.cells[i] - first_cell) // NUM_RANK_CLASSES)
        columns = torch.from_numpy(np.array([[0] * len(leaves), slots, token_ids, nodes]))
        return Frontier(request=columns[0], slot=columns[1], token_ids=columns[2], node=columns[3])

    def ranked(self, limit: int) -> list[int]:
        """The best `limit` candidates by falling score, parents first on ties; merged ones are left out."""
        present = [i for i, score in enumerate(self.scores) if score > -math.inf]
        return sorted(present, key=self.scores.__getitem__, reverse=True)[:limit]

    def floor(self, limit: int) -> float:
        """No candidate that a later block adds can be among the best `limit` if it scores below this."""
        if len(self.scores) < limit or self.has_duplicates(range(len(self.scores))):
            return -math.inf
        return sorted(self.scores, reverse=True)[limit - 1]

    def has_duplicates(self, order: Sequence[int]) -> bool:
        """Whether siblings among these candidates hold the same token."""
        return len({(self.parents[i], self.token_ids[i]) for i in order}) < len(order)

    def merge_duplicates(self) -> None:
        """Merge siblings with equal tokens, level by level; the better one takes over the other's children."""
        kept_as: dict[int, int] = {-1: -1}
        winners: dict[tuple[int, int], int] = {}
        for i in sorted(self.ranked(len(self.scores)), key=self.depths.__getitem__):
            parent = self.parents[i] = kept_as[self.parents[i]]
            kept_as[i] = winners.setdefault((parent, self.token_ids[i]), i)
        for i, kept in kept_as.items():
            if i != kept:
                self.scores[i] = -math.inf

    def tree(self, order: Sequence[int], anchor_token_id: int) -> TreeBatch:
        """The candidates of `order` (closed under parents, parents first) as a tree."""
        row_of = {-1: 0}
        for row, i in enumerate(order, 1):
            row_of[i] = row
        host = HostTree(
            token_ids=[anchor_token_id, *(self.token_ids[i] for i in order)],
            parents=[-1, *(row_of[self.parents[i]] for i in order)],
            depths=[0, *(self.depths[i] for i in order)],
            scores=[0.0, *(self.scores[i] for i in order)],
            cells=[-1, *(self.cells[i] for i in order)],
        )
        size = len(order) + 1
        ancestors = np.eye(size, dtype=bool)
        for row in range(1, size):
            ancestors[row] |= ancestors[host.parents[row]]
        columns = torch.from_numpy(np.array([host.token_ids, host.parents, host.depths]))  # cheaper than torch.tensor
        return TreeBatch(
            token_ids=columns[0],
            parents=columns[1],
            depths=columns[2],
            scores=torch.from_numpy(np.array(host.scores, dtype=np.float32)),
            cu_nodes=torch.from_numpy(np.array([0, size])),
            ancestors=torch.from_numpy(ancestors),
            host=host,
        )


def walk(host: HostTree, next_token_ids: Sequence[int]) -> list[int]:
    """Rows of the accepted path, root first: descend while the token drawn at a node is one of its children."""
    path, current = [0], 0
    for row in range(1, len(host.parents)):  # parents come before children, and siblings hold different tokens
        if host.parents[row] == current and host.token_ids[row] == next_token_ids[current]:
            path.append(row)
            current = row
    return path
