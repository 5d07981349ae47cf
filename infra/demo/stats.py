"""Demo statistics: totals per phase, temperature and group, and the tail of each phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.contracts import Group
from paceline.infra.demo.diary import Answer

MAIN_SHARE = 0.2
"""Share of a phase's requests that makes a class one of the phase's own."""


@dataclass(slots=True)
class Totals:
    """Sums over requests of one kind."""

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    device_s: float = 0.0

    def add(self, a: Answer) -> None:
        self.requests += 1
        self.tokens += a.num_tokens
        self.rounds += a.num_rounds
        self.accepted += a.num_accepted_tokens
        self.device_s += a.device_s

    @property
    def acceptance_length(self) -> float | None:
        return self.accepted / self.rounds + 1 if self.rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.device_s if self.device_s > 0 else None

    def to_dict(self, *, is_plain: bool = False) -> dict:
        out: dict = {"requests": self.requests, "tokens": self.tokens, "tokens_per_s": _round(self.tokens_per_s, 1)}
        if not is_plain:
            out |= {"acceptance_length": _round(self.acceptance_length, 3), "rounds": self.rounds}
        return out


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def totals(answers: list[Answer], group: Group) -> Totals:
    """Sum the answers of one group."""
    out = Totals()
    for a in answers:
        if a.group == group:
            out.add(a)
    return out


def groups_dict(answers: list[Answer]) -> dict:
    """The three groups side by side, in the form of the JSON report."""
    return {g.value: totals(answers, g).to_dict(is_plain=g == Group.PLAIN) for g in Group}


def gross_saving_s(answers: list[Answer]) -> float | None:
    """Device seconds that adaptive requests took less than they would have at the static group's rate.

    None when either group has no tokens.
    """
    adaptive, static = totals(answers, Group.ADAPTIVE), totals(answers, Group.STATIC)
    if not adaptive.tokens or not static.tokens:
        return None
    return adaptive.tokens * static.device_s / static.tokens - adaptive.device_s


def own_version_s(answers: list[Answer], first_version: str, began: float) -> float | None:
    """Seconds from a phase's beginning to its first adaptive answer by a version of its own; None: there was none.

    Its own are those, but the first, that answered for a class with MAIN_SHARE of the phase's requests: smaller classes are
    another phase's, of which some look alike, or parts of this one.
    """
    sizes = Counter(a.traffic_class for a in answers)
    main = {name for name, count in sizes.items() if count >= MAIN_SHARE * len(answers)}
    adaptive = [a for a in answers if a.group == Group.ADAPTIVE]
    own = {a.drafter_version for a in adaptive if a.traffic_class in main} - {first_version}
    return min((a.ended - began for a in adaptive if a.drafter_version in own), default=None)


@dataclass(slots=True)
class DemoStats:
    """Collects answers; everything else is derived."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def take(self, item: Answer | Exception) -> None:
        """Add what a client got."""
        if isinstance(item, Exception):
            self.failures.append(str(item))
        else:
            self.answers.append(item)

    def of_phase(self, phase: str) -> list[Answer]:
        return [a for a in self.answers if a.phase == phase]

    def phase_dict(self, name: str, bucket: str, spent_s: float) -> dict:
        """One element of `phases`; `spent_s` is what the ledger charged during the phase."""
        answers = self.of_phase(name)
        tail = answers[-max(8, int(len(answers) * 0.4)) :]
        by_temperature = {}
        tokens = sum(a.num_tokens for a in answers if a.group == Group.ADAPTIVE)
        for t in sorted({a.temperature for a in answers}):
            part = [a for a in answers if a.temperature == t]
            gross = gross_saving_s(part)
            share = sum(a.num_tokens for a in part if a.group == Group.ADAPTIVE) / tokens if tokens else 0.0
            by_temperature[f"{t:g}"] = groups_dict(part) | {
                "gross_saved_s": _round(gross, 3),
                "net_saved_s": _round(None if gross is None else gross - spent_s * share, 3),
            }
        gross = gross_saving_s(answers)
        return {
            "name": name,
            "bucket": bucket,
            "classes": dict(Counter(a.traffic_class for a in answers).most_common()),
            "requests": len(answers),
            "tokens": sum(a.num_tokens for a in answers),
            **groups_dict(answers),
            "at_end": groups_dict(tail),
            "by_temperature": by_temperature,
            "spent_s": round(spent_s, 3),
            "gross_saved_s": _round(gross, 3),
            "net_saved_s": _round(None if gross is None else gross - spent_s, 3),
        }
