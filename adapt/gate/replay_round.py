"""How many draft tokens would one round have accepted, given the text that followed?

`calibrated` builds the tree as serving does, learning the score calibration from round to round, and walks it.
`whole_tree` walks any tree. `decided_early` gives the answer for trees from the drafter's own scores with less work: it
re-enters the drafter only where later blocks can change the outcome, which is the exception.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter, DraftInputs, Frontier, Proposal
from paceline.serving.trees.builder import (
    Candidates,
    Leaves,
    block_candidates,
    choose_frontier,
    rank_candidates,
    select_tree,
)
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.policy import RoundDraft
from paceline.serving.trees.reentry import reenter
from paceline.serving.trees.tree import TreeBatch

BuildTree = Callable[[Drafter, DraftInputs], TreeBatch]
AcceptRound = Callable[[Drafter, DraftInputs, torch.Tensor], torch.Tensor]
"""(drafter, inputs of B requests, continuation (B, D)) -> num_accepted_tokens (B,) int64.

D is one more than the drafter's depth, so that the bonus token of every round is seen.
"""


def deepest_match(tree: TreeBatch, continuation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Deepest node of each tree whose whole path the target's text follows.

    Args:
        tree: trees of B requests; a parent has at most one child per token.
        continuation: (B, D) int64, the tokens behind each anchor, padded with -1.
    Returns: depth (B,) int64, 0 = the root, and the node's score (B,) float32.
    """
    owner, on_path = _accepted_rows(tree, continuation)
    depth = torch.zeros(tree.num_requests, dtype=torch.int64, device=owner.device)
    depth = depth.scatter_reduce(0, owner, tree.depths.masked_fill(~on_path, 0), "amax")
    lowest = tree.scores.masked_fill(~on_path, 0.0)  # scores fall along the path, so the deepest one is the least
    return depth, torch.zeros_like(depth, dtype=lowest.dtype).scatter_reduce(0, owner, lowest, "amin")


