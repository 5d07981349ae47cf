"""The demo's live terminal view: phase, the three groups, decisions, ledger."""

from __future__ import annotations

from rich.console import Group as Rows
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.contracts import Group
from paceline.infra.demo.stats import Answer, totals


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def groups_table(answers: list[Answer], title: str) -> Table:
    """Acceptance length and speed of the three groups."""
    table = Table(title=title, title_justify="left", expand=True)
    for name, justify in (("group", "left"), ("requests", "right"), ("tokens", "right"), ("accept. length", "right"), ("tokens/s", "right"), ("vs plain", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    plain = totals(answers, Group.PLAIN).tokens_per_s
    for group in Group:
        t = totals(answers, group)
        ratio = t.tokens_per_s / plain if t.tokens_per_s and plain else None
        table.add_row(
            group.value,
            str(t.requests),
            f"{t.tokens:,}",
            "-" if group == Group.PLAIN else _number(t.acceptance_length),
            _number(t.tokens_per_s, ".0f"),
            _number(ratio) + ("x" if ratio else ""),
        )
    return table


def _interval(bounds: list[float] | None) -> list[tuple[str, str]]:
    return [(f" (95%: {bounds[0]:.1f} to {bounds[1]:.1f})", "dim")] if bounds and bounds[1] > bounds[0] else []


def render(
    *,
    phase: str,
    bucket: str,
    elapsed_s: float,
    total_s: float,
    answers: list[Answer],
    state: dict,
    decisions: list[dict],
) -> Panel:
    """Build one frame; `answers` are those of the current phase, `state` the controller's snapshot."""
    recent = answers[-48:]
    ledger = state.get("ledger") or {}
    head = Text.assemble(
        ("phase ", "dim"), (phase, "bold"), ("  traffic ", "dim"), (bucket, "bold"),
        ("  live drafter ", "dim"), (str(state.get("version") or "-"), "bold cyan"),
        ("  generation ", "dim"), str(state.get("gen") or "-"),
        ("  trainer ", "dim"), ("busy" if state.get("job") else "idle", "yellow" if state.get("job") else "green"),
    )  # fmt: skip
    lines = [
        Text(
            f"{d.get('action', '?'):8} {d.get('bucket', ''):8} {d.get('reason', '')}", no_wrap=True, overflow="ellipsis"
        )
        for d in decisions[-6:]
    ]
    money = Text.assemble(
        ("ledger  spent ", "dim"), f"{ledger.get('spent_s', 0.0):.1f} s", ("  saved ", "dim"), f"{ledger.get('saved_s', 0.0):.1f} s",
        *_interval(state.get("saved_interval_s")),
        ("  net ", "dim"), (f"{ledger.get('net_s', 0.0):+.1f} s", "bold"),
    )  # fmt: skip
    return Panel(
        Rows(
            head,
            ProgressBar(total=max(total_s, 1e-9), completed=min(elapsed_s, total_s)),
            groups_table(recent, "this phase, latest 48 requests"),
            Text("decisions", style="dim"),
            *(lines or [Text("  none yet")]),
            money,
        ),
        title="Paceline demo",
        subtitle=f"{elapsed_s:.0f} of {total_s:.0f} s",
    )
