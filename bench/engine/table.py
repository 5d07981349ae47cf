"""How are the engine benchmark's cells shown in a terminal?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.engine.cells import FLOOR, PLAIN, SPECULATIVE

_COLOURS = {"gain": "green", "holds": "green", "below": "red", "unclear": "yellow"}


def interval_text(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Both ends, or a dash where there is no interval."""
    return "-" if interval is None else f"{interval[0]:.{digits}f}-{interval[1]:.{digits}f}"


def _ratio(row: dict[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (f"{row['ratio']:.3f}", interval_text(row["interval"], 3))


def number_text(value: float | None, digits: int = 0) -> str:
    """The rounded number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def new_table(title: str, columns: Sequence[str], num_left: int) -> Table:
    """A table whose first num_left columns are texts."""
    table = Table(title=title)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < num_left else "right", no_wrap=name == "arm")
    return table


def cells_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Speed of every arm of every cell and its ratio to the plain engine."""
    names = ("bucket", "batch", "T", "arm", "tok/s", "decode", "full batch", "TTFT ms", "accept.", "/ plain", "95%", "full batch", "95%", "verdict")  # fmt: skip
    table = new_table("Tokens per second by arm, and as a ratio to the plain engine", names, 1)
    for cell in cells:
        for i, (name, arm) in enumerate(cell["arms"].items()):
            ratios = cell["ratios"].get(name, {"whole": None, "full_batch": None})
            verdict = cell["verdict"] if name == SPECULATIVE else None
            colour = _COLOURS.get(verdict or "", "")
            where = (cell["bucket"], str(cell["batch"]), f"{cell['temperature']:g}") if i == 0 else ("", "", "")
            table.add_row(
                *where, name, number_text(arm["tokens_per_s"]), number_text(arm["decode_tokens_per_s"]),
                number_text(arm.get("full_batch_tokens_per_s")), number_text(arm["ttft_ms"]["p50"], 1),
                number_text(arm.get("acceptance_length"), 2), *_ratio(ratios["whole"]), *_ratio(ratios["full_batch"]),
                f"[{colour}]{verdict}[/{colour}]" if verdict and colour else verdict or "",
                end_section=i + 1 == len(cell["arms"]),
            )  # fmt: skip
    table.caption = (
        "tok/s: whole groups, prefill and draining tail included; decode: without prefill and first tokens; full batch: "
        "from the last first token to the first end"
    )
    return table


def rounds_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Where the time of a decode round goes."""
    parts = list(dict.fromkeys(p for c in cells for a in c["arms"].values() for p in a.get("rounds", {}).get("part_ms", {})))  # fmt: skip
    columns = ("bucket", "batch", "T", "arm", "rounds", "at full batch", "round ms", *(f"{p} ms" for p in parts), "outside models", "draft/round", "predicted")  # fmt: skip
    table = new_table("Time of a decode round by part (mean over all rounds)", columns, 1)
    for cell in cells:
        for name, arm in cell["arms"].items():
            rounds = arm.get("rounds")
            if rounds is None:
                continue
            share, outside = arm["full_batch_round_share"], rounds["outside_share"]
            table.add_row(
                cell["bucket"], str(cell["batch"]), f"{cell['temperature']:g}", name, str(rounds["num_rounds"]),
                "-" if share is None else f"{share:.0%}", number_text(rounds["round_ms"], 3),
                *(number_text(rounds["part_ms"].get(p), 3) for p in parts),
                "-" if outside is None else f"{outside:.1%}", number_text(arm["draft_tokens_per_round"], 2),
                "" if name == PLAIN else number_text(cell["ratios"][name]["from_parts"], 3),
            )  # fmt: skip
    table.caption = "outside models: everything but draft and verify; predicted: plain round ms x acceptance length / round ms, at full batch"  # fmt: skip
    return table


def print_summary(document: dict[str, Any], console: Console) -> None:
    """The verdict line, the crossovers, the lossless line and where the JSON is."""
    summary = document["summary"]
    if summary["num_cells"]:
        words = {
            "holds": f"[green]holds[/green]: all {summary['num_cells']} intervals lie at or above {FLOOR}",
            "violated": f"[red]violated[/red] in {', '.join(summary['below'])}",
            "unclear": f"[yellow]unclear[/yellow]: the interval of {', '.join(summary['unclear'])} includes {FLOOR}; "
            "more --prompts or --groups narrow it",
        }
        console.print(f"speculative never below {FLOOR}x plain: {words[summary['verdict']]}", soft_wrap=True)
    for row in document["crossovers"]:
        where = f"{row['bucket']} T={row['temperature']:g}"
        if row["gains_up_to"] is None:
            text = "speculation gains at no measured batch"
        elif row["crossover_batch"] is None:
            text = f"speculation gains up to the largest measured batch, {row['gains_up_to']}"
        else:
            text = f"speculation gains up to batch {row['gains_up_to']}, stops at about {row['crossover_batch']:g}"
        console.print(f"crossover, {where}: {text}", soft_wrap=True)
    rows = [c["lossless"] for c in document["cells"] if c.get("lossless")]
    if rows:
        compared, differing, ties = (sum(r[k] for r in rows) for k in ("num_compared", "num_differing", "num_near_ties"))  # fmt: skip
        console.print(
            f"lossless at T=0: {summary['num_mismatches']} mismatches and {ties} near ties among "
            f"{summary['num_checked_tokens']} tokens checked in fp32; {differing} of {compared} answers differ between the engines",
            soft_wrap=True,
        )  # fmt: skip
    if document["options"]["json"]:
        console.print(f"JSON: {document['options']['json']}", soft_wrap=True)
