"""Day report: what a service came to over many kinds of text, by kind and over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from paceline.bench.common.html_page import COLORS
from paceline.bench.common.terminal import interval_text, new_table, number_text
from paceline.bootstrap import interval
from paceline.contracts import Group
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.demo.diary import Answer
from paceline.infra.demo.stats import MAIN_SHARE, groups_dict

GROUP_COLORS = dict(zip((Group.ADAPTIVE, Group.STATIC, Group.PLAIN), COLORS, strict=False))
WINDOW_S = 600.0
"""Width of a curve's window: some 60 answers of each of the small groups at one a second."""
POINT_EVERY_S = 30.0
NUM_RESAMPLES = 2000
KIND_COLUMNS = ("kind", "requests", "prompts", "static accept.", "adaptive accept.", "plain tok/s", "static tok/s", "adaptive tok/s", "adaptive / static", "95%", "asked once")  # fmt: skip


def speedup(answers: Sequence[Answer], over: Group, spent_s: float = 0.0) -> dict[str, Any]:
    """How many times as fast adaptive requests were as another group's, with `spent_s` device seconds on top of theirs.

    Rates are compared by bucket and temperature, so that no group's mix counts. Tokens of a bucket and temperature of which either
    group has fewer than two prompts are left out. A sample of the bootstrap is a prompt with all its answers of one group.
    """
    sums: dict[tuple[str, float], dict[Group, dict[tuple[int, ...], list[float]]]] = {}
    for a in answers:
        if a.group in (Group.ADAPTIVE, over):
            cell = sums.setdefault((a.bucket, a.temperature), {Group.ADAPTIVE: {}, over: {}})
            own = cell[a.group].setdefault(a.prompt_token_ids, [0.0, 0.0])
            own[0] += a.num_tokens
            own[1] += a.device_s
    cells = [cell for cell in sums.values() if all(len(samples) > 1 for samples in cell.values())]
    if not cells:
        return {"value": None, "interval_95": None}
    rng, saved, taken = np.random.default_rng(0), np.zeros(NUM_RESAMPLES + 1), np.full(NUM_RESAMPLES + 1, spent_s)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without a token has no rate
        for cell in cells:
            tokens, seconds = _resampled(cell[Group.ADAPTIVE], rng)
            other_tokens, other_s = _resampled(cell[over], rng)
            saved += tokens * other_s / other_tokens
            taken += seconds
        values = saved / taken
    least = min(sum(len(cell[group]) for cell in cells) for group in (Group.ADAPTIVE, over))
    bounds = interval(float(values[0]), values[1:], least, is_positive=True)
    return {"value": round(float(values[0]), 4), "interval_95": bounds}


