"""The capturing of graphs is shown as a bar on a terminal and in the log elsewhere."""

import io
import logging

from rich.console import Console

from paceline.infra.replica.capture_progress import capture_progress


def run(console, calls):
    with capture_progress(console) as show:
        for done in range(1, calls + 1):
            show(done, 60)


def test_a_terminal_gets_a_bar_with_counts():
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, width=80), 60)
    assert "capturing graphs" in out.getvalue() and "60/60" in out.getvalue()


def test_a_pipe_gets_a_few_log_lines_and_no_bar(caplog):
    out = io.StringIO()
    with caplog.at_level(logging.INFO, logger="paceline.infra.replica.capture_progress"):
        run(Console(file=out, force_terminal=False), 60)
    assert out.getvalue() == ""
    assert [r.getMessage() for r in caplog.records] == [f"capturing graphs {n} of 60" for n in (25, 50, 60)]


def test_a_start_without_graphs_stays_silent(caplog):
    out = io.StringIO()
    with caplog.at_level(logging.INFO):
        run(Console(file=out, force_terminal=True), 0)
    assert out.getvalue() == "" and not caplog.records
