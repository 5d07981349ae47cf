"""Local service: a Paceline service started for one measurement, and the lag of the load generator beside it.

A load generator's late event loop is no fault of the server that it measures.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from paceline.errors import PacelineError

TICK_S = 0.05


async def watch_lag(lags_s: list[float], on_tick: Callable[[float], None]) -> None:
    """Append the seconds by which each tick came late, and call `on_tick(perf_counter)`; runs until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        lags_s.append(max(0.0, now - before - TICK_S))
        on_tick(now)


START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.5
_LOG_LINES = 8


@contextmanager
def local_service(*, drafter: str | None = None, timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Run `paceline serve` in a process of its own with a folder of its own; gives its URL.

    Raises: PacelineError when it ends or does not answer in time; the message has the end of its log.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        log = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "paceline.cli.main", "serve", "--port", str(port), "--data-dir", str(Path(folder) / "data")]  # fmt: skip
        if drafter is not None:
            command += ["--drafter", drafter]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(process, port, log, timeout_s)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


def stop(process: subprocess.Popen, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """Ctrl-C first, so that Ray and Redis are stopped by the service itself; then less politely."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            continue


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen, port: int, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PacelineError(f"`paceline serve` ended with code {process.returncode} before it answered: {_tail(log)}")  # fmt: skip
        try:
            if httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise PacelineError(f"`paceline serve` did not answer within {timeout_s:.0f} s: {_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-_LOG_LINES:]) or "it printed nothing"
