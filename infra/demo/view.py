"""Demo view: phase, the three groups, decisions, ledger; a live frame on a terminal, lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.console import Group as Rows
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.bench.common.terminal import number_text
from paceline.contracts import Group
from paceline.infra.controller.snapshot import Snapshot
from paceline.infra.demo.diary import Answer
from paceline.infra.demo.scenario import GROUP_PATTERN
from paceline.infra.demo.stats import totals

LINE_S = 20.0
"""Seconds between two lines of a log."""


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
            "-" if group == Group.PLAIN else number_text(t.acceptance_length, 2),
            number_text(t.tokens_per_s),
            number_text(ratio, 2) + ("x" if ratio else ""),
        )
    return table


def render(
    *, phase: str, bucket: str, elapsed_s: float, total_s: float, answers: list[Answer], state: Snapshot
) -> Panel:
    """Build one frame; `answers` are those of the current phase."""
    acted = [d for d in state.decisions if d.action != "hold"]
    lines = [Text(f"{d.action:8} {d.bucket:8} {d.reason}", no_wrap=True, overflow="ellipsis") for d in acted[-6:]]
    return Panel(
        Rows(
            _head(phase, bucket, answers, state),
            ProgressBar(total=max(total_s, 1e-9), completed=min(elapsed_s, total_s)),
            groups_table(answers[-48:], "this phase, latest 48 requests"),
            Text("decisions", style="dim"),
            *(lines or [Text("  none yet")]),
            _money(state),
        ),
        title="Paceline demo",
        subtitle=f"{elapsed_s:.0f} of {total_s:.0f} s",
    )


class Lines:
    """What a log gets instead of the frame: a line now and then, and each decision that acts."""

    def __init__(self, console: Console) -> None:
        self._console, self._said_s, self._phase, self._told = console, -LINE_S, "", -1

    def say(
        self, *, phase: str, bucket: str, elapsed_s: float, total_s: float, answers: list[Answer], state: Snapshot
    ) -> None:
        """Print what is new; takes what `render` does."""
        at = f"{elapsed_s:3.0f} of {total_s:.0f} s"
        for d in state.decisions:
            if d.action != "hold" and d.decision_id > self._told:
                self._print(f"{at}  {d.action} {d.bucket}: {d.reason}")
                self._told = d.decision_id
        if phase == self._phase and elapsed_s < self._said_s + LINE_S:
            return
        self._phase, self._said_s = phase, elapsed_s
        speeds = [(g.value, totals(answers[-48:], g).tokens_per_s) for g in Group]
        told = ", ".join(f"{name} {number_text(speed)}" for name, speed in speeds)
        self._print(f"{at}  {_head(phase, bucket, answers, state)}  tokens/s: {told}  {_money(state)}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._console.file.flush()


def _head(phase: str, bucket: str, answers: list[Answer], state: Snapshot) -> Text:
    latest = [a for a in answers[-2 * len(GROUP_PATTERN) :] if a.group == Group.ADAPTIVE]
    classes = ", ".join(dict.fromkeys(a.traffic_class for a in latest)) or "-"
    drafters = ", ".join(dict.fromkeys(a.drafter_version for a in latest)) or "-"
    return Text.assemble(
        ("phase ", "dim"), (phase, "bold"), ("  traffic ", "dim"), (bucket, "bold"), ("  class ", "dim"), classes,
        ("  drafter ", "dim"), (drafters, "bold cyan"), ("  generation ", "dim"), str(state.gen or "-"),
        ("  trainer ", "dim"), ("busy", "yellow") if state.job is not None else ("idle", "green"),
    )  # fmt: skip


def _money(state: Snapshot) -> Text:
    ledger, (low, high) = state.ledger, state.saved_interval_s
    interval = [(f" (95%: {low:.1f} to {high:.1f})", "dim")] if high > low else []
    return Text.assemble(
        ("ledger  spent ", "dim"), f"{ledger.spent_s:.1f} s", ("  saved ", "dim"), f"{ledger.saved_s:.1f} s", *interval,
        ("  net ", "dim"), (f"{ledger.net_s:+.1f} s", "bold"),
    )  # fmt: skip
