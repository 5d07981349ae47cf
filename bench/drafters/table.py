"""Tables of the drafter benchmark in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.common.terminal import interval_text, new_table, number_text, say_file
from paceline.bench.engine.cells import PLAIN

COLUMNS = ("bucket", "batch", "T", "arm", "accept. length", "95%", "per request", "speedup", "95%", "predicted", "tok/s", "user tok/s", "TTFT ms", "gap p99", "draft share", "95% of share", "ms/draft")  # fmt: skip
SUMMARY_COLUMNS = (
    "kind",
    "batch",
    "T",
    "arm",
    "speedup",
    "95%",
    "least",
    "in",
    "accept. macro",
    "pooled",
    "draft share",
)
GAP_COLUMNS = ("random bucket", "instead of", "batch", "T", "arm", "random", "text", "gap")


def cell_texts(cell: dict[str, Any], arm: str) -> list[str]:
    """One row of a cell, as COLUMNS."""
    row, speed = cell["drafting"].get(arm), cell["arms"][arm]
    ratio = cell["ratios"].get(arm, {}).get("whole")
    shown = "" if ratio is None else f"{ratio['ratio']:.3f}"
    head = [cell["bucket"], str(cell["batch"]), f"{cell['temperature']:g}", arm]
    speedup = [shown, "" if ratio is None else interval_text(ratio["interval"])]
    if row is None:  # not an engine of ours
        return [*head, "", "", "", *speedup, "", f"{speed['tokens_per_s']:.0f}", "", number_text(speed["ttft_ms"]["p50"], 1), "", "", "", ""]  # fmt: skip
    length, cost = row["acceptance_length"], row.get("cost")
    share = None if cost is None else cost["of_round"]
    prediction = row.get("prediction")
    return [
        *head,
        *(["-"] * 3 if length is None else [f"{length['pooled']:.2f}", interval_text(length["interval"]), f"{length['per_request']:.2f}"]),
        *speedup,
        "" if arm == PLAIN else number_text(None if prediction is None else prediction["predicted"], 3),
        f"{speed['tokens_per_s']:.0f}", number_text(row["user_tokens_per_s"]["mean"]),
        number_text(row["ttft_ms"]["p50"], 1), number_text(row["gap_ms"]["p99"], 2),
        *(["", ""] if share is None else [f"{share['share']:.1%}", interval_text([100 * v for v in share["interval"]] if share["interval"] else None)]),
        "" if cost is None else number_text(cost["ms_per_draft"], 3),
    ]  # fmt: skip


def acceptance_table(document: dict[str, Any]) -> Table:
    """Every arm of every cell."""
    table = new_table("Drafters and policies against plain decoding, arms alternating", COLUMNS, 1)
    for cell in document["cells"]:
        names = list(cell["arms"])
        for i, arm in enumerate(names):
            texts = cell_texts(cell, arm)
            where = texts[:3] if i == 0 else ["", "", ""]
            is_known = cell["drafting"].get(arm, {}).get("in_domain")
            table.add_row(*where, arm + (" *" if is_known else ""), *texts[4:], end_section=i + 1 == len(names))
    table.caption = "* the drafter was trained on this bucket's domain. Acceptance length pooled over rounds, bonus token included"  # fmt: skip
    return table


def summary_texts(row: dict[str, Any]) -> list[str]:
    """One row of the summary, as SUMMARY_COLUMNS."""
    share = row["draft_share"]
    return [
        row["kind"], str(row["batch"]), f"{row['temperature']:g}", row["arm"], f"{row['speedup']:.3f}",
        interval_text(row["speedup_interval"]), f"{row['least_speedup']:.3f}", row["least_bucket"],
        number_text(row["acceptance_length_macro"], 2), number_text(row["acceptance_length_pooled"], 2),
        "-" if share is None else f"{share:.1%}",
    ]  # fmt: skip


def summary_table(document: dict[str, Any]) -> Table:
    """Every arm over all buckets of a kind."""
    title = "Over all buckets: geometric mean of the speedups, without random tokens"
    return new_table(title, SUMMARY_COLUMNS, rows=map(summary_texts, document["summary"]))


def gap_texts(row: dict[str, Any]) -> list[str]:
    """One row of the random gaps, as GAP_COLUMNS."""
    return [
        row["random_bucket"], row["kind"], str(row["batch"]), f"{row['temperature']:g}", row["arm"],
        f"{row['random_tokens_per_s']:.0f}", f"{row['real_tokens_per_s']:.0f}", f"{row['gap']:+.1%}",
    ]  # fmt: skip


def lossless_counts(document: dict[str, Any]) -> dict[str, int]:
    """Sums over all cells and arms."""
    rows = [r for c in document["cells"] for r in c["lossless"].values()]
    names = ("num_compared", "num_differing", "num_checked_tokens", "num_near_ties", "num_mismatches")
    return {name: sum(r[name] for r in rows) for name in names}


def print_end(document: dict[str, Any], console: Console) -> None:
    """Random tokens beside real text, losslessness, the selection, and where the files are."""
    for name, reason in document["skipped_buckets"].items():
        console.print(f"[yellow]left out[/yellow] {name}: {reason}", soft_wrap=True)
    if document["random_gaps"]:
        title = "Random tokens instead of text, tokens per second"
        console.print(new_table(title, GAP_COLUMNS, 2, rows=map(gap_texts, document["random_gaps"])))
    for name, workload in document["workloads"].items():
        if workload.get("similarity") is not None:
            console.print(
                f"prompts of {name}: mean similarity {workload['similarity']:.3f}, of uniformly drawn ones "
                f"{workload['uniform_similarity']:.3f}",
                soft_wrap=True,
            )
    counts = lossless_counts(document)
    console.print(
        f"lossless: {counts['num_mismatches']} mismatches and {counts['num_near_ties']} near ties among "
        f"{counts['num_checked_tokens']} tokens checked in fp32; {counts['num_differing']} of {counts['num_compared']} "
        "answers differ from plain decoding",
        soft_wrap=True,
    )
    say_file(console, "JSON", document["options"]["json"])
