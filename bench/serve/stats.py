"""Load statistics: figures of a load with intervals, of long streams as running sums, and of answers that changed.

Of a load, everything but acceptance counts inside the **steady window** only: ramp-up, in which the server is not yet full, and
drain, in which it no longer is, would understate throughput and flatter latency.

Chunks are no tokens: a round of a speculative server is one chunk with several of them, and a slow reader gets several
rounds in one piece. Tokens are therefore counted from what the server says, and where it says nothing the figure is
marked as an estimate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.bench.serve.cell import Answer, CellRun, Load
from paceline.bench.serve.client import REFUSED, ServerFeatures, StreamResult
from paceline.bootstrap import expanded_level, mean_interval, ratio_interval, resample_counts

NAMED, USAGE, CHUNKS = "token ids", "usage", "chunks"
COUNT_WORDS = {
    NAMED: "exact: chunks name their tokens",
    USAGE: "totals exact (usage); spread evenly over an answer's chunks, so that rates in a window are estimates",
    CHUNKS: "ESTIMATE: the server counts nothing and a chunk is taken for a token, which understates a server that sends several at once",
}  # fmt: skip
RAMP_SHARE = 0.1
"""Share of an open loop's arrivals that counts as ramp-up."""
_NUM_BLOCKS = 20
NUM_RESAMPLES = 1000
POINTS = (50, 95, 99)


def token_count_kind(features: ServerFeatures, answers: Sequence[Answer]) -> str:
    """How tokens can be counted of these answers."""
    whole = [a.result for a in answers if a.result.problem is None and a.result.arrivals]
    if features.has_token_ids and any(r.token_ids for r in whole):
        return NAMED
    return USAGE if whole and all(r.usage_tokens is not None for r in whole) else CHUNKS


def token_arrivals(answer: Answer, kind: str) -> list[tuple[float, float]]:
    """(time, tokens) of each chunk; of an answer that broke off before its usage a chunk counts as one token."""
    result = answer.result
    if kind != USAGE or not result.arrivals or result.usage_tokens is None:
        return [(at, float(n)) for at, n in result.arrivals]
    each = result.usage_tokens / len(result.arrivals)
    return [(at, each) for at, _ in result.arrivals]


def steady_window(run: CellRun, load: Load) -> tuple[float, float] | None:
    """(begin, end) in seconds of the timer; None where the load was over before it was full.

    Closed loop: from the first token of the last of the first `concurrency` answers. Open loop: from the arrival after
    the first tenth. Both: until the last request was sent.
    """
    if not run.answers or run.supply_ended_s is None:
        return None
    if load.concurrency is not None:
        firsts = [a.first_token_s for a in run.answers[: load.concurrency]]
        begin = max((f for f in firsts if f is not None), default=None)
    else:
        begin = run.answers[min(len(run.answers) - 1, int(RAMP_SHARE * len(run.answers)))].due_s
    return (begin, run.supply_ended_s) if begin is not None and begin < run.supply_ended_s else None


def summarize(run: CellRun, load: Load, features: ServerFeatures, from_metrics: dict[str, Any]) -> dict[str, Any]:
    """One load as JSON values.

    Args:
        from_metrics: what the server's own metrics say (server_metrics.acceptance_between).
    """
    answers = run.answers
    kind = token_count_kind(features, answers)
    window = steady_window(run, load)
    broken = [a for a in reversed(answers) if a.result.problem is not None]  # the first one of a kind is its example
    problems = Counter(str(a.result.kind) for a in broken)
    ended = max((a.result.ended_s for a in answers), default=run.began_s)
    out: dict[str, Any] = {
        "load": load.name, "concurrency": load.concurrency, "rate_per_s": load.rate_per_s,
        "num_requests": len(answers), "num_whole": len(answers) - sum(problems.values()),
        "num_errors": sum(n for k, n in problems.items() if k != REFUSED), "problems": dict(sorted(problems.items())),
        "examples": {str(a.result.kind): a.result.problem for a in sorted(broken, key=lambda a: str(a.result.kind))},
        "num_refusals": sum(a.num_refused for a in answers), "refused_wait_s": round(sum(a.waited_s for a in answers), 3),
        "max_in_flight": run.max_in_flight, "num_sent_late": run.num_late,
        "token_count": kind, "token_count_means": COUNT_WORDS[kind],
        "num_tokens": round(sum(n for a in answers for _, n in token_arrivals(a, kind))),
        "seconds": round(ended - run.began_s, 3), "window": None,
    }  # fmt: skip
    if window is not None:
        out["window"] = {
            "seconds": round(window[1] - window[0], 3), "excluded_ramp_up_s": round(window[0] - run.began_s, 3),
            "excluded_drain_s": round(max(0.0, ended - window[1]), 3),
        }  # fmt: skip
    out |= _in_window(answers, kind, window)
    out["acceptance"] = acceptance(answers, from_metrics)
    return out


def acceptance(answers: Sequence[Answer], from_metrics: dict[str, Any]) -> dict[str, Any]:
    """Acceptance as answers account for it themselves, otherwise as the server's metrics do; pooled over rounds."""
    known = [(a.result.request.bucket, a.result.server_stats) for a in answers if (a.result.server_stats or {}).get("num_rounds")]  # fmt: skip
    if not known:
        return from_metrics
    by_bucket: dict[str, Any] = {}
    for bucket in sorted({b for b, _ in known}):
        by_bucket[bucket] = _length([s for b, s in known if b == bucket and s])
    stats = [s for _, s in known if s]
    proposed, accepted = (sum(int(s.get(k, 0)) for s in stats) for k in ("num_draft_tokens", "num_accepted_tokens"))
    return {
        "source": "answers", "acceptance_length": _length(stats),
        "acceptance_rate": round(accepted / proposed, 4) if proposed else None,
        "num_rounds": sum(int(s["num_rounds"]) for s in stats), "num_draft_tokens": proposed,
        "num_accepted_tokens": accepted, "by_bucket": by_bucket, "metrics": from_metrics,
    }  # fmt: skip


