"""Page of a replay: net per cell, regret over time, decisions on a time line, and tables."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from paceline.bandit.replay.simulate import BOUND, HINDSIGHT, ORACLE
from paceline.bench.common.html_page import COLORS, menu_figure, plots, write_page
from paceline.bench.replay.report import OFF_POLICY, off_policy_cells

MAX_TIMELINES = 40


_PAGE = """<h1>Paceline replay: {{ source }}</h1>
<p>{{ num_seeds }} seeds, {{ scenarios | length }} cells. Net device-seconds = serving cost without training - serving cost - spend,
in percent of serving cost without training. Intervals: 95%, bootstrap over seeds.</p>
{% for note in notes %}<p>{{ note }}</p>{% endfor %}
<h2>Which policy to run for your traffic</h2>
{{ table(("traffic", "best", "net", "oracle", "cannot be told from it", "safest (worst run)"), advice_rows) }}
<h2>Over all cells</h2>
{{ table(("policy", "net", "95% interval", "worst cell", "worst run", "of oracle, least", "of oracle, mean", "spent"), overall_rows) }}
{% for check in checks %}
<p class={{ "yes" if check.holds else "no" }}>{{ "yes" if check.holds else "no" }}: {{ check.claim }}. {{ check.numbers | join("; ") }}</p>
{% endfor %}
{% if off_policy %}
<h2>What the log says</h2><p>Doubly robust net, device-seconds; the log itself: {{ "%+.1f" | format(off_policy[0].logged_s) }}.
IPS and SNIPS use no model; agreement is the share of the acts until which the log did what the policy may do.</p>
{{ table(off_policy_head, off_policy_rows) }}
{% endif %}
{{ plots }}
<h2>Cells</h2>
{{ table(("cell", "policy", "net", "95% interval", "worst run", "of oracle", "spent", "saved, true", "saved, booked", "jobs", "swaps"),
         cell_rows) }}"""


def write_html(report: dict[str, Any], path: Path) -> None:
    """Write the page: net per cell, regret over time, decisions on a time line, tables."""

    def ends(net: dict[str, float]) -> str:
        return f"{_pct(net['low'])} .. {_pct(net['high'])}"

    overall_rows = [
        [o["label"], _pct(o["net_percent"]["mean"]), ends(o["net_percent"]), f"{_pct(o['worst_cell_percent'])} {o['worst_cell']}",
         _pct(o["worst_run_percent"]), _share(o["of_oracle_least"]), _share(o["of_oracle_mean"]), _pct(o["spent_percent"])]
        for o in report["overall"]
    ]  # fmt: skip
    cell_rows = [
        [c["cell"], c["label"], _pct(c["net_percent"]["mean"]), ends(c["net_percent"]), _pct(c["net_percent"]["worst"]),
         _share(c["of_oracle"]), *(_pct(c[f"{n}_percent"]) for n in ("spent", "true_saving", "booked_saving")),
         f"{c['num_jobs']:g}", f"{c['num_swaps']:g}"]
        for c in report["cells"]
    ]  # fmt: skip
    advice_rows = [
        [a["family"], a["best"], _pct(a["net_percent"]), "-" if a["oracle_percent"] is None else _pct(a["oracle_percent"]),
         ", ".join(a["as_good"]) or "-", f"{a['safest']} ({_pct(a['safest_worst_percent'])})"]
        for a in report["advice"]
    ]  # fmt: skip
    off_policy = report["off_policy"] or []
    write_page(
        path, "Paceline replay", _PAGE,
        **{key: report[key] for key in ("source", "num_seeds", "scenarios", "notes", "checks")},
        overall_rows=overall_rows, cell_rows=cell_rows, advice_rows=advice_rows, off_policy=off_policy,
        off_policy_head=(*OFF_POLICY, "why"), off_policy_rows=[[*off_policy_cells(o), o["why"]] for o in off_policy],
        plots=plots([_bars(report), _over_time(report), _timeline(report)]),
    )  # fmt: skip


def _pct(value: float) -> str:
    return f"{value:+.2f}%"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _labels(report: dict[str, Any]) -> dict[str, str]:
    names = list(dict.fromkeys(c["label"] for c in report["cells"]))
    return {
        name: "#111111" if name == ORACLE else "#999999" if name == BOUND else COLORS[i % len(COLORS)]
        for i, name in enumerate(names)
    }


def _bars(report: dict[str, Any]) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    for label, color in _labels(report).items():
        mine = [c for c in report["cells"] if c["label"] == label]
        net = [c["net_percent"] for c in mine]
        error = {"type": "data", "symmetric": False, "array": [n["high"] - n["mean"] for n in net], "arrayminus": [n["mean"] - n["low"] for n in net]}  # fmt: skip
        figure.add_trace(go.Scatter(x=[c["cell"] for c in mine], y=[n["mean"] for n in net], error_y=error, mode="markers", name=label, marker={"color": color, "size": 9}))  # fmt: skip
    figure.add_hline(y=0, line={"color": "#9ca3af"})
    figure.update_layout(title="Net, % of serving cost", height=520, template="plotly_white", yaxis_range=[-20, None])
    return figure


def _over_time(report: dict[str, Any]) -> Any:
    import plotly.graph_objects as go

    colors, traces = _labels(report), {}
    has_regret = any(line["regret_percent"] for lines in report["over_time"].values() for line in lines.values())
    field = "regret_percent" if has_regret else "net_percent"
    for cell, lines in report["over_time"].items():
        shown = {k: v for k, v in lines.items() if v[field] and not (has_regret and k in HINDSIGHT)}
        traces[cell] = [
            go.Scatter(x=line["times_s"], y=line[field], name=label, line={"color": colors[label]})
            for label, line in shown.items()
        ]
    title = "Regret against the oracle over time, % of the run's serving cost" if has_regret else "Cumulated net, % of the run's serving cost"  # fmt: skip
    return menu_figure(traces, title=title, height=480, xaxis_title="seconds")


def _timeline(report: dict[str, Any]) -> Any:
    import plotly.graph_objects as go

    symbols = {"train": "triangle-up", "recall": "star", "rollback": "x", "accepted": "circle", "rejected": "circle-open", "failed": "x-open"}  # fmt: skip
    colors = _labels(report)
    traces = {
        cell: [
            go.Scatter(
                x=[e["t"] for e in events], y=[label] * len(events), mode="markers", name=label, showlegend=False,
                marker={"symbol": [symbols.get(e["action"], "circle") for e in events], "size": 10, "color": colors.get(label)},
                text=[html.escape(f"{e['action']} {e['bucket']} {e['what']}: {e['reason']}")[:300] for e in events], hoverinfo="text",
            )
            for label, events in by_label.items()
        ]
        for cell, by_label in list(report["decisions"].items())[:MAX_TIMELINES]
    }  # fmt: skip
    title = "Decisions of the first seed (triangle: job ordered, circle: accepted, open: rejected, star: recall)"
    return menu_figure(traces, title=title, height=420, xaxis_title="seconds")
