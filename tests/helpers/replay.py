"""Replayed rounds whose trees a test builds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline.adapt.gate.shadow import AcceptRound, follow_text
from paceline.errors import DrafterMismatchError
from paceline.serving.drafters.interface import Drafter, DraftInputs
from paceline.serving.trees.tree import TreeBatch


def whole_tree(build_tree: Callable[[Drafter, DraftInputs], TreeBatch]) -> AcceptRound:
    """Rounds that build the whole tree with `build_tree` and walk it."""

    def accept(drafter: Drafter, inputs: DraftInputs, continuation: torch.Tensor) -> torch.Tensor:
        tree = build_tree(drafter, inputs)
        if not bool((tree.scores <= 1e-3).all()):
            raise DrafterMismatchError("log-probabilities must be numbers of at most 0")
        owners = tree.on_host().owners[follow_text(tree, continuation)]
        return torch.from_numpy(np.bincount(owners, minlength=tree.num_requests) - 1)

    return accept
