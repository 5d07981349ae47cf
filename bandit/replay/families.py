"""Families of table worlds: services that the pay-off rule was not made for, drawn from a seed.

Nothing is drawn from the rule's own beliefs. Costs and gains span what training the bundled drafter measured on held-out
texts on one CPU thread: 3 to 7.7 ms a row, of which scoring takes two fifths, and +0.28 to +0.46 tokens a round from 1,600 to
4,000 rows; the other figures are each family's point.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paceline.bandit.beliefs.arms import default_arms
from paceline.bandit.beliefs.job_cost import prior_training_s
from paceline.bandit.replay.outcomes import KNOWN_ROWS, SimulatedOutcomes
from paceline.bandit.replay.scenario import Traffic
from paceline.bandit.replay.table import Failures, JobTable, RoundPrices, Spell, TableWorld, TrafficClass

STEP_S = 10.0
NUM_STEPS = 360
ROWS = (250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0, 16_000.0)
"""Points of a curve."""
PLAIN_S = 0.005
REQUEST_TOKENS = 100.0
HEAD_SHARE = (0.2, 0.6)
"""What training the head alone brings of a full fine-tune: measured 0.25; believed 0.62."""

Shape = Callable[[float], float]
"""Rows -> share of the ceiling's gap that a full fine-tune closes."""


def hyperbola(half: float) -> Shape:
    """Half of the gap after `half` rows."""
    return lambda rows: rows / (rows + half)


def logistic(middle: float) -> Shape:
    """Next to nothing before `middle` rows, nearly all soon after."""
    low = 1.0 / (1.0 + math.exp(5.0))
    return lambda rows: (1.0 / (1.0 + math.exp(-5.0 * (rows / middle - 1.0))) - low) / (1.0 - low)


def two_phase(middle: float) -> Shape:
    """A quarter at once, a plateau, the rest around `middle` rows."""
    late = logistic(middle)
    return lambda rows: 0.25 * rows / (rows + 150.0) + 0.75 * late(rows)


