"""Switch: decides for every traffic class and batch size whether drafting makes more tokens per second than plain decoding.

A drafted round emits `tokens` for a request and takes `time` plain rounds of the same batch: drafting pays while
tokens > time, and in a batch with others while it makes more of its time than they do. What a class has lost within its
MEMORY is the mean loss of a round times the rounds; it stops drafting once that exceeds what is allowed: LOSS at first, nothing
once the memory is full. Of gains it remembers CREDIT. A class that is off is probed for PROBE_ROUNDS, and on as long as the probe gains, until past and
present together pay. Plain rounds interrupt drafting now and then, to compare times.
Both kinds of probe cost TreeConfig.probe_share of the time in the long run; max_probe_rounds and max_probe_s bound the wait
whatever was measured. Times are compared only across a change of mode (`_Pace`): all else that moves them is the machine.
Every method is a pure function of its arguments and the observations so far; no clock, no randomness.

Shape legend: B requests of the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import TreeConfig
from paceline.serving.budget.cost_model import log2_bucket
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, RoundObservation

MEMORY = 512
"""Drafted rounds that the mean of emitted tokens remembers. Answers differ: about ten lone ones are behind a full memory."""
LOSS = 16.0
"""Rounds that an early verdict may cost. After n rounds it lets the mean be LOSS / n below what pays: about the standard error
that one lone answer leaves (half of its mean after 30 rounds)."""
PAST = 64
"""Rounds that the past counts for in a probe, at most, so that a few probes overrule any past."""
CREDIT = 64.0
"""Rounds of gain that are remembered, at most, so that what pays well and then no more is noticed as soon as what pays little."""
PROBE_REQUESTS = 4
"""Requests that a trial or probe drafts for, at most: they tell as much as all of a large batch and cost less."""
PROBE_ROUNDS = 4
"""Least rounds of a trial or probe; catching up after plain rounds is paid once for all of them."""
PROBE_NODES = 4
"""Least nodes of a request in a trial or probe: where none is verified nothing is learnt."""
FIRST_WAIT = 16
"""Least rounds between probes."""
EARLY = 8
"""How often probes come right after drafting has stopped, over the long run; from probe to probe the wait doubles until then."""
FIRST_PLAIN = 3
"""Plain rounds with which a batch size begins, for a pace to compare with."""
CONTACT = 8
"""Rounds after a change of mode in which the times of both modes are compared."""
FREE_BACKLOG = 16
"""Rows that a drafter ingests in passing."""
_RATE = 0.1
"""Least weight of one round in the machine's pace or in a class's time."""
_MAX_MISS = 0.7
"""Largest logarithm of measured over expected time that counts: hiccups of any length are all alike."""


@dataclass(slots=True)
class Record:
    """What is known of drafting for one class at one batch size."""

    state: str = "trial"
    """trial | on | off | probe."""
    tokens: float = 0.0
    """Mean of the tokens that a drafted round emits for a request, bonus included."""
    weight: int = 0
    """Rounds behind it, at most MEMORY."""
    nodes: float = PROBE_NODES
    """Mean of the nodes of a drafted request."""
    time: float = 1.0
    """Plain rounds that a round takes in which all requests draft; a forecast until measured."""
    num_times: float = 0.0
    """Rounds' worth of measurements behind it."""
    left: int = PROBE_ROUNDS
    """Rounds until a trial or probe may end."""
    gain: float = 0.0
    """Tokens that the trial or probe has gained for a request by itself."""
    cost: float = 0.0
    """Plain rounds that it has lost, catching up included."""
    wait: float = 0.0
    """Rounds until the next probe; counts down while nothing is drafted."""
    due_s: float = 0.0
    """Busy seconds of the engine at which it comes at the latest."""
    num_lost: int = 0
    """Probes in a row after which drafting stayed off."""

    @property
    def is_probing(self) -> bool:
        """Whether the class is on trial or probed."""
        return self.state in ("trial", "probe")

    def begin(self, state: str) -> None:
        """Begin a trial or probe."""
        self.state, self.left, self.gain, self.cost = state, PROBE_ROUNDS, 0.0, 0.0
        self.weight = min(self.weight, PAST) if state == "probe" else 0

    def note(self, tokens: float, nodes: float) -> None:
        """Fold the means of one drafted round."""
        self.weight = min(self.weight + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.weight
        self.nodes += (nodes - self.nodes) / self.weight


@dataclass(slots=True)
class _Pace:
    """How fast the machine is now at one batch size, in plain rounds, whichever mode runs."""

    scale: float = 0.0
    """Seconds of a plain round over its forecast."""
    num_plain: int = 0
    is_drafted: bool = False
    """Mode of the latest round."""
    since_change: int = 0
    """Rounds in this mode."""
    before: int = 0
    """Rounds that the other mode had run then."""
    num_contacts: int = 0
    """Times that plain decoding was compared with the drafting before it."""

    def turn(self, *, is_drafted: bool) -> None:
        """Note the mode of a round."""
        if is_drafted != self.is_drafted:
            self.before, self.since_change, self.is_drafted = self.since_change, 0, is_drafted
        self.since_change += 1

    @property
    def is_contact(self) -> bool:
        """Whether the other mode has told the pace just now: then a round that misses it tells of the modes' times."""
        return self.before >= FIRST_PLAIN and self.since_change <= CONTACT


class Switch:
    """One per engine; the engine's thread only, but for `states`. The engine bounds versions and buckets."""

    def __init__(self, config: TreeConfig, costs: RoundCosts) -> None:
        self._config = config
        self._costs = costs
        self._records: dict[tuple[DraftKey, int], Record] = {}  # by class and log2 of the batch size
        self._latest: dict[DraftKey, Record] = {}
        self._paces: dict[int, _Pace] = {}
        self._busy_s = 0.0

    def record(self, key: DraftKey, num_requests: int) -> Record:
        """What decides for a class. A new batch size begins as the nearest one that the class knows; a new class has a trial
        of its own, with the times of its version."""
        size = log2_bucket(num_requests)
        found = self._records.get((key, size))
        if found is None:
            alike = [at for at in self._records if at[0][0] == key[0] and at[0][2] == key[2]]
            if not alike:
                found = Record()
            else:
                near = min(alike, key=lambda at: (at[0] != key, abs(at[1] - size), at[1]))
                known = self._records[near]
                found = replace(known, weight=min(known.weight, PAST), num_times=0.0)
                if near[0] != key:
                    found.wait, found.num_lost = 0.0, 0
                    found.begin("trial")
            self._records[key, size] = found
        return found

    def is_probing(self, key: DraftKey, num_requests: int) -> bool:
        """Whether the class is on trial or probed in this round."""
        return self.record(key, num_requests).is_probing

    def states(self) -> list[tuple[DraftKey, str]]:
        """Every class with trial | on | off | probe at its latest batch size; from any thread, may be a round old."""
        return [(key, record.state) for key, record in self._latest.copy().items()]

    def forget(self, version: str) -> None:
        """Drop what is known of a drafter version."""
        self._records = {at: record for at, record in self._records.items() if at[0][0] != version}
        self._latest = {key: record for key, record in self._latest.items() if key[0] != version}

    def wants(
        self,
        keys: Sequence[DraftKey | None],
        context_rows: int,
        backlogs: Sequence[int],
        horizons: Sequence[int],
    ) -> list[bool]:
        """Which of the B requests draft in this round. Call once a round: waits count down.

        keys: None where there is no drafter. backlogs: rows that the drafter would have to ingest first. horizons: tokens
        that each request is expected to get still; catching up must pay within them.
        """
        num_requests, wants = len(keys), [False] * len(keys)
        rows = _rows(keys)
        pace = self._paces.setdefault(log2_bucket(num_requests), _Pace())
        if not rows or pace.num_plain < FIRST_PLAIN:
            return wants
        on: list[tuple[Record, list[int]]] = []
        for key, own in rows.items():
            record = self._latest[key] = self.record(key, num_requests)
            if record.num_times < 1:
                record.time = self._forecast(record.nodes, context_rows, num_requests)
            if record.wait > 0:
                record.wait -= 1
                if record.wait <= 0 or self._busy_s >= record.due_s:
                    record.wait = 0.0
                    self._begin_probe(record, context_rows, num_requests)
            if record.state != "off":
                on.append((record, own))
        tokens, time = _sums([(record, len(own)) for record, own in on if record.state == "on"], num_requests)
        saved = max(1 - time / tokens, 0.0)  # of a plain round
        if pace.is_drafted and pace.since_change >= self._wait(saved, pace.num_contacts):
            return wants
        saved_s = self._plain_s(context_rows, num_requests) / num_requests * saved  # a token
        for record, own in on:
            if record.is_probing:
                for i in _probed(own, backlogs):
                    wants[i] = True
                continue
            for i in own:
                wants[i] = backlogs[i] <= FREE_BACKLOG or self._costs.catch_up_s(backlogs[i]) <= horizons[i] * saved_s
            if any(wants[i] for i in own):
                record.wait = 0.0
            elif record.wait <= 0:  # catching up pays for none
                self._rest(record, self._config.max_probe_rounds)
        return wants

    def _rest(self, record: Record, num_rounds: float) -> None:
        record.wait, record.due_s = num_rounds, self._busy_s + self._config.max_probe_s

    def _wait(self, cost: float, num_before: int) -> float:
        """Rounds until the next probe, of which each costs so many plain rounds, after so many alike."""
        paid = cost / self._config.probe_share * min(2.0**num_before / EARLY, 1.0)
        return min(max(paid, FIRST_WAIT), self._config.max_probe_rounds)

    def _begin_probe(self, record: Record, context_rows: int, num_requests: int) -> None:
        record.begin("probe")
        if num_requests > PROBE_REQUESTS:  # no whole batch will tell: measured times grow old
            record.time = math.sqrt(record.time * self._forecast(record.nodes, context_rows, num_requests))

    def _plain_s(self, context_rows: int, num_requests: int) -> float:
        return self._forecast_s(context_rows, num_requests) * self._paces[log2_bucket(num_requests)].scale

    def _forecast_s(self, context_rows: int, num_requests: int) -> float:
        """Seconds of a plain forward as they were at start: only its shape over sizes and contexts matters."""
        return float(self._costs.verify.prior(num_requests, context_rows, num_requests))

    def _forecast(self, nodes: float, context_rows: int, num_requests: int) -> float:
        """Plain rounds of a round that drafts so many nodes for every request, from the measured costs of its parts."""
        rows = num_requests * (1 + round(nodes))
        drafted_s = self._costs.round_s(rows, num_requests, context_rows, num_requests)
        return max(drafted_s / self._costs.round_s(num_requests, 0, context_rows, num_requests), 1.0)

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        if not seen.round_s > 0:
            return
        num_requests = len(seen.keys)
        self._busy_s += seen.round_s + seen.catch_up_s
        size = log2_bucket(num_requests)
        pace = self._paces.setdefault(size, _Pace())
        drafted = _rows([k if d else None for k, d in zip(seen.keys, seen.is_drafted, strict=True)])
        pace.turn(is_drafted=bool(drafted))
        if not drafted:
            known = [self._records.get((key, size)) for key in dict.fromkeys(seen.keys) if key is not None]
            self._learn_plain(pace, seen, [r for r in known if r is not None and r.state == "on"])
        elif pace.scale > 0:
            records = [(self.record(key, num_requests), own) for key, own in drafted.items()]
            self._learn_time(pace, seen, records)
            self._book(seen, records)

    def _learn_plain(self, pace: _Pace, seen: RoundObservation, records: list[Record]) -> None:
        """records: those that would have drafted."""
        ratio = seen.round_s / self._forecast_s(seen.context_rows, len(seen.keys))
        pace.num_plain += 1
        if pace.scale <= 0:
            pace.scale = ratio
            return
        miss, rate = _clipped(ratio / pace.scale), _RATE
        if pace.is_contact and pace.num_plain > FIRST_PLAIN:
            if pace.since_change == 1:
                pace.num_contacts += 1
            rate = max(_RATE, 1 / (1 + pace.num_contacts))
            for record in records:
                record.time = max(record.time * math.exp(-rate * miss), 1.0)
        pace.scale *= math.exp(max(rate, 1 / pace.num_plain) * miss)

    def _learn_time(self, pace: _Pace, seen: RoundObservation, records: list[tuple[Record, list[int]]]) -> None:
        num_requests = len(seen.keys)
        _, total = _sums([(record, len(own)) for record, own in records], num_requests)
        expected = total / num_requests
        miss = _clipped(seen.round_s / (self._plain_s(seen.context_rows, num_requests) * expected))
        if not pace.is_contact:
            pace.scale *= math.exp(_RATE * miss)
            return
        for record, own in records:
            share = len(own) / num_requests * record.time / expected  # of the round's time that the class answers for
            record.num_times += share
            rate = max(_RATE, share / record.num_times)
            record.time = max(record.time * math.exp(rate * share * miss), 1.0)

    def _book(self, seen: RoundObservation, records: list[tuple[Record, list[int]]]) -> None:
        """Enter one drafted round into the accounts."""
        num_requests = len(seen.keys)
        took = (seen.round_s + seen.catch_up_s) / self._plain_s(seen.context_rows, num_requests)
        made = 1 + sum(seen.num_accepted_tokens) / num_requests
        tokens, time = _sums([(record, len(own)) for record, own in records], num_requests)
        for record, own in records:
            count = len(own)
            # What the batch makes without the class is what the class's time would bring otherwise.
            others = max((tokens - count * max(record.tokens - 1, 0)) / (time - count * (record.time - 1)), 1.0)
            worth = 1 + others * (record.time - 1)
            emitted = 1 + sum(seen.num_accepted_tokens[i] for i in own) / count
            record.note(emitted, sum(seen.num_nodes[i] for i in own) / count)
            if record.is_probing:
                record.left, record.gain = record.left - 1, record.gain + emitted - worth
                record.cost += took - made / others if record.state == "probe" else 0.0
            if record.left <= 0:
                self._judge(record, worth)

    def _judge(self, record: Record, worth: float) -> None:
        """worth: tokens that the time of a drafted round would bring otherwise."""
        balance = (record.tokens / worth - 1) * record.weight  # rounds gained within the memory
        if balance > 0:
            record.state, record.cost = "on", 0.0
            if balance >= LOSS:
                record.num_lost = 0
            if balance > CREDIT:
                record.weight = max(int(record.weight * CREDIT / balance), min(record.weight, PAST))
            return
        if record.state == "probe":
            is_over = record.gain <= 0  # the past may say no and the present yes: more of it
        else:
            is_over = -balance > LOSS * (1 - record.weight / MEMORY)
        if is_over:
            self._rest(record, self._wait(record.cost, record.num_lost))
            record.num_lost += 1
            record.state, record.cost = "off", 0.0


def _rows(keys: Sequence[DraftKey | None]) -> dict[DraftKey, list[int]]:
    """The requests of every class."""
    rows: dict[DraftKey, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            rows.setdefault(key, []).append(i)
    return rows


def _sums(records: Sequence[tuple[Record, int]], num_requests: int) -> tuple[float, float]:
    """Tokens, and time in plain rounds, of a batch in which so many requests of each class draft; both times B."""
    tokens = num_requests + sum(count * max(record.tokens - 1, 0) for record, count in records)
    return tokens, num_requests + sum(count * (record.time - 1) for record, count in records)


def _probed(own: list[int], backlogs: Sequence[int]) -> list[int]:
    """Those already drafted for in this probe, else from the middle: the newest are not like the others."""
    if len(own) <= PROBE_REQUESTS:
        return own
    own = sorted(own, key=backlogs.__getitem__)
    start = 0 if backlogs[own[PROBE_REQUESTS - 1]] <= FREE_BACKLOG else (len(own) - PROBE_REQUESTS) // 2
    return own[start : start + PROBE_REQUESTS]


def _clipped(ratio: float) -> float:
    """The logarithm of a measured over an expected time, bounded."""
    return min(max(math.log(ratio), -_MAX_MISS), _MAX_MISS)
