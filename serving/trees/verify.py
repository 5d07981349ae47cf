"""Verification: the path of each tree that the target accepts, and the bonus token.

Shape legend: B requests, N packed tree rows (roots included), W widest tree, D deepest accepted depth, V vocabulary.
Sample-match: draw one token per node from the processed target distribution and walk while the drawn token is a child.
Lossless for every tree that does not depend on the draws (tree_speculation.md, decision on verification).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels.cpu.trees import walk_trees
from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference import tree_accept as tree_accept_ref
from paceline.kernels.reference.tree_accept import RowPaths
from paceline.serving.sampling.draw import SamplingBatch, argmax_rows, draw_tokens
from paceline.serving.trees.tree import TreeBatch, TreeRows

_MAX_ROWS_AT_ONCE = 160
"""Rows of a round whose tokens are drawn together on the CPU (0.3 to 0.7 of the time of drawing level by level)."""


_NOT_DRAWN = -1


@dataclass(kw_only=True, slots=True)
class AcceptPlan:
    """The accepted path of every request, before truncation by stop or length."""

    found: RowPaths | None = None
    """On the device, until it is read."""
    host: list[tuple[list[int], int]] | None = None
    """(B,) path rows and bonus token, once they were read."""
    host_tokens: list[list[int]] | None = None
    """(B,) accepted tokens, root and bonus excluded."""

    def on_host(self) -> list[tuple[list[int], int]]:
        """Path rows (root first) and bonus token of each request.  Syncs: one, the first time."""
        if self.host is None:
            found = self.found
            assert found is not None
            width = found.path.shape[1]
            columns = found.num_accepted_tokens[:, None], found.bonus_token_ids[:, None]
            lines = torch.cat((found.path, *columns, found.path_token_ids), 1).tolist()
            self.host = [(line[: line[width] + 1], line[width + 1]) for line in lines]
            self.host_tokens = [line[width + 3 : width + 3 + line[width]] for line in lines]
        return self.host

    def accepted_tokens(self) -> list[list[int]]:
        """Accepted tokens of each request, root and bonus excluded.  Syncs: that of `on_host`."""
        self.on_host()
        assert self.host_tokens is not None
        return self.host_tokens


def owners(tree: TreeBatch) -> torch.Tensor:
    """Request index of every packed row, (N,) int64."""
    if tree.num_requests == 1:
        return torch.zeros_like(tree.parents)
    counts = tree.cu_nodes[1:] - tree.cu_nodes[:-1]
    return torch.repeat_interleave(counts, output_size=tree.token_ids.numel())


def accept(tree: TreeBatch, next_token_ids: torch.Tensor, kernels: Kernels | None = None) -> AcceptPlan:
    """Walk every tree while the token drawn at a node is one of its children.

    next_token_ids: (N,) int64, the token drawn at each row. Siblings of a tree have different tokens.
    kernels: for trees off the CPU; None = the reference.
    Syncs: none off the CPU (`accept_rows`); on the CPU the depth of the longest accepted path is read.
    """
    if next_token_ids.device.type != "cpu":
        return accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, next_token_ids, kernels)
    if tree.token_ids.numel() == tree.num_requests:  # roots only
        host = [([row], bonus) for row, bonus in enumerate(next_token_ids.tolist())]
        return AcceptPlan(host=host, host_tokens=[[] for _ in host])
    walked = walk_trees(tree.token_ids, tree.parents, tree.cu_nodes, next_token_ids)
    if walked is not None:
        return _plan(*walked)
    rows, drawn = tree.on_host(), next_token_ids.numpy()
    return plan_of(rows, accepted_rows(rows, rows.token_ids == drawn[rows.above]), drawn)


def accepted_rows(rows: TreeRows, is_match: np.ndarray) -> np.ndarray:
    """Rows whose whole path matches, (M,) int64, request after request, root first: the one acceptance walk of the host.

    is_match: (N,) bool, whether the token of a row is the one that follows its parent; those of roots are not read.
    Mutates: is_match. All nodes are judged at once: a node is accepted when it and all its ancestors match.
    """
    is_match[rows.roots] = True
    above = rows.above
    for _ in range(rows.max_depth.bit_length()):  # the stride doubles, roots stay above themselves
        is_match &= is_match.take(above)
        above = above.take(above)
    return is_match.nonzero()[0]


def plan_of(rows: TreeRows, found: np.ndarray, drawn: np.ndarray) -> AcceptPlan:
    """The plan of accepted rows `found` (M,). drawn: (N,) int64, read at these rows."""
    counts = np.bincount(rows.owners[found], minlength=len(rows.roots))
    return _plan(found.tolist(), drawn[found].tolist(), counts.tolist())


def _plan(rows: list[int], drawn: list[int], counts: list[int]) -> AcceptPlan:
    """rows, drawn: of all paths, request after request, and the tokens drawn there: those of the next row, or the bonus."""
    host, host_tokens, start = [], [], 0
    for count in counts:
        stop = start + count
        host.append((rows[start:stop], drawn[stop - 1]))
        host_tokens.append(drawn[start : stop - 1])
        start = stop
    return AcceptPlan(host=host, host_tokens=host_tokens)


def accept_rows(
    token_ids: torch.Tensor,
    cu_rows: torch.Tensor,
    ancestors: torch.Tensor,
    next_token_ids: torch.Tensor,
    kernels: Kernels | None = None,
) -> AcceptPlan:
    """`accept` with shapes that follow from its arguments' shapes: for devices that must not wait for the host.

    Rows from cu_rows[-1] on belong to no request; requests may have no rows (their results mean nothing).

    Args:
        token_ids, next_token_ids: (N,) int64.
        cu_rows: (B + 1,) int64.
        ancestors: (N, W) bool; W bounds the path, because a tree of W rows has no depth beyond W - 1.
        kernels: None = the reference.
    Returns: a plan that is not read yet.  Syncs: none.
    """
    find = tree_accept_ref.accept_rows if kernels is None else kernels.accept_rows
    found = find(token_ids=token_ids, cu_rows=cu_rows, ancestors=ancestors, next_token_ids=next_token_ids)
    return AcceptPlan(found=found)


def verify(
    tree: TreeBatch,
    logits: torch.Tensor,
    sampling: SamplingBatch,
    context_lens: torch.Tensor,
    accept: Callable[[TreeBatch, torch.Tensor], AcceptPlan] = accept,
) -> AcceptPlan:
    """Draw from the processed target distribution and accept: what the engine calls each round.

    Args:
        logits: (N, V) float32, one row per tree row.
        context_lens: (B,) int64, the anchors' positions: the token drawn at a row of depth d has position
            context_len + d + 1.
        accept: another implementation of `accept`.
    All-greedy batches take one argmax, on the CPU at the rows that the walk reaches. Otherwise tokens are drawn at every node at once, or, where a draw is dear on the
    CPU, level by level and only at the nodes that the walk reaches, which gives the same; elsewhere every level would cost a
    wait for the device. Requests with a grammar walk everywhere: at every level their rows are masked for
    the state that the path has led to, and the drawn token moves that state. Grammars are left ahead of the committed
    tokens, until those that are emitted are committed (`GrammarState.keep`).
    """
    if sampling.is_all_greedy:
        if logits.is_cpu:
            walked = walk_trees(tree.token_ids, tree.parents, tree.cu_nodes, logits)
            if walked is not None:
                return _plan(*walked)
        return accept(tree, argmax_rows(logits))
    if sampling.has_grammars:
        sampling.rewind()
    elif logits.device.type != "cpu" or _draws_at_once(sampling, logits.shape[0]):
        return accept(tree, draw_all(tree, logits, sampling, context_lens))
    return _walk(tree, logits, sampling, context_lens)


def _draws_at_once(sampling: SamplingBatch, num_rows: int) -> bool:
    """Whether a few operators over all rows beat a few per level: not where rows are sorted or counted for."""
    return num_rows <= _MAX_ROWS_AT_ONCE and not any(sampling.is_filtered) and not any(sampling.is_penalised)


def draw_all(
    tree: TreeBatch, logits: torch.Tensor, sampling: SamplingBatch, context_lens: torch.Tensor
) -> torch.Tensor:
    """Draw at every tree row, (N,) int64; `accept(tree, draw_all(...))` equals `verify(...)`, without per-level syncs.

    Raises: ValueError with grammars, whose state would be another one at every row.
    """
    if sampling.has_grammars:
        raise ValueError("requests with a grammar must be verified level by level, got a draw at every row")
    owner, extra, uniforms, owner_list = owners(tree), None, None, None
    if sampling.reads_paths:
        above = tree.ancestors.clone()
        above[:, 0] = False  # the root is committed, so it is counted already
        packed = tree.cu_nodes[owner][:, None] + torch.arange(above.shape[1], device=owner.device)
        extra = torch.where(above, tree.token_ids[packed.clamp(max=owner.numel() - 1)], -1)
    if tree.counts is not None:
        owner_list = [b for b, count in enumerate(tree.counts) for _ in range(count)]
    if tree.num_requests == 1 and logits.device.type == "cpu":
        uniforms = sampling.uniforms_of_one(int(context_lens[0]) + 1, tree.depths.tolist())
    positions = context_lens[owner] + tree.depths + 1
    return draw_tokens(logits, owner, positions, sampling, extra, uniforms, owner_list)


def _walk(tree: TreeBatch, logits: torch.Tensor, sampling: SamplingBatch, context_lens: torch.Tensor) -> AcceptPlan:
    """Loop over depths; each level draws for the requests whose last draw was a child.  Syncs: once a level."""
    rows, device = tree.on_host(), logits.device
    num_requests = len(rows.roots)
    drawn = np.full(len(rows.token_ids), _NOT_DRAWN)
    active, current = np.arange(num_requests), rows.roots
    paths = np.empty((num_requests, 0), dtype=np.int64)  # tokens that the active requests have come along
    is_accepted = np.zeros(len(drawn), dtype=bool)
    while len(active):
        is_accepted[current] = True
        owner = torch.from_numpy(active).to(device)
        tokens = draw_tokens(
            logits[torch.from_numpy(current).to(device)], owner, context_lens[owner] + (paths.shape[1] + 1), sampling,
            torch.from_numpy(paths).to(device), owner_list=active.tolist(),
        ).cpu().numpy()  # fmt: skip
        if sampling.has_grammars:
            sampling.advance(active.tolist(), tokens.tolist())
        drawn[current] = tokens
        is_next = (rows.token_ids == drawn[rows.above]) & is_accepted[rows.above] & ~is_accepted
        current = is_next.nonzero()[0]
        going = rows.owners[current]
        paths = np.concatenate((paths[active.searchsorted(going)], rows.token_ids[current, None]), 1)
        active = going
    return plan_of(rows, is_accepted.nonzero()[0], drawn)
