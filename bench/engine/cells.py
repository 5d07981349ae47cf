"""Cells: what the groups of one (bucket, batch, temperature) say: rates, ratios with intervals, time per round, verdicts.

Everything here is arithmetic on GroupTiming, but the lossless row, which has answers checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.bench.common.lossless import LosslessChecker, check_sampled
from paceline.bench.engine.arms import BenchGroup, GroupTiming, Stretch
from paceline.bootstrap import rate_ratio
from paceline.serving.sampling.request import SamplingParams

PLAIN, SPECULATIVE = "plain", "speculative"
FLOOR = 0.98
"""Least speed of speculative over plain decoding that counts as 'costs nothing'."""
MODEL_PARTS = ("draft", "verify")
"""Parts of a round spent inside a model."""


def paired_ratio(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Pooled rate of `a` over pooled rate of `b` with a 95% interval; None without groups.

    Args:
        a, b: (tokens, seconds) of each group; element i of both is the same group.
    """
    if not a:
        return None
    ratio, ends = rate_ratio(np.transpose(a), np.transpose(b))
    return {"ratio": round(ratio, 4), "interval": ends, "num_groups": len(a)}


def whole_rates(groups: Iterable[GroupTiming]) -> list[tuple[float, float]]:
    return [(float(g.num_tokens), g.seconds) for g in groups]


