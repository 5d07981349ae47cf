"""Terminal output of benchmarks: tables, numbers as texts, one progress bar, and where files were written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


def new_table(
    title: str, columns: Sequence[str], left: int | Collection[str] = 1, *, rows: Iterable[Sequence[str]] = (),
    caption: str | None = None,
) -> Table:  # fmt: skip
    """A table whose first `left` columns (or those of these names) are texts; the others are aligned as numbers."""
    table = Table(title=title, caption=caption)
    for i, name in enumerate(columns):
        is_text = i < left if isinstance(left, int) else name in left
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "arm")
    for row in rows:
        table.add_row(*row)
    return table


def interval_text(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Both ends, or a dash where there is no interval."""
    return "-" if interval is None else f"{interval[0]:.{digits}f}-{interval[1]:.{digits}f}"


def number_text(value: float | None, digits: int = 0) -> str:
    """The rounded number, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def say_file(console: Console, kind: str, path: Path | str | None) -> None:
    """Where a file of this kind was written; nothing without one."""
    if path:
        console.print(f"{kind}: {path}", soft_wrap=True)


class Bar:
    """One task of a progress display."""

    def __init__(self, display: Progress, title: str, total: float) -> None:
        self._display, self._task = display, display.add_task(title, total=total, info="")

    def step(self, count: float = 1, info: str | None = None) -> None:
        """`count` more are done; info: words behind the bar, None leaves them."""
        self._display.advance(self._task, count)
        if info is not None:
            self.say(info)

    def at(self, completed: float, info: str) -> None:
        """So many are done."""
        self._display.update(self._task, completed=completed, info=info)

    def name(self, title: str) -> None:
        """What is being done, before the bar."""
        self._display.update(self._task, description=title)

    def say(self, info: str) -> None:
        """Words behind the bar."""
        self._display.update(self._task, info=info)


@contextmanager
def progress(console: Console, title: str, total: float) -> Iterator[Bar]:
    """A progress bar with counts and times; total: pieces of work, or seconds."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[info]}", markup=False))  # fmt: skip
    with Progress(*columns, console=console) as display:
        yield Bar(display, title, total)
