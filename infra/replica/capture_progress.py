"""Capture progress: a bar or log lines for whoever starts a replica that captures graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

_LOG_EVERY = 25


@contextmanager
def capture_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (graphs made, graphs planned): a bar on a terminal, now and then a log line elsewhere.

    Nothing is shown before the first call: a start without graphs stays silent.
    """
    console = console or Console(stderr=True)
    bar = Progress(
        TextColumn("capturing graphs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = None

    def show(done: int, planned: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task("graphs", total=planned)
        bar.update(task, completed=done)
        if not console.is_terminal and (done % _LOG_EVERY == 0 or done == planned):
            log.info("capturing graphs %d of %d", done, planned)

    try:
        yield show
    finally:
        if task is not None:
            bar.stop()
