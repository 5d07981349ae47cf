"""Switch: decides for every traffic class and batch size whether drafting makes more tokens per second than plain decoding.

Both rates are measured in plain rounds: drafting a request emits `tokens` per round and takes `time` plain rounds of the
same batch. A class drafts while tokens / time > 1; of several classes in one batch, those draft that make the rate of the
whole batch largest. What is off is drafted again in short probes, what is on is interrupted by single plain rounds: the
price of either kind of probe sets how often it comes, and MAX_WAIT bounds it whatever was measured.
Times are compared only across a change of mode (`_Pace`): everything else that moves them is the machine.
Every method is a pure function of its arguments and the observations so far; no clock, no randomness.

Shape legend: B requests of the round.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.serving.budget.cost_model import log2_bucket
from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, RoundObservation

MAX_KEYS = 512
"""Classes remembered: clients name buckets, so they must not decide how much is kept."""
MEMORY = 128
"""Drafted rounds that the mean of emitted tokens remembers. Answers differ: about four lone ones are behind a verdict."""
TRIAL_ROUNDS = 12
"""Drafted rounds of a class of which nothing alike is known, before the first verdict."""
PROBE_ROUNDS = 4
"""Drafted rounds of a probe; catching up after plain rounds is paid once for all of them."""
PROBE_REQUESTS = 4
"""Requests that a trial or a probe drafts for, at most: they tell as much as all of a large batch and cost less."""
PROBE_NODES = 4
"""Least nodes of a request in a trial or a probe: where none is verified nothing is learnt."""
PAST = 8 * PROBE_ROUNDS
"""Rounds that the past counts for in a probe, at most, so that a few probes overrule any past."""
SHARE, EARLY_SHARE = 0.005, 0.04
"""Part of the time that either kind of probe may cost, in the long run and right after drafting has stopped: from probe to
probe the wait doubles."""
FIRST_WAIT, MAX_WAIT = 16, 512
"""Least and most rounds between probes."""
HOPELESS = 0.75
"""A trial or probe ends after half of its rounds with a rate below this."""
WAIT_REQUESTS = 32
"""A round of more requests than this counts for more than one while waiting: the wait is bounded in tokens, too."""
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
class Probe:
    """What one trial or probe has shown by itself."""

    tokens: float = 0.0
    """Sum of the tokens that its rounds emitted for a request."""
    num_rounds: int = 0
    catch_up: float = 0.0
    """Plain rounds spent on rows that plain rounds had left behind."""


@dataclass(slots=True)
class Record:
    """What is known of drafting for one class at one batch size."""

    tokens: float = 0.0
    """Mean of the tokens that a drafted round emits for a request, bonus included."""
    weight: float = 0.0
    """Rounds behind it, at most MEMORY."""
    time: float | None = None
    """Plain rounds that a round takes in which all requests draft; None: not even predicted yet."""
    num_times: float = 0.0
    """Rounds' worth of measurements behind it."""
    nodes: float = PROBE_NODES
    """Mean of the nodes of a drafted request."""
    left: int = 0
    """Rounds left of a trial or probe."""
    is_idle: bool = False
    """Whether no request drafts: the class is off, or catching up pays for none."""
    wait: float = 0.0
    """Rounds until the next probe; counts down while idle."""
    num_lost: int = 0
    """Probes in a row after which drafting stayed off."""
    probe: Probe | None = None
    """The latest one while it runs or its verdict holds."""
    state: str = "trial"
    """trial | on | off | probe: for metrics."""

    def child(self) -> Record:
        """A record that begins with what is known here."""
        past = min(self.weight, PAST)
        return Record(
            self.tokens, past, self.time, 0.0, self.nodes, self.left, self.is_idle, self.wait, state=self.state
        )

    def begin_probe(self) -> None:
        """Draft for some rounds, whatever the past says."""
        self.state, self.left, self.probe, self.is_idle = "probe", PROBE_ROUNDS, Probe(), False
        self.weight = min(self.weight, PAST)

    def note(self, tokens: float, nodes: float, catch_up: float) -> None:
        """One drafted round; it ends trials and probes that are over."""
        self.weight = min(self.weight + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self.weight
        self.nodes += (nodes - self.nodes) / self.weight
        if self.left == 0:
            return
        self.left -= 1
        self.probe = own = self.probe or Probe()
        own.tokens += tokens
        own.num_rounds += 1
        own.catch_up += catch_up
        own_rate, time = own.tokens / own.num_rounds, self.time or 1.0
        half = (TRIAL_ROUNDS if self.state == "trial" else PROBE_ROUNDS) / 2
        if own.num_rounds >= half and max(own_rate, self.tokens) < HOPELESS * time:
            self.left = 0
        if self.left == 0 and self.tokens <= time < own_rate:  # the past says no and the present yes: more of it
            self.left = PROBE_ROUNDS


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
    def since_plain(self) -> int:
        """Drafted rounds since the latest plain one."""
        return self.since_change if self.is_drafted else 0

    @property
    def is_contact(self) -> bool:
        """Whether the other mode has told the pace just now: then a round that misses it tells of the modes' times."""
        return self.before >= FIRST_PLAIN and self.since_change <= CONTACT


@dataclass(slots=True)
class _Class:
    """One key's records by log2 of the batch size."""

    records: dict[int, Record] = field(default_factory=dict)
    latest: int = 0
    """Batch size (log2) of the latest decision."""

    def near(self, size: int) -> Record | None:
        """The record of the nearest batch size at which the class has drafted; the smaller of two."""
        known = [s for s, r in self.records.items() if r.weight > 0]
        return self.records[min(known, key=lambda s: (abs(s - size), s))] if known else None


class Switch:
    """One per engine; the engine's thread only, but for `states`."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._classes: OrderedDict[DraftKey, _Class] = OrderedDict()
        self._versions: OrderedDict[tuple[str, bool], _Class] = OrderedDict()
        """What all buckets of a version have shown, greedy and sampled apart: where new buckets begin."""
        self._paces: dict[int, _Pace] = {}

    def record(self, key: DraftKey, num_requests: int) -> Record:
        """What decides for a class: its own record, until it has drafted that of its version."""
        size = log2_bucket(num_requests)
        own = self._classes.get(key)
        version = self._class(self._versions, (key[0], key[2]))
        for known in (own, version):
            if known is not None and size in known.records:
                return known.records[size]
            near = None if known is None else known.near(size)
            if known is not None and near is not None:
                found = known.records[size] = near.child()
                found.time, found.left = None, 0
                return found
        return version.records.setdefault(size, Record(left=TRIAL_ROUNDS))

    def is_probing(self, key: DraftKey, num_requests: int) -> bool:
        """Whether the class is on trial or probed in this round."""
        return self.record(key, num_requests).left > 0

    def states(self) -> list[tuple[DraftKey, str]]:
        """Every class that has drafted or waits, with trial | on | off | probe; from any thread, may be a round old."""
        for _ in range(20):
            try:
                return [(key, self._state(key, own)) for key, own in list(self._classes.items())]
            except RuntimeError:  # the engine's thread met a new class meanwhile
                continue
        return []

    def _state(self, key: DraftKey, own: _Class) -> str:
        shared = self._versions.get((key[0], key[2]))
        found = own.records.get(own.latest) or (shared and shared.records.get(own.latest))
        return found.state if found else "trial"

    def forget(self, version: str) -> None:
        """Drop what is known of a drafter version."""
        for key in [k for k in self._classes if k[0] == version]:
            del self._classes[key]
        for pair in [k for k in self._versions if k[0] == version]:
            del self._versions[pair]

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
        rows: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(keys):
            if key is not None:
                rows.setdefault(key, []).append(i)
        pace = self._paces.setdefault(log2_bucket(num_requests), _Pace())
        if not rows or pace.num_plain < FIRST_PLAIN:
            return wants
        probed: list[tuple[Record, list[int]]] = []
        known: list[tuple[Record, list[int]]] = []
        waited: set[int] = set()
        for key, own in rows.items():
            self._class(self._classes, key).latest = log2_bucket(num_requests)
            record = self.record(key, num_requests)
            if record.num_times < 1:
                record.time = self._forecast(record.nodes, context_rows, num_requests)
            if record.left == 0 and record.is_idle and id(record) not in waited:
                waited.add(id(record))  # several new classes wait together
                record.wait -= max(1.0, len(own) / WAIT_REQUESTS)
                if record.wait <= 0:
                    self._begin_probe(record, context_rows, num_requests)
            (probed if record.left > 0 else known).append((record, own))
        rate = self._switch(known, num_requests)
        if pace.since_plain >= _wait(1 - 1 / rate, pace.num_contacts):
            return wants
        saved_s = self._plain_s(context_rows, num_requests) / num_requests * (1 - 1 / rate)  # a token
        for record, own in known:
            if record.state != "on":
                continue
            for i in own:
                wants[i] = backlogs[i] <= FREE_BACKLOG or self._costs.catch_up_s(backlogs[i]) <= horizons[i] * saved_s
            if record.is_idle != (is_idle := not any(wants[i] for i in own)):
                record.is_idle, record.wait = is_idle, MAX_WAIT
        for _, own in probed:
            for i in self._probe_requests(own, backlogs):
                wants[i] = True
        return wants

    def _class(self, classes: OrderedDict, key: object) -> _Class:
        found: _Class | None = classes.get(key)
        if found is None:
            found = classes[key] = _Class()
            if len(classes) > MAX_KEYS:
                classes.popitem(last=False)
        else:
            classes.move_to_end(key)
        return found

    def _probe_requests(self, own: list[int], backlogs: Sequence[int]) -> list[int]:
        """Those already drafted for in this probe, else from the middle: the newest are not like the others."""
        if len(own) <= PROBE_REQUESTS:
            return own
        own = sorted(own, key=backlogs.__getitem__)
        start = 0 if backlogs[own[PROBE_REQUESTS - 1]] <= FREE_BACKLOG else (len(own) - PROBE_REQUESTS) // 2
        return own[start : start + PROBE_REQUESTS]

    def _begin_probe(self, record: Record, context_rows: int, num_requests: int) -> None:
        record.begin_probe()
        if (
            num_requests > PROBE_REQUESTS and record.time is not None
        ):  # no whole batch will tell: measured times grow old
            record.time = math.sqrt(record.time * self._forecast(record.nodes, context_rows, num_requests))

    def _switch(self, known: list[tuple[Record, list[int]]], num_requests: int) -> float:
        """Turn classes on and off: those on together make the highest rate. Returns it, in plain rounds' rates."""
        tokens = time = float(num_requests)
        # Of sums of gains over sums of times the best set is a prefix of the classes in this order.
        known.sort(key=lambda k: -(k[0].tokens - 1) / max((k[0].time or 1.0) - 1, 1e-9))
        for record, own in known:
            more_tokens = tokens + len(own) * (record.tokens - 1)
            more_time = time + len(own) * ((record.time or 1.0) - 1)
            if more_tokens / more_time > tokens / time:
                tokens, time = more_tokens, more_time
                record.state, record.probe = "on", None
                if record.weight >= MEMORY / 2:
                    record.num_lost = 0
            elif record.state != "off":
                self._stop(record, num_requests)
        return tokens / time

    def _stop(self, record: Record, num_requests: int) -> None:
        """Turn off; the next probe comes the later, the more this one cost."""
        share = min(PROBE_REQUESTS / num_requests, 1.0)
        cost = PROBE_ROUNDS * share * max((record.time or 1.0) - record.tokens, 0.0)
        cost += 0.0 if record.probe is None else record.probe.catch_up
        record.wait = _wait(cost, record.num_lost)
        record.num_lost += 1
        record.state, record.probe, record.is_idle = "off", None, True

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
        num_requests = len(seen.keys)
        size = log2_bucket(num_requests)
        pace = self._paces.setdefault(size, _Pace())
        drafted: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(seen.keys):
            if key is not None and seen.is_drafted[i]:
                drafted.setdefault(key, []).append(i)
        before = [r for key in dict.fromkeys(seen.keys) if key is not None and (r := self._own(key, size)) is not None]
        pace.turn(is_drafted=bool(drafted))
        if not drafted:
            self._learn_plain(pace, seen, before)
            return
        for key, rows in drafted.items():
            self._learn_key(key, rows, seen, num_requests)
        self._learn_time(pace, seen, {key: len(rows) for key, rows in drafted.items()})

    def _own(self, key: DraftKey, size: int) -> Record | None:
        own = self._classes.get(key)
        return None if own is None else own.records.get(size)

    def _learn_plain(self, pace: _Pace, seen: RoundObservation, records: list[Record]) -> None:
        if not seen.round_s > 0:
            return
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
                if record.state == "on" and record.time is not None:
                    record.time = max(record.time * math.exp(-rate * miss), 1.0)
        pace.scale *= math.exp(max(rate, 1 / pace.num_plain) * miss)

    def _learn_key(self, key: DraftKey, rows: list[int], seen: RoundObservation, num_requests: int) -> None:
        size = log2_bucket(num_requests)
        record = self.record(key, num_requests)
        own = self._class(self._classes, key)
        shared = self._versions[key[0], key[2]].records.get(size)
        if record is shared:
            own.records[size] = record = shared.child()
        elif shared is None:
            shared = self._versions[key[0], key[2]].records[size] = record.child()
        count = len(rows)
        tokens = 1 + sum(seen.num_accepted_tokens[i] for i in rows) / count
        nodes = sum(seen.num_nodes[i] for i in rows) / count
        plain_s = self._plain_s(seen.context_rows, num_requests)
        catch_up = seen.catch_up_s / plain_s * count / sum(seen.is_drafted) if plain_s > 0 else 0.0
        for one in (record, shared):
            one.note(tokens, nodes, catch_up)

    def _learn_time(self, pace: _Pace, seen: RoundObservation, counts: dict[DraftKey, int]) -> None:
        if not seen.round_s > 0 or pace.scale <= 0:
            return
        num_requests = len(seen.keys)
        records = {key: self.record(key, num_requests) for key in counts}
        expected = 1.0
        for key, record in records.items():
            record.time = record.time or self._forecast(record.nodes, seen.context_rows, num_requests)
            expected += counts[key] / num_requests * (record.time - 1)
        miss = _clipped(seen.round_s / (self._plain_s(seen.context_rows, num_requests) * expected))
        if not pace.is_contact:
            pace.scale *= math.exp(_RATE * miss)
            return
        for key, record in records.items():
            time = record.time or 1.0
            share = counts[key] / num_requests * time / expected  # of the round's time that the class answers for
            record.num_times += share
            rate = max(_RATE, share / record.num_times)
            record.time = max(time * math.exp(rate * share * miss), 1.0)
            shared = self._versions[key[0], key[2]].records.get(log2_bucket(num_requests))
            if shared is not None:
                shared.time = record.time


def _wait(cost: float, num_before: int) -> float:
    """Rounds until the next probe, of which each costs so many plain rounds, after so many alike."""
    first = max(cost / EARLY_SHARE, FIRST_WAIT)
    return min(max(cost / SHARE, FIRST_WAIT), first * 2.0 ** min(num_before, 10), MAX_WAIT)


def _clipped(ratio: float) -> float:
    """The logarithm of a measured over an expected time, bounded."""
    return min(max(math.log(ratio), -_MAX_MISS), _MAX_MISS)