@dataclass
class Draft:
    """A world in the making: classes first, then traffic; the rest has values that most families share."""

    name: str
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.classes: dict[str, TrafficClass] = {}
        self.rounds = self.prices(float(self.rng.uniform(1.1, 1.5)))
        self.head = float(self.rng.uniform(*HEAD_SHARE))
        self.jobs = self._jobs()
        self.extra: dict[str, Any] = {}

    def prices(self, break_even: float) -> RoundPrices:
        """A drafted round costs `break_even` plain ones: drafting pays above that acceptance length."""
        return RoundPrices(drafted_s=break_even * PLAIN_S, plain_s=PLAIN_S)

    def _jobs(self) -> dict[str, JobTable]:
        fixed, row_s = float(self.rng.uniform(0.5, 2.0)), float(self.rng.uniform(0.003, 0.0077))
        scoring = float(self.rng.uniform(0.1, 0.5))
        return {
            "calibration": JobTable(
                fixed_s=fixed / 3, row_s=0.6 * row_s / 10, scoring_s=scoring, scoring_row_s=0.4 * row_s
            ),
            "head": JobTable(fixed_s=fixed / 2, row_s=0.6 * row_s / 2, scoring_s=scoring, scoring_row_s=0.4 * row_s),
            "full": JobTable(fixed_s=fixed, row_s=0.6 * row_s, scoring_s=scoring, scoring_row_s=0.4 * row_s),
        }

    def add(self, name: str, first: float, room: float, shape: Shape | None = None, bucket: str = "") -> None:
        """A class that the first drafter does not know: its acceptance length, and what training can add."""
        shape = shape or hyperbola(float(self.rng.uniform(1500.0, 5000.0)))

        def points(share: float) -> tuple[tuple[float, float], ...]:
            return tuple((rows, first + room * share * min(max(shape(rows), 0.0), 1.0)) for rows in ROWS)

        curves = {"calibration": points(0.08), "head": points(self.head), "full": points(1.0)}
        self.classes[name] = TrafficClass(acceptance_length=first, bucket=bucket, curves=curves)

    def add_known(self, name: str = "known", first: float | None = None, bucket: str = "") -> None:
        """The class that the first drafter was trained for; more training brings nothing."""
        first = float(self.rng.uniform(2.2, 2.8)) if first is None else first
        self.classes[name] = TrafficClass(acceptance_length=first, bucket=bucket, learned_rows=KNOWN_ROWS)

    def add_unseen(self, count: int, shape: Callable[[], Shape] | None = None) -> None:
        """Classes c1, c2, ... with room to improve."""
        for i in range(1, count + 1):
            first, room = float(self.rng.uniform(1.1, 1.7)), float(self.rng.uniform(0.4, 1.0))
            self.add(f"c{i}", first, room, None if shape is None else shape())

    def between(self, value: float) -> dict[str, dict[str, float]]:
        """The same value between any two classes."""
        return {a: {b: value for b in self.classes if b != a} for a in self.classes}

    def world(self, shares: np.ndarray, load: float | np.ndarray = 1.0) -> TableWorld:
        """shares: (T, D) of the traffic; load: devices that the first drafter would keep busy, or (T,) of them."""
        lengths = np.array([c.acceptance_length for c in self.classes.values()])
        price = np.minimum(self.rounds.drafted_s / lengths, self.rounds.plain_s)
        per_step = np.broadcast_to(load, len(shares)) * STEP_S / price.mean()
        tokens = self.rng.poisson(shares * per_step[:, None] / REQUEST_TOKENS) * REQUEST_TOKENS
        names = list(self.classes)
        traffic = tuple(
            Spell(tokens={n: float(v) for n, v in zip(names, row, strict=True) if v > 0}) for row in tokens.tolist()
        )
        extra = {"forgetting": self.between(float(self.rng.uniform(0.0, 0.1))), **self.extra}
        return TableWorld(
            name=self.name, family=self.name, traffic=traffic, classes=self.classes, rounds=self.rounds, jobs=self.jobs,
            step_s=STEP_S, tokens_per_request=REQUEST_TOKENS, num_replicas=max(math.ceil(float(np.max(load))), 1), **extra,
        )  # fmt: skip

    def visits(self, lengths: Callable[[], float], lead_s: float = 300.0) -> np.ndarray:
        """(T, D) shares: the first class for `lead_s`, then one class after the other, chosen at random, for so many seconds."""
        out = np.zeros((NUM_STEPS, len(self.classes)))
        at, now = 0, 0
        while at < NUM_STEPS:
            seconds = lead_s if at == 0 else lengths()
            stop = at + max(round(seconds / STEP_S), 1)
            out[at:stop, now] = 1.0
            others = [d for d in range(len(self.classes)) if d != now]
            at, now = stop, int(self.rng.choice(others))
        return out


def _gamma(draft: Draft, mean_s: float) -> Callable[[], float]:
    return lambda: float(draft.rng.gamma(4.0, mean_s / 4.0))


def power_lives(draft: Draft) -> TableWorld:
    """Lives of texts follow a power law without a mean worth the name: most are short, a few last."""
    draft.add_known()
    draft.add_unseen(5)
    return draft.world(draft.visits(lambda: min(60.0 * float(draft.rng.random()) ** (-1.0 / 1.1), 7200.0)))


def gradual(draft: Draft) -> TableWorld:
    """Named buckets take over from each other over half an hour."""
    draft.add_known()
    draft.add_unseen(2)
    return draft.world(_crossfade(np.linspace(0.0, 2.0, NUM_STEPS), 3))


def hidden_morph(draft: Draft) -> TableWorld:
    """One bucket whose text turns into other text, class by class, under the same name; neighbours help each other."""
    count = 9
    draft.add_known("m0", 2.0, bucket="all")
    for i in range(1, count):
        draft.add(f"m{i}", 2.0 - 0.08 * i, float(draft.rng.uniform(0.4, 0.8)), bucket="all")
    near = {f"m{i}": {f"m{j}": math.exp(-abs(i - j) / 1.5) for j in range(count) if j != i} for i in range(count)}
    draft.extra = {"transfer": near, "forgetting": {}}
    return draft.world(_crossfade(np.linspace(0.0, count - 1.0, NUM_STEPS), count))


