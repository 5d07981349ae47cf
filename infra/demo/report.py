"""The demo's results: closing table, JSON document, self-contained HTML page with plots."""

from __future__ import annotations

import html
import json
from pathlib import Path

from rich.table import Table

from paceline.contracts import Group
from paceline.infra.demo.stats import Answer

_COLORS = {Group.ADAPTIVE: "#0b7285", Group.STATIC: "#c2410c", Group.PLAIN: "#6b7280"}


def _cell(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def result_table(result: dict) -> Table:
    """Phases by temperature: acceptance length and tokens/s of the three groups, what adaptation gained net."""
    table = Table(title="What adaptation did, by phase and temperature (device time, one run, groups alternating)")
    columns = ("phase", "traffic", "T", "static\naccept.", "adaptive\naccept.", "plain\ntok/s", "static\ntok/s", "adaptive\ntok/s", "saved\ns", "net\ns")  # fmt: skip
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 else "right")
    for phase in result["phases"]:
        for t, row in [*phase["by_temperature"].items(), ("all", phase)]:
            table.add_row(
                phase["name"], phase["bucket"], t,
                _cell(row["static"]["acceptance_length"]), _cell(row["adaptive"]["acceptance_length"]),
                _cell(row["plain"]["tokens_per_s"], ".0f"), _cell(row["static"]["tokens_per_s"], ".0f"),
                _cell(row["adaptive"]["tokens_per_s"], ".0f"), _cell(row["gross_saved_s"], "+.2f"), _cell(row["net_saved_s"], "+.2f"),
                end_section=t == "all", style="bold" if t == "all" else "",
            )  # fmt: skip
    return table


def _within(bounds: list[float] | None) -> str:
    return f" (95%: {bounds[0]:.1f} to {bounds[1]:.1f})" if bounds and bounds[1] > bounds[0] else ""


def _cell_line(row: dict) -> str:
    """One version in one bucket: what it cost and what it saved there."""
    return (
        f"\n  {row['bucket'] or '-'}  {row['arm'] or '-'}  {row['version']}: spent {row['spent_s']:.1f} s, "
        f"saved {row['saved_s']:.1f} s{_within([row['saved_low_s'], row['saved_high_s']])}"
    )


def summary_lines(result: dict) -> list[str]:
    """The figures below the table."""
    ledger, swaps, lossless, feedback = (result[k] for k in ("ledger", "swaps", "lossless", "feedback"))
    acted = [d for d in result["decisions"] if d.get("action") != "hold"]
    return [
        f"decisions: {len(result['decisions'])} logged, {len(acted)} acted on"
        + "".join(f"\n  t={d['t_s']:.0f} s  {d['action']} {d.get('arm') or d.get('version') or ''} ({d.get('outcome') or 'done'}): {d['reason']}" for d in acted),
        f"ledger: spent {ledger['spent_s']:.1f} s, saved {ledger['saved_s']:.1f} s{_within(result.get('saved_interval_s'))}, net {ledger['net_s']:+.1f} s of device time"
        + "".join(_cell_line(row) for row in result.get("ledger_cells") or [] if row["version"] is not None),
        f"swaps: {swaps['count']}, pause p50 {_cell(swaps['pause_ms_p50'])} ms, p99 {_cell(swaps['pause_ms_p99'])} ms, "
        f"requests dropped {swaps['requests_dropped']}",
        f"lossless: {lossless['checked']} greedy tokens checked in fp32, {lossless['near_ties']} near ties within the bf16 "
        f"rounding bound, {lossless['mismatches']} mismatches",
        f"feedback: {feedback['produced']} rows produced, {feedback['delivered']} delivered, {feedback['dropped']} dropped",
    ]  # fmt: skip


