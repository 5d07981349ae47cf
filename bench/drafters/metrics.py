"""Drafter metrics: acceptance per depth, acceptance length, rates and gaps of a drafter's rounds.

Shape legend: K depths, P prompts, R bootstrap resamples.
A round that the end of the request cuts is censored: the draft tokens inside the answer count as accepted, deeper ones
were never at risk. A round with room for one token is left out, since nothing is drafted for it. The conditional rate of
a depth is then accepted / at risk (Kaplan and Meier 1958), and the acceptance length is 1 + sum_i prod_{j <= i} of them,
which is accepted / rounds + 1 where nothing was cut. Definitions: SPEED-Bench, arXiv 2604.09557.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from paceline.bench.common.recorders import Round
from paceline.bench.engine.arms import GroupTiming
from paceline.bench.serve.stats import percentiles_ms
from paceline.bootstrap import interval, ratio_interval, resampled

Requests = Sequence[tuple[Hashable, Sequence[Round]]]
"""(prompt, rounds) of each request; requests with the same prompt are one sample of the bootstrap."""


def depth_counts(rounds: Iterable[Round], num_depths: int) -> np.ndarray:
    """Rounds at risk and rounds accepted per depth: (2, K) float64; element i - 1 is depth i."""
    counts = np.zeros((2, num_depths))
    for r in rounds:
        if r.is_limited:
            continue
        counts[:, : r.num_known] += 1
        if not r.is_cut and r.num_known < num_depths:
            counts[0, r.num_known] += 1  # the depth at which the round ended
    return counts


def joint_rates(counts: np.ndarray) -> np.ndarray:
    """P(the first i draft tokens are all accepted) for i = 1..K. (2, K, ...) counts -> (K, ...)."""
    at_risk, accepted = counts
    return np.cumprod(np.divide(accepted, at_risk, out=np.zeros_like(accepted), where=at_risk > 0), axis=0)


def mean_length(counts: np.ndarray) -> np.ndarray:
    """Acceptance length, bonus included. (2, K, ...) -> (...)."""
    return 1 + joint_rates(counts).sum(0)


def acceptance(requests: Requests) -> dict[str, Any]:
    """Acceptance over the rounds of all requests; lengths are None without a round that counts.

    Returns: num_rounds and, of them, num_cut; num_limited (left out); acceptance_length pooled over rounds, with its
    interval over prompts, and per_request (each request counts once); depths 1..K, dense; histogram of the lengths of
    rounds that were not cut, dense from 1.
    """
    rounds = [r for _, own in requests for r in own if not r.is_limited]
    num_limited = sum(r.is_limited for _, own in requests for r in own)
    depth = max((r.num_known for r in rounds), default=0)
    by_prompt: dict[Hashable, np.ndarray] = {}
    for prompt, own in requests:
        if any(not r.is_limited for r in own):
            by_prompt[prompt] = by_prompt.get(prompt, np.zeros((2, depth))) + depth_counts(own, depth)
    out: dict[str, Any] = {
        "num_rounds": len(rounds),
        "num_cut": sum(r.is_cut for r in rounds),
        "num_limited": num_limited,
        "draft_tokens_per_round": sum(r.num_draft_tokens for r in rounds) / len(rounds) if rounds else None,
    }
    if not rounds:
        return {**out, "acceptance_length": None, "depths": [], "histogram": []}
    total = np.sum(list(by_prompt.values()), axis=0)  # (2, K)
    joint = joint_rates(total)
    pooled, ends = 1.0, None if len(by_prompt) < 2 else [1.0, 1.0]
    if depth:
        columns = np.stack([c.ravel() for c in by_prompt.values()], 1)  # (2 * K, P)
        pooled, values = resampled(columns, lambda sums: mean_length(sums.reshape(2, depth, -1)))
        ends = interval(pooled, values, len(by_prompt), is_positive=True)
    lengths = [
        float(mean_length(depth_counts(own, depth))) for _, own in requests if any(not r.is_limited for r in own)
    ]
    whole = np.bincount([r.num_accepted_tokens for r in rounds if not r.is_cut], minlength=1)
    return {
        **out,
        "acceptance_length": {
            "pooled": pooled,
            "interval": ends,
            "num_prompts": len(by_prompt),
            "per_request": float(np.mean(lengths)),
        },
        "depths": [
            {
                "depth": i + 1,
                "num_at_risk": int(total[0, i]),
                "num_accepted": int(total[1, i]),
                "conditional": float(total[1, i] / total[0, i]) if total[0, i] else None,
                "joint": float(joint[i]),
            }
            for i in range(depth)
        ],
        "histogram": [{"acceptance_length": i + 1, "num_rounds": int(n)} for i, n in enumerate(whole)],
    }


def stream_metrics(timings: Sequence[GroupTiming], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """What a user of each request saw: time to the first token, tokens per second after it, gaps between later chunks.

    prompts: of the requests of all groups in order. A chunk is a round, so gaps say how evenly text appears; the wait for
    the first token is no gap. Tokens per second of a request are those after its first chunk over the time since then.
    """
    ttft_s: list[float] = []
    gaps_s: list[float] = []
    rates: dict[Hashable, list[float]] = {}
    chunks = [c for g in timings for c in zip(g.submitted_s, g.chunks, strict=True)]
    for prompt, (submitted_s, own) in zip(prompts, chunks, strict=True):
        times = [at for at, _ in own]
        ttft_s.append(times[0] - submitted_s)
        gaps_s += np.diff(times).tolist()
        if len(own) > 1 and times[-1] > times[0]:
            rates.setdefault(prompt, []).append(sum(n for _, n in own[1:]) / (times[-1] - times[0]))
    user: dict[str, Any] = {"mean": None, "interval": None}
    if rates:
        mean, ends = ratio_interval([sum(r) for r in rates.values()], [len(r) for r in rates.values()])
        user = {"mean": mean, "interval": ends}
    return {"user_tokens_per_s": user, "ttft_ms": percentiles_ms(ttft_s), "gap_ms": percentiles_ms(gaps_s)}


def round_times(requests: Requests) -> dict[str, float | None]:
    """Percentiles and maximum of the time of a round in ms, prefill left out, each request of a round counting once."""
    return percentiles_ms([r.round_ms / 1e3 for _, own in requests for r in own])


def share_of_time(parts_s: Sequence[float], totals_s: Sequence[float]) -> dict[str, Any] | None:
    """Pooled part / total with its interval over groups; None when no time passed."""
    if not sum(totals_s) > 0:
        return None
    share, ends = ratio_interval(parts_s, totals_s)
    return {"share": share, "interval": ends}
