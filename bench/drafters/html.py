"""Page of the drafter benchmark: Pareto plots, speedups, acceptance by depth, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.common.html_page import COLORS, plots, trace_menu, write_page
from paceline.bench.common.terminal import number_text
from paceline.bench.drafters.table import (
    COLUMNS,
    GAP_COLUMNS,
    SUMMARY_COLUMNS,
    cell_texts,
    gap_texts,
    lossless_counts,
    summary_texts,
)
from paceline.bench.engine.cells import PLAIN

_PAGE = """<h1>Paceline drafters</h1>
<p>{{ began }}, {{ machine.system }}, {{ machine.num_threads }} threads, device {{ device }}, {{ target.dtype }}. Intervals: 95%,
bootstrap over groups (speed) or prompts (acceptance length, user tokens per second). Acceptance length counts the bonus token.</p>
<p class={{ "no" if counts.num_mismatches else "yes" }}>{{ counts.num_mismatches }} mismatches and {{ counts.num_near_ties }} near
ties among {{ counts.num_checked_tokens }} tokens checked in fp32; {{ counts.num_differing }} of {{ counts.num_compared }} answers
differ from plain decoding.</p>
{{ plots }}
<h2>Over all buckets</h2>{{ table(summary_columns, summary_rows) }}
<h2>Cells</h2>{{ table(cell_columns, cell_rows) }}
<h2>Random tokens beside text</h2><p>Random prompts are no result: the gap is what they would flatter or hurt.</p>
{{ table(gap_columns, gap_rows) }}
<h2>Arms</h2>{{ table(("arm", "nodes at most", "weights", "bytes", "of the target", "trained on"), arm_rows) }}
<h2>Prompts</h2>
{{ table(("bucket", "kind", "prompts", "mean tokens", "similarity", "uniform", "entropy, nats", "seed"), prompt_rows) }}
<h2>Configuration</h2>{{ table(("option", "value"), options.items()) }}"""


def write_html(document: dict[str, Any], path: Path) -> None:
    """Write the page of a finished run."""
    prompt_rows = [
        [name, w["kind"], w["num_prompts"], f"{w['prompt_tokens']['mean']:.0f}", number_text(w.get("similarity"), 3),
         number_text(w.get("uniform_similarity"), 3), number_text(w.get("entropy_nats", {}).get("mean"), 3), w["seed"]]
        for name, w in document["workloads"].items()
    ]  # fmt: skip
    arm_rows = [
        [a["name"], a["tree"]["max_draft_tokens"], a["num_weights"], a["weight_bytes"],
         f"{a['num_weights'] / document['target']['num_weights']:.2%}", ", ".join(a["domains"]) or "-"]
        for a in document["drafting_arms"]
    ]  # fmt: skip
    write_page(
        path, "Paceline drafters", _PAGE,
        **{key: document[key] for key in ("began", "machine", "device", "target", "options")},
        plots=plots([_pareto(document), _speedups(document), _depths(document)]), counts=lossless_counts(document),
        summary_columns=SUMMARY_COLUMNS, summary_rows=[summary_texts(r) for r in document["summary"]],
        cell_columns=COLUMNS, cell_rows=[cell_texts(c, arm) for c in document["cells"] for arm in c["arms"]],
        gap_columns=GAP_COLUMNS, gap_rows=[gap_texts(r) for r in document["random_gaps"]],
        arm_rows=arm_rows, prompt_rows=prompt_rows,
    )  # fmt: skip


def _views(document: dict[str, Any]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Cells of each (bucket, temperature), by batch."""
    out: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in sorted(document["cells"], key=lambda c: c["batch"]):
        out.setdefault((cell["bucket"], cell["temperature"]), []).append(cell)
    return out


def _colors(document: dict[str, Any]) -> dict[str, str]:
    names = list(dict.fromkeys(arm for c in document["cells"] for arm in c["arms"]))
    others = [n for n in names if n != PLAIN]
    return {PLAIN: "#111111", **{n: COLORS[i % len(COLORS)] for i, n in enumerate(others)}}


