"""Budget controller: whether each request of a round drafts (switch.py) and how many nodes it gets (node_rule.py).

Every method is a pure function of its arguments and the observations so far; no clock, no randomness.

Shape legend: B requests of the round, M best candidates of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import CostModel
from paceline.serving.budget.node_rule import FixedRule, NodeRule, RateRule
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, RoundObservation
from paceline.serving.budget.switch import FIRST_WAIT, PROBE_NODES, REPLAYED_NODES, Switch


class BudgetController:
    """One per engine; of policy `adaptive` with a switch, of the others without: they draft in every round."""

    def __init__(self, config: TreeConfig, cost: CostModel | None = None) -> None:
        """cost: of the verify forward."""
        self.config = config
        self.costs = RoundCosts(cost)
        self._rule: NodeRule = RateRule(self.costs) if config.policy in ("adaptive", "bastion") else FixedRule()
        self._switch = Switch(self.costs) if config.policy == "adaptive" else None

    def states(self) -> list[tuple[DraftKey, str]]:
        """Every class that the switch knows with trial | on | off | probe; from any thread, may be one round old."""
        return [] if self._switch is None else self._switch.states()

    def draft_ratio(self, num_requests: int) -> float:
        """Plain rounds that a drafted round of so many requests would take, from the measured costs of its parts and without
        what contexts cost; from any thread."""
        return self.costs.draft_ratio(REPLAYED_NODES, 0, num_requests)

    def foretell(self, version: str, bucket: str, acceptance_length: float) -> None:
        """What a version will do in a bucket, as an exact replay of its text shows, before the engine has seen it."""
        if self._switch is not None:
            self._switch.foretell(version, bucket, acceptance_length)

    def forget(self, version: str) -> None:
        """Drop what is known of a drafter version."""
        if self._switch is not None:
            self._switch.forget(version)
        self._rule.forget(version)

    def turns(
        self, keys: Sequence[DraftKey | None], text_keys: Sequence[DraftKey | None], context_rows: int
    ) -> list[DraftKey | None]:
        """(B,) key under which each request of the round may draft: the text's where it has one and does not lose by it."""
        if self._switch is not None:
            return self._switch.turns(keys, text_keys, context_rows)
        return [key if own is None else own for key, own in zip(keys, text_keys, strict=True)]

    def wants_draft(
        self,
        keys: Sequence[DraftKey | None],
        context_rows: int,
        backlogs: Sequence[int] | None = None,
        horizons: Sequence[int] | None = None,
    ) -> list[bool]:
        """Which of the B requests to draft for; None = has no drafter. Call once per round, or `skip`: probes' waits
        count down.

        backlogs: (B,) rows that a drafter would have to ingest first; None = none.
        horizons: (B,) tokens that each request is expected to get still; None = enough for any backlog to pay.
        """
        if self._switch is None:
            return [key is not None for key in keys]
        return self._switch.wants(keys, context_rows, backlogs or [0] * len(keys), horizons or [1 << 30] * len(keys))

    def catch_up_rows(self, num_prompt_rows: int, context_rows: int, num_requests: int) -> int:
        """How many rows of long backlogs drafters may ingest in a round: such as take no longer than a forward of so many prompt
        rows, or than the plain rounds that a probe may stop all streams for. As many as those, before any was timed."""
        costs = self.costs
        if costs.ingest_row_s <= 0:
            return num_prompt_rows
        plain_s = costs.round_s(num_requests, 0, context_rows, num_requests)
        return int(max(costs.verify.seconds(num_prompt_rows), FIRST_WAIT * plain_s) / costs.catch_up_s(1))

    def rest(self, keys: Iterable[DraftKey], num_requests: int) -> int:
        """How many rounds of the same requests need no decision: nothing is drafted and no probe begins. `skip` each."""
        return 0 if self._switch is None else self._switch.rest(keys, num_requests)

    def skip(self) -> None:
        """A round passes without a decision."""
        if self._switch is not None:
            self._switch.skip()

    def choose(
        self, masses: np.ndarray, keys: Sequence[DraftKey | None], context_rows: int, num_drafting: int | None = None
    ) -> np.ndarray:
        """Nodes per request.

        Args:
            masses: (B, M) float64, estimated path masses of the candidates, falling, 0 = absent (or not drafted).
            keys: (B,), to give requests on trial or probe a minimum of nodes, so that they have something to learn from.
            num_drafting: requests the drafter was called for; None = those with any mass.
        Returns: (B,) int64, at most max_draft_tokens each.
        """
        masses = masses[:, : self.config.max_draft_tokens]
        if num_drafting is None:
            num_drafting = int((masses > 0).any(1).sum())
        nodes = self._rule.choose(masses, context_rows, num_drafting)
        for i, floor in enumerate(self.floors(keys)):
            if floor:
                nodes[i] = max(nodes[i], min(floor, (masses[i] > 0).sum()))
        return nodes

    def floors(self, keys: Sequence[DraftKey | None]) -> list[int]:
        """Nodes that each of the B requests gets whatever they weigh."""
        switch = self._switch
        if switch is None:
            return [0] * len(keys)
        probed = {k for k in set(keys) if k is not None and switch.is_probing(k, len(keys))}
        return [PROBE_NODES if key in probed else 0 for key in keys]

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """Which leaves of one drafter to re-enter: indices, heaviest first. Call once per group and round.

        keys, masses: (F,) request's key and path mass of each leaf.
        """
        return self._rule.choose_leaves(keys, masses, context_rows, num_requests)

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        if self._switch is not None:
            self._switch.observe(seen)
        self.costs.observe(seen)
        self._rule.observe(seen)
