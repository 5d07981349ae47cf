"""Capture progress: a bar or log lines for whoever starts a replica that captures graphs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

_LOG_EVERY = 25


@contextmanager
def capture_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (graphs made, graphs planned): a bar on a terminal, now and then a log line elsewhere.

    Nothing is shown before the first call: a start without graphs stays silent.
    """
    if not (sys.stderr.isatty() if console is None else console.is_terminal):
        yield _log_some
        return
    from rich.console import Console  # a sixth of a second of imports
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("capturing graphs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console or Console(stderr=True), transient=True,
    )  # fmt: skip
    task = None

    def show(done: int, planned: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task("graphs", total=planned)
        bar.update(task, completed=done)

    try:
        yield show
    finally:
        if task is not None:
            bar.stop()


def _log_some(done: int, planned: int) -> None:
    if done % _LOG_EVERY == 0 or done == planned:
        log.info("capturing graphs %d of %d", done, planned)