def _per_view(document: dict[str, Any], traces: Any, title: str, axes: Sequence[str]) -> Any:
    """A figure with a menu of views. traces: cells of a view -> its traces."""
    import plotly.graph_objects as go

    figure, counts = go.Figure(), {}
    for i, ((bucket, temperature), cells) in enumerate(_views(document).items()):
        own = traces(cells)
        counts[f"{bucket} T={temperature:g}"] = len(own)
        for trace in own:
            figure.add_trace(trace.update(visible=i == 0))
    figure.update_layout(
        title=title, height=480, template="plotly_white", xaxis_title=axes[0], yaxis_title=axes[1],
        updatemenus=trace_menu(counts, len(figure.data)),
    )  # fmt: skip
    return figure


def _pareto(document: dict[str, Any]) -> Any:
    """User against output tokens per second: a curve per arm, a point per batch size."""
    import plotly.graph_objects as go

    colors = _colors(document)

    def traces(cells: list[dict[str, Any]]) -> list[Any]:
        out = []
        for arm in [a for a in colors if any(a in c["drafting"] for c in cells)]:
            own = [c for c in cells if c["drafting"].get(arm, {}).get("user_tokens_per_s", {}).get("mean") is not None]
            users = [c["drafting"][arm]["user_tokens_per_s"] for c in own]
            error = None
            if all(u["interval"] for u in users):
                error = {
                    "type": "data", "symmetric": False, "array": [u["interval"][1] - u["mean"] for u in users],
                    "arrayminus": [u["mean"] - u["interval"][0] for u in users],
                }  # fmt: skip
            out.append(
                go.Scatter(
                    x=[u["mean"] for u in users], y=[c["arms"][arm]["tokens_per_s"] for c in own], error_x=error,
                    mode="lines+markers+text", text=[f"batch {c['batch']}" for c in own], textposition="top center",
                    name=arm, line={"color": colors[arm]},
                )
            )  # fmt: skip
        return out

    return _per_view(document, traces, "Pareto: up and right is better", ("tokens/s of a user", "tokens/s of all"))


def _speedups(document: dict[str, Any]) -> Any:
    """Measured speedup with its interval, and predicted from round times, per batch."""
    import plotly.graph_objects as go

    colors = _colors(document)

    def traces(cells: list[dict[str, Any]]) -> list[Any]:
        out = []
        for arm in [a for a in colors if any(a in c["ratios"] and a in c["drafting"] for c in cells)]:
            own = [c for c in cells if arm in c["ratios"]]
            ratios = [c["ratios"][arm]["whole"] for c in own]
            ends = [r["interval"] or [r["ratio"], r["ratio"]] for r in ratios]
            predictions = [c["drafting"][arm]["prediction"] for c in own]
            out.append(
                go.Bar(
                    x=[f"batch {c['batch']}" for c in own], y=[r["ratio"] for r in ratios], name=arm,
                    marker={"color": colors[arm]},
                    error_y={
                        "type": "data", "symmetric": False,
                        "array": [e[1] - r["ratio"] for e, r in zip(ends, ratios, strict=True)],
                        "arrayminus": [r["ratio"] - e[0] for e, r in zip(ends, ratios, strict=True)],
                    },
                    hovertext=["" if p is None else f"from round times: {p['predicted']:.3f}" for p in predictions],
                )
            )  # fmt: skip
        return out

    return _per_view(document, traces, "Speedup over plain decoding, 95%", ("", "times plain"))


def _depths(document: dict[str, Any]) -> Any:
    """Conditional acceptance by depth in rounds that drafted, at the smallest batch."""
    import plotly.graph_objects as go

    colors = _colors(document)

    def traces(cells: list[dict[str, Any]]) -> list[Any]:
        out, cell = [], cells[0]
        for arm in [a for a in colors if a != PLAIN and a in cell["drafting"]]:
            depths = cell["drafting"][arm]["drafted"]["depths"]
            out.append(
                go.Scatter(
                    x=[d["depth"] for d in depths], y=[d["conditional"] for d in depths], mode="lines+markers", name=arm,
                    line={"color": colors[arm]}, text=[f"{d['num_accepted']} of {d['num_at_risk']}" for d in depths],
                )
            )  # fmt: skip
        return out

    return _per_view(document, traces, "Acceptance of a depth, given the ones before it", ("depth", "conditional rate"))
