"""Demo scenario: the traffic that the demo sends, phases that shift between buckets, temperatures and groups by a fixed pattern."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline.bench.common.workloads import Prompt
from paceline.contracts import Group

# Four of six requests are adaptive; the other two measure what they are compared with, under the same conditions.
GROUP_PATTERN = (Group.ADAPTIVE, Group.STATIC, Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN, Group.ADAPTIVE)
DAY_GROUPS = (*4 * (Group.ADAPTIVE,), Group.STATIC, *4 * (Group.ADAPTIVE,), Group.PLAIN)
"""Of a day: a hold-back as small as a service's own, and as many without drafts."""
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

    index: int
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
    """Kinds that come, go and return: each once in every round of all, in another order. A phase has two, of which one was there
    before and one stays. A longer day begins like a shorter one."""
    rng, order, phases, left = random.Random(seed), [], [], minutes
    while left > 0:
        while len(order) < 2:
            turn = rng.sample(kinds, len(kinds))
            if order and turn[0] == order[-1]:
                turn.append(turn.pop(0))
            order += turn
        length = min(DAY_MINUTES[len(phases) % len(DAY_MINUTES)], left)
        phases.append(Phase(name=str(len(phases) + 1), buckets=tuple(dict.fromkeys(order[:2])), share=length / minutes))
        del order[0]
        left -= length
    return tuple(phases)


class Traffic:
    """Endless seeded requests of a phase; prompts go round without repeating until a bucket is used up.

    What is asked at a place of a bucket, and how it is drawn, is the same whatever was asked of other buckets meanwhile.
    """

    def __init__(
        self, buckets: tuple[str, ...], prompts: Callable[[str, int], list[Prompt]], seed: int, *,
        groups: tuple[Group, ...] = GROUP_PATTERN, sent: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """prompts: the prompts of a bucket in an order that belongs to a seed. sent: of each bucket, how many were sent before."""
        self._streams = {b: self._stream(b, prompts, seed) for b in buckets}
        self._seed, self._groups = seed, groups
        self._sent = Counter(sent)
        self._index = sum(self._sent.values())
        for bucket in buckets:
            for _ in range(self._sent[bucket]):
                next(self._streams[bucket])

    @staticmethod
    def _stream(bucket: str, prompts: Callable[[str, int], list[Prompt]], seed: int) -> Iterator[Prompt]:
        turn = 0
        while True:
            yield from prompts(bucket, seed + turn)
            turn += 1

    def next(self, phase: Phase) -> PlannedRequest:
        """Return the next request: of one bucket for a whole pattern of groups, and of one temperature, so that groups compare
        alike."""
        i, pattern = self._index, self._groups
        bucket = phase.buckets[(i // len(pattern)) % len(phase.buckets)]
        at = self._sent[bucket]
        self._index, self._sent[bucket] = i + 1, at + 1
        is_greedy = (at // len(pattern)) % GREEDY_EVERY == 0
        return PlannedRequest(
            index=i,
            prompt=next(self._streams[bucket]),
            temperature=0.0 if is_greedy else SAMPLED_TEMPERATURE,
            group=pattern[at % len(pattern)],
            seed=random.Random(f"{self._seed}-{bucket}-{at}").randrange(2**31),
        )
