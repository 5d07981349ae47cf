"""Day report: what a service came to over many kinds of text, by kind and over time."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from paceline.bench.common.html_page import COLORS
from paceline.bench.common.terminal import interval_text, number_text
from paceline.bootstrap import interval, resampled
from paceline.contracts import Group
from paceline.infra.demo.stats import Answer, groups_dict

GROUP_COLORS = {Group.ADAPTIVE: "#0b7285", Group.STATIC: "#c2410c", Group.PLAIN: "#6b7280"}
GROUP_NAMES = {Group.ADAPTIVE: "adaptive", Group.STATIC: "first drafter", Group.PLAIN: "no drafter"}
WINDOW_S, STEP_S = 600.0, 30.0
"""Width of a curve's window, some 60 answers of the small groups, and the distance of its points."""
KIND_COLUMNS = ("kind", "requests", "prompts", "first drafter accept.", "adaptive accept.", "no drafter tok/s", "first drafter tok/s", "adaptive tok/s", "adaptive / first", "95%")  # fmt: skip


def speedup(answers: Sequence[Answer], over: Group, spent_s: float = 0.0) -> dict[str, Any]:
    """Device seconds of another group for the tokens of the adaptive one / what these and learning took.

    Rates are taken by bucket and temperature, so that neither group's mix counts; tokens of which the other group has none are
    left out. A sample of the bootstrap is an answer.
    """
    cells = sorted({(a.bucket, a.temperature) for a in answers if a.group == over})
    place = {cell: i for i, cell in enumerate(cells)}
    kept = [a for a in answers if a.group in (Group.ADAPTIVE, over) and (a.bucket, a.temperature) in place]
    num = len(cells)
    columns = np.zeros((4 * num, len(kept)))
    for j, a in enumerate(kept):
        row = place[a.bucket, a.temperature] + (0 if a.group == Group.ADAPTIVE else 2 * num)
        columns[row, j], columns[row + num, j] = a.num_tokens, a.device_s
    if not any(a.group == Group.ADAPTIVE for a in kept):
        return {"value": None, "interval_95": None}

    def statistic(sums: np.ndarray) -> np.ndarray:
        tokens, taken_s, other_tokens, other_s = sums.reshape(4, num, -1)
        return (tokens * other_s / other_tokens).sum(0) / (taken_s.sum(0) + spent_s)

    value, values = resampled(columns, statistic)
    return {"value": round(value, 4), "interval_95": interval(value, values, len(kept), is_positive=True)}


