"""How many draft nodes, if any, does each request of a round get?

Two questions, both answered in tokens per second: `wants_draft` (is calling the drafter worth its time, per drafter
version, traffic bucket and greedy or sampled?) and `choose` (how many nodes, given the masses that it proposed?).
Source: BASTION's rate argmax (tree_speculation.md 3.3, 4.5), evaluated over all budgets, jointly over the batch.
Every method is a pure function of its arguments and the observations so far; no clock, no randomness.

Shape legend: B requests of the round, M best candidates of a request.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import numpy as np

from paceline.config import TreeConfig
from paceline.serving.budget.batch_guard import BatchGuard
from paceline.serving.budget.cost_model import CostModel, log2_bucket
from paceline.serving.budget.node_split import best_split
from paceline.serving.budget.request_record import DraftRecord
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, KeyStats, RoundObservation

_MAX_KEYS = 512  # buckets are named by clients: bound what they can make us remember


class BudgetController:
    """Decides from measured costs; one per engine."""

    TRIAL_ROUNDS = 12
    TRIAL_SHARE = 16
    """One request in so many, at least one, drafts in a trial or probe: that costs a batch little and tells as much."""
    PROBE_ROUNDS = 4
    FILLING_SHARE = 4
    """A batch of B fills up while more than B over this many prompts are being read."""
    FREE_BACKLOG = 16
    """Rows that cost next to nothing beside a round's own."""
    MAX_WEIGHT = 40.0
    MAX_LOSSES = 6.0
    """More lost rounds than this in a row are no accident: the average then forgets."""
    SHORT_WEIGHT = 6.0
    PROBE_SHARE = 0.015
    """Largest share of plain decoding's time that probing may lose; halves with every losing probe."""
    MIN_PROBE_SHARE = 0.001
    BATCH_PROBE_SHARE = 0.2
    """Of these shares in a batch, where there is less to win."""
    PLAIN_EVERY = 128
    """While the advantage of drafting is small, one plain round in this many keeps plain decoding's cost honest."""

    def __init__(self, config: TreeConfig, cost: CostModel | None = None) -> None:
        self.config = config
        self.costs = RoundCosts(cost)
        self._stats: OrderedDict[DraftKey, KeyStats] = OrderedDict()
        self._guards: defaultdict[int, BatchGuard] = defaultdict(BatchGuard)  # by log2 of the requests
        self._rate = 0.0  # EMA of tokens per second over rounds
        nonzero = [n for n in config.node_buckets if 0 < n <= config.max_draft_tokens] or [config.max_draft_tokens]
        self.node_options: Sequence[int] = (0, *nonzero)
        """Numbers of nodes that a lone request chooses among, rising from 0."""
        self._forced_nodes = nonzero[min(1, len(nonzero) - 1)]

    def stats(self, key: DraftKey) -> KeyStats:
        """The statistics of a key, made on first use (for tests and metrics)."""
        found = self._stats.get(key)
        if found is None:
            if len(self._stats) >= _MAX_KEYS:
                self._stats.popitem(last=False)
            found = self._stats[key] = KeyStats(rounds_left=self.TRIAL_ROUNDS, share=self.PROBE_SHARE)
        else:
            self._stats.move_to_end(key)
        return found

    def states(self) -> list[tuple[DraftKey, str]]:
        """Every key with its KeyStats.state; from any thread, may be one round old."""
        for _ in range(20):
            try:
                return [(key, stats.state) for key, stats in list(self._stats.items())]
            except RuntimeError:  # the engine's thread met a new key meanwhile
                continue
        return []

    def forget(self, version: str) -> None:
        """Drop the statistics of a drafter version."""
        for key in [k for k in self._stats if k[0] == version]:
            del self._stats[key]

    # Whether to draft

    def wants_draft(
        self,
        keys: Sequence[DraftKey | None],
        context_rows: int,
        backlogs: Sequence[int] | None = None,
        horizons: Sequence[int] | None = None,
        records: Sequence[DraftRecord] | None = None,
        num_filling: int = 0,
    ) -> list[bool]:
        """Which of the B requests to draft for; None = has no drafter. Call once per round: it moves probe states.

        New keys draft for a short trial with a few of their requests; keys known to lose decode plainly and draft again
        in rare probes; among the rest, the set with the highest rate (tokens per second) drafts.

        backlogs: (B,) rows that a drafter would have to ingest first; None = none. Trials prefer requests with few.
        horizons: (B,) tokens that each request is expected to get still: a backlog must pay for itself within them.
        records: (B,) how drafting went for each request; those for which it does not pay sit out for a while.
        num_filling: requests whose prompts are being read. A batch that fills up decodes plainly, in short rounds: a token
            is dearer in it than it will be in the full one.
        """
        rows: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(keys):
            if key is not None:
                rows.setdefault(key, []).append(i)
        if not self.config.is_adaptive:
            return [k is not None for k in keys]
        if num_filling * self.FILLING_SHARE > len(keys) > 1:
            return [False] * len(keys)
        few = max(1, len(keys) // self.TRIAL_SHARE)
        is_locked = len(keys) > 1 and self._guards[log2_bucket(len(keys))].forbids()
        num = {key: len(own) for key, own in rows.items()}
        forced: list[DraftKey] = []
        known: list[DraftKey] = []
        for key, own in rows.items():
            stats = self.stats(key)
            least = min((backlogs[i] for i in own), default=0) if backlogs is not None else 0
            self._advance(key, stats, min(num[key], few), len(keys), context_rows, least)
            if is_locked:
                continue
            if stats.state in ("trial", "probe"):
                num[key] = min(num[key], few)
                forced.append(key)
            else:
                known.append(key)
        known.sort(key=lambda k: -self._stats[k].num_accepted_tokens)
        rate, value = self._rate_of(forced, num, len(keys), context_rows), len(forced)
        base, first = rate, value
        for i in range(1, len(known) + 1):
            drafting = forced + known[:i]
            slack = self._stats[known[i - 1]].slack(len(keys))
            new = self._rate_of(drafting, num, len(keys), context_rows) * slack
            if new > rate:
                rate, value = new, len(drafting)
        chosen = set((forced + known)[:value])
        for key in known:
            self._switch(key, key in chosen)
        if value > first and rate < 1.25 * base:
            for key in chosen - set(forced):
                stats = self._stats[key]
                stats.rounds_on += 1
                if stats.rounds_on % self.PLAIN_EVERY == 0:
                    chosen.discard(key)
        wants = [False] * len(keys)
        saved_s = 1 / base - 1 / rate if rate > base else 0.0  # a token
        for key in chosen:
            own = rows[key]
            if len(own) > num[key]:
                own = sorted(own, key=backlogs.__getitem__)[: num[key]] if backlogs is not None else own[: num[key]]
            elif backlogs is not None and horizons is not None and key not in forced:
                own = [i for i in own if self._repays(backlogs[i], horizons[i] * saved_s)]
            if records is not None and key not in forced:
                break_even = self._break_even(self._stats[key], len(keys), num[key], context_rows)
                own = [i for i in own if not records[i].sit_out(break_even)]
            for i in own:
                wants[i] = True
        return wants

    def _break_even(self, stats: KeyStats, num_requests: int, num_drafting: int, context_rows: int) -> float:
        """Accepted tokens per round at which drafting for one request of a batch is worth its share of the time."""
        plain_s = self.costs.verify.seconds(num_requests, context_rows, num_requests)
        num_rows = num_requests + num_drafting * stats.num_nodes
        rows_s = (self.costs.drafted_verify_s(num_rows, context_rows, num_requests) - plain_s) / num_drafting
        return (self.costs.draft_s(num_drafting) / num_drafting + rows_s) * num_requests / plain_s

    def _repays(self, backlog: int, gain_s: float) -> bool:
        """Whether catching up with so many rows costs less than half of what drafting then gains."""
        return backlog <= self.FREE_BACKLOG or self.costs.catch_up_s(backlog) <= gain_s / 2

    def _switch(self, key: DraftKey, is_on: bool) -> None:
        stats = self._stats[key]
        if is_on and stats.state != "on":
            stats.state, stats.share, stats.credit_s = "on", self.PROBE_SHARE, min(stats.credit_s, 0.0)
            stats.losses = 0.0
        elif not is_on and stats.state == "on":
            stats.state = "off"

    def _advance(
        self, key: DraftKey, stats: KeyStats, num: int, num_requests: int, context_rows: int, backlog: int
    ) -> None:
        """End trials and probes, start probes. backlog: rows that each of `num` requests would have to catch up with."""
        if stats.state in ("trial", "probe"):
            is_hopeless = stats.state == "trial" and stats.weight >= 6 and not self._pays(key, stats, context_rows, 1.2)
            if stats.rounds_left > 0 and not is_hopeless:
                return
            is_paying = self._pays(key, stats, context_rows, 1.0)
            if stats.state == "probe" and not is_paying:
                stats.share = max(stats.share / 2, self.MIN_PROBE_SHARE)
            stats.state, stats.rounds_left = ("on" if is_paying else "off"), 0
        elif stats.state == "off":
            plain_s = self.costs.verify.seconds(num_requests, context_rows, num_requests)
            added_s = self.costs.draft_s(num) - plain_s
            added_s += self.costs.drafted_verify_s(num_requests + num * self._forced_nodes, context_rows, num_requests)
            catch_up_s = self.costs.catch_up_s(num * backlog)
            if stats.credit_s >= self.PROBE_ROUNDS * added_s + catch_up_s:
                stats.state, stats.rounds_left = "probe", self.PROBE_ROUNDS
                stats.weight = min(stats.weight, self.PROBE_ROUNDS / 2)  # the probe outweighs the past

    def _pays(self, key: DraftKey, stats: KeyStats, context_rows: int, benefit: float) -> bool:
        """Whether this key alone would decode faster with drafting, its acceptance taken `benefit` times."""
        plain = self._rate_of([], {}, 1, context_rows)
        time_s = self.costs.round_s(1 + stats.num_nodes, 1, context_rows, 1)
        return (1 + benefit * stats.num_accepted_tokens) / time_s > plain

    def _rate_of(
        self, drafting: Sequence[DraftKey], num: dict[DraftKey, int], num_requests: int, context_rows: int
    ) -> float:
        """Expected tokens per second when the requests of these keys draft."""
        tokens = rows = float(num_requests)
        num_drafting = 0
        for key in drafting:
            stats = self._stats[key]
            tokens += num[key] * stats.num_accepted_tokens
            rows += num[key] * stats.num_nodes
            num_drafting += num[key]
        return tokens / self.costs.round_s(rows, num_drafting, context_rows, num_requests)

    # How many nodes

    def choose(
        self, masses: np.ndarray, keys: Sequence[DraftKey | None], context_rows: int, num_drafting: int | None = None
    ) -> np.ndarray:
        """Nodes per request that maximise (B + expected accepted tokens) / (T_draft + T_aux + T_verify(B + nodes)).

        Args:
            masses: (B, M) float64, estimated path masses of the candidates, falling, 0 = absent (or not drafted).
            keys: (B,), to give requests on trial or probe a minimum of nodes, so that they have something to learn from.
            num_drafting: requests the drafter was called for; None = those with any mass.
        Returns: (B,) int64, at most max_draft_tokens each. One request chooses among node_buckets; a batch splits every
        total as node_split.py says.
        """
        num_requests = masses.shape[0]
        masses = masses[:, : self.config.max_draft_tokens]
        available = (masses > 0).sum(1)
        if num_drafting is None:
            num_drafting = int((available > 0).sum())
        if num_requests == 1:
            return np.array([self.choose_one(masses[0, : available[0]].tolist(), keys[0], context_rows, num_drafting)])
        if not self.config.is_adaptive:
            return available
        fixed_s = self.costs.draft_s(num_drafting) + self.costs.aux_s(num_drafting)

        def times(start: int, stop: int) -> np.ndarray:
            return self.costs.verify.predict(np.arange(start, stop), context_rows, num_requests) + fixed_s

        nodes = best_split(masses, available, times, self.costs.padding(context_rows, num_requests))
        forced = {key for key in set(keys) if key is not None and self._is_forced(key)}
        for i, key in enumerate(keys if forced else ()):
            if key in forced and nodes[i] < self._forced_nodes:
                nodes[i] = min(self._forced_nodes, available[i])
        return nodes

    def choose_one(
        self, masses: Sequence[float], key: DraftKey | None, context_rows: int, num_drafting: int = 1
    ) -> int:
        """`choose` for a lone request; masses: estimated path masses of its candidates, falling, all above 0."""
        available = min(len(masses), self.config.max_draft_tokens)
        if not self.config.is_adaptive:
            return available
        fixed_s = self.costs.draft_s(num_drafting) + self.costs.aux_s(num_drafting)
        best, best_rate, gain, taken = 0, 0.0, 1.0, 0
        for option in self.node_options:
            option = min(option, available)
            gain += sum(masses[taken:option])
            taken = option
            rate = gain / (fixed_s + self.costs.verify.seconds(1 + option, context_rows))
            if rate > best_rate:
                best, best_rate = option, rate
            if option == available:
                break
        if key is not None and best < self._forced_nodes and self._is_forced(key):
            best = min(self._forced_nodes, available)
        return best

    def _is_forced(self, key: DraftKey) -> bool:
        stats = self._stats.get(key)
        return stats is not None and stats.state in ("trial", "probe")

    def choose_leaves(
        self, keys: Sequence[DraftKey], masses: Sequence[float], context_rows: int, num_requests: int
    ) -> list[int]:
        """Which leaves of one drafter to re-enter: those that earn more tokens than the time they take would bring
        (re-entry rule, tree_speculation.md 4.5), evaluated over all numbers of leaves.

        keys, masses: (F,) request's key and path mass of each leaf. Call once per group and round: it counts down trials.
        Returns: indices, heaviest first.
        """
        order = sorted(range(len(masses)), key=lambda i: -masses[i])
        if not self.config.is_adaptive or not self.costs.expand.is_known or self._rate <= 0 or not order:
            return order
        rate = self._rate * self.costs.speed
        row_s = self.costs.row_s(context_rows, num_requests)
        found = {key: self._stats.get(key) for key in set(keys)}
        worth = {key: 1.0 if stats is None else stats.expand_gain / stats.expand_mass for key, stats in found.items()}
        best, best_gain, gain, rows_rate = 0, 0.0, 0.0, self._rate * row_s
        for num, (i, expand_s) in enumerate(zip(order, self.costs.expand.up_to(len(order)), strict=True), 1):
            gain += masses[i] * worth[keys[i]]
            net = gain - rate * expand_s - rows_rate * num
            if net > best_gain:
                best, best_gain = num, net
        if best:
            return order[:best]
        first = self.stats(keys[order[0]])
        if first.expand_wait > 0:
            first.expand_wait -= 1
            return []
        first.expand_wait = first.expand_backoff
        first.expand_backoff = min(2 * first.expand_backoff, 1024)
        return order[:4]

    # Learning

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        num_requests = len(seen.keys)
        num_drafting = sum(seen.is_drafted)
        plain_s = self.costs.verify.seconds(num_requests, seen.context_rows, num_requests)
        if num_requests > 1 and seen.round_s > 0:
            forecast_s = self.costs.verify.at_start(num_requests, num_requests)
            tokens_per_request = 1 + sum(seen.num_accepted_tokens) / num_requests
            seconds = seen.round_s + seen.catch_up_s
            guard = self._guards[log2_bucket(num_requests)]
            guard.note(tokens_per_request, seconds, forecast_s, is_drafted=num_drafting > 0)
        self.costs.observe(seen)
        tokens = num_requests + sum(seen.num_accepted_tokens)
        drafted: dict[DraftKey, list[int]] = {}
        plain: dict[DraftKey, int] = {}
        for i, key in enumerate(seen.keys):
            if key is not None:
                if seen.is_drafted[i]:
                    drafted.setdefault(key, []).append(i)
                else:
                    plain[key] = plain.get(key, 0) + 1
        if seen.round_s > 0:
            now = tokens / seen.round_s
            self._rate += (0.05 if self._rate > 0 else 1.0) * (now - self._rate)
        for key, count in plain.items():
            stats = self.stats(key)
            if stats.state == "off":
                share = stats.share if num_requests == 1 else stats.share * self.BATCH_PROBE_SHARE
                stats.credit_s += share * seen.round_s * count / num_requests
        if drafted:
            self._learn_keys(drafted, seen, num_drafting, plain_s)

    def _learn_keys(
        self, drafted: dict[DraftKey, list[int]], seen: RoundObservation, num_drafting: int, plain_s: float
    ) -> None:
        num_requests = len(seen.keys)
        num_rows = num_requests + sum(seen.num_nodes)
        # More than a plain round takes, per drafted request; predicted, because a hiccup would have hit either.
        lost_s = self.costs.draft_s(num_drafting) - plain_s
        lost_s += self.costs.drafted_verify_s(num_rows, seen.context_rows, num_requests)
        lost_s /= num_drafting
        catch_up_s = seen.catch_up_s / num_drafting
        for key, rows in drafted.items():
            self._learn_key(self.stats(key), seen, rows, lost_s, catch_up_s, plain_s / num_requests)

    def _learn_key(
        self, stats: KeyStats, seen: RoundObservation, rows: list[int], lost_s: float, catch_up_s: float, token_s: float
    ) -> None:
        """One observation a round, whatever the batch: requests of one round are alike, and many of them must not make
        the memory short.

        rows: requests of the key that were drafted. lost_s, catch_up_s: per request. token_s: of plain decoding.
        """
        count = len(rows)
        accepted = sum(seen.num_accepted_tokens[i] for i in rows)
        stats.weight = min(stats.weight + 1, self.MAX_WEIGHT)
        stats.num_accepted_tokens += (accepted / count - stats.num_accepted_tokens) / stats.weight
        stats.num_nodes += (sum(seen.num_nodes[i] for i in rows) / count - stats.num_nodes) / stats.weight
        gained_s = accepted * token_s
        if stats.state in ("trial", "probe"):
            stats.credit_s -= (lost_s + catch_up_s) * count - gained_s
            stats.rounds_left -= 1
        elif lost_s > 0:
            stats.losses = max(stats.losses + 1.0 - gained_s / (lost_s * count), 0.0)
            if stats.losses > self.MAX_LOSSES:
                stats.losses, stats.weight = 0.0, min(stats.weight, self.SHORT_WEIGHT)
        if seen.frontier_mass:
            stats.expand_gain = stats.expand_gain * 0.98 + sum(seen.num_accepted_tokens_reentered[i] for i in rows)
            stats.expand_mass = stats.expand_mass * 0.98 + sum(seen.frontier_mass[i] for i in rows)
            if stats.expand_gain > 2.0:
                stats.expand_backoff = 32