def _crossfade(position: np.ndarray, count: int) -> np.ndarray:
    """(T, count) shares of the two classes between which a position lies."""
    return np.maximum(1.0 - np.abs(position[:, None] - np.arange(count)), 0.0)


def zipf(draft: Draft) -> TableWorld:
    """Twenty classes at once, their shares by Zipf's law; which one is the largest changes every ten minutes."""
    draft.add_known()
    draft.add_unseen(19)
    weights = 1.0 / np.arange(1, 21)
    shares = np.zeros((NUM_STEPS, 20))
    for at in range(0, NUM_STEPS, 60):
        shares[at : at + 60, draft.rng.permutation(20)] = weights / weights.sum()
    return draft.world(shares)


def late_gain(draft: Draft) -> TableWorld:
    """Logistic curves: nothing is learned from the first thousands of rows."""
    draft.add_known()
    draft.add_unseen(3, lambda: logistic(float(draft.rng.uniform(3000.0, 6000.0))))
    return draft.world(draft.visits(_gamma(draft, 900.0)))


def two_phases(draft: Draft) -> TableWorld:
    """Curves that rise at once, rest, and rise again."""
    draft.add_known()
    draft.add_unseen(3, lambda: two_phase(float(draft.rng.uniform(5000.0, 9000.0))))
    return draft.world(draft.visits(_gamma(draft, 900.0)))


def flat(draft: Draft) -> TableWorld:
    """Texts that the drafter does badly on, and that training does not help."""
    draft.add_known()
    for i in range(1, 5):
        draft.add(f"c{i}", float(draft.rng.uniform(1.1, 1.7)), float(draft.rng.uniform(0.0, 0.03)))
    return draft.world(draft.visits(_gamma(draft, 600.0)))


def dear(draft: Draft) -> TableWorld:
    """Training costs ten times what the controller believes before its first job."""
    draft.add_known()
    draft.add_unseen(3)
    draft.jobs = {}
    for arm in default_arms():
        whole, none = prior_training_s(arm), prior_training_s(msgspec.structs.replace(arm, num_rows=0))
        row_s = 10.0 * (whole - none) / arm.num_rows
        draft.jobs[arm.parameters] = JobTable(fixed_s=10.0 * none, row_s=row_s, scoring_s=2.0, scoring_row_s=0.004)
    return draft.world(draft.visits(_gamma(draft, 1200.0)))


def transfer(draft: Draft) -> TableWorld:
    """What one class learns, four fifths of it the others learn too."""
    draft.add_known()
    draft.add_unseen(5)
    draft.extra = {"transfer": draft.between(0.8), "forgetting": {}}
    return draft.world(draft.visits(_gamma(draft, 600.0)))


def conflict(draft: Draft) -> TableWorld:
    """Learning one class costs the others up to three fifths of what lies above 1."""
    draft.add_known()
    draft.add_unseen(5)
    draft.extra = {"forgetting": draft.between(0.6)}
    return draft.world(draft.visits(_gamma(draft, 600.0)))


def returns(draft: Draft) -> TableWorld:
    """Classes that leave just when a version for them is ready, and come back again and again."""
    draft.add_known()
    draft.add_unseen(3)
    return draft.world(draft.visits(lambda: float(draft.rng.uniform(60.0, 120.0))))


def spikes(draft: Draft) -> TableWorld:
    """A quiet service with spikes of twenty times its load for one to three minutes, each of an unseen class."""
    draft.add_known()
    draft.add_unseen(3)
    shares, load = np.zeros((NUM_STEPS, 4)), np.full(NUM_STEPS, 0.3)
    shares[:, 0] = 1.0
    at = 60
    while at < NUM_STEPS:
        stop = at + int(draft.rng.integers(6, 19))
        load[at:stop] = 6.0
        shares[at:stop] = np.eye(4)[int(draft.rng.integers(1, 4))] * 0.95 + np.eye(4)[0] * 0.05
        at = stop + int(draft.rng.integers(20, 80))
    return draft.world(shares, load)


