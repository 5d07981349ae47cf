"""Stream statistics: percentiles, tokens over time, problems, and answers that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.bench.serve.client import REFUSED, StreamResult

NEAR_TIE_NATS = 0.25
"""Two greedy tokens whose log-probabilities lie closer may swap with rounding: bfloat16 keeps 8 bits, so that four
roundings on either side move a logit of 16 by up to 0.25 (bench/common/lossless.py)."""


def percentiles_ms(seconds: Sequence[float], points: Sequence[float] = (50, 95, 99)) -> dict[str, float | None]:
    """Percentiles and maximum in ms; None without values."""
    names = [*(f"p{p:g}" for p in points), "max"]
    if not len(seconds):
        return dict.fromkeys(names)
    values = np.percentile(np.asarray(seconds), [*points, 100])
    return {name: round(1e3 * float(v), 3) for name, v in zip(names, values, strict=True)}


@dataclass(slots=True)
class StreamTotals:
    """Sums over answers; grows with chunks, not with texts."""

    began_s: float
    bin_s: float
    num_answers: int = 0
    num_tokens: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    bins: Counter[int] = field(default_factory=Counter)

    def add(self, result: StreamResult) -> None:
        """Fold one answer; an answer with a problem still counts what arrived."""
        self.num_answers += 1
        if result.problem is not None:
            kind = result.problem.split(":", 1)[0]
            self.problems[kind] += 1
            self.examples.setdefault(kind, result.problem)
        if result.ttft_s is not None:
            self.ttft_s.append(result.ttft_s)
        self.gaps_s += result.gaps_s
        for at, count in result.arrivals:
            self.bins[int((at - self.began_s) / self.bin_s)] += count
            self.num_tokens += count

    @property
    def num_errors(self) -> int:
        """Problems except refusals for lack of room."""
        return sum(n for kind, n in self.problems.items() if kind != REFUSED)

    def tokens_over_time(self, window_s: float) -> list[dict[str, float]]:
        """Tokens per second of each bin that lies wholly inside the window: what drains afterwards is left out."""
        return [
            {"at_s": round(i * self.bin_s, 3), "tokens_per_s": round(self.bins[i] / self.bin_s, 2)}
            for i in range(int(window_s / self.bin_s + 1e-9))
        ]

    def summary(self, window_s: float) -> dict[str, Any]:
        """Everything as JSON values. The steady rate leaves out the first tenth of the window, when clients start."""
        series = self.tokens_over_time(window_s)
        steady = [b["tokens_per_s"] for b in series if b["at_s"] >= 0.1 * window_s] or [b["tokens_per_s"] for b in series]  # fmt: skip
        return {
            "num_answers": self.num_answers,
            "num_whole": self.num_answers - sum(self.problems.values()),
            "num_errors": self.num_errors,
            "problems": dict(sorted(self.problems.items())),
            "examples": dict(sorted(self.examples.items())),
            "num_tokens": self.num_tokens,
            "tokens_per_s": round(float(np.mean(steady)), 2) if steady else None,
            "ttft_ms": percentiles_ms(self.ttft_s),
            "gap_ms": percentiles_ms(self.gaps_s),
            "tokens_over_time": series,
        }


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Index of the first difference, a shorter one differing at its end; None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def explain_difference(
    first: Sequence[int], again: Sequence[int], third: tuple[list[int], list[float]] | None
) -> tuple[str, str]:
    """(near_tie | mismatch | unexplained, words) for two greedy answers that differ.

    Args:
        third: the answer once more with the distance of the two best log-probabilities at every token.
    """
    at = first_difference(first, again)
    if at is None:
        raise ValueError("the answers must differ")
    if third is None:
        return "unexplained", f"token {at} differs and the server gives no log-probabilities"
    ids, gaps = third
    known = first_difference(ids[:at], list(again[:at]))
    if known is not None or at >= len(gaps):
        return "unexplained", f"token {at} differs, and a third answer went another way before"
    words = f"token {at} differs, the two best lie {gaps[at]:.4f} nats apart"
    return ("near_tie" if gaps[at] <= NEAR_TIE_NATS else "mismatch"), words