def _resampled(samples: dict[tuple[int, ...], list[float]], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(R + 1,) tokens and seconds: of all n samples, then of resamples.

    Of n - 1 draws, scaled up: with n draws the variance within a cell of n samples would be too small by (n - 1) / n (Hesterberg
    2015, see paceline/bootstrap.py), and there are many cells.
    """
    columns = np.array([*samples.values()]).T
    num = columns.shape[1]
    drawn = columns @ rng.multinomial(num - 1, np.full(num, 1 / num), size=NUM_RESAMPLES).T * (num / (num - 1))
    tokens, seconds = np.concatenate([columns.sum(1, keepdims=True), drawn], axis=1)
    return tokens, seconds


def kind_dict(kind: str, answers: Sequence[Answer], first_version: str) -> dict[str, Any]:
    """A kind's groups, what its adaptive requests gained, also by prompts that were asked for the first time, and who answered."""
    first: dict[tuple[int, ...], Answer] = {}
    for a in answers:
        first.setdefault(a.prompt_token_ids, a)
    versions = Counter(a.drafter_version for a in answers if a.group == Group.ADAPTIVE)
    own = sum(count for version, count in versions.items() if version != first_version)
    return {
        "kind": kind, "requests": len(answers), "prompts": len(first), **groups_dict(list(answers)),
        "over_static": speedup(answers, Group.STATIC), "over_static_asked_once": speedup([*first.values()], Group.STATIC),
        "classes": dict(Counter(a.traffic_class for a in answers).most_common()), "versions": dict(versions.most_common()),
        "has_own_version": own > 0 and own >= MAIN_SHARE * versions.total(),
    }  # fmt: skip


def day_dict(answers: Sequence[Answer], state: Snapshot) -> dict[str, Any]:
    """What a day's JSON document says beyond any other demo's."""
    kinds = sorted({a.bucket for a in answers})
    return {
        "kinds": [kind_dict(k, [a for a in answers if a.bucket == k], state.first_version) for k in kinds],
        "over_static": speedup(answers, Group.STATIC),
        "over_plain": speedup(answers, Group.PLAIN),
        "over_static_paid": speedup(answers, Group.STATIC, state.ledger.spent_s),
    }


def kind_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of KIND_COLUMNS."""
    for row in result["day"]["kinds"]:
        lengths = [number_text(row[group]["acceptance_length"], 2) for group in ("static", "adaptive")]
        speeds = [number_text(row[group]["tokens_per_s"]) for group in ("plain", "static", "adaptive")]
        gain, once = row["over_static"], row["over_static_asked_once"]
        yield [
            row["kind"], str(row["requests"]), str(row["prompts"]), *lengths, *speeds, number_text(gain["value"], 2),
            interval_text(gain["interval_95"]), number_text(once["value"], 2),
        ]  # fmt: skip


def kind_table(result: dict[str, Any]) -> Table:
    """A line for each kind."""
    title = "What adaptation did, by kind of text (device time, groups alternating)"
    return new_table(title, [name.replace(" ", "\n") for name in KIND_COLUMNS], rows=list(kind_rows(result)))


def day_sentence(result: dict[str, Any]) -> str:
    """What the day came to."""
    day, ledger = result["day"], result["ledger"]
    own = [row["kind"] for row in day["kinds"] if row["has_own_version"]]

    def told(gain: dict[str, Any]) -> str:
        return f"{number_text(gain['value'], 3)} times as fast (95%: {interval_text(gain['interval_95'], 3)})"

    return (
        f"net {ledger['net_s']:+.1f} s: {len(own)} of {len(day['kinds'])} kinds had versions of their own "
        f"({', '.join(own) or 'none'}); adaptive requests were {told(day['over_static'])} as static ones, "
        f"{told(day['over_static_paid'])} with what was spent counted, {told(day['over_plain'])} as plain ones"
    )


def _windows(answers: Sequence[Answer], group: Group, total_s: float) -> tuple[list[float], list[float]]:
    """Minutes, and tokens per second of device time in the window around each."""
    mine = sorted((a.ended, a.num_tokens, a.device_s) for a in answers if a.group == group)
    ended, tokens, seconds = np.array(mine).reshape(-1, 3).T
    sums = [np.concatenate([[0.0], np.cumsum(x)]) for x in (tokens, seconds)]
    middles = np.arange(0.0, total_s + POINT_EVERY_S, POINT_EVERY_S)
    low, high = (np.searchsorted(ended, middles + side * WINDOW_S / 2) for side in (-1, 1))
    (tokens, seconds) = (total[high] - total[low] for total in sums)
    speeds = np.divide(tokens, seconds, out=np.full(len(middles), np.nan), where=seconds > 0)
    return [float(m) / 60 for m in middles], [float(speed) for speed in speeds]


def day_figure(result: dict[str, Any], answers: Sequence[Answer]) -> Any:
    """The plotly figure: speed of the three groups, who answered each kind, and the ledger, over minutes."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = (
        f"Tokens per second of device time, over {WINDOW_S / 60:.0f} minutes",
        "Adaptive answers by kind of text",
        "Device seconds saved less spent",
    )
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.42, 0.34, 0.24], subplot_titles=titles)  # fmt: skip
    total_s, first = max(a.ended for a in answers), result["drafter"]["first_version"]
    for group, color in GROUP_COLORS.items():
        x, y = _windows(answers, group, total_s)
        line = {"color": color, "width": 2.5 if group == Group.ADAPTIVE else 1.5}
        figure.add_trace(go.Scatter(x=x, y=y, name=group.value, line=line), row=1, col=1)
    adaptive = [a for a in answers if a.group == Group.ADAPTIVE]
    for name, is_own, color in (("by the first drafter", False, COLORS[1]), ("by a later version", True, COLORS[0])):
        mine = [a for a in adaptive if (a.drafter_version != first) == is_own]
        kinds, marker = [a.bucket for a in mine], {"color": color, "size": 6, "symbol": "line-ns-open"}
        dots = go.Scatter(x=[a.ended / 60 for a in mine], y=kinds, name=name, mode="markers", marker=marker)
        figure.add_trace(dots, row=2, col=1)
    booked = sorted(
        (e["t_s"], e["seconds"] if e["kind"] == "saving" else -e["seconds"]) for e in result["ledger_entries"]
    )
    x, y = [t / 60 for t, _ in booked], [*map(float, np.cumsum([s for _, s in booked]))]
    line = {"color": COLORS[3], "width": 2, "shape": "hv"}
    figure.add_trace(go.Scatter(x=x, y=y, line=line, showlegend=False, fill="tozeroy"), row=3, col=1)
    figure.update_layout(height=760, template="plotly_white", margin={"t": 60, "r": 20}, legend={"orientation": "h", "y": 1.09, "x": 1, "xanchor": "right"})  # fmt: skip
    figure.update_xaxes(title_text="minutes", row=3, col=1)
    return figure