def mixed_sampling(draft: Draft) -> TableWorld:
    """Greedy and sampled requests of the same text in one bucket: the sampled ones accept less and gain less."""
    texts, shares_of = 3, draft.rng.uniform(0.2, 0.8, 4)
    draft.add_known("known")
    for i in range(1, texts + 1):
        first, room = float(draft.rng.uniform(1.2, 1.7)), float(draft.rng.uniform(0.4, 1.0))
        draft.add(f"greedy{i}", first, room, bucket=f"c{i}")
        draft.add(f"sampled{i}", 1.0 + 0.6 * (first - 1.0), 0.5 * room, bucket=f"c{i}")
    pairs = [(f"greedy{i}", f"sampled{i}") for i in range(1, texts + 1)]
    draft.extra = {"transfer": {a: {b: 0.9} for a, b in [*pairs, *(p[::-1] for p in pairs)]}, "forgetting": {}}
    whole, names = np.zeros((NUM_STEPS, len(draft.classes))), list(draft.classes)
    at, now = 0, 0
    while at < NUM_STEPS:
        stop = at + (30 if at == 0 else max(round(_gamma(draft, 900.0)() / STEP_S), 1))
        if now == 0:
            whole[at:stop, 0] = 1.0
        else:
            whole[at:stop, names.index(f"greedy{now}")] = 1.0 - shares_of[now]
            whole[at:stop, names.index(f"sampled{now}")] = shares_of[now]
        at, now = stop, int(draft.rng.choice([i for i in range(texts + 1) if i != now]))
    return draft.world(whole)


def failures(draft: Draft) -> TableWorld:
    """A quarter of the jobs end without a version, 15% harm and pass the gate."""
    draft.add_known()
    draft.add_unseen(3)
    draft.extra = {"failures": Failures(failed=0.25, harmful=0.15)}
    return draft.world(draft.visits(_gamma(draft, 900.0)))


def capped(draft: Draft) -> TableWorld:
    """A known class at 5 tokens a round beside classes that end near the length at which drafting begins to pay."""
    draft.rounds = draft.prices(1.5)
    draft.add_known(first=5.0)
    for i in range(1, 4):
        first = float(draft.rng.uniform(1.1, 1.3))
        draft.add(f"c{i}", first, float(draft.rng.uniform(1.35, 2.0)) - first)
    return draft.world(draft.visits(_gamma(draft, 900.0)))


def break_even(draft: Draft) -> TableWorld:
    """Drafted rounds so dear that drafting pays above 2.07 tokens a round, which only the best-learned texts reach."""
    draft.rounds = draft.prices(2.07)
    draft.add_known()
    draft.add_unseen(3)
    return draft.world(draft.visits(_gamma(draft, 900.0)))


FAMILIES: dict[str, Callable[[Draft], TableWorld]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        power_lives, gradual, hidden_morph, zipf, late_gain, two_phases, flat, dear, transfer, conflict, returns, spikes,
        mixed_sampling, failures, capped, break_even,
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyWorld:
    """A cell of a replay whose every seed is another table world of the family."""

    name: str

    @property
    def family(self) -> str:
        """Families stand alone in the advice table."""
        return self.name

    @property
    def duration_s(self) -> float:
        """Simulated time."""
        return NUM_STEPS * STEP_S

    def table(self, seed: int) -> TableWorld:
        """The world of a seed. Raises KeyError for a name that is not in FAMILIES."""
        key = zlib.crc32(self.name.encode())
        return FAMILIES[self.name](Draft(self.name, np.random.default_rng([seed, key])))

    def draw(self, seed: int) -> tuple[Traffic, SimulatedOutcomes]:
        """Traffic and truth of a seed."""
        return self.table(seed).draw(seed)


def family_worlds(names: Sequence[str] = tuple(FAMILIES)) -> list[FamilyWorld]:
    """A cell for each family."""
    return [FamilyWorld(name=name) for name in names]