def _accepted_rows(tree: TreeBatch, continuation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of each packed row (N,) int64, and whether the text follows the row's whole path (N,) bool."""
    num_requests, sizes = tree.num_requests, tree.cu_nodes.diff()
    owner = torch.repeat_interleave(torch.arange(num_requests, device=sizes.device), sizes)
    local = torch.arange(owner.numel(), device=sizes.device) - tree.cu_nodes[owner]
    wanted = torch.cat([continuation.new_full((num_requests, 1), -1), continuation], dim=1)  # column = depth
    column = tree.depths.clamp(max=wanted.shape[1] - 1)
    is_match = (tree.depths == 0) | ((wanted[owner, column] == tree.token_ids) & (tree.depths < wanted.shape[1]))
    table = is_match.new_zeros(num_requests, tree.ancestors.shape[1])
    table[owner, local] = is_match
    return owner, (~tree.ancestors | table[owner]).all(dim=1)


def whole_tree(build_tree: BuildTree) -> AcceptRound:
    """Rounds that build the whole tree with `build_tree` and walk it."""

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        tree = build_tree(drafter, inputs)
        _check(tree.scores)
        return deepest_match(tree, continuation)[0]

    return accept


def calibrated(num_nodes: int, max_frontier: int) -> AcceptRound:
    """Rounds at a fixed node budget whose trees follow the engine's score calibration, learnt from these rounds.

    The engine corrects a drafter's scores by the hit rates that it has seen, greedy and sampled requests apart, which
    moves nodes between branches. Rounds that the end of the text cuts teach nothing: what they hit is not known. Nor do
    rounds with one token left, for which the engine does not draft.
    The state lives in the returned function: make one per drafter version and bucket.
    """
    calibration = ScoreCalibration()

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        proposal = drafter.propose(inputs)
        _check(proposal.logprobs)
        num_requests, num_slots = proposal.logprobs.shape[:2]
        if num_nodes == 0 or num_slots == 0:
            return torch.zeros_like(inputs.anchor_token_ids)
        keys = [("", "", t == 0) for t in inputs.temperatures.tolist()]
        first_kappa, late_kappa = calibration.table(keys, num_slots).to(proposal.logprobs.device)
        candidates = block_candidates(proposal, drafter.caps.is_product, num_nodes, first_kappa)
        candidates = reenter(drafter, inputs, proposal, candidates, max_frontier, kappa=late_kappa, check=_check)
        ranked = rank_candidates(candidates, num_nodes)
        tree, cells = select_tree(ranked, inputs.anchor_token_ids, [num_nodes] * num_requests)
        owner, on_path = _accepted_rows(tree, continuation)
        paths: list[list[int]] = [[] for _ in range(num_requests)]
        rows = on_path.nonzero()[:, 0]
        for request, row in zip(owner[rows].tolist(), rows.tolist(), strict=True):
            paths[request].append(row)
        num_accepted_tokens = torch.tensor([len(p) - 1 for p in paths], device=continuation.device)
        num_left = (continuation >= 0).sum(1)
        teaches = ((num_accepted_tokens < num_left) & (num_left > 1)).tolist()
        calibration.observe(
            RoundDraft(tree=tree, keys=list(keys), num_draft_tokens=[], is_drafted=teaches, cells=cells), paths
        )
        return num_accepted_tokens

    return accept


def decided_early(num_nodes: int, max_frontier: int) -> AcceptRound:
    """Rounds at a fixed node budget that equal `whole_tree` of `draft_fixed`, node for node.

    Let v be the deepest matching node of the best tree of first-block candidates alone. More candidates can only push
    nodes out, and only candidates that score above v push v out; these hang below leaves that score above v. So when v
    is the root, or no leaf that would be re-entered scores as high as v (v itself is not such a leaf, then), later
    blocks change nothing and are not computed.
    """

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        proposal = drafter.propose(inputs)
        _check(proposal.logprobs)
        if num_nodes == 0 or proposal.logprobs.shape[1] == 0:
            return torch.zeros_like(inputs.anchor_token_ids)
        first = block_candidates(proposal, drafter.caps.is_product, num_nodes)
        depth, score = _best(first, inputs.anchor_token_ids, continuation, num_nodes)
        if not drafter.caps.is_reentrant or max_frontier == 0:
            return depth
        leaves = choose_frontier(first, max_frontier)
        request = leaves.frontier.request
        is_open = torch.zeros_like(depth, dtype=torch.bool)
        is_open[request[(leaves.scores >= score[request]) & (depth[request] > 0)]] = True
        if bool(is_open.any()):
            chosen = is_open.nonzero()[:, 0]
            more = _reenter(drafter, inputs, proposal, first, leaves, is_open, max_frontier)
            depth[chosen] = _best(more, inputs.anchor_token_ids[chosen], continuation[chosen], num_nodes)[0]
        return depth

    return accept


def _reenter(
    drafter: Drafter, inputs: DraftInputs, proposal: Proposal, first: Candidates, leaves: Leaves, is_open: torch.Tensor,
    max_frontier: int,
) -> Candidates:  # fmt: skip
    """Candidates of all blocks for the requests in `is_open` (B,) bool only."""
    keep = is_open[leaves.frontier.request]
    place = is_open.long().cumsum(0) - 1
    kept = Leaves(
        frontier=Frontier(
            request=place[leaves.frontier.request[keep]],
            slot=leaves.frontier.slot[keep],
            token_ids=leaves.frontier.token_ids[keep],
        ),
        candidates=leaves.candidates[keep],
        columns=leaves.columns[keep],
        scores=leaves.scores[keep],
    )
    mine = Candidates(
        token_ids=first.token_ids[is_open],
        parents=first.parents[is_open],
        scores=first.scores[is_open],
        depths=first.depths[is_open],
        cells=first.cells[is_open],
    )
    requests = is_open.nonzero()[:, 0]
    return reenter(drafter, inputs, proposal, mine, max_frontier, leaves=kept, requests=requests, check=_check)


def _best(
    candidates: Candidates, anchors: torch.Tensor, continuation: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tree, _ = select_tree(rank_candidates(candidates, num_nodes), anchors, [num_nodes] * anchors.numel())
    return deepest_match(tree, continuation)


def _check(logprobs: torch.Tensor) -> None:
    if not bool((logprobs <= 1e-3).all()):  # false for NaN too; -inf marks an absent candidate
        raise DrafterMismatchError(
            "drafter log-probabilities must be numbers <= 0; train it again or use another version"
        )
