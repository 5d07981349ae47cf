"""Charts of a replay's page, drawn as SVG: the script of plotly was 4.8 of the 5.3 MB of a page with 16 cells."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

Point = tuple[float, float | None, float | None]
"""(mean, low, high); without an interval the ends are None."""
WIDTH, LABELS, ROW = 1100, 220, 20
"""Pixels: of a chart, of the names on its left, of a row."""
MARKS = {
    "train": "M0-5L5 4H-5Z", "recall": "M0-5L5 0 0 5-5 0Z", "rollback": "M-4-4L4 4M4-4L-4 4", "failed": "M-4 0H4",
    "accepted": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
}  # fmt: skip
OTHER = "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0Z"
"""Shape of any other act, drawn hollow."""


def legend(colors: Mapping[str, str]) -> Markup:
    """Names in their colours."""
    return Markup(" ").join(Markup('<b style="color:{}">{}</b>').format(c, n) for n, c in colors.items())


def dots(rows: Mapping[str, Mapping[str, Point]], colors: Mapping[str, str], lowest: float) -> Markup:
    """A row for each cell, a dot with its interval for each name; what lies below `lowest` stands at the edge."""
    values = [v for row in rows.values() for point in row.values() for v in point if v is not None]
    low, high = max(min([0.0, *values]), lowest), max([1.0, *values])
    scale = (WIDTH - LABELS - 20) / (high - low)

    def at(value: float) -> float:
        return round(LABELS + (max(value, low) - low) * scale, 1)

    body = [_axis([at(v) for v in _ticks(low, high)], [f"{v:g}%" for v in _ticks(low, high)], len(rows) * ROW)]
    for i, (name, row) in enumerate(rows.items()):
        y = i * ROW + ROW / 2
        body.append(_name(name, y))
        for label, (mean, left, right) in row.items():
            color, title = colors[label], html.escape(f"{label}: {mean:+.2f}%")
            if left is not None and right is not None:
                body.append(f'<path d="M{at(left)} {y}H{at(right)}" stroke="{color}" opacity=".5"/>')
            body.append(f'<circle cx="{at(mean)}" cy="{y}" r="4" fill="{color}"><title>{title}</title></circle>')
    return _svg(len(rows) * ROW + 20, body)


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], colors: Mapping[str, str]) -> Markup:
    """A line for each name over the seconds of a run, in percent."""
    times = [t for x, _ in series.values() for t in x]
    values = [0.0, *(v for _, y in series.values() for v in y)]
    if not times:
        return Markup("")
    low, high = min(values), max([*values, min(values) + 0.1])
    end, height = max([*times, 1.0]), 160
    body = [_axis([_x(t, end) for t in _ticks(0, end)], [f"{t:g} s" for t in _ticks(0, end)], height)]
    for v in _ticks(low, high):
        body.append(_name(f"{v:g}%", height - (v - low) / (high - low) * height))
    for label, (x, y) in series.items():
        path = " ".join(f"{_x(t, end)},{round(height - (v - low) / (high - low) * height, 1)}" for t, v in zip(x, y, strict=True))  # fmt: skip
        body.append(f'<polyline points="{path}" fill="none" stroke="{colors[label]}"><title>{html.escape(label)}</title></polyline>')  # fmt: skip
    return _svg(height + 20, body)


def acts(rows: Mapping[str, Iterable[tuple[float, str, str]]], colors: Mapping[str, str], end: float) -> Markup:
    """A row for each name, a mark for each of its acts: (seconds, action, words shown under the pointer)."""
    body = [_axis([_x(t, end) for t in _ticks(0, end)], [f"{t:g} s" for t in _ticks(0, end)], len(rows) * ROW)]
    for i, (label, own) in enumerate(rows.items()):
        y = i * ROW + ROW / 2
        body.append(_name(label, y))
        for t, action, words in own:
            fill = colors[label] if action in MARKS else "none"
            body.append(
                f'<path transform="translate({_x(t, end)} {y})" d="{MARKS.get(action, OTHER)}" fill="{fill}" '
                f'stroke="{colors[label]}"><title>{html.escape(words)}</title></path>'
            )
    return _svg(len(rows) * ROW + 20, body)


def _x(t: float, end: float) -> float:
    return round(LABELS + t / end * (WIDTH - LABELS - 20), 1)


def _ticks(low: float, high: float) -> list[float]:
    """About six round values."""
    raw = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _axis(places: Sequence[float], names: Sequence[str], height: float) -> str:
    return "".join(
        f'<path d="M{x} 0V{height}" stroke="#e5e7eb"/><text x="{x}" y="{height + 15}" text-anchor="middle">{name}</text>'
        for x, name in zip(places, names, strict=True)
    )


def _name(text: str, y: float) -> str:
    return f'<text x="{LABELS - 8}" y="{round(y + 4, 1)}" text-anchor="end">{html.escape(text)}</text>'


def _svg(height: float, body: Sequence[str]) -> Markup:
    """Everything in `body` is escaped where it is made."""
    return Markup(f'<svg viewBox="0 0 {WIDTH} {height:g}" width="100%" font-size="11" role="img">{"".join(body)}</svg>')
