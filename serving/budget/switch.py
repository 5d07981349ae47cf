"""Switch: decides for every traffic class and batch size whether drafting makes more tokens per second than plain decoding.

Both rates are measured in plain rounds: drafting a request emits `tokens` per round and takes `time` plain rounds of the
same batch. A class drafts while tokens / time > 1; of several classes in one batch, those draft that make the rate of the
whole batch largest. What is off is drafted again in short probes, what is on is interrupted by single plain rounds: the
price of either kind of probe sets how often it comes, and MAX_WAIT bounds it whatever was measured.
What a plain round takes now is told by the verify forward of any round and the shape of the calibrated times; how wrong
that is, by rounds before and after a change of mode (`_Size`): everything else that moves times is the machine.
Every method is a pure function of its arguments and the observations so far; no clock, no randomness.

Shape legend: B requests of the round.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.serving.budget.round_costs import RoundCosts
from paceline.serving.budget.stats import DraftKey, RoundObservation

MAX_KEYS = 512
"""Classes remembered: clients name buckets, so they must not decide how much is kept."""
MEMORY, MEMORY_ROUNDS = 128, 8
"""Drafts that the mean of emitted tokens remembers, or rounds if those hold more. Answers differ: about four lone ones are
behind a verdict."""
TRIAL_ROUNDS = 12
"""Drafted rounds of a class of which nothing alike is known, before the first verdict."""
PROBE_ROUNDS = 4
"""Drafted rounds of a probe; catching up after plain rounds is paid once for all of them."""
PROBE_REQUESTS = 4
"""Requests that a trial or a probe drafts for, at most: they tell as much as all of a large batch and cost less."""
PROBE_NODES = 4
"""Least nodes of a request in a trial or a probe: where none is verified nothing is learnt."""
REPLAYED_NODES = 8
"""Nodes of the trees by which versions are scored before they are published."""
PAST = 8 * PROBE_ROUNDS
"""Drafts that the past counts for in a probe, at most, so that a few probes overrule any past."""
SHARE, EARLY_SHARE = 0.005, 0.04
"""Part of the time that either kind of probe may cost, in the long run and right after drafting has stopped: from probe to
probe the wait doubles. Probes that cost more than MAX_WAIT * SHARE plain rounds exceed it: none may starve."""
FIRST_WAIT, MAX_WAIT = 16, 512
"""Least and most rounds between probes."""
HOPELESS = 0.75
"""A trial or probe ends after half of its rounds with a rate below this."""
MARGIN = 1.05
"""Rate with which a batch larger than its probes begins to draft: what all of it would take is forecast, and all of it has
to catch up first."""
WAIT_REQUESTS = 32
"""A round of more requests than this counts for more than one while waiting: the wait is bounded in tokens, too."""
CONTACT = 8
"""Rounds after a change of mode in which the times of both modes are compared."""
FREE_BACKLOG = 16
"""Rows that a drafter ingests in passing."""
REST = 8
"""Rounds that are decided at once where all classes are off, texts too, and no probe is near: new text is looked at and waits
count down once for all of them."""
_RATE = 0.1
"""Least weight of one round in a measured time."""
_MAX_MISS = 0.7
"""Largest logarithm of measured over expected time that counts: hiccups of any length are all alike."""


@dataclass(slots=True)
class Probe:
    """What one trial or probe has shown by itself."""

    tokens: float = 0.0
    """Sum of the tokens that its rounds emitted for a request."""
    num_rounds: int = 0
    cost: float = 0.0
    """Plain rounds that it took beyond those that its tokens would have taken."""


@dataclass(slots=True)
class Record:
    """What is known of drafting for one class at one batch size."""

    tokens: float = 0.0
    """Mean of the tokens that a drafted round emits for a request, bonus included."""
    weight: float = 0.0
    """Drafts behind it, at most MEMORY or those of MEMORY_ROUNDS."""
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
    num_passed: int = 0
    """Drafted rounds that the latest trial or probe passed over."""
    probe: Probe | None = None
    """The latest one while it runs or its verdict holds."""
    state: str = "trial"
    """trial | on | off | probe: for metrics."""

    def child(self) -> Record:
        """A record that begins with what is known here."""
        past = min(self.weight, PAST)
        return Record(
            tokens=self.tokens, weight=past, time=self.time, nodes=self.nodes, left=self.left, is_idle=self.is_idle,
            wait=self.wait, num_passed=self.num_passed, state=self.state,
        )  # fmt: skip

    def pass_over(self) -> bool:
        """Whether a trial or probe leaves out a round in which requests still catch up, as it is about all that it drafts for;
        counts those that it does."""
        if self.left == 0 or self.num_passed == FIRST_WAIT:
            return False
        self.num_passed += 1
        return True

    def begin_probe(self) -> None:
        """Draft for some rounds, whatever the past says."""
        self.state, self.left, self.probe, self.is_idle = "probe", PROBE_ROUNDS, Probe(), False
        self.num_passed = 0
        self.weight = min(self.weight, PAST)

    def note(self, num_drafts: int, tokens: float, nodes: float, cost: float) -> None:
        """One drafted round; it ends trials and probes that are over."""
        self.weight = min(self.weight + num_drafts, max(MEMORY, MEMORY_ROUNDS * num_drafts))
        self.tokens += (tokens - self.tokens) * num_drafts / self.weight
        self.nodes += (nodes - self.nodes) * num_drafts / self.weight
        if self.left == 0:
            return
        self.left -= 1
        self.probe = own = self.probe or Probe()
        own.tokens += tokens
        own.num_rounds += 1
        own.cost += cost
        own_rate, time = own.tokens / own.num_rounds, self.time or 1.0
        half = (TRIAL_ROUNDS if self.state == "trial" else PROBE_ROUNDS) / 2
        if own.num_rounds >= half and max(own_rate, self.tokens) < HOPELESS * time:
            self.left = 0
        if self.left == 0 and self.tokens <= time < own_rate:  # the past says no and the present yes: more of it
            self.left = PROBE_ROUNDS


@dataclass(slots=True)
class _Size:
    """How wrong the calibrated times are at one batch size: what drafted rounds tell of plain ones."""

    bias: float = 0.0
    """Logarithm of a plain round's time over what the drafted rounds beside it tell."""
    num_compared: int = 0
    is_drafted: bool = False
    """Mode of the latest round."""
    since_change: int = 0
    """Rounds in this mode."""
    now: float = 0.0
    """Mean of the latest ones' logarithm of plain time over calibrated time."""
    other: float = 0.0
    """That of the other mode, when it ended."""
    num_left: int = 0
    """Rounds that are compared with it yet: as many as it lasted, at most CONTACT."""

    @property
    def since_plain(self) -> int:
        """Drafted rounds since the latest plain one."""
        return self.since_change if self.is_drafted else 0

    def note(self, *, is_drafted: bool, level: float) -> None:
        """One round. The modes are compared across a change: everything else that moves times is the machine."""
        if is_drafted != self.is_drafted:
            self.other, self.num_left = self.now, min(self.since_change, CONTACT)
            self.since_change, self.is_drafted = 0, is_drafted
        self.since_change += 1
        self.now += (level - self.now) * max(1 / self.since_change, 2 * _RATE)
        if self.num_left > 0:
            self.num_left -= 1
            self.num_compared += 1
            found = _clipped(self.other - self.now if is_drafted else self.now - self.other)
            self.bias += (found - self.bias) * max(_RATE, 1 / (1 + self.num_compared))


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
        self._sizes: dict[int, _Size] = {}
        self._num_rounds = 1
        """Rounds that the next decision stands for."""
        self._owed_s: dict[DraftKey, float] = {}
        """Catching up, at calibration speed, that no drafted round of the class has answered for yet."""
        self._foretold: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(version, bucket) -> acceptance length by exact replay, of which a class knows nothing better yet."""

    def foretell(self, version: str, bucket: str, acceptance_length: float) -> None:
        """A class of this version begins with what a replay of the bucket's text has shown, not with a trial."""
        self._foretold[version, bucket] = acceptance_length
        if len(self._foretold) > MAX_KEYS:
            self._foretold.popitem(last=False)

    def record(self, key: DraftKey, num_requests: int) -> Record:
        """What decides for a class: its own record, until it has drafted that of its version."""
        size = _log2_size(num_requests)
        own = self._classes.get(key)
        foretold = self._foretold.get(key[:2])
        if foretold is not None and (own is None or own.near(size) is None):
            # It counts as much as the past does in a probe: a few probes' worth of rounds overrule it.
            own = self._class(self._classes, key)
            own.records[size] = Record(foretold, PAST, nodes=REPLAYED_NODES, state="on")
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
        for place in [k for k in self._foretold if k[0] == version]:
            del self._foretold[place]

    def rest(self, keys: Iterable[DraftKey], num_requests: int) -> int:
        """How many rounds from now on need no decision: no class of them drafts, and no probe begins.

        keys: of the round's requests under drafters and texts, whether these expect something or not. Say `skip` of each
        round without a decision; call behind `wants`.
        """
        rest, step = REST, _wait_step(num_requests)
        for key in keys:
            record = self.record(key, num_requests)
            if record.state != "off":
                return 0
            rest = min(rest, math.ceil(record.wait / step))
        return max(rest - 1, 0)

    def skip(self) -> None:
        """A round passes without a decision; the next one counts for it, whoever's requests it has."""
        self._num_rounds += 1

    def turns(
        self, keys: Sequence[DraftKey | None], text_keys: Sequence[DraftKey | None], context_rows: int
    ) -> list[DraftKey | None]:
        """(B,) key under which each request of the round may draft: the text's until such rounds have made fewer tokens per
        second than the drafter's rounds do, then the drafter's, from probe to probe. Call once a round, or `skip`: waits count down.

        text_keys: of those whose text goes on as it did before; None = it does not.
        """
        found, num_requests = list(keys), len(keys)
        rows: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(text_keys):
            if key is not None:
                rows.setdefault(key, []).append(i)
        size, waited = _log2_size(num_requests), set[int]()
        for key, own in rows.items():
            self._class(self._classes, key).latest = size
            record = self.record(key, num_requests)
            if record.num_times < 1:
                record.time = self._costs.draft_ratio(record.nodes, context_rows, num_requests)
            if record.state == "off":
                self._count_down(record, len(own), waited, context_rows, num_requests)
            elif record.left == 0:
                rival = max(self._rate(drafter, num_requests) for drafter in {keys[i] for i in own})
                if record.tokens < rival * (record.time or 1.0):
                    self._stop(record, num_requests, rival)
            if record.state == "off":
                continue
            for i in own if record.left == 0 else own[:PROBE_REQUESTS]:
                drafter = keys[i]
                if drafter is None or not self.is_probing(drafter, num_requests):  # its rate is asked for first
                    found[i] = key
        if rows:
            self._wait_without_turns(set(keys) - set(found), found, context_rows)
        return found

    def _wait_without_turns(
        self, drafters: set[DraftKey | None], found: Sequence[DraftKey | None], context_rows: int
    ) -> None:
        """Count down to the next probe of drafters whose every turn the text has: `wants` does not see them."""
        num_requests = len(found)
        waited = {id(self.record(key, num_requests)) for key in set(found) if key is not None}
        for key in drafters:
            record = None if key is None else self.record(key, num_requests)
            if record is None or id(record) in waited or record.left > 0:
                continue
            self._class(self._classes, key).latest = _log2_size(num_requests)
            if not record.is_idle:
                record.is_idle, record.wait = True, MAX_WAIT
            self._count_down(record, 1, waited, context_rows, num_requests)

    def _count_down(
        self, record: Record, num_waiting: int, waited: set[int], context_rows: int, num_requests: int
    ) -> None:
        """One round nearer to the next probe, which begins at 0. waited: ids of the records that have waited in this round;
        several new classes share one."""
        if id(record) in waited:
            return
        waited.add(id(record))
        record.wait -= self._num_rounds * _wait_step(num_waiting)
        if record.wait <= 0:
            self._begin_probe(record, context_rows, num_requests)

    def _rate(self, key: DraftKey | None, num_requests: int) -> float:
        """Tokens of a class in the time of a plain round: drafted where that is more than one."""
        record = None if key is None else self.record(key, num_requests)
        return 1.0 if record is None or record.state == "off" else max(record.tokens / (record.time or 1.0), 1.0)

    def wants(
        self,
        keys: Sequence[DraftKey | None],
        context_rows: int,
        backlogs: Sequence[int],
        horizons: Sequence[int],
    ) -> list[bool]:
        """Which of the B requests draft in this round. Call once a round, or `skip`: waits count down.

        keys: None where there is no drafter. backlogs: rows that the drafter would have to ingest first. horizons: tokens
        that each request is expected to get still; catching up must pay within them.
        """
        num_requests, wants = len(keys), [False] * len(keys)
        rows: dict[DraftKey, list[int]] = {}
        for i, key in enumerate(keys):
            if key is not None:
                rows.setdefault(key, []).append(i)
        if not rows:
            self._num_rounds = 1
            return wants
        size = _log2_size(num_requests)
        probed: list[tuple[Record, list[int]]] = []
        known: list[tuple[Record, list[int]]] = []
        waited: set[int] = set()
        for key, own in rows.items():
            self._class(self._classes, key).latest = size
            record = self.record(key, num_requests)
            if record.num_times < 1:
                record.time = self._costs.draft_ratio(record.nodes, context_rows, num_requests)
            if record.left == 0 and record.is_idle:
                self._count_down(record, len(own), waited, context_rows, num_requests)
            (probed if record.left > 0 else known).append((record, own))
        self._num_rounds = 1
        rate = self._switch(known, context_rows, num_requests)
        state = self._size(num_requests)
        if state.since_plain >= _wait(1 - 1 / rate, state.num_compared):
            return wants
        on = [k for k in known if k[0].state == "on"]
        for _, own in on:
            for i in own:
                wants[i] = backlogs[i] <= FREE_BACKLOG
        if behind := [i for _, own in on for i in own if not wants[i]]:
            plain_s = self._costs.round_s(num_requests, 0, context_rows, num_requests)
            saved_s = plain_s / num_requests * (1 - 1 / rate)  # by a token
            for i in behind:
                wants[i] = self._costs.catch_up_s(backlogs[i]) <= horizons[i] * saved_s
        num_drafting = sum(wants)
        if num_drafting < sum(len(own) for _, own in on):
            nodes = max(record.nodes for record, _ in on)
            padding = self._padding(nodes, num_drafting, context_rows, num_requests)
            if padding > num_drafting / num_requests * (rate - 1):
                wants = [False] * num_requests
        for record, own in on:
            if record.is_idle != (is_idle := not any(wants[i] for i in own)):
                record.is_idle, record.wait = is_idle, MAX_WAIT
        for _, own in probed:
            plain_s = self._costs.round_s(num_requests, 0, context_rows, num_requests)
            for i in self._probe_requests(own, backlogs, plain_s):
                wants[i] = True
        return wants

    def _size(self, num_requests: int) -> _Size:
        size = _log2_size(num_requests)
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = _Size()
        return found

    def _class(self, classes: OrderedDict, key: object) -> _Class:
        found: _Class | None = classes.get(key)
        if found is None:
            found = classes[key] = _Class()
            if len(classes) > MAX_KEYS:
                classes.popitem(last=False)
        else:
            classes.move_to_end(key)
        return found

    def _probe_requests(self, own: list[int], backlogs: Sequence[int], plain_s: float) -> list[int]:
        """Those already drafted for in this probe, else from the middle: the newest are not like the others. Where catching
        up with those would stop all streams for FIRST_WAIT rounds, the ones that have least to catch up with."""
        if len(own) <= PROBE_REQUESTS:
            return own
        own = sorted(own, key=backlogs.__getitem__)
        middle = own[(len(own) - PROBE_REQUESTS) // 2 :][:PROBE_REQUESTS]
        is_dear = self._costs.catch_up_s(sum(backlogs[i] for i in middle)) > FIRST_WAIT * plain_s
        return own[:PROBE_REQUESTS] if is_dear or backlogs[own[PROBE_REQUESTS - 1]] <= FREE_BACKLOG else middle

    def _begin_probe(self, record: Record, context_rows: int, num_requests: int) -> None:
        record.begin_probe()
        # Where no whole batch will tell, what was measured ages.
        if num_requests > PROBE_REQUESTS and record.time is not None:
            record.time = math.sqrt(record.time * self._costs.draft_ratio(record.nodes, context_rows, num_requests))

    def _switch(self, known: list[tuple[Record, list[int]]], context_rows: int, num_requests: int) -> float:
        """Turn classes on and off: those on together make the highest rate. Returns it, in plain rounds' rates."""
        tokens = time = float(num_requests)
        best, rate = 0, 1.0
        # Of sums of gains over sums of times the best set is a prefix of the classes in this order.
        known.sort(key=lambda k: -(k[0].tokens - 1) / max((k[0].time or 1.0) - 1, 1e-9))
        for num, (record, own) in enumerate(known, 1):
            margin = MARGIN if num_requests > PROBE_REQUESTS and record.state != "on" else 1.0
            tokens += len(own) * (record.tokens - 1)
            time += len(own) * ((record.time or 1.0) * margin - 1)
            num_drafting = sum(len(k[1]) for k in known[:num])
            found = tokens / (
                time + num_requests * self._padding(record.nodes, num_drafting, context_rows, num_requests)
            )
            if found > rate:
                best, rate = num, found
        for num, (record, _) in enumerate(known):
            if num < best:
                if record.state == "probe":
                    record.num_lost = max(record.num_lost - 1, 0)
                record.state, record.probe = "on", None
            elif record.state != "off":
                self._stop(record, num_requests)
        return rate

    def _padding(self, nodes: float, num_drafting: int, context_rows: int, num_requests: int) -> float:
        """Plain rounds that padding takes where few of the requests draft; in the time of a whole batch it is contained."""
        padding = self._costs.padding(context_rows, num_requests) if _is_few(num_drafting, num_requests) else None
        if padding is None:
            return 0.0
        widest = 1 + math.ceil(nodes)
        padded_s = padding.seconds(num_requests, widest, num_requests + num_drafting * (widest - 1))
        return padded_s / self._costs.round_s(num_requests, 0, context_rows, num_requests)

    def _stop(self, record: Record, num_requests: int, rival: float = 1.0) -> None:
        """Turn off; the next probe comes the later, the more this one cost. rival: tokens in the time of a plain round that
        the class makes from now on."""
        share = min(PROBE_REQUESTS / num_requests, 1.0)
        if record.probe is not None:
            cost = record.probe.cost * PROBE_ROUNDS / record.probe.num_rounds
        else:
            cost = PROBE_ROUNDS * share * max((record.time or 1.0) - record.tokens, 0.0)
        cost += PROBE_ROUNDS * share * (rival - 1.0)
        record.wait = _wait(cost, record.num_lost)
        record.num_lost += 1
        record.state, record.probe, record.is_idle = "off", None, True

    def observe(self, seen: RoundObservation) -> None:
        """Fold one verified round."""
        if not (seen.round_s > 0 and seen.verify_s > 0):
            return
        num_requests = len(seen.keys)
        drafted: dict[DraftKey, list[int]] = {}
        if True in seen.is_drafted:
            for i, key in enumerate(seen.keys):
                if key is not None and seen.is_drafted[i]:
                    drafted.setdefault(key, []).append(i)
        size = self._size(num_requests)
        plain_s = self._costs.plain_s(seen) if drafted else seen.round_s
        num_drafting = sum(map(len, drafted.values()))
        is_whole = not _is_few(num_drafting, num_requests)  # a few pay for the padding of all
        if is_whole or not drafted:
            level = math.log(plain_s / self._costs.verify.prior(num_requests, seen.context_rows, num_requests))
            size.note(is_drafted=is_whole, level=level)
        behind = self._note_catching_up(seen)
        if not drafted:
            return
        plain_s *= math.exp(size.bias)
        extra, is_probed = seen.round_s / plain_s - 1, False  # beyond a plain round, to be shared by the classes
        for key, rows in drafted.items():
            tokens = 1 + sum(seen.num_accepted_tokens[i] for i in rows) / len(rows)
            nodes = sum(seen.num_nodes[i] for i in rows) / len(rows)
            cost = extra * len(rows) / num_drafting - (tokens - 1) * len(rows) / num_requests
            records = self._records(key, num_requests)
            is_probed |= records[0].left > 0
            if key in behind and records[0].pass_over():
                continue
            cost += self._owed_s.pop(key, 0.0) * self._costs.speed / plain_s
            for record in records:
                record.note(len(rows), tokens, nodes, cost)
        if is_whole or not is_probed:  # text drafters have something for a part of the requests only
            counts = {key: len(rows) for key, rows in drafted.items()}
            self._learn_time(seen.round_s / plain_s, counts, seen.context_rows, num_requests)

    def _note_catching_up(self, seen: RoundObservation) -> set[DraftKey]:
        """Share out what catching up took; returns the classes of requests that go on with it."""
        keys = [key for i in seen.catching_up if (key := seen.keys[i]) is not None]
        self._owed_s = {key: owed for key, owed in self._owed_s.items() if key in seen.keys}  # nobody is left to draft
        for key in keys:
            self._owed_s[key] = self._owed_s.get(key, 0.0) + seen.catch_up_s / self._costs.speed / len(keys)
        return {key for i in seen.catching_up if not seen.is_drafted[i] and (key := seen.keys[i]) is not None}

    def _records(self, key: DraftKey, num_requests: int) -> tuple[Record, Record]:
        """Those of a class that has drafted and of its version."""
        size = _log2_size(num_requests)
        record = self.record(key, num_requests)
        own = self._class(self._classes, key)
        version = self._versions[key[0], key[2]]
        shared = version.records.get(size)
        if record is shared:
            own.records[size] = record = shared.child()
        elif shared is None:
            shared = version.records[size] = record.child()
        return record, shared

    def _learn_time(self, times: float, counts: dict[DraftKey, int], context_rows: int, num_requests: int) -> None:
        """times: plain rounds that a round has taken in which so many requests of each class drafted."""
        records = {key: self._records(key, num_requests) for key in counts}
        expected = 1.0
        for key, (record, _) in records.items():
            record.time = record.time or self._costs.draft_ratio(record.nodes, context_rows, num_requests)
            expected += counts[key] / num_requests * (record.time - 1)
        miss = _clipped(math.log(times / expected))
        for key, (record, shared) in records.items():
            time = record.time or 1.0
            share = counts[key] / num_requests * time / expected  # of the round's time that the class answers for
            record.num_times += share
            rate = max(_RATE, share / record.num_times)
            shared.time = record.time = max(time * math.exp(rate * share * miss), 1.0)


def _wait_step(num_requests: int) -> float:
    """What a round of so many requests takes off a wait."""
    return max(1.0, num_requests / WAIT_REQUESTS)


def _wait(cost: float, num_before: int) -> float:
    """Rounds until the next probe, of which each costs so many plain rounds, after so many alike."""
    first = max(cost / EARLY_SHARE, FIRST_WAIT)
    return min(max(cost / SHARE, FIRST_WAIT), first * 2.0 ** min(num_before, 10), MAX_WAIT)


def _clipped(miss: float) -> float:
    """The logarithm of a measured over an expected time, bounded."""
    return min(max(miss, -_MAX_MISS), _MAX_MISS)


def _is_few(num_drafting: int, num_requests: int) -> bool:
    """Whether most requests of a round do not draft."""
    return 2 * num_drafting < num_requests


def _log2_size(num_requests: int) -> int:
    """Class of batch sizes: those up to a power of two, which is what engines are limited to."""
    return (num_requests - 1).bit_length()
