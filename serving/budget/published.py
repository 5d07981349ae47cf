"""How many nodes do the published tree policies give a round?

Policies that draft in every round, as their papers do, beside the controller that also decides whether to:
- `ddtree` and `bundle`: always max_draft_tokens nodes (DDTree: the heaviest; JetSpec: grown by bundle_expansion.py).
- `bastion`: as many as maximise S(N) = A(N) T_plain / (T_draft + T_aux + T_verify(N, c)), with its own latency model.
BASTION stops before node i as soon as rho_i (T_d + T_aux + T_v(N)) <= A(N) (T_v(N + 1) - T_v(N)). That finds the best N
only where T_v is convex. Measured verify times are staircases (tiles, captured sizes): one dear step would stop it in
front of a cheap plateau. So S is evaluated at every N and the best is taken; with convex times both choose the same N.
Source: tree_speculation.md 3.3 (BASTION, DDTree, CaDDTree) and 4.5.

Shape legend: B requests of the round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.config import TreeConfig
from paceline.serving.budget.controller import BudgetController
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.request_record import DraftRecord
from paceline.serving.budget.roofline import ScaledPrior, TargetShape
from paceline.serving.budget.stats import DraftKey, KeyStats


def make_budget(config: TreeConfig, cost: CostModel | None = None) -> BudgetController:
    """The controller of `config.policy`. cost: of the verify forward; None = the policy's own, not calibrated yet."""
    if config.policy == "adaptive":
        return BudgetController(config, cost)
    if config.policy == "bastion":
        return RateBudget(config, cost or ScaledPrior())
    return FixedBudget(config, cost)


def verify_cost(config: TreeConfig, target_config: object, value_bytes: int) -> CostModel | None:
    """The latency model of a policy that wants its own; None = the usual one.

    target_config: transformers' text configuration of the target. value_bytes: of one weight.
    """
    if config.policy != "bastion":
        return None
    return ScaledPrior(TargetShape.of(target_config, value_bytes))


class _AlwaysDrafting(BudgetController):
    """Drafts for everybody who has a drafter."""

    def __init__(self, config: TreeConfig, cost: CostModel | None = None) -> None:
        super().__init__(dataclasses.replace(config, is_adaptive=True), cost)

    def stats(self, key: DraftKey) -> KeyStats:
        """The statistics of a key, which is on from the first round."""
        found = super().stats(key)
        found.state = "on"
        return found

    def wants_draft(
        self,
        keys: Sequence[DraftKey | None],
        context_rows: int,
        backlogs: Sequence[int] | None = None,
        horizons: Sequence[int] | None = None,
        records: Sequence[DraftRecord] | None = None,
        num_filling: int = 0,
    ) -> list[bool]:
        """Every request with a drafter."""
        for key in keys:
            if key is not None:
                self.stats(key)
        return [key is not None for key in keys]


class FixedBudget(_AlwaysDrafting):
    """max_draft_tokens nodes a request, fewer only where candidates run out; re-entry at all leaves."""

    def choose(
        self, masses: np.ndarray, keys: Sequence[DraftKey | None], context_rows: int, num_drafting: int | None = None
    ) -> np.ndarray:
        """All nodes that there are. masses: (B, M). Returns: (B,) int64."""
        return (masses[:, : self.config.max_draft_tokens] > 0).sum(1)

    def choose_one(
        self, masses: Sequence[float], key: DraftKey | None, context_rows: int, num_drafting: int = 1
    ) -> int:
        """All nodes that there are."""
        return min(len(masses), self.config.max_draft_tokens)

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """All of them, heaviest first."""
        return sorted(range(len(masses)), key=lambda i: -masses[i])


class RateBudget(_AlwaysDrafting):
    """BASTION: expected tokens over predicted time, over all node counts. A batch shares one budget, split where it brings
    most (node_split.py); leaves are re-entered by rate too."""

    def __init__(self, config: TreeConfig, cost: CostModel | None = None) -> None:
        super().__init__(config, cost)
        self.node_options = range(config.max_draft_tokens + 1)
