"""Demo scenario: the traffic that the demo sends, phases that shift between buckets, temperatures and groups by a fixed pattern."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.common.workloads import Prompt, load_prompts
from paceline.contracts import Group

# Four of six requests are adaptive; the other two measure what they are compared with, under the same conditions.
GROUP_PATTERN = (Group.ADAPTIVE, Group.STATIC, Group.ADAPTIVE, Group.ADAPTIVE, Group.PLAIN, Group.ADAPTIVE)
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


class Traffic:
    """Endless seeded requests of a phase; prompts go round without repeating until a bucket is used up."""

    def __init__(self, buckets: tuple[str, ...], data: Path | None, seed: int) -> None:
        self._streams = {b: self._stream(b, data, seed) for b in buckets}
        self._rng = random.Random(seed)
        self._index = 0

    @staticmethod
    def _stream(bucket: str, data: Path | None, seed: int) -> Iterator[Prompt]:
        turn = 0
        while True:
            yield from load_prompts(bucket, data, 240, seed=seed + turn)
            turn += 1

    def next(self, phase: Phase) -> PlannedRequest:
        """Return the next request; groups, buckets and temperatures go round with coprime periods."""
        i = self._index
        self._index += 1
        block = i // len(GROUP_PATTERN)  # one bucket and temperature for a whole pattern, so that groups compare alike
        bucket = phase.buckets[block % len(phase.buckets)]
        is_greedy = (block // len(phase.buckets)) % GREEDY_EVERY == 0
        return PlannedRequest(
            index=i,
            prompt=next(self._streams[bucket]),
            temperature=0.0 if is_greedy else SAMPLED_TEMPERATURE,
            group=GROUP_PATTERN[i % len(GROUP_PATTERN)],
            seed=self._rng.randrange(2**31),
        )