def kind_dict(kind: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """A kind's groups, also of prompts that were asked for the first time, and what its adaptive requests gained."""
    seen: set[tuple[int, ...]] = set()
    first_time = [a for a in answers if a.prompt_token_ids not in seen and not seen.add(a.prompt_token_ids)]  # type: ignore[func-returns-value]
    return {
        "kind": kind, "requests": len(answers), "prompts": len(seen), **groups_dict(list(answers)),
        "over_static": speedup(answers, Group.STATIC), "over_static_first_time": speedup(first_time, Group.STATIC),
        "classes": dict(Counter(a.traffic_class for a in answers).most_common()),
        "versions": dict(Counter(a.drafter_version for a in answers if a.group == Group.ADAPTIVE).most_common()),
    }  # fmt: skip


def day_dict(answers: Sequence[Answer], spent_s: float) -> dict[str, Any]:
    """What a day's JSON document says beyond any other demo's."""
    return {
        "kinds": [kind_dict(k, [a for a in answers if a.bucket == k]) for k in sorted({a.bucket for a in answers})],
        "over_static": speedup(answers, Group.STATIC), "over_plain": speedup(answers, Group.PLAIN),
        "over_static_paid": speedup(answers, Group.STATIC, spent_s), "over_plain_paid": speedup(answers, Group.PLAIN, spent_s),
    }  # fmt: skip


def kind_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of KIND_COLUMNS."""
    for row in result["day"]["kinds"]:
        lengths = [number_text(row[group]["acceptance_length"], 2) for group in ("static", "adaptive")]
        speeds = [number_text(row[group]["tokens_per_s"], 0) for group in ("plain", "static", "adaptive")]
        gain = row["over_static"]
        yield [row["kind"], str(row["requests"]), str(row["prompts"]), *lengths, *speeds, number_text(gain["value"], 2), interval_text(gain["interval_95"])]  # fmt: skip


def kind_table(result: dict[str, Any]) -> Table:
    """A line for each kind."""
    table = Table(title="What adaptation did, by kind of text (device time, groups alternating)")
    for i, name in enumerate(KIND_COLUMNS):
        table.add_column(name.replace(" ", "\n"), justify="right" if i else "left")
    for row in kind_rows(result):
        table.add_row(*row)
    return table


def day_sentence(result: dict[str, Any]) -> str:
    """What the day came to."""
    day, ledger, first = result["day"], result["ledger"], result["drafter"]["first_version"]
    learned = [row["kind"] for row in day["kinds"] if {*row["versions"]} - {first}]

    def told(gain: dict[str, Any]) -> str:
        return f"{number_text(gain['value'], 3)} times as fast (95%: {interval_text(gain['interval_95'], 3)})"

    return (
        f"net {ledger['net_s']:+.1f} s: {len(learned)} of {len(day['kinds'])} kinds had versions of their own "
        f"({', '.join(learned) or 'none'}); adaptive requests were {told(day['over_static'])} as with the first drafter, "
        f"{told(day['over_static_paid'])} with what was spent counted, {told(day['over_plain'])} as without drafts"
    )


def _windows(answers: Sequence[Answer], group: Group, total_s: float) -> tuple[list[float], list[float]]:
    """Minutes, and tokens per second of device time in the window around each."""
    mine = [a for a in answers if a.group == group]
    ended, tokens, seconds = (np.array([getattr(a, n) for a in mine]) for n in ("ended", "num_tokens", "device_s"))
    sums = [np.concatenate([[0.0], np.cumsum(x)]) for x in (tokens, seconds)]
    middles = np.arange(0.0, total_s + STEP_S, STEP_S)
    low, high = (np.searchsorted(ended, middles + side * WINDOW_S / 2) for side in (-1, 1))
    speeds = [float((sums[0][b] - sums[0][a]) / (sums[1][b] - sums[1][a])) if b > a else float("nan") for a, b in zip(low, high, strict=True)]  # fmt: skip
    return [float(m) / 60 for m in middles], speeds


def day_figure(result: dict[str, Any], answers: Sequence[Answer]) -> Any:
    """The plotly figure: speed of the three groups, kinds by the drafter that answers them, and the ledger over minutes."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = (
        f"Tokens per second of device time ({WINDOW_S / 60:.0f} minutes)",
        "Kinds of text: ● the first drafter answers, ● a version of its own",
        "Device seconds saved less spent",
    )
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.42, 0.34, 0.24])
    total_s = max(a.ended for a in answers)
    for group in (Group.ADAPTIVE, Group.STATIC, Group.PLAIN):
        x, y = _windows(answers, group, total_s)
        line = {"color": GROUP_COLORS[group], "width": 2.5 if group == Group.ADAPTIVE else 1.5}
        figure.add_trace(go.Scatter(x=x, y=y, name=GROUP_NAMES[group], line=line), row=1, col=1)
    first = result["drafter"]["first_version"]
    adaptive = [a for a in answers if a.group == Group.ADAPTIVE]
    for is_own, color in ((False, GROUP_COLORS[Group.STATIC]), (True, GROUP_COLORS[Group.ADAPTIVE])):
        mine = [a for a in adaptive if (a.drafter_version != first) == is_own]
        marker = {"color": color, "size": 5, "symbol": "line-ns-open" if is_own else "circle"}
        figure.add_trace(
            go.Scatter(x=[a.ended / 60 for a in mine], y=[a.bucket for a in mine], mode="markers", marker=marker, showlegend=False),
            row=2, col=1,
        )  # fmt: skip
    entries = sorted(
        (e["t_s"], e["seconds"] if e["kind"] == "saving" else -e["seconds"]) for e in result["ledger_entries"]
    )
    net = result["ledger"]["net_s"] - np.cumsum([s for _, s in entries[::-1]])[::-1] if entries else np.zeros(0)
    x, y = [t / 60 for t, _ in entries], [*map(float, net + np.array([s for _, s in entries]))]
    line = {"color": COLORS[3], "width": 2, "shape": "hv"}
    figure.add_trace(go.Scatter(x=x, y=y, line=line, showlegend=False, fill="tozeroy"), row=3, col=1)
    for row, title in enumerate(titles, 1):
        ref = "" if row == 1 else str(row)
        figure.add_annotation(text=html.escape(title), xref="x domain", yref=f"y{ref} domain", x=0, y=1.02, yanchor="bottom", showarrow=False)  # fmt: skip
    figure.update_layout(height=760, template="plotly_white", margin={"t": 40, "r": 20}, legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.06})  # fmt: skip
    figure.update_xaxes(title_text="minutes", row=3, col=1)
    return figure
