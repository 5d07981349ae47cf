"""HTML pages of reports: one file that needs no network, by jinja2 templates that escape every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from paceline.paths import write_atomic

COLORS = ("#0b7285", "#c2410c", "#6b7280", "#7c3aed", "#16a34a", "#be185d", "#ca8a04", "#1d4ed8", "#0f766e", "#9f1239")
_BASE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#111}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{border-bottom:1px solid #e5e7eb;padding:4px 8px;text-align:left}
.no{color:#b91c1c}.yes{color:#15803d}</style></head><body>
{% block body %}{% endblock %}
</body></html>"""
_MACROS = """{% macro table(head, rows) %}
<table><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% endmacro %}"""
_PAGES = Environment(
    autoescape=True,
    trim_blocks=True,
    undefined=StrictUndefined,
    loader=DictLoader({"base": _BASE, "macros": _MACROS}),
)


def write_page(path: Path, title: str, body: str, **values: Any) -> None:
    """Write the page. body: a template, which has the macro `table(head, rows)` and the values, all escaped."""
    text = '{% extends "base" %}{% from "macros" import table %}{% block body %}' + body + "{% endblock %}"
    write_atomic(path, _PAGES.from_string(text).render(title=title, **values))


def plots(figures: Sequence[Any]) -> Markup:
    """plotly figures as HTML; the first one carries the library."""
    return Markup("".join(f.to_html(full_html=False, include_plotlyjs=i == 0) for i, f in enumerate(figures)))


def menu_figure(traces: Mapping[str, Sequence[Any]], **layout: Any) -> Any:
    """A plotly figure with a drop-down that shows the traces of one name at a time, those of the first one at first."""
    import plotly.graph_objects as go

    figure, buttons, at = go.Figure(), [], 0
    total = sum(map(len, traces.values()))
    for i, (name, own) in enumerate(traces.items()):
        figure.add_traces([trace.update(visible=i == 0) for trace in own])
        visible = [at <= j < at + len(own) for j in range(total)]
        buttons.append({"label": name, "method": "update", "args": [{"visible": visible}]})
        at += len(own)
    menu = {"buttons": buttons, "x": 1.0, "xanchor": "right", "y": 1.15}
    return figure.update_layout(template="plotly_white", updatemenus=[menu], **layout)
