"""Round costs: seconds of a decode round by its parts: drafting, verify, and everything around them."""

from __future__ import annotations

import math

from paceline.kernels.reference.tree_attention import CALL_PAIRS
from paceline.serving.budget.cost_model import CostCurve, CostModel, log2_bucket
from paceline.serving.budget.node_split import Padding
from paceline.serving.budget.stats import RoundObservation

_RATE = 0.05
_MAX_PAIRS = 2 * CALL_PAIRS
"""About the most that is padded: requests that differ more are attended to by a call of their own (attention_groups.py)."""


class RoundCosts:
    """Every cost that the budget controller weighs, in seconds at the machine's present speed."""

    def __init__(self, verify: CostModel | None = None) -> None:
        self.verify = verify or CostModel()
        self.draft = CostCurve()
        """Whole drafting passes by the requests that draft."""
        self.expand = CostCurve()
        """Re-entry by leaves."""
        self.ingest_row_s = 0.0
        """Seconds that a drafter takes to ingest one row of a long backlog, at calibration speed."""
        self.pair_s = self.uneven_s = 0.0
        """Seconds of one padded (row, key) pair of attention in all layers, and of requests of different widths at all, at
        calibration speed; 0: nothing is padded."""
        self._skew = 1.0  # EMA of the longest context over the mean one, in rounds of several requests
        self._padding_s: dict[int, float] = {}  # by log2 of the requests: EMA of what it cost drafted rounds
        self._aux_s: dict[bool, float] = {}  # drafted? -> EMA of round - draft - verify, per round

    @property
    def speed(self) -> float:
        """Time now over time at calibration."""
        return self.verify.speed

    def round_s(self, rows: float, num_drafting: int, context_rows: int, num_requests: int) -> float:
        """A round of so many packed rows, for some of whose requests a drafter is called."""
        if num_drafting > 0:
            verify_s = self.drafted_verify_s(rows, context_rows, num_requests)
        else:
            verify_s = self.verify.seconds(rows, context_rows, num_requests)
        return verify_s + self.draft_s(num_drafting) + self.aux_s(num_drafting)

    def plain_s(self, seen: RoundObservation) -> float:
        """What a drafted round would have taken had nobody drafted, by its verify forward and the calibrated shape."""
        num_requests, context_rows = len(seen.keys), seen.context_rows
        plain_s = self.verify.seconds(num_requests, context_rows, num_requests)
        drafted_s = self.verify.seconds(num_requests + sum(seen.num_nodes), context_rows, num_requests)
        return (seen.verify_s - self._padded_s(seen)) * plain_s / drafted_s + self.aux_s(0)

    def _padded_s(self, seen: RoundObservation) -> float:
        """Part of a round's verify forward that went into padding."""
        num_requests = len(seen.keys)
        if self.pair_s <= 0 or True not in seen.is_drafted:
            return 0.0
        padding = self.padding(seen.context_rows, num_requests)
        if padding is None:
            return 0.0
        num_rows = num_requests + sum(seen.num_nodes)
        return min(padding.seconds(num_requests, 1 + max(seen.num_nodes), num_rows), seen.verify_s / 2)

    def drafted_verify_s(self, rows: float, context_rows: int, num_requests: int) -> float:
        """The verify forward of a drafted round, with what padding has taken in such rounds."""
        padding_s = self._padding_s.get(log2_bucket(num_requests), 0.0)
        return self.verify.seconds(rows, context_rows, num_requests) + padding_s * self.speed

    def padding(self, context_rows: int, num_requests: int) -> Padding | None:
        """What padding costs a round of several requests; None: nothing is padded."""
        if self.pair_s <= 0 or num_requests < 2:
            return None
        pair_s = self.pair_s * self.speed
        return Padding(
            uneven_s=self.uneven_s * self.speed,
            pair_s=pair_s,
            keys=self._skew * context_rows / num_requests,
            max_s=_MAX_PAIRS * pair_s,
        )

    def alone_s(
        self, verify_s: float, num_rows: int, num_prompt_rows: int, context_rows: int, num_requests: int
    ) -> float:
        """Part of a forward that took prompt rows along which its tree rows would have taken alone: few of them cost much more
        than their share by number. What slows the machine down slows both parts."""
        alone_s = self.verify.seconds(num_rows, context_rows, num_requests)
        return verify_s * alone_s / self.verify.seconds(num_rows + num_prompt_rows, context_rows, num_requests)

    def aux_s(self, num_drafting: int) -> float:
        """What a round takes outside drafting and verify."""
        return self._aux_s.get(num_drafting > 0, self._aux_s.get(num_drafting == 0, 0.0)) * self.speed

    def draft_s(self, num_drafting: int) -> float:
        """Drafting for so many requests; a guess of 0.4 plain forwards until measured."""
        if num_drafting == 0:
            return 0.0
        if not self.draft.is_known:
            return 0.4 * self.verify.seconds(1) * math.sqrt(num_drafting)
        return self.draft.seconds(num_drafting) * self.speed

    def draft_ratio(self, nodes: float, context_rows: int, num_requests: int) -> float:
        """Plain rounds that a round takes in which every request drafts and gets so many nodes; at least 1."""
        rows = num_requests * (1 + round(nodes))
        drafted_s = self.round_s(rows, num_requests, context_rows, num_requests)
        return max(drafted_s / self.round_s(num_requests, 0, context_rows, num_requests), 1.0)

    def catch_up_s(self, num_rows: int) -> float:
        """Ingesting so many rows of long backlogs."""
        return num_rows * self.ingest_row_s * self.speed

    def row_s(self, context_rows: int, num_requests: int) -> float:
        """One more row of a verify forward that has a draft node a request already."""
        rows = 2 * num_requests
        more = self.verify.seconds(rows + 8, context_rows, num_requests)
        return (more - self.verify.seconds(rows, context_rows, num_requests)) / 8

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        num_requests, num_drafting = len(seen.keys), sum(seen.is_drafted)
        num_rows = num_requests + sum(seen.num_nodes)
        if num_requests > 1 and seen.longest_context is not None and seen.context_rows > 0:
            self._skew += _RATE * (seen.longest_context * num_requests / seen.context_rows - self._skew)
        padding_s = self._padded_s(seen)
        if num_drafting > 0 and self.pair_s > 0 and num_requests > 1:
            bucket = log2_bucket(num_requests)
            old_s = self._padding_s.get(bucket, padding_s / self.speed)
            self._padding_s[bucket] = old_s + _RATE * (padding_s / self.speed - old_s)
        self.verify.observe(num_rows, seen.context_rows, seen.verify_s - padding_s, num_requests)
        speed = self.speed
        aux = max(seen.round_s - seen.draft_s - seen.verify_s, 0.0) / speed
        old = self._aux_s.get(num_drafting > 0)
        # one hiccup must not look like a regime
        self._aux_s[num_drafting > 0] = aux if not old else old + _RATE * (min(aux, 4 * old) - old)
        if num_drafting > 0 and not seen.has_text_turns and seen.num_new_rows <= 12 * num_drafting:
            self.draft.observe(num_drafting, seen.draft_s / speed)
        if seen.num_catch_up_rows > 0:
            row_s = seen.catch_up_s / seen.num_catch_up_rows / speed
            if self.ingest_row_s:  # a hiccup is not what rows take
                row_s = min(row_s, 4 * self.ingest_row_s)
            self.ingest_row_s += (0.2 if self.ingest_row_s else 1.0) * (row_s - self.ingest_row_s)
        if seen.num_leaves > 0 and not seen.has_text_turns:
            self.expand.observe(seen.num_leaves, seen.expand_s / speed)
