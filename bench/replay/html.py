"""Page of a replay: net per cell, regret over time, decisions on a time line, and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from paceline.bandit.replay.simulate import BOUND, HINDSIGHT, ORACLE
from paceline.bench.common.html_page import COLORS, write_page
from paceline.bench.replay import charts
from paceline.bench.replay.report import OFF_POLICY, ends, off_policy_cells

LOWEST_PERCENT = -20.0
"""Net below which a dot stands at the edge of its chart."""
MAX_WORDS = 150
"""Letters of a reason in a chart."""


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
<h2>Net, % of serving cost</h2><p>{{ legend }}</p>{{ bars }}
<h2>Over time</h2><p>{{ "Regret against the oracle" if has_regret else "Cumulated net" }}, % of the run's serving cost, and the
acts of the first seed (triangle: job ordered, circle: accepted, hollow: rejected, line: failed, diamond: recall, cross: rolled back).</p>
{% for cell, over_time, acts in cell_charts %}
<details{{ " open" if loop.first }}><summary>{{ cell }}</summary>{{ over_time }}{{ acts }}</details>
{% endfor %}
<h2>Cells</h2>
{{ table(("cell", "policy", "net", "95% interval", "worst run", "of oracle", "spent", "saved, true", "saved, booked", "jobs", "swaps"),
         cell_rows) }}"""


def write_html(report: dict[str, Any], path: Path) -> None:
    """Write the page: net per cell, regret over time, decisions on a time line, tables."""
    overall_rows = [
        [o["label"], _pct(o["net_percent"]["mean"]), ends(o["net_percent"], "%"), f"{_pct(o['worst_cell_percent'])} {o['worst_cell']}",
         _pct(o["worst_run_percent"]), _share(o["of_oracle_least"]), _share(o["of_oracle_mean"]), _pct(o["spent_percent"])]
        for o in report["overall"]
    ]  # fmt: skip
    cell_rows = [
        [c["cell"], c["label"], _pct(c["net_percent"]["mean"]), ends(c["net_percent"], "%"), _pct(c["net_percent"]["worst"]),
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
        legend=charts.legend(_labels(report)), bars=_bars(report), has_regret=_has_regret(report),
        cell_charts=_cell_charts(report),
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


def _bars(report: dict[str, Any]) -> Markup:
    rows: dict[str, dict[str, charts.Point]] = {}
    for c in report["cells"]:
        net = c["net_percent"]
        rows.setdefault(c["cell"], {})[c["label"]] = (net["mean"], net["low"], net["high"])
    return charts.dots(rows, _labels(report), LOWEST_PERCENT)


def _cell_charts(report: dict[str, Any]) -> list[tuple[str, Markup, Markup]]:
    """(cell, regret or net over time, acts of the first seed)."""
    colors, has_regret = _labels(report), _has_regret(report)
    field, out = "regret_percent" if has_regret else "net_percent", []
    for cell, found in report["over_time"].items():
        shown = {
            k: (v["times_s"], v[field]) for k, v in found.items() if v[field] and not (has_regret and k in HINDSIGHT)
        }
        end = max([1.0, *(t for v in found.values() for t in v["times_s"])])
        acts = {
            label: [
                (e["t"], e["action"], f"{e['action']} {e['bucket']} {e['what']}: {e['reason']}"[:MAX_WORDS])
                for e in events
            ]
            for label, events in report["decisions"].get(cell, {}).items()
        }
        out.append((cell, charts.lines(shown, colors), charts.acts(acts, colors, end)))
    return out


def _has_regret(report: dict[str, Any]) -> bool:
    return any(line["regret_percent"] for found in report["over_time"].values() for line in found.values())
