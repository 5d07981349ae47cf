"""How does a report become one HTML page that needs no network: style, tables, plots with a menu?"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0b7285", "#c2410c", "#6b7280", "#7c3aed", "#16a34a", "#be185d", "#ca8a04", "#1d4ed8", "#0f766e", "#9f1239")
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem;color:#111}
table{border-collapse:collapse;width:100%;font-size:13px}td,th{border-bottom:1px solid #e5e7eb;padding:4px 8px;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}.no{color:#b91c1c}.yes{color:#15803d}"""


def write_page(path: Path, *, title: str, body: str) -> None:
    """Write the page; `body` is HTML."""
    page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>
{body}
</body></html>"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def html_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of plain texts, escaped."""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in head) + f"</tr>{body}</table>"


def plots(figures: Sequence[Any]) -> str:
    """plotly figures as HTML; the first one carries the library."""
    return "".join(f.to_html(full_html=False, include_plotlyjs=i == 0) for i, f in enumerate(figures))


def trace_menu(per_name: Mapping[str, int], total: int) -> list[dict[str, Any]]:
    """A drop-down that shows one name's traces at a time. per_name: consecutive traces of each, in order."""
    buttons, at = [], 0
    for name, count in per_name.items():
        visible = [at <= i < at + count for i in range(total)]
        buttons.append({"label": name, "method": "update", "args": [{"visible": visible}]})
        at += count
    return [{"buttons": buttons, "x": 1.0, "xanchor": "right", "y": 1.15}]
