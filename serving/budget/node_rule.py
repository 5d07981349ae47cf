"""Node rules: how many nodes each request of a drafted round gets, and which leaves are re-entered.

- `FixedRule` (policies fixed, ddtree, bundle): always max_draft_tokens nodes. DDTree takes the heaviest; JetSpec's trees
  grow by bundles, which is the tree builder's business.
- `RateRule` (policies bastion and adaptive): as many as maximise S(N) = A(N) T_plain / (T_draft + T_aux + T_verify(N, c)).
  BASTION stops before node i as soon as rho_i (T_d + T_aux + T_v(N)) <= A(N) (T_v(N + 1) - T_v(N)). That finds the best N
  only where T_v is convex. Measured verify times are staircases (tiles, captured sizes): one dear step would stop it in
  front of a cheap plateau. So S is evaluated at every N and the best is taken; with convex times both choose the same N.
Source: tree_speculation.md 3.3 (BASTION, DDTree, CaDDTree) and 4.5.

Shape legend: B requests of the round, M best candidates of a request, F leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.serving.budget.node_split import best_split
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, RoundObservation

_MAX_KEYS = 512
"""Classes remembered: clients name them."""


class NodeRule(Protocol):
    """What a policy decides once its drafter has proposed."""

    def choose(self, masses: np.ndarray, context_rows: int, num_drafting: int) -> np.ndarray:
        """Nodes per request, (B,) int64, from the path masses (B, M) of its candidates, falling, 0 = absent."""
        ...

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """Indices of the leaves of one drafter to re-enter, heaviest first. Call once per group and round.

        keys, masses: (F,) request's key and path mass of each leaf.
        """
        ...

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        ...

    def forget(self, version: str) -> None:
        """Drop what is known of a drafter version."""
        ...


class FixedRule:
    """All nodes that there are, re-entry at all leaves."""

    def choose(self, masses: np.ndarray, context_rows: int, num_drafting: int) -> np.ndarray:
        """See NodeRule."""
        return np.asarray((masses > 0).sum(1))

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """See NodeRule."""
        return sorted(range(len(masses)), key=lambda i: -masses[i])

    def observe(self, seen: RoundObservation) -> None:
        """See NodeRule."""

    def forget(self, version: str) -> None:
        """See NodeRule."""


@dataclass(slots=True)
class _Reentry:
    """What re-entry has brought one class."""

    gain: float = 2.0
    """Decayed sum of tokens accepted in re-entered blocks (with a prior)."""
    mass: float = 2.0
    """Decayed sum of the frontier mass that was re-entered."""
    wait: int = 0
    """Rounds until the next trial expansion."""
    backoff: int = 32


class RateRule:
    """The most expected tokens per second. A batch shares one budget, split where it brings most (node_split.py)."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._reentry: OrderedDict[DraftKey, _Reentry] = OrderedDict()
        self._rate = 0.0  # EMA of tokens per second over rounds

    def choose(self, masses: np.ndarray, context_rows: int, num_drafting: int) -> np.ndarray:
        """See NodeRule; splits every total as node_split.py says."""
        num_requests = masses.shape[0]
        if num_requests == 1:
            return np.array([self._choose_one(masses[0].tolist(), context_rows, num_drafting)])
        available = (masses > 0).sum(1)
        fixed_s = self._costs.draft_s(num_drafting) + self._costs.aux_s(num_drafting)

        def times(start: int, stop: int) -> np.ndarray:
            return self._costs.verify.predict(np.arange(start, stop), context_rows, num_requests) + fixed_s

        return best_split(masses, available, times, self._costs.padding(context_rows, num_requests))

    def _choose_one(self, masses: Sequence[float], context_rows: int, num_drafting: int) -> int:
        """`choose` for a lone request, without arrays; masses: falling, 0 = absent."""
        fixed_s = self._costs.draft_s(num_drafting) + self._costs.aux_s(num_drafting)
        times = self._costs.verify.up_to(1 + len(masses), context_rows)
        best, best_rate, gain = 0, 1.0 / (fixed_s + times[1]), 1.0
        for num, mass in enumerate(masses, 1):
            if mass <= 0:
                break
            gain += mass
            rate = gain / (fixed_s + times[1 + num])
            if rate > best_rate:
                best, best_rate = num, rate
        return best

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """Those that earn more tokens than the time they take would bring (re-entry rule, tree_speculation.md 4.5),
        evaluated over all numbers of leaves."""
        order = sorted(range(len(masses)), key=lambda i: -masses[i])
        if not self._costs.expand.is_known or self._rate <= 0 or not order:
            return order
        rate = self._rate * self._costs.speed
        row_s = self._costs.row_s(context_rows, num_requests)
        worth = {key: stats.gain / stats.mass for key in set(keys) for stats in (self._stats(key),)}
        best, best_gain, gain, rows_rate = 0, 0.0, 0.0, self._rate * row_s
        for num, (i, expand_s) in enumerate(zip(order, self._costs.expand.up_to(len(order)), strict=True), 1):
            gain += masses[i] * worth[keys[i]]
            net = gain - rate * expand_s - rows_rate * num
            if net > best_gain:
                best, best_gain = num, net
        if best:
            return order[:best]
        first = self._stats(keys[order[0]])
        if first.wait > 0:
            first.wait -= 1
            return []
        first.wait = first.backoff
        first.backoff = min(2 * first.backoff, 1024)
        return order[:4]

    def observe(self, seen: RoundObservation) -> None:
        """See NodeRule."""
        if seen.round_s > 0:
            now = (len(seen.keys) + sum(seen.num_accepted_tokens)) / seen.round_s
            self._rate += (0.05 if self._rate > 0 else 1.0) * (now - self._rate)
        if not seen.frontier_mass:
            return
        rows: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(seen.keys):
            if key is not None and seen.is_drafted[i]:
                rows.setdefault(key, []).append(i)
        for key, own in rows.items():
            stats = self._stats(key)
            stats.gain = stats.gain * 0.98 + sum(seen.num_accepted_tokens_reentered[i] for i in own)
            stats.mass = stats.mass * 0.98 + sum(seen.frontier_mass[i] for i in own)
            if stats.gain > 2.0:
                stats.backoff = 32

    def _stats(self, key: DraftKey) -> _Reentry:
        found = self._reentry.get(key)
        if found is None:
            found = self._reentry[key] = _Reentry()
            if len(self._reentry) > _MAX_KEYS:
                self._reentry.popitem(last=False)
        else:
            self._reentry.move_to_end(key)
        return found

    def forget(self, version: str) -> None:
        """Drop what is known of a drafter version."""
        for key in [k for k in self._reentry if k[0] == version]:
            del self._reentry[key]
