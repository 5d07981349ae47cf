"""Page of the drafter benchmark: Pareto plots, speedups, acceptance by depth, and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.common.html_page import COLORS, menu_figure, plots, write_page
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
        plots=plots([_figure(document, *f) for f in _FIGURES]), counts=lossless_counts(document),
        summary_columns=SUMMARY_COLUMNS, summary_rows=[summary_texts(r) for r in document["summary"]],
        cell_columns=COLUMNS, cell_rows=[cell_texts(c, arm) for c in document["cells"] for arm in c["arms"]],
        gap_columns=GAP_COLUMNS, gap_rows=[gap_texts(r) for r in document["random_gaps"]],
        arm_rows=arm_rows, prompt_rows=prompt_rows,
    )  # fmt: skip


def _figure(document: dict[str, Any], make: Callable[..., Any], title: str, axes: Sequence[str]) -> Any:
    """A figure with a menu of views, the (bucket, temperature) pairs, and a trace an arm in each.

    make: (plotly, arm, its color, cells of a view by batch) -> a trace, or None where the arm has nothing to show.
    """
    import plotly.graph_objects as go

    views: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in sorted(document["cells"], key=lambda c: c["batch"]):
        views.setdefault((cell["bucket"], cell["temperature"]), []).append(cell)
    names = [n for n in dict.fromkeys(arm for c in document["cells"] for arm in c["arms"]) if n != PLAIN]
    colors = {PLAIN: "#111111", **{n: COLORS[i % len(COLORS)] for i, n in enumerate(names)}}
    traces = {
        f"{bucket} T={t:g}": [m for arm, color in colors.items() if (m := make(go, arm, color, cells)) is not None]
        for (bucket, t), cells in views.items()
    }
    return menu_figure(traces, title=title, height=480, xaxis_title=axes[0], yaxis_title=axes[1])


def _errors(values: Sequence[float], ends: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Error bars of values whose intervals have these ends."""
    above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
    below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}


def _pareto(go: Any, arm: str, color: str, cells: list[dict[str, Any]]) -> Any:
    """User against output tokens per second: a curve per arm, a point per batch size."""
    if not any(arm in c["drafting"] for c in cells):
        return None
    own = [c for c in cells if c["drafting"].get(arm, {}).get("user_tokens_per_s", {}).get("mean") is not None]
    users = [c["drafting"][arm]["user_tokens_per_s"] for c in own]
    x, ends = ([u[key] for u in users] for key in ("mean", "interval"))
    return go.Scatter(
        x=x, y=[c["arms"][arm]["tokens_per_s"] for c in own], error_x=_errors(x, ends) if all(ends) else None,
        mode="lines+markers+text", text=[f"batch {c['batch']}" for c in own], textposition="top center", name=arm,
        line={"color": color},
    )  # fmt: skip


def _speedups(go: Any, arm: str, color: str, cells: list[dict[str, Any]]) -> Any:
    """Measured speedup with its interval, and predicted from round times, per batch."""
    own = [c for c in cells if arm in c["ratios"]]
    if not any(arm in c["drafting"] for c in own):
        return None
    ratios = [c["ratios"][arm]["whole"] for c in own]
    y = [r["ratio"] for r in ratios]
    predictions = [c["drafting"][arm]["prediction"] for c in own]
    return go.Bar(
        x=[f"batch {c['batch']}" for c in own], y=y, name=arm, marker={"color": color},
        error_y=_errors(y, [r["interval"] or [r["ratio"], r["ratio"]] for r in ratios]),
        hovertext=["" if p is None else f"from round times: {p['predicted']:.3f}" for p in predictions],
    )  # fmt: skip


def _depths(go: Any, arm: str, color: str, cells: list[dict[str, Any]]) -> Any:
    """Conditional acceptance by depth in rounds that drafted, at the smallest batch."""
    if arm == PLAIN or arm not in cells[0]["drafting"]:
        return None
    depths = cells[0]["drafting"][arm]["drafted"]["depths"]
    return go.Scatter(
        x=[d["depth"] for d in depths], y=[d["conditional"] for d in depths], mode="lines+markers", name=arm,
        line={"color": color}, text=[f"{d['num_accepted']} of {d['num_at_risk']}" for d in depths],
    )  # fmt: skip


_FIGURES = (
    (_pareto, "Pareto: up and right is better", ("tokens/s of a user", "tokens/s of all")),
    (_speedups, "Speedup over plain decoding, 95%", ("", "times plain")),
    (_depths, "Acceptance of a depth, given the ones before it", ("depth", "conditional rate")),
)
