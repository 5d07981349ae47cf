"""Learning curves of several drafter folders: a table, and one page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

from rich.console import Console

from paceline.adapt.recipes.learning_curve import read_curve, read_validation
from paceline.bench.common.html_page import COLORS, plots, write_page
from paceline.bench.common.terminal import new_table, number_text, say_file
from paceline.errors import ConfigError
from paceline.paths import resolve_drafter
from paceline.records import HtmlFile, Setting, record

_HEAD = (
    "drafter", "steps", "rows", "seconds", "nll at half the seconds", "nll at the end", "held-out nll", "held-out AL", "kept step",
)  # fmt: skip
_AXES = {"seconds": "seconds of training", "rows": "supervised rows"}
_PAGE = """<h1>Learning curves</h1>
<p>nll in nats per row at the first draft token: on the rows that are trained on, a mean over each interval, and dashed
on held-out text. AL: acceptance length, tokens per round by exact replay of held-out text; the weights with the longest
one are kept.</p>
{{ plots }}
{{ table(head, rows) }}"""
Columns = Mapping[str, Sequence[float]]
Curves = Mapping[str, tuple[Columns, Columns]]
"""Drafter -> its curve and its validation curve: column -> one value a point (adapt/recipes/learning_curve.py)."""


@record()
class CurvesOptions:
    """Nats per row over training seconds and rows.

    Example: paceline bench curves eagle3 jetspec runs/mine --html curves.html.
    """

    drafters: A[
        tuple[str, ...],
        Setting("Bundled drafters by name, or folders of drafters.", is_argument=True, is_repeated=True),
    ]
    html: HtmlFile = None


def run_bench_curves(options: CurvesOptions, console: Console) -> None:
    """Print the ends of the drafters' learning curves; with a page, plot nll over training seconds and over rows.

    Raises: ConfigError where one has no curve, or two are called the same.
    """
    curves, html = read_curves(options.drafters), options.html
    console.print(new_table("Learning curves (nll: nats per row, first draft token)", _HEAD, rows=_rows(curves)))
    if html is not None:
        write_curves(curves, html)
        say_file(console, "HTML", html)


def read_curves(drafters: Sequence[str]) -> Curves:
    """The curves of drafters by name or folder, called by the last part of their folder's path."""
    curves = {}
    for drafter in drafters:
        folder = resolve_drafter(drafter)
        if folder is None:
            raise ConfigError(f"drafters must have weights to have a learning curve, got {drafter!r}")
        if folder.name in curves:
            raise ConfigError(f"folders must differ in the last part of their path, got {folder.name!r} twice")
        curves[folder.name] = read_curve(folder), read_validation(folder)
    return curves


def write_curves(curves: Curves, path: Path) -> None:
    """Write the page: nll over seconds and over rows, one line a drafter, logarithmic axes; held-out acceptance length."""
    figures = plots([*(_figure(curves, column) for column in _AXES), _lengths(curves)])
    write_page(path, "Paceline learning curves", _PAGE, plots=figures, head=_HEAD, rows=_rows(curves))


def _figure(curves: Curves, column: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, both) in enumerate(curves.items()):
        for curve, label, dash in zip(both, (name, f"{name}, held out"), ("solid", "dash"), strict=True):
            if curve["nll"]:
                line = {"color": COLORS[i % len(COLORS)], "dash": dash}
                figure.add_trace(go.Scatter(x=curve[column], y=curve["nll"], name=label, mode="lines", line=line))
    axes = {"type": "log", "dtick": "D2", "exponentformat": "SI"}  # D2: ticks at 1, 2 and 5 of every decade
    figure.update_layout(title=f"nll over {_AXES[column]}", height=480, template="plotly_white", showlegend=True)
    figure.update_xaxes(title=_AXES[column], **axes)
    figure.update_yaxes(title="nats per row", **axes)
    return figure


def _lengths(curves: Curves) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, (_, held_out)) in enumerate(curves.items()):
        line = {"color": COLORS[i % len(COLORS)]}
        x, y = held_out["seconds"], held_out["acceptance_length"]
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines+markers", line=line))
    figure.update_layout(
        title="held-out acceptance length", height=480, template="plotly_white", showlegend=True,
        xaxis_title=_AXES["seconds"], yaxis_title="tokens per round",
    )  # fmt: skip
    return figure


def _rows(curves: Curves) -> list[list[str]]:
    rows = []
    for name, (curve, held_out) in curves.items():
        seconds, nll = curve["seconds"], curve["nll"]
        half = next(n for s, n in zip(seconds, nll, strict=True) if s >= seconds[-1] / 2)
        counts = [f"{curve[n][-1]:,.0f}" for n in ("step", "rows", "seconds")]
        points = zip(held_out["acceptance_length"], held_out["nll"], held_out["step"], strict=True)
        length, held_nll, step = max(points, key=lambda p: (p[0], -p[1]), default=(None, None, None))
        kept = (number_text(held_nll, 3), number_text(length, 3), number_text(step, 0))
        rows.append([name, *counts, number_text(half, 3), number_text(nll[-1], 3), *kept])
    return rows
