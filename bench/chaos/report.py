"""Report: recovery times by kind of fault, what failed and how to have it again, as tables and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from paceline.bench.chaos.faults import FAULTS
from paceline.bench.chaos.schedule import Outcome, all_names
from paceline.bench.common.html_page import plots, write_page
from paceline.bench.common.terminal import new_table, number_text

HEAD = ("fault", "times", "p50 s", "p99 s", "longest s", "answers", "broken off", "skipped", "failed")
_MAX_SHOWN = 20
_PAGE = """<h1>{{ title }}</h1><p>{{ words }}</p>
<h2>Recovery times</h2><p>Seconds from the end of a fault until every process is back, every replica runs the desired version and
has Redis, and the controller reads and writes.</p>{{ table(head, rows) }}{{ charts }}
<h2>What failed</h2>{% if failures %}{{ table(('fault', 'what', 'again'), failures) }}{% else %}<p class="yes">Nothing.</p>{% endif %}
<h2>What the faults are</h2>{{ table(('fault', 'what it does', 'how its end is seen'), faults) }}"""


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Sums of a run, and its faults by name."""
    return {
        "num_faults": sum(len(all_names(o)) for o in outcomes),
        "num_failed": sum(o.status == "failed" for o in outcomes),
        "num_skipped": sum(o.status == "skipped" for o in outcomes),
        "num_answers": sum(o.num_answers for o in outcomes),
        "num_broken": sum(o.num_broken for o in outcomes),
        "num_refusals": sum(o.num_refusals for o in outcomes),
        "num_tokens": sum(o.num_tokens for o in outcomes),
        "swaps": _swaps(outcomes),
        "by_name": {name: _of_name(found) for name in FAULTS if (found := [o for o in outcomes if name in all_names(o)])},
        "failures": [msgspec.to_builtins(o) for o in outcomes if o.status == "failed"],
    }  # fmt: skip


def _swaps(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Pauses of all swaps and what a round took beside them, ms; None = there were none."""
    swapped = [o for o in outcomes if o.pauses_ms and o.round_ms is not None]
    if not swapped:
        return None
    pauses = [pause for o in swapped for pause in o.pauses_ms]
    p50, p99 = (float(np.percentile(pauses, q)) for q in (50, 99))
    rounds = [o.round_ms for o in swapped if o.round_ms is not None]
    return {"num_swaps": len(pauses), "pause_p50_ms": p50, "pause_p99_ms": p99, "pause_max_ms": max(pauses), "round_ms": float(np.median(rounds))}  # fmt: skip


def _of_name(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    times = sorted(o.recovery_s for o in outcomes if o.recovery_s is not None)
    p50, p99 = (float(np.percentile(times, q)) if times else None for q in (50, 99))
    return {
        "times": len(outcomes),
        "recovery_p50_s": p50, "recovery_p99_s": p99, "recovery_max_s": times[-1] if times else None,
        "num_answers": sum(o.num_answers for o in outcomes), "num_broken": sum(o.num_broken for o in outcomes),
        "num_skipped": sum(o.status == "skipped" for o in outcomes),
        "num_failed": sum(o.status == "failed" for o in outcomes),
    }  # fmt: skip


def _rows(found: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name, f"{v['times']}", *(number_text(v[f"recovery_{q}_s"], 1) for q in ("p50", "p99", "max")),
            *(f"{v[k]}" for k in ("num_answers", "num_broken", "num_skipped", "num_failed")),
        ]
        for name, v in found["by_name"].items()
    ]  # fmt: skip


def _title(failure: dict[str, Any]) -> str:
    return f"{failure['number']} {' + '.join([failure['name'], *failure['beside']])}"


def words(found: dict[str, Any]) -> str:
    """A run in one sentence."""
    swaps = ""
    if s := found["swaps"]:
        swaps = (
            f"; {s['num_swaps']} swaps kept engines from their rounds for {s['pause_p50_ms']:.3f} ms (p50), {s['pause_p99_ms']:.3f} "
            f"(p99), {s['pause_max_ms']:.3f} (longest), a request's share of a round was {s['round_ms']:.2f} ms"
        )
    return (
        f"{found['num_faults']} faults ({found['num_skipped']} skipped), {found['num_answers']} answers with "
        f"{found['num_tokens']} tokens, {found['num_broken']} of them ended early by an explicit error, "
        f"{found['num_refusals']} refusals with 429; {found['num_failed']} faults after which something did not hold{swaps}"
    )


def print_report(document: dict[str, Any], console: Console) -> None:
    """The table by fault, and each failure with the command that repeats it."""
    console.print(new_table("recovery times, seconds after the end of a fault", HEAD, rows=_rows(document)))
    console.print(words(document), soft_wrap=True)
    for failure in document["failures"][:_MAX_SHOWN]:
        console.print(f"[red]failed[/red] {_title(failure)}", highlight=False)
        for text in failure["problems"][:4]:
            console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
        console.print(f"  again: {escape(failure['command'])}", highlight=False, soft_wrap=True)
    if len(document["failures"]) > _MAX_SHOWN:
        console.print(f"and {len(document['failures']) - _MAX_SHOWN} more in the JSON file (--json)")


def write_html(path: Path, document: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The page of a run."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name in document["by_name"]:
        figure.add_trace(go.Box(x=[o.recovery_s for o in outcomes if name in all_names(o)], name=name, boxpoints="all"))
    figure.update_layout(template="plotly_white", showlegend=False, height=120 + 26 * len(document["by_name"]), xaxis_title="seconds")  # fmt: skip
    write_page(
        path, "Paceline: faults and recoveries", _PAGE, words=words(document), head=HEAD, rows=_rows(document),
        charts=plots([figure]), failures=[(_title(f), "; ".join(f["problems"]), f["command"]) for f in document["failures"]],
        faults=[(f.name, f.what, f.seen) for f in FAULTS.values() if f.name in document["by_name"]],
    )  # fmt: skip
