"""Demo scenario: the traffic that the demo sends, phases that shift between buckets, temperatures and groups by a fixed pattern."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.common.workloads import Prompt
from paceline.contracts import Group

# Four of six requests are adaptive; the other two measure what they are compared with, under the same conditions.
GROUP_PATTERN = (Group.ADAPTIVE, Group.STATIC, Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN, Group.ADAPTIVE)
DAY_GROUPS = (*4 * (Group.ADAPTIVE,), Group.STATIC, *4 * (Group.ADAPTIVE,), Group.PLAIN)
"""The pattern of a day: a hold-back as small as a service's own, and as many requests without drafts."""
DAY_MINUTES = (3.0, 5.0, 7.0)
"""A day's phases have these lengths by turns."""
GREEDY_EVERY = 3
"""One request in three is greedy, the others sample at SAMPLED_TEMPERATURE."""
SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of traffic with one mix of buckets."""

    name: str
    buckets: tuple[str, ...]
    share: float
    """Share of the whole demo's time."""

    @property
    def bucket(self) -> str:
        return "+".join(self.buckets)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request of the demo."""

    place: int
    """Of its bucket's requests: 0, 1, 2, ..."""
    prompt: Prompt
    temperature: float
    group: Group
    seed: int


def shifting_scenario(known: tuple[str, ...], shifted: tuple[str, ...], brief: tuple[str, ...]) -> tuple[Phase, ...]:
    """A (known) -> B (unseen) -> C (unseen, too briefly to pay for learning) -> B again, as 30 : 150 : 55 : 75."""
    return (
        Phase(name="A", buckets=known, share=30 / 310),
        Phase(name="B", buckets=shifted, share=150 / 310),
        Phase(name="C", buckets=brief, share=55 / 310),
        Phase(name="B again", buckets=shifted, share=75 / 310),
    )


def steady_scenario(known: tuple[str, ...]) -> tuple[Phase, ...]:
    """One phase of traffic that does not shift."""
    return (Phase(name="A", buckets=known, share=1.0),)


def day_scenario(kinds: tuple[str, ...], minutes: float, seed: int) -> tuple[Phase, ...]:
    """Kinds that come, go and return: each comes once before one comes again, in another order every time. A phase has two, and the
    second one goes on into the next phase. A longer day begins like a shorter one."""
    order: list[str] = []
    phases: list[Phase] = []
    rng, left = random.Random(seed), minutes
    while left > 0:
        while len(order) < 2:
            turn = rng.sample(kinds, len(kinds))
            if order and turn[0] == order[-1]:
                turn.append(turn.pop(0))
            order += turn
        length = min(DAY_MINUTES[len(phases) % len(DAY_MINUTES)], left)
        phases.append(Phase(name=str(len(phases) + 1), buckets=tuple(order[:2]), share=length / minutes))
        del order[0]
        left -= length
    return tuple(phases)


class Traffic:
    """Endless seeded requests of a phase; prompts go round without repeating until a bucket is used up.

    A bucket's requests have places 0, 1, 2, ...; prompt, group, temperature and seed follow from bucket and place, whatever was
    asked of other buckets meanwhile.
    """

    def __init__(
        self, pools: Mapping[str, Sequence[Prompt]], seed: int, *, groups: tuple[Group, ...] = GROUP_PATTERN,
        sent: Mapping[str, Collection[int]] | None = None,
    ) -> None:  # fmt: skip
        """pools: the prompts of each bucket. sent: places of each that were answered before, and are not asked again."""
        self._pools, self._seed, self._groups = pools, seed, groups
        self._places = {b: itertools.filterfalse(frozenset((sent or {}).get(b, ())).__contains__, itertools.count()) for b in pools}  # fmt: skip
        self._turns: dict[str, tuple[int, list[Prompt]]] = {}
        """Bucket -> how often its prompts have gone round, and their order this time."""
        self._last: tuple[str, int] | None = None

    def next(self, phase: Phase) -> PlannedRequest:
        """Return the next request: a bucket has a whole pattern of groups, all of one temperature, before the next one is asked, so
        that groups compare alike."""
        bucket, pattern = phase.buckets[0], self._groups
        if self._last is not None and self._last[0] in phase.buckets:
            bucket = self._last[0]
            if (self._last[1] + 1) % len(pattern) == 0:
                bucket = phase.buckets[(phase.buckets.index(bucket) + 1) % len(phase.buckets)]
        place = next(self._places[bucket])
        self._last = (bucket, place)
        is_greedy = (place // len(pattern)) % GREEDY_EVERY == 0
        return PlannedRequest(
            place=place,
            prompt=self._prompt(bucket, place),
            temperature=0.0 if is_greedy else SAMPLED_TEMPERATURE,
            group=pattern[place % len(pattern)],
            seed=random.Random(f"{self._seed}-{bucket}-{place}").randrange(2**31),
        )

    def _prompt(self, bucket: str, place: int) -> Prompt:
        turn, at = divmod(place, len(self._pools[bucket]))
        known, order = self._turns.get(bucket, (-1, []))
        if known != turn:
            order = random.Random(f"{self._seed + turn}-{bucket}").sample(self._pools[bucket], len(self._pools[bucket]))
            self._turns[bucket] = (turn, order)
        return order[at]
