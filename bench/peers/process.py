"""Peer process: a server with all its children, which is started, stopped in its tracks, woken and ended.

Servers wait for their turn under SIGSTOP: what does not run takes no core from the one that is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from paceline import SPINS
from paceline.bench.peers.catalog import Peer, filled
from paceline.bench.serve.local_service import log_end, stop, wait_until_ready
from paceline.errors import PacelineError
from paceline.machine import free_port

_SWEEPS = 20
"""Times that the processes of a server are looked up: one that still runs may start another meanwhile."""
_STOP_S = 20.0
_END_S = 1.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PeerProcess:
    """A server of its own on a free port of this computer; its log and data lie in a folder of its own."""

    def __init__(self, peer: Peer, values: Mapping[str, str], room: Path) -> None:
        """values: of the catalog's FIELDS, but port and room."""
        port = free_port()
        self.peer, self.url = peer, f"http://127.0.0.1:{port}"
        self._room, self._log = room, room / "server.log"
        self._values = {**values, "port": str(port), "room": str(room)}
        self._process: subprocess.Popen | None = None
        self._seen: dict[int, psutil.Process] = {}

    @property
    def served_name(self) -> str | None:
        """The model's name in requests, where the server does not tell it."""
        name = self.peer.kind.served_name
        return None if name is None else filled([name], self._values)[0]

    def start(self, timeout_s: float) -> None:
        """Start the server and return when it can be asked. Raises: PacelineError when it ends or does not answer in time."""
        self._room.mkdir(parents=True, exist_ok=True)
        threads = dict.fromkeys(_THREAD_VARIABLES, self._values["threads"])
        own = zip(self.peer.env, filled(list(self.peer.env.values()), self._values), strict=True)
        given = {name: value for name, value in os.environ.items() if (name, value) != SPINS}  # ours, not the user's
        env = {**given, **threads, **dict(own)}
        try:
            with self._log.open("wb") as out:
                self._process = subprocess.Popen(
                    filled(self.peer.command, self._values), env=env, cwd=self._room, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as e:
            raise PacelineError(f"it cannot be started: {e.strerror}") from e
        wait_until_ready(self._process, f"{self.url}{self.peer.kind.ready}", self._log, "it", timeout_s)

    def end_words(self) -> str | None:
        """How the server ended; None while it lives. A connection breaks a moment before its process has ended."""
        if self._process is None:
            return None
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None
        return f"it ended with code {self._process.returncode}: {log_end(self._log)}"

    def pause(self) -> None:
        """Stop every process of the server in its tracks, parents first: none sees another one missing."""
        for _ in range(_SWEEPS):
            running = [p for p in self._family() if _status(p) not in (None, psutil.STATUS_STOPPED)]
            if not running:
                return
            for process in running:
                _send(process, signal.SIGSTOP)
            time.sleep(0.01)

    def resume(self) -> None:
        """Let every process of the server go on."""
        for process in self._family():
            _send(process, signal.SIGCONT)

    def stop(self) -> None:
        """End the server as its user would, then whatever of it is left."""
        if self._process is None:
            return
        self.resume()
        family = self._family()
        stop(self._process, _STOP_S)
        left = [p for p in family if _status(p) is not None and p.pid != self._process.pid]
        for process in left:
            _send(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=_STOP_S)

    def rss_bytes(self) -> int:
        """Memory of all processes; pages that they share count for each."""
        total = 0
        for process in self._family():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return total

    def _family(self) -> list[psutil.Process]:
        """The living processes of the server: descendants, those of its session, and those once seen that lost their parent."""
        if self._process is None:
            return []
        parents: dict[int, list[psutil.Process]] = {}
        own: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                parents.setdefault(process.ppid(), []).append(process)
                if process.pid == self._process.pid or os.getsid(process.pid) == self._process.pid:
                    own.append(process)
            except (psutil.Error, OSError):
                continue  # it has just ended
        own += [p for p in self._seen.values() if p.is_running()]
        found: dict[int, psutil.Process] = {}
        while own:
            process = own.pop(0)
            if process.pid not in found:
                found[process.pid] = process
                own += parents.get(process.pid, [])
        self._seen = {pid: p for pid, p in found.items() if _status(p) is not None}
        return list(self._seen.values())


def _status(process: psutil.Process) -> str | None:
    """What a process does; None for one that has ended."""
    try:
        status = process.status()
    except psutil.Error:
        return None
    return None if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):  # it has just ended
        process.send_signal(number)


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process by an exception: stopped servers, which nobody would see, are ended before it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
