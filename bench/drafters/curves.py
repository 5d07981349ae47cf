"""Learning curves of several drafter folders: a table, and one page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated as A
from typing import Any

from rich.console import Console

from paceline.adapt.recipes.learning_curve import read_curve
from paceline.bench.common.html_page import COLORS, plots, write_page
from paceline.bench.common.terminal import new_table, number_text, say_file
from paceline.errors import ConfigError
from paceline.paths import resolve_drafter
from paceline.records import HtmlFile, Setting, record

_HEAD = ("drafter", "steps", "rows", "seconds", "nll at half the seconds", "nll at the end")
_AXES = {"seconds": "seconds of training", "rows": "supervised rows"}
_PAGE = """<h1>Learning curves</h1>
<p>nll in nats per row at the first draft token, on the rows that are trained on, a mean over each interval.</p>
{{ plots }}
{{ table(head, rows) }}"""
Curves = Mapping[str, Mapping[str, Sequence[float]]]
"""Drafter -> column -> one value a point (adapt/recipes/learning_curve.py)."""


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
        curves[folder.name] = read_curve(folder)
    return curves


def write_curves(curves: Curves, path: Path) -> None:
    """Write the page: nll over seconds and over rows, one line a drafter, logarithmic axes."""
    figures = plots([_figure(curves, column) for column in _AXES])
    write_page(path, "Paceline learning curves", _PAGE, plots=figures, head=_HEAD, rows=_rows(curves))


def _figure(curves: Curves, column: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for i, (name, curve) in enumerate(curves.items()):
        figure.add_trace(
            go.Scatter(x=curve[column], y=curve["nll"], name=name, mode="lines", line={"color": COLORS[i % len(COLORS)]})
        )  # fmt: skip
    axes = {"type": "log", "dtick": "D2", "exponentformat": "SI"}  # D2: ticks at 1, 2 and 5 of every decade
    figure.update_layout(title=f"nll over {_AXES[column]}", height=480, template="plotly_white", showlegend=True)
    figure.update_xaxes(title=_AXES[column], **axes)
    figure.update_yaxes(title="nats per row", **axes)
    return figure


def _rows(curves: Curves) -> list[list[str]]:
    rows = []
    for name, curve in curves.items():
        seconds, nll = curve["seconds"], curve["nll"]
        half = next(n for s, n in zip(seconds, nll, strict=True) if s >= seconds[-1] / 2)
        counts = [f"{curve[n][-1]:,.0f}" for n in ("step", "rows", "seconds")]
        rows.append([name, *counts, number_text(half, 3), number_text(nll[-1], 3)])
    return rows