def full_batch_pairs(
    a: Sequence[GroupTiming], b: Sequence[GroupTiming]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(tokens, seconds) of the full-batch parts, of the groups in which both arms had one."""
    pairs = [(x.full_batch, y.full_batch) for x, y in zip(a, b, strict=True)]
    both = [(x, y) for x, y in pairs if x is not None and y is not None and x.num_rounds and y.num_rounds]
    return [(float(x.num_tokens), x.seconds) for x, _ in both], [(float(y.num_tokens), y.seconds) for _, y in both]


def split_of_rounds(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """Mean milliseconds of a decode round by part, and the share outside the two models."""
    rounds = sum(s.num_rounds for s in stretches)
    parts: dict[str, float] = {}
    for stretch in stretches:
        for name, seconds in stretch.part_s.items():
            parts[name] = parts.get(name, 0.0) + seconds
    total = sum(parts.values())
    inside = sum(parts.get(name, 0.0) for name in MODEL_PARTS)
    return {
        "num_rounds": rounds,
        "round_ms": round(1e3 * total / rounds, 4) if rounds else None,
        "part_ms": {k: round(1e3 * v / rounds, 4) for k, v in parts.items()} if rounds else {},
        "outside_share": round(1 - inside / total, 4) if total > 0 else None,
    }


def arm_summary(groups: Sequence[GroupTiming]) -> dict[str, Any]:
    """One arm's figures over the counted groups of a cell; engine figures are absent for other arms."""
    tokens, seconds = sum(g.num_tokens for g in groups), sum(g.seconds for g in groups)
    requests = sum(len(g.token_ids) for g in groups)
    prefill_s = sum(g.prefill_s for g in groups)
    ttft_ms = 1e3 * np.array([t for g in groups for t in g.ttft_s])
    decode_s = seconds - prefill_s
    out: dict[str, Any] = {
        "num_tokens": tokens,
        "seconds": round(seconds, 6),
        "tokens_per_s": round(tokens / seconds, 2),
        "ttft_ms": {name: round(float(v), 3) for name, v in zip(("p50", "p95", "max"), np.quantile(ttft_ms, [0.5, 0.95, 1]), strict=True)},
        "prefill_s": round(prefill_s, 6),
        "decode_tokens_per_s": round((tokens - requests) / decode_s, 2) if decode_s > 0 and tokens > requests else None,
        "group_tokens": [g.num_tokens for g in groups],
        "group_seconds": [g.seconds for g in groups],
    }  # fmt: skip
    whole = [g.whole for g in groups if g.whole is not None]
    if not whole:
        return out
    full = [g.full_batch for g in groups if g.full_batch is not None and g.full_batch.num_rounds]
    full_s, full_tokens = sum(f.seconds for f in full), sum(f.num_tokens for f in full)
    rounds, request_rounds = sum(w.num_rounds for w in whole), sum(g.num_request_rounds for g in groups)
    full_rounds = sum(f.num_rounds for f in full)
    return {
        **out,
        "acceptance_length": round(sum(g.num_accepted_tokens for g in groups) / request_rounds + 1, 4) if request_rounds else None,
        "draft_tokens_per_round": round(sum(g.num_draft_tokens for g in groups) / request_rounds, 3) if request_rounds else None,
        "rounds": split_of_rounds(whole),
        "num_full_batch_rounds": full_rounds,
        "full_batch_round_share": round(full_rounds / rounds, 4) if rounds else None,
        "full_batch_tokens_per_s": round(full_tokens / full_s, 2) if full_s > 0 else None,
        "full_batch_rounds": split_of_rounds(full) if full else None,
    }  # fmt: skip


def ratio_from_parts(plain: dict[str, Any], arm: dict[str, Any]) -> float | None:
    """Speed ratio predicted from full-batch round times: t_plain x acceptance_length / t_arm (A.3 of SPEED-Bench).

    Source: SPEED-Bench, arXiv 2604.09557, Table 10. Far from the measured ratio, something outside the rounds decides.
    """
    a, b = arm.get("full_batch_rounds"), plain.get("full_batch_rounds")
    if not a or not b or not a["round_ms"] or not arm["acceptance_length"]:
        return None
    return round(b["round_ms"] * arm["acceptance_length"] / a["round_ms"], 4)


def cell_row(bucket: str, batch: int, temperature: float, timings: dict[str, list[GroupTiming]]) -> dict[str, Any]:
    """The figures of a cell: every arm, and every arm's ratio to the plain engine."""
    plain = timings[PLAIN]
    arms = {name: arm_summary(g) for name, g in timings.items()}
    ratios = {
        name: {
            "whole": paired_ratio(whole_rates(g), whole_rates(plain)),
            "full_batch": paired_ratio(*full_batch_pairs(g, plain)),
            "from_parts": ratio_from_parts(arms[PLAIN], arms[name]),
        }
        for name, g in timings.items()
        if name != PLAIN
    }
    return {
        "bucket": bucket,
        "batch": batch,
        "temperature": temperature,
        "num_groups": len(plain),
        "num_requests": sum(len(g.token_ids) for g in plain),
        "arms": arms,
        "ratios": ratios,
        **judge(ratios.get(SPECULATIVE)),
    }


def judge(ratio: dict[str, Any] | None) -> dict[str, Any]:
    """Verdict of a cell on speculative over plain: gain | holds | below | unclear, and what it was judged on.

    The full-batch part decides where every group has one: the whole group ends with a draining tail of few requests,
    where speculation gains more, so that its ratio flatters large batches.
    """
    if ratio is None:
        return {"verdict": None, "judged_on": None}
    whole, full = ratio["whole"], ratio["full_batch"]
    name = "full_batch" if full is not None and full["num_groups"] == whole["num_groups"] else "whole"
    interval = ratio[name]["interval"]
    if interval is None:
        verdict = "unclear"
    elif interval[0] > 1:
        verdict = "gain"
    elif interval[0] >= FLOOR:
        verdict = "holds"
    else:
        verdict = "below" if interval[1] < FLOOR else "unclear"
    return {"verdict": verdict, "judged_on": name}


def crossover(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The batch up to which speculation gains, of (batch, ratio) points.

    Returns gains_up_to (largest measured batch with a ratio above 1; None when there is none) and crossover_batch, where
    the ratio falls to 1 between it and the next batch, on a line in log2(batch); None when no larger batch was measured.
    """
    points = sorted(points)
    above = [i for i, (_, r) in enumerate(points) if r > 1]
    if not above:
        return {"gains_up_to": None, "crossover_batch": None}
    i = above[-1]
    if i + 1 == len(points):
        return {"gains_up_to": points[i][0], "crossover_batch": None}
    (b0, r0), (b1, r1) = points[i], points[i + 1]
    return {"gains_up_to": b0, "crossover_batch": round(b0 * (b1 / b0) ** ((r0 - 1) / (r0 - r1)), 1)}


def crossovers(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The crossover of every (bucket, temperature)."""
    out = []
    judged = [c for c in cells if c["judged_on"]]
    for bucket, temperature in dict.fromkeys((c["bucket"], c["temperature"]) for c in judged):
        points = [
            (c["batch"], c["ratios"][SPECULATIVE][c["judged_on"]]["ratio"])
            for c in judged
            if (c["bucket"], c["temperature"]) == (bucket, temperature)
        ]
        out.append({"bucket": bucket, "temperature": temperature, **crossover(points)})
    return out


def overall_verdict(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether speculation is never below FLOOR x plain. holds: every interval lies above; violated: one lies wholly below."""
    judged = [c for c in cells if c["verdict"] is not None]

    def names(verdict: str) -> list[str]:
        return [f"{c['bucket']} batch {c['batch']} T={c['temperature']:g}" for c in judged if c["verdict"] == verdict]

    below, unclear = names("below"), names("unclear")
    verdict = "violated" if below else "unclear" if unclear or not judged else "holds"
    lossless = [c["lossless"] for c in cells if c.get("lossless")]
    return {
        "floor": FLOOR,
        "verdict": verdict,
        "num_cells": len(judged),
        "num_gain": len(names("gain")),
        "below": below,
        "unclear": unclear,
        "num_mismatches": sum(r["num_mismatches"] for r in lossless),
        "num_checked_tokens": sum(r["num_checked_tokens"] for r in lossless),
    }


def lossless_row(
    groups: Sequence[BenchGroup],
    timings: dict[str, list[GroupTiming]],
    checker: LosslessChecker | None,
    num_check: int,
    arm: str = SPECULATIVE,
) -> dict[str, float]:
    """Every answer that differs between `arm` and the plain engine is checked against the fp32 target (a near tie may go
    either way), and the first `num_check` of each engine besides.

    Greedy and sampled answers: with equal seeds both engines draw the same tokens.
    """
    answers: dict[tuple[tuple[int, ...], tuple[int, ...], SamplingParams], None] = {}
    num_differing = num_compared = 0
    for g, group in enumerate(groups):
        for i, (prompt, params) in enumerate(zip(group.prompts, group.params, strict=True)):
            texts = [timings[name][g].token_ids[i] for name in (PLAIN, arm) if name in timings]
            is_same = len(set(texts)) == 1
            num_compared += 1
            num_differing += not is_same
            if not is_same or num_compared <= num_check:
                answers.update(dict.fromkeys((prompt, text, params) for text in texts))
    out = {"num_compared": num_compared, "num_differing": num_differing}
    if checker is None:
        return {**out, "num_checked_tokens": 0, "num_near_ties": 0, "num_mismatches": 0, "largest_gap": 0.0}
    reports = (
        checker.check([(prompt, text) for prompt, text, p in answers if p.temperature == 0]),
        check_sampled(checker, [a for a in answers if a[2].temperature > 0]),
    )
    return {
        **out,
        "num_checked_tokens": sum(r.checked for r in reports),
        "num_near_ties": sum(r.near_ties for r in reports),
        "num_mismatches": sum(r.mismatches for r in reports),
        "largest_gap": round(max(r.largest_gap for r in reports), 5),
    }
