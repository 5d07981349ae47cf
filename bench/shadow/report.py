"""Shadow report: the error of a shadow score with its interval, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from paceline.adapt.gate.gate import RequestScore, pooled_acceptance_length
from paceline.bench.common.recorders import Round
from paceline.bench.common.terminal import new_table
from paceline.bootstrap import rate_ratio

MAX_ERROR_PERCENT = 2.0
MIN_ROUNDS = 200
"""Rounds below which a row is not judged: one long round would decide."""


def compare(
    scores: Sequence[RequestScore], rounds: Sequence[Sequence[Round]], *, is_paired: bool, drafted_only: bool = False
) -> dict[str, Any]:
    """One row's figures: shadow and real acceptance length, error in percent of the real one, 95% bootstrap interval.

    Args:
        scores: replay of each request. rounds: the engine's, of each request.
        is_paired: element i of both is the same request, and both are resampled together; otherwise apart.
        drafted_only: leave out rounds that the engine decoded without a draft (an adaptive budget has many of them).
    """
    shadow = np.array([(s.num_tokens + s.num_unseen_tokens, s.num_rounds) for s in scores], dtype=np.float64)
    counts = [sum(r.num_draft_tokens > 0 for r in own) if drafted_only else len(own) for own in rounds]
    accepted = [sum(r.num_accepted_tokens for r in own) for own in rounds]
    real = np.array([(a + n, n) for a, n in zip(accepted, counts, strict=True)], dtype=np.float64)
    out: dict[str, Any] = {
        "shadow_acceptance_length": round(pooled_acceptance_length(scores), 4),
        "real_acceptance_length": round(float(_ratio(real.sum(0))), 4),
        "error_percent": round(float(100 * (_ratio(shadow.sum(0)) / _ratio(real.sum(0)) - 1)), 3),
        "interval": error_interval(shadow, real, is_paired=is_paired),
        "num_requests": len(rounds),
        "num_rounds": int(real[:, 1].sum()),
    }
    if is_paired and not drafted_only:  # what the text alone decides: its tokens behind the first over its rounds
        per_round = float(np.mean([r.num_emitted_tokens for own in rounds for r in own]))
        replayed = sum(s.num_tokens for s in scores) / sum(s.num_rounds for s in scores)
        out["emitted_error_percent"] = round(100 * (replayed / per_round - 1), 3)
    return out


def _ratio(sums: np.ndarray) -> Any:
    return sums[..., 0] / sums[..., 1]


def error_interval(shadow: np.ndarray, real: np.ndarray, *, is_paired: bool) -> list[float] | None:
    """Interval over requests of the error in percent; shadow and real are (requests, 2): tokens, rounds."""
    _, ends = rate_ratio(shadow.T, real.T, is_paired=is_paired)
    return None if ends is None else [round(100 * (end - 1), 3) for end in ends]


def is_judged(row: dict[str, Any]) -> bool:
    """Whether the error of this row counts: paired texts, the gate's budget, enough rounds."""
    return row["budget"] == "fixed" and row["text"] in ("own", "same") and row["num_rounds"] >= MIN_ROUNDS


def judge(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The verdict: whether every judged row is within MAX_ERROR_PERCENT, and a summary by text and temperature."""
    judged = [r for r in rows if is_judged(r)]
    summary = []
    for budget, text in (("fixed", "own"), ("fixed", "same"), ("fixed", "other"), ("adaptive", "own")):
        for t in sorted({r["temperature"] for r in rows}):
            errors = np.array(
                [r["error_percent"] for r in rows if (r["budget"], r["text"], r["temperature"]) == (budget, text, t)]
            )
            if errors.size:
                summary.append(
                    {
                        "budget": budget, "text": text, "temperature": t, "num_rows": int(errors.size),
                        "mean_error_percent": round(float(errors.mean()), 3),
                        "mean_absolute_error_percent": round(float(np.abs(errors).mean()), 3),
                        "largest_absolute_error_percent": round(float(np.abs(errors).max()), 3),
                    }
                )  # fmt: skip
    return {
        "max_error_percent": MAX_ERROR_PERCENT,
        "num_judged_rows": len(judged),
        "passed": bool(judged) and all(abs(r["error_percent"]) <= MAX_ERROR_PERCENT for r in judged),
        "summary": summary,
    }


def print_report(result: dict[str, Any], console: Console) -> None:
    """A line per version, bucket and temperature, then the summary and the verdict."""
    title = "Shadow score against real decoding: error of acceptance length, 95% interval over requests"
    columns = ("version", "bucket", "T", "real", "own text", "same text", "other text", "adaptive real")
    table = new_table(title, columns, 2)
    cells: dict[tuple, dict[str, dict[str, Any]]] = {}
    for r in result["rows"]:
        key = (_name(r), r["bucket"], r["temperature"])
        cells.setdefault(key, {})["adaptive" if r["budget"] == "adaptive" else r["text"]] = r
    for (name, bucket, t), by_text in cells.items():
        adaptive = by_text.get("adaptive")
        served = (
            "-" if adaptive is None else f"{adaptive['real_acceptance_length']:.2f} at {adaptive['num_draft_tokens']:g}"
        )
        errors = [_error_text(by_text.get(text)) for text in ("own", "same", "other")]
        table.add_row(name, bucket, f"{t:g}", f"{by_text['own']['real_acceptance_length']:.3f}", *errors, served)
    table.caption = (
        f"real: engine with {result['tree']['num_nodes']} draft nodes a round"
        f"{', one below another' if result['options'].get('chain') else ''}; adaptive real: one request at a time, "
        "drafted rounds, at that many draft nodes a round"
    )
    console.print(table)
    heads = ("budget", "text", "T", "rows", "mean", "mean |error|", "largest |error|")
    rows = [
        [s["budget"], s["text"], f"{s['temperature']:g}", str(s["num_rows"]), f"{s['mean_error_percent']:+.2f}",
         f"{s['mean_absolute_error_percent']:.2f}", f"{s['largest_absolute_error_percent']:.2f}"]
        for s in result["summary"]
    ]  # fmt: skip
    console.print(new_table("Error in percent of the real acceptance length", heads, 2, rows=rows))
    if result["num_judged_rows"] == 0:
        console.print(f"no row has {MIN_ROUNDS} rounds: ask for more prompts or tokens")
    verdict = "[green]passed[/green]" if result["passed"] else "[red]failed[/red]"
    console.print(
        f"{verdict}: {result['num_judged_rows']} rows on own and same texts with at least {MIN_ROUNDS} rounds, "
        f"limit {result['max_error_percent']:g}%, target in {result['dtype']}"
    )


def _name(row: dict[str, Any]) -> str:
    return "first" if row["trained_on"] is None else f"{row['arm']}-{row['trained_on']}"


def _error_text(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    mark = "" if is_judged(row) or row["text"] == "other" else " *"
    ends = "({:+.2f} {:+.2f})".format(*row["interval"]) if row["interval"] else "(one request)"
    return f"{row['error_percent']:+.2f} {ends}{mark}"
