"""Which path of each tree does the target accept, and what is the bonus token?

Shape legend: B requests, N packed tree rows (roots included), W widest tree, D deepest accepted depth, V vocabulary.
Sample-match: draw one token per node from the processed target distribution and walk while the drawn token is a child.
Lossless for every tree that does not depend on the draws (tree_speculation.md, decision on verification).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels.dispatch import Kernels
from paceline.kernels.reference import tree_accept as tree_accept_ref
from paceline.serving.sampling.draw import SamplingBatch, argmax_rows, draw_tokens
from paceline.serving.trees.host_tree import walk
from paceline.serving.trees.tree import HostTree, TreeBatch

_MAX_ROWS_AT_ONCE = 160
"""Rows of a round whose tokens are drawn together on the CPU (0.3 to 0.7 of the time of drawing level by level)."""


@dataclass(kw_only=True, slots=True)
class AcceptPlan:
    """The accepted path of every request, before truncation by stop or length."""

    path: torch.Tensor  # (B, D + 1) int64, packed row ids into the TreeBatch; column 0 = root; -1 padded
    num_accepted_tokens: torch.Tensor  # (B,) int64, bonus token excluded
    bonus_token_ids: torch.Tensor  # (B,) int64
    host: list[tuple[list[int], int]] | None = None
    """(B,) path rows and bonus token, once they were read."""
    path_token_ids: torch.Tensor | None = None  # (B, D + 1) int64, tokens of the path's rows; None = read the tree's
    host_tokens: list[list[int]] | None = None
    """(B,) accepted tokens, root and bonus excluded, once they were read with the paths."""

    def on_host(self) -> list[tuple[list[int], int]]:
        """Path rows (root first, padding dropped) and bonus token of each request.  Syncs: one, the first time."""
        if self.host is None:
            width = self.path.shape[1]
            parts = [self.path, self.num_accepted_tokens[:, None], self.bonus_token_ids[:, None]]
            if self.path_token_ids is not None:
                parts.append(self.path_token_ids)
            lines = torch.cat(parts, 1).tolist()
            self.host = [(line[: line[width] + 1], line[width + 1]) for line in lines]
            if self.path_token_ids is not None:
                self.host_tokens = [line[width + 3 : width + 3 + line[width]] for line in lines]
        return self.host

    def accepted_tokens(self, tree: TreeBatch) -> list[list[int]]:
        """Accepted tokens of each request, root and bonus excluded.

        Syncs: that of `on_host`, and one more when the plan does not carry the path's tokens.
        """
        paths = self.on_host()
        if self.host_tokens is None:
            tokens = tree.token_ids.tolist() if tree.host is None else tree.host.token_ids
            self.host_tokens = [[tokens[row] for row in path[1:]] for path, _ in paths]
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
    if tree.host is not None:
        drawn = next_token_ids.tolist()
        found = walk(tree.host, drawn)
        return _host_plan(found, drawn[found[-1]])
    if next_token_ids.device.type != "cpu":
        return accept_rows(tree.token_ids, tree.cu_nodes, tree.ancestors, next_token_ids, kernels)
    if tree.token_ids.numel() == tree.num_requests:  # roots only
        return AcceptPlan(
            path=torch.arange(tree.num_requests, device=next_token_ids.device)[:, None],
            num_accepted_tokens=torch.zeros_like(next_token_ids),
            bonus_token_ids=next_token_ids,
            host=[([row], bonus) for row, bonus in enumerate(next_token_ids.tolist())],
        )
    return _accept_batch(tree, next_token_ids.numpy())


def _accept_batch(tree: TreeBatch, drawn: np.ndarray) -> AcceptPlan:
    """`accept` of a batch on the CPU, where NumPy takes a fraction of a torch operator's time."""
    token_ids, cu_nodes, depths = tree.token_ids.numpy(), tree.cu_nodes.numpy(), tree.depths.numpy()
    roots, counts = cu_nodes[:-1], np.diff(cu_nodes)
    above = roots.repeat(counts) + tree.parents.numpy()
    above[roots] = roots
    is_accepted = token_ids == drawn[above]
    is_accepted[roots] = True
    # A node is accepted when it and all its ancestors match; `above` doubles its stride, roots stay above themselves.
    for _ in range(int(depths.max()).bit_length()):
        is_accepted &= is_accepted[above]
        above = above[above]
    rows = is_accepted.nonzero()[0]
    depths, owners = depths[rows], np.arange(len(roots)).repeat(counts)[rows]
    path = np.full((len(roots), int(depths.max()) + 1), -1)
    path[owners, depths] = rows
    num_accepted_tokens = np.bincount(owners) - 1
    bonus_token_ids = drawn[path[np.arange(len(roots)), num_accepted_tokens]]
    lines = zip(path.tolist(), num_accepted_tokens.tolist(), bonus_token_ids.tolist(), strict=True)
    return AcceptPlan(
        path=torch.from_numpy(path),
        num_accepted_tokens=torch.from_numpy(num_accepted_tokens),
        bonus_token_ids=torch.from_numpy(bonus_token_ids),
        host=[(line[: count + 1], bonus) for line, count, bonus in lines],
    )


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
    Returns: a plan whose path and path_token_ids are (B, W).  Syncs: none.
    """
    find = tree_accept_ref.accept_rows if kernels is None else kernels.accept_rows
    found = find(token_ids=token_ids, cu_rows=cu_rows, ancestors=ancestors, next_token_ids=next_token_ids)
    return AcceptPlan(
        path=found.path,
        path_token_ids=found.path_token_ids,
        num_accepted_tokens=found.num_accepted_tokens,
        bonus_token_ids=found.bonus_token_ids,
    )


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
    All-greedy batches take one argmax. Otherwise tokens are drawn at every node at once, or, where a draw is dear on the
    CPU, level by level and only at the nodes that the walk reaches, which gives the same; elsewhere every level would cost a
    wait for the device. Requests with a grammar walk everywhere: at every level their rows are masked for
    the state that the path has led to, and the drawn token moves that state. Grammars are left ahead of the committed
    tokens, until those that are emitted are committed (`GrammarState.keep`).
    """
    if sampling.is_all_greedy:
        return accept(tree, argmax_rows(logits))
    if sampling.has_grammars:
        sampling.rewind()
    elif logits.device.type != "cpu" or _draws_at_once(sampling, logits.shape[0]):
        return accept(tree, draw_all(tree, logits, sampling, context_lens))
    if tree.host is not None:
        return _walk_host(tree.host, logits, sampling, context_lens)
    return _walk(tree, logits, sampling, context_lens)


