"""Local service: the server that a benchmark loads, one started for it or another, and the lag of the load generator.

A load generator's late event loop is no fault of the server that it measures.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated as A

import httpx
from rich.console import Console

from paceline.bench.common.workloads import BUNDLED_BUCKETS
from paceline.errors import ConfigError, PacelineError
from paceline.machine import free_port
from paceline.records import DataFolder, JsonFile, Setting, record, require

TICK_S = 0.05
SERVER, LOAD, REQUESTS = "Server", "Load", "Requests"
"""Headings of options in --help."""


@record()
class ServerOptions:
    """Options of a benchmark that streams answers of a server."""

    url: A[str, Setting("Address of the server, with or without /v1.", panel=SERVER)] = "http://127.0.0.1:8000"
    is_local: A[bool, Setting("Start `paceline serve` for this run, on a free port.", flag="serve", panel=SERVER)] = (
        False
    )
    max_tokens: A[int, Setting("Longest answer.", panel=REQUESTS, ge=1)] = 128
    buckets: A[tuple[str, ...], Setting("Comma list of buckets.", panel=REQUESTS, non_empty=True)] = BUNDLED_BUCKETS
    timeout_s: A[
        float, Setting("Seconds of silence after which a stream counts as dead.", flag="timeout", panel=REQUESTS, gt=0)
    ] = 120.0
    seed: A[int, Setting("Seed of prompts, arrivals and sampling.", ge=0)] = 0
    data: DataFolder = None
    json: JsonFile = None

    def __post_init__(self) -> None:
        require(self.url.startswith(("http://", "https://")), "url must begin with http:// or https://", self.url)
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as e:
            raise ConfigError(f"url must be an address, got {self.url!r}: {e}") from e

    @contextmanager
    def server(self, console: Console) -> Iterator[str]:
        """The server's address, of one that is started for so long where that is asked for."""
        with ExitStack() as stack:
            url = self.url
            if self.is_local:
                with console.status("starting a local service (about 30 s)"):
                    url = stack.enter_context(local_service())
                console.print(f"local service at {url}", highlight=False)
            yield url.rstrip("/").removesuffix("/v1")

    def client(self, url: str, token: str | None) -> httpx.AsyncClient:
        """A client of that server with as many connections as are asked for."""
        return httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(self.timeout_s, connect=10.0),
        )  # fmt: skip


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
def local_service(*, timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Run `paceline serve` in a process of its own with a folder of its own; gives its URL.

    Raises: PacelineError when it ends or does not answer in time; the message has the end of its log.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        log = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "paceline.cli.main", "serve", "--port", str(port), "--data-dir", str(Path(folder) / "data")]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(process, f"{url}/healthz", log, "`paceline serve`", timeout_s)
            yield url
        finally:
            stop(process)


def stop(process: subprocess.Popen, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """Ctrl-C first, so that Ray and Redis are stopped by the service itself; then less politely.

    A shell's script lets what it runs in the background ignore Ctrl-C, and the server has inherited that.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for number in (*(() if is_ignored else (signal.SIGINT,)), signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            continue


def wait_until_ready(process: subprocess.Popen, url: str, log: Path, name: str, timeout_s: float) -> None:
    """Return when a server answers 200 at `url`; name: what an error calls it. Raises: PacelineError, with the end of its log."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PacelineError(f"{name} ended with code {process.returncode} before it answered: {log_end(log)}")
        try:
            if httpx.get(url, timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise PacelineError(f"{name} did not answer within {timeout_s:.0f} s: {log_end(log)}")


def log_end(log: Path) -> str:
    """The last lines that a server printed, as one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-_LOG_LINES:]) or "it printed nothing"
