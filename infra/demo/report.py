"""Demo report: closing table, JSON document and self-contained HTML page with plots of the demo's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.bench.common.html_page import plots, write_page
from paceline.contracts import Group
from paceline.infra.demo.day_report import GROUP_COLORS, KIND_COLUMNS, day_figure, day_sentence, kind_rows
from paceline.infra.demo.diary import Answer

_PHASE_COLUMNS = ("phase", "traffic", "T", "static accept.", "adaptive accept.", "plain tok/s", "static tok/s", "adaptive tok/s", "saved s", "net s")  # fmt: skip
_PAGE = """
<h1>Paceline demo report</h1>
<p>Target {{ result.target.name }}, drafter {{ result.drafter.name }}, policy {{ result.policy }},
{{ result.hardware.cpu }}, {{ result.hardware.cores }} cores.{% if not kinds %} Dotted lines: phases. Purple: decisions acted on. Green: swaps.{% endif %}</p>
{{ figures }}
{% if kinds %}
<h2>Kinds of text</h2>
{{ table(kind_columns, kinds) }}
{% endif %}
<h2>Phases</h2>
{{ table(phase_columns, phases) }}
<h2>Figures</h2>
{% for line in summary %}
<p style="white-space:pre-line">{{ line }}</p>
{% endfor %}
<h2>Decisions</h2>
{{ table(decision_columns, decisions) }}
"""


def _cell(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _phase_rows(result: dict) -> Iterator[list[str]]:
    """Cells of _PHASE_COLUMNS: every phase by temperature, then all of it."""
    for phase in result["phases"]:
        for t, row in [*phase["by_temperature"].items(), ("all", phase)]:
            lengths = [_cell(row[group]["acceptance_length"]) for group in ("static", "adaptive")]
            speeds = [_cell(row[group]["tokens_per_s"], ".0f") for group in ("plain", "static", "adaptive")]
            money = [_cell(row[key], "+.2f") for key in ("gross_saved_s", "net_saved_s")]
            yield [phase["name"], phase["bucket"], t, *lengths, *speeds, *money]


def result_table(result: dict) -> Table:
    """Phases by temperature: acceptance length and tokens/s of the three groups, what adaptation gained net."""
    table = Table(title="What adaptation did, by phase and temperature (device time, one run, groups alternating)")
    for i, name in enumerate(_PHASE_COLUMNS):
        table.add_column(name if i < 2 else name.replace(" ", "\n"), justify="left" if i < 2 else "right")
    for row in _phase_rows(result):
        is_sum = row[2] == "all"
        table.add_row(*row, end_section=is_sum, style="bold" if is_sum else "")
    return table


def within(bounds: list[float]) -> str:
    return f" (95%: {bounds[0]:.1f} to {bounds[1]:.1f})" if bounds[1] > bounds[0] else ""


def _cell_line(row: dict) -> str:
    """One version in one bucket: what it cost and what it saved there."""
    return (
        f"\n  {row['bucket'] or '-'}  {row['arm'] or '-'}  {row['version']}: spent {row['spent_s']:.1f} s, "
        f"saved {row['saved_s']:.1f} s{within([row['saved_low_s'], row['saved_high_s']])}"
    )


def priced(ledger: dict, price: float) -> str:
    """What the ledger's net would be if a second of the trainer's core were worth one of serving."""
    if price in (0.0, 1.0):
        return ""
    trainer_s = sum(ledger["by_kind"].get(kind, 0.0) for kind in ("training", "shadow")) / price
    net_s = ledger["net_s"] - (1.0 - price) * trainer_s
    return f"\n  the trainer's {trainer_s:.1f} s count {price:g} of it: its core would idle; counted in full the net is {net_s:+.1f} s"


def summary_lines(result: dict) -> list[str]:
    """The figures below the table."""
    ledger, swaps, lossless, feedback = (result[k] for k in ("ledger", "swaps", "lossless", "feedback"))
    acted = [d for d in result["decisions"] if d["action"] != "hold"]
    outcomes = Counter(f"{d['action']} {d.get('outcome') or 'done'}" for d in acted)
    done = (
        [f"\n  {name}: {count}" for name, count in outcomes.most_common()]
        if "day" in result
        else [
            f"\n  t={d['t_s']:.0f} s  {d['action']} {d.get('arm') or d.get('version') or ''} ({d.get('outcome') or 'done'}): {d['reason']}"
            for d in acted
        ]
    )
    cells = [_cell_line(row) for row in result["ledger_cells"] if row["version"] is not None]
    return [
        f"decisions: {len(result['decisions'])} logged, {len(acted)} acted on{''.join(done)}",
        f"ledger: spent {ledger['spent_s']:.1f} s, saved {ledger['saved_s']:.1f} s{within(result['saved_interval_s'])}, "
        f"net {ledger['net_s']:+.1f} s of device time{priced(ledger, result['trainer_price'])}{''.join(cells)}",
        f"swaps: {swaps['count']}, pause p50 {_cell(swaps['pause_ms_p50'])} ms, p99 {_cell(swaps['pause_ms_p99'])} ms, "
        f"requests dropped {swaps['requests_dropped']}",
        f"lossless: {lossless['checked']} greedy tokens checked in fp32, {lossless['near_ties']} near ties within "
        f"bf16's rounding, {lossless['mismatches']} mismatches",
        f"feedback: {feedback['produced']} rows produced, {feedback['delivered']} delivered, {feedback['dropped']} dropped",
        day_sentence(result) if "day" in result else closing_sentence(result),
    ]


def closing_sentence(result: dict) -> str:
    """What the run came to: gain and price of what was learned, how fast a returning class had it, and what was declined."""
    ledger, phases = result["ledger"], result["phases"]
    told, learned = [], {p["bucket"] for p in phases if p["own_version_s"] is not None}
    if learned:
        spent_s, saved = ledger["spent_s"], f"{ledger['saved_s']:.1f} s{within(result['saved_interval_s'])}"
        told.append(
            f"learning took {spent_s:.1f} s of device time in all, and {', '.join(sorted(learned))} saved {saved}"
        )
    elif ended := [d.get("outcome") or "not ended" for d in result["decisions"] if d["action"] == "train"]:
        spent_s, brought = ledger["spent_s"], "a version too late" if {"accepted", "kept"} & {*ended} else "no version"
        told.append(f"{spent_s:.1f} s of device time brought {brought} (training jobs: {', '.join(ended)})")
    seen: set[str] = set()
    for phase in phases:
        bucket, own_s = phase["bucket"], phase["own_version_s"]
        if bucket in seen and own_s is not None:
            told.append(f"when {bucket} came back, its own version had answered after {own_s:.1f} s")
        if seen and bucket not in learned and (end := _without_version(result, phase)):
            told.append(f"{bucket} {end}")
        seen.add(bucket)
    return f"net {ledger['net_s']:+.1f} s: " + "; ".join(told or ["nothing was learned"])


def _without_version(result: dict, phase: dict) -> str:
    """What became of the classes that only this phase has: what a job took, else the latest reason against one; '' where
    there is neither."""
    others = {name for p in result["phases"] if p is not phase for name in p["classes"]}
    own = [name for name in phase["classes"] if name not in others]
    if any(d["action"] == "train" and d["bucket"] in own for d in result["decisions"]):
        spent_s = sum(cell["spent_s"] for cell in result["ledger_cells"] if cell["bucket"] in own)
        return f"took {spent_s:.1f} s and had no version before it went"
    for decision in reversed(result["decisions"]):
        if decision["action"] == "hold" and decision["bucket"] in own:
            return f"was declined: {decision['reason'].rstrip('.')}"
    for name in own:
        rows, needed = result["rows"].get(name, (0, 0))
        if rows < needed:
            return f"was declined: {name} brought {rows} of the {needed} rows that a job needs before it went"
    return ""


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
    write_page(
        path,
        "Paceline demo report",
        _PAGE,
        result=result,
        figures=plots([day_figure(result, answers) if "day" in result else _time_lines(result, answers)]),
        kind_columns=KIND_COLUMNS,
        kinds=list(kind_rows(result)) if "day" in result else [],
        phase_columns=_PHASE_COLUMNS,
        phases=_phase_rows(result),
        summary=summary_lines(result),
        decision_columns=("t", "action", "bucket", "what", "expected saving s", "expected cost s", "realised cost s", "outcome", "reason"),
        decisions=map(_decision_row, result["decisions"]),
    )  # fmt: skip


def _decision_row(d: dict) -> list[str]:
    money = [_cell(d.get(key)) for key in ("expected_saving_s", "expected_cost_s", "realised_cost_s")]
    what = d.get("arm") or d.get("version") or ""
    return [f"{d['t_s']:.0f}", d["action"], d["bucket"], what, *money, d.get("outcome") or "", d["reason"]]


def _time_lines(result: dict, answers: list[Answer]) -> Any:
    """The plotly figure: acceptance length and speed over time; phases, decisions acted on and swaps marked."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("Acceptance length (10 requests)", "Tokens per second of device time (10 requests)")
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=titles)
    for group in Group:
        x, length, speed = _rolling(answers, group)
        common = {
            "x": x,
            "name": group.value,
            "legendgroup": group.value,
            "line": {"color": GROUP_COLORS[group], "width": 2},
        }
        is_plain = group == Group.PLAIN  # it drafts nothing: its only line is its speed
        if not is_plain:
            figure.add_trace(go.Scatter(y=length, **common), row=1, col=1)
        figure.add_trace(go.Scatter(y=speed, showlegend=is_plain, **common), row=2, col=1)
    for phase in result["phases"]:
        mark, text = {"dash": "dot", "color": "#9ca3af"}, f"{phase['name']}: {phase['bucket']}"
        figure.add_vline(x=phase["started_s"], line=mark, annotation_text=text, annotation_position="top left")
    for d in result["decisions"]:
        if d["action"] != "hold":
            figure.add_vline(x=d["t_s"], line={"color": "#7c3aed", "width": 1})
    for s in result["swaps"]["times_s"]:
        figure.add_vline(x=s, line={"color": "#16a34a", "width": 2})
    figure.update_layout(height=760, template="plotly_white", legend={"orientation": "h"}, margin={"t": 60})
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    return figure