def _draws_at_once(sampling: SamplingBatch, num_rows: int) -> bool:
    """Whether a few operators over all rows beat a few per level: not where rows are sorted or counted for."""
    return num_rows <= _MAX_ROWS_AT_ONCE and not any(sampling.is_filtered) and not any(sampling.is_penalised)


def _host_plan(rows: list[int], bonus: int) -> AcceptPlan:
    return AcceptPlan(
        path=torch.tensor([rows]),
        num_accepted_tokens=torch.tensor([len(rows) - 1]),
        bonus_token_ids=torch.tensor([bonus]),
        host=[(rows, bonus)],
    )


def _walk_host(host: HostTree, logits: torch.Tensor, sampling: SamplingBatch, context_lens: torch.Tensor) -> AcceptPlan:
    """`_walk` of a lone request: draw at a node, descend while the token is one of its children."""
    owner = torch.zeros(1, dtype=torch.int64)
    children: dict[tuple[int, int], int] = {}
    for row in range(1, len(host.parents)):
        children[host.parents[row], host.token_ids[row]] = row
    rows, tokens = [0], list[int]()
    is_penalised = any(sampling.is_penalised)
    while True:
        current = rows[-1]
        extra = torch.tensor([tokens], dtype=torch.int64) if is_penalised else None
        drawn = draw_tokens(logits[current : current + 1], owner, context_lens + len(rows), sampling, extra)
        token = int(drawn[0])
        sampling.advance((0,), (token,))
        child = children.get((current, token))
        if child is None:
            return _host_plan(rows, token)
        rows.append(child)
        tokens.append(token)


def draw_all(
    tree: TreeBatch, logits: torch.Tensor, sampling: SamplingBatch, context_lens: torch.Tensor
) -> torch.Tensor:
    """Draw at every tree row, (N,) int64; `accept(tree, draw_all(...))` equals `verify(...)`, without per-level syncs.

    Raises: ValueError with grammars, whose state would be another one at every row.
    """
    if sampling.has_grammars:
        raise ValueError("requests with a grammar must be verified level by level, got a draw at every row")
    owner, extra, uniforms, owner_list = owners(tree), None, None, None
    if any(sampling.is_penalised):
        above = tree.ancestors.clone()
        above[:, 0] = False  # the root is committed, so it is counted already
        packed = tree.cu_nodes[owner][:, None] + torch.arange(above.shape[1], device=owner.device)
        extra = torch.where(above, tree.token_ids[packed.clamp(max=owner.numel() - 1)], -1)
    if tree.counts is not None:
        owner_list = [b for b, count in enumerate(tree.counts) for _ in range(count)]
    if tree.host is not None:
        owner_list = [0] * len(tree.host.depths)
        uniforms = sampling.uniforms_of_one(int(context_lens[0]) + 1, tree.host.depths)
    positions = context_lens[owner] + tree.depths + 1
    return draw_tokens(logits, owner, positions, sampling, extra, uniforms, owner_list)


def _walk(tree: TreeBatch, logits: torch.Tensor, sampling: SamplingBatch, context_lens: torch.Tensor) -> AcceptPlan:
    """Loop over depths; each level draws for the requests whose last draw was a child."""
    num_requests = tree.num_requests
    has_children = tree.token_ids.numel() > num_requests
    owner = owners(tree)
    start = tree.cu_nodes[owner]
    parent = torch.where(tree.parents < 0, -1, start + tree.parents)
    active = torch.arange(num_requests, device=owner.device)
    current = tree.cu_nodes[:-1]
    levels = [current]
    extra = torch.empty(num_requests, 0, dtype=torch.int64, device=owner.device)
    bonus = torch.empty(num_requests, dtype=torch.int64, device=owner.device)
    depth = 0
    while True:
        drawn = draw_tokens(logits[current], active, context_lens[active] + (depth + 1), sampling, extra)
        bonus[active] = drawn
        if sampling.has_grammars:
            sampling.advance(active.tolist(), drawn.tolist())
        if not has_children:
            break
        wanted = torch.full((num_requests, 2), -2, dtype=torch.int64, device=owner.device)  # current row, token
        wanted[active, 0] = current
        wanted[active, 1] = drawn
        want = wanted[owner]
        found = ((parent == want[:, 0]) & (tree.token_ids == want[:, 1])).nonzero()[:, 0]
        if found.numel() == 0:
            break
        active = owner[found]
        current = found
        depth += 1
        level = torch.full((num_requests,), -1, dtype=torch.int64, device=owner.device)
        level[active] = found
        levels.append(level)
        path_tokens = torch.where(torch.stack(levels[1:], 1) >= 0, tree.token_ids[torch.stack(levels[1:], 1)], -1)
        extra = path_tokens[active]
    path = torch.stack(levels, 1)
    return AcceptPlan(path=path, num_accepted_tokens=(path >= 0).sum(1) - 1, bonus_token_ids=bonus)
