"""Replay round: how many draft tokens a round accepts, given the text that followed.

The tree is built and walked by the code that serves on the CPU (`trees.host`, `trees.verify`), at a fixed number of nodes.

Shape legend: B requests, D columns of the continuation, N packed tree rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter, DraftInputs
from paceline.serving.trees.calibration import ScoreCalibration
from paceline.serving.trees.candidates import pack_trees
from paceline.serving.trees.host import HostBlocks
from paceline.serving.trees.policy import plain_round
from paceline.serving.trees.propose import propose_blocks
from paceline.serving.trees.tree import TreeBatch
from paceline.serving.trees.verify import accepted_rows

AcceptRound = Callable[[Drafter, DraftInputs, torch.Tensor], torch.Tensor]
"""(drafter, inputs of B requests, continuation (B, D)) -> num_accepted_tokens (B,) int64.

D is one more than the drafter's depth, so that the bonus token of every round is seen.
"""


def follow_text(tree: TreeBatch, continuation: torch.Tensor) -> np.ndarray:
    """Rows whose whole path the target's text follows, (M,) int64, request after request, root first.

    continuation: (B, D) int64, the tokens behind each anchor, padded with -1.
    """
    rows, wanted = tree.on_host(), continuation.cpu().numpy()
    column = rows.depths - 1  # -1 for roots, which are accepted whatever they read
    is_match = (column < wanted.shape[1]) & (
        wanted[rows.owners, column.clip(max=wanted.shape[1] - 1)] == rows.token_ids
    )
    return accepted_rows(rows, is_match)


def fixed_rounds(num_nodes: int, max_frontier: int, *, is_calibrated: bool = True) -> AcceptRound:
    """Rounds at a fixed node budget; re-entrant drafters go on below the `max_frontier` heaviest leaves of every block.

    is_calibrated: the trees follow the engine's score calibration, learnt from these rounds; False = the drafter's own
    probabilities. The engine corrects a drafter's scores by the hit rates that it has seen, greedy and sampled requests
    apart, which moves nodes between branches. Rounds that the end of the text cuts teach nothing: what they hit is not
    known. Nor do rounds with one token left, for which the engine does not draft. The state lives in the returned function:
    make one per drafter version and bucket.
    """
    calibration = ScoreCalibration()

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        keys = [("", "", t == 0) for t in inputs.temperatures.tolist()]
        out = plain_round(list(keys), inputs.anchor_token_ids, context_rows=0)
        blocks = HostBlocks(
            is_product=drafter.caps.is_product,
            max_nodes=num_nodes,
            max_frontier=max_frontier,
            corrections=lambda num_slots: calibration.corrections(keys, num_slots) if is_calibrated else None,
        )
        try:
            has_drafted = propose_blocks(drafter, inputs, blocks, out, time.perf_counter)
        except ValueError as e:
            raise DrafterMismatchError(f"a proposal must be numbers that make a tree: {e}; use another version") from e
        if num_nodes == 0 or not has_drafted or blocks.is_empty:
            return torch.zeros_like(inputs.anchor_token_ids)
        everyone = list(range(len(keys)))
        tree = pack_trees([(blocks.ranked(), everyone)], np.full(len(keys), num_nodes), inputs.anchor_token_ids)
        rows, found = tree.on_host(), follow_text(tree, continuation)
        num_accepted_tokens = np.bincount(rows.owners[found], minlength=len(keys)) - 1
        if is_calibrated:
            num_left = (continuation >= 0).sum(1).cpu().numpy()
            teaches = (num_accepted_tokens < num_left) & (num_left > 1)
            is_accepted = np.zeros(len(rows.owners), dtype=bool)
            is_accepted[found] = True
            calibration.observe(rows, keys, teaches.tolist(), is_accepted)
        return torch.from_numpy(num_accepted_tokens).to(continuation.device)

    return accept