def write_json(result: dict, path: Path) -> None:
    """Write the JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _rolling(answers: list[Answer], group: Group, width: int = 10) -> tuple[list[float], list[float], list[float]]:
    mine = [a for a in answers if a.group == group]
    x, length, speed = [], [], []
    for i in range(len(mine)):
        part = mine[max(0, i - width + 1) : i + 1]
        rounds = sum(a.num_rounds for a in part)
        seconds = sum(a.device_s for a in part)
        x.append(mine[i].ended)
        length.append(sum(a.num_accepted_tokens for a in part) / rounds + 1 if rounds else float("nan"))
        speed.append(sum(a.num_tokens for a in part) / seconds if seconds else float("nan"))
    return x, length, speed


def write_html(result: dict, answers: list[Answer], path: Path) -> None:
    """Write a page that needs no network: time lines of acceptance length and speed, decisions, ledger, the table."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=("Acceptance length (10 requests)", "Tokens per second of device time (10 requests)"))  # fmt: skip
    for group in Group:
        x, length, speed = _rolling(answers, group)
        line = {"color": _COLORS[group], "width": 2}
        if group != Group.PLAIN:
            figure.add_trace(
                go.Scatter(x=x, y=length, name=group.value, line=line, legendgroup=group.value), row=1, col=1
            )
        figure.add_trace(go.Scatter(x=x, y=speed, name=group.value, line=line, legendgroup=group.value, showlegend=group == Group.PLAIN), row=2, col=1)  # fmt: skip
    for phase in result["phases"]:
        figure.add_vline(x=phase["started_s"], line={"dash": "dot", "color": "#9ca3af"}, annotation_text=f"{phase['name']}: {phase['bucket']}", annotation_position="top left")  # fmt: skip
    for d in result["decisions"]:
        if d.get("action") != "hold":
            figure.add_vline(x=d["t_s"], line={"color": "#7c3aed", "width": 1})
    for s in result["swaps"]["times_s"]:
        figure.add_vline(x=s, line={"color": "#16a34a", "width": 2})
    figure.update_layout(height=760, template="plotly_white", legend={"orientation": "h"}, margin={"t": 60})
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in (f"{d['t_s']:.0f}", d["action"], d.get("bucket", ""), d.get("arm") or d.get("version") or "", _cell(d.get("expected_saving_s")), _cell(d.get("expected_cost_s")), _cell(d.get("realised_cost_s")), d.get("outcome") or "", d["reason"])) + "</tr>"
        for d in result["decisions"]
    )  # fmt: skip
    phases = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in (p["name"], p["bucket"], t, _cell(r["static"]["acceptance_length"]), _cell(r["adaptive"]["acceptance_length"]), _cell(r["plain"]["tokens_per_s"], ".0f"), _cell(r["static"]["tokens_per_s"], ".0f"), _cell(r["adaptive"]["tokens_per_s"], ".0f"), _cell(r["gross_saved_s"], "+.2f"), _cell(r["net_saved_s"], "+.2f"))) + "</tr>"
        for p in result["phases"]
        for t, r in [*p["by_temperature"].items(), ("all", p)]
    )  # fmt: skip
    summary = "".join(f"<p>{html.escape(line)}</p>" for line in summary_lines(result))
    page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline demo report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#111}}
table{{border-collapse:collapse;width:100%;font-size:13px}}td,th{{border-bottom:1px solid #e5e7eb;padding:4px 8px;text-align:left}}
p{{white-space:pre-line}}</style></head><body>
<h1>Paceline demo report</h1><p>Target {html.escape(str(result["target"]["name"]))}, drafter {html.escape(str(result["drafter"]["name"]))}, policy {html.escape(str(result["policy"]))},
{html.escape(str(result["hardware"]["cpu"]))}, {result["hardware"]["cores"]} cores. Dotted lines: phases. Purple: decisions acted on. Green: swaps.</p>
{figure.to_html(full_html=False, include_plotlyjs=True)}
<h2>Phases</h2><table><tr><th>phase<th>traffic<th>T<th>acceptance static<th>acceptance adaptive<th>plain tok/s<th>static tok/s<th>adaptive tok/s<th>saved s<th>net s</tr>{phases}</table>
<h2>Figures</h2>{summary}
<h2>Decisions</h2><table><tr><th>t<th>action<th>bucket<th>what<th>expected saving s<th>expected cost s<th>realised cost s<th>outcome<th>reason</tr>{rows}</table>
</body></html>"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