def _length(stats: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    rounds = [float(s["num_rounds"]) for s in stats]
    emitted = [s.get("num_accepted_tokens", 0) + s["num_rounds"] for s in stats]  # one bonus token a round
    return ratio_with_interval(emitted, rounds)


def _in_window(answers: Sequence[Answer], kind: str, window: tuple[float, float] | None) -> dict[str, Any]:
    names = ("ttft_ms", "gap_ms", "end_to_end_ms")
    if window is None:
        return {"output_tokens_per_s": None, "user_tokens_per_s": None, **{n: percentiles_with_intervals([]) for n in names}}  # fmt: skip
    begin, end = window
    ttft: list[list[float]] = []
    gaps: list[list[float]] = []
    whole: list[list[float]] = []
    user: list[tuple[float, float]] = []  # tokens after the first chunk, and the seconds they took
    blocks = [0.0] * _NUM_BLOCKS
    for a in answers:
        chunks = [(at, n) for at, n in token_arrivals(a, kind) if begin <= at <= end]
        for at, n in chunks:
            blocks[min(_NUM_BLOCKS - 1, int((at - begin) / (end - begin) * _NUM_BLOCKS))] += n
        times = [at for at, _ in chunks]
        if len(times) > 1:
            gaps.append([later - before for before, later in itertools.pairwise(times)])
            user.append((sum(n for _, n in chunks[1:]), times[-1] - times[0]))
        if begin <= a.due_s <= end and a.first_token_s is not None:
            ttft.append([a.first_token_s - a.due_s])
            if a.result.problem is None:
                whole.append([a.result.ended_s - a.due_s])
    rate = mean_with_interval([b * _NUM_BLOCKS / (end - begin) for b in blocks])
    return {
        "output_tokens_per_s": rate, "user_tokens_per_s": ratio_with_interval([n for n, _ in user], [s for _, s in user], digits=2),
        **{n: percentiles_with_intervals(v) for n, v in zip(names, (ttft, gaps, whole), strict=True)},
    }  # fmt: skip


def percentiles_with_intervals(
    seconds: Sequence[Sequence[float]], points: Sequence[float] = POINTS, *, seed: int = 0
) -> dict[str, Any]:
    """Percentiles in ms with 95% intervals, maximum and count of the values of all answers.

    Answers are resampled, never single chunks: those of one answer resemble each other (same load, same text).

    Args:
        seconds: one list of times an answer; an answer without any still counts as one that can be drawn.
    Returns:
        {p50: ms, ..., max: ms, intervals: {p50: [low, high], ...} or None for fewer than two answers, num_values}.
    """
    names = [f"p{p:g}" for p in points]
    sizes = np.array([len(s) for s in seconds], dtype=np.int64)
    num_values = int(sizes.sum())
    if num_values == 0:
        return {**dict.fromkeys([*names, "max"]), "intervals": None, "num_values": 0}
    values = np.concatenate([np.asarray(s, dtype=np.float64) for s in seconds if len(s)])
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(values, kind="stable")
    values, owner = 1e3 * values[order], owner[order]
    out: dict[str, Any] = {n: round(float(v), 3) for n, v in zip(names, np.percentile(values, points), strict=True)}
    out |= {"max": round(float(values[-1]), 3), "intervals": None, "num_values": num_values}
    if len(sizes) < 2:
        return out
    drawn = []
    for times in itertools.chain.from_iterable(resample_counts(len(sizes), NUM_RESAMPLES, np.random.default_rng(seed))):
        reached = np.cumsum(times[owner])  # how many resampled values lie at or below each value
        if reached[-1]:
            at = np.searchsorted(reached, np.asarray(points) / 100 * reached[-1])
            drawn.append(values[np.minimum(at, len(values) - 1)])
    tail = (1 - expanded_level(len(sizes))) / 2
    low, high = np.quantile(np.array(drawn), [tail, 1 - tail], axis=0)
    out["intervals"] = {n: [round(float(a), 3), round(float(b), 3)] for n, a, b in zip(names, low, high, strict=True)}
    return out


def mean_with_interval(values: Sequence[float], *, digits: int = 2) -> dict[str, Any] | None:
    """{value, interval} of a mean of figures >= 0; the interval is None for fewer than two, everything None without any."""
    if not len(values):
        return None
    value, ends = mean_interval(values, is_positive=True, digits=digits)
    return {"value": round(value, digits), "interval": ends}


def ratio_with_interval(tops: Sequence[float], bottoms: Sequence[float], *, digits: int = 4) -> dict[str, Any] | None:
    """{value, interval} of sum(tops) / sum(bottoms), resampling pairs; None where the bottoms sum to 0."""
    if not sum(bottoms):
        return None
    value, ends = ratio_interval(tops, bottoms, digits=digits)
    return {"value": round(value, digits), "interval": ends}


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
        if result.problem is not None and result.kind is not None:
            self.problems[result.kind] += 1
            self.examples.setdefault(result.kind, result.problem)
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
