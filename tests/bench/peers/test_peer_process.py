"""Claims of a peer's process: all of it stands still between its turns, and nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from paceline.bench.peers.catalog import Peer
from paceline.bench.peers.process import PeerProcess, ending_on_sigterm
from paceline.bench.serve.local_service import stop
from paceline.errors import PacelineError
from tests.helpers.api_server import wait_until

FAMILY = """
import pathlib, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
room = pathlib.Path(sys.argv[2])
count = "import pathlib, sys, time\\nwhile True:\\n pathlib.Path(sys.argv[1]).write_text(str(time.monotonic())); time.sleep(0.005)"
# one child with a session of its own, and a grandchild whose parent ends
subprocess.Popen([sys.executable, "-c", count, str(room / "own_session")], start_new_session=True)
code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
subprocess.run([sys.executable, "-c", code, count, str(room / "orphan")])
class Models(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Models).serve_forever()
"""


def process(tmp_path, *words: str, env=None) -> PeerProcess:
    peer = Peer(name="mine", command=(sys.executable, *words), env=env or {})
    return PeerProcess(peer, {"threads": "3"}, tmp_path / "room")


def test_the_whole_family_stands_still_and_goes_on(tmp_path):
    server = process(tmp_path, "-c", FAMILY, "{port}", "{room}")
    counts = [tmp_path / "room" / name for name in ("own_session", "orphan")]
    try:
        server.start(30)
        wait_until(lambda: all(c.exists() for c in counts))
        assert server.rss_bytes() > 10 * 2**20
        server.pause()
        before = [c.read_text() for c in counts]
        time.sleep(0.2)
        assert [c.read_text() for c in counts] == before
        server.resume()
        wait_until(lambda: all(c.read_text() not in ("", b) for c, b in zip(counts, before, strict=True)))
        server.pause()
    finally:
        server.stop()  # also while it stands still
    time.sleep(0.1)
    at_end = [c.read_text() for c in counts]
    time.sleep(0.1)
    assert [c.read_text() for c in counts] == at_end
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_server_has_its_threads_its_variables_and_a_folder_of_its_own(tmp_path):
    code = (
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.environ['MINE'], 'GOMP_SPINCOUNT' in os.environ, "
        "os.getcwd()); sys.exit(4)"
    )
    with pytest.raises(PacelineError) as error:
        process(tmp_path, "-c", code, env={"MINE": "yes"}).start(30)
    assert (
        str(error.value)
        == f"it ended with code 4 before it answered: 3 yes False {os.path.realpath(tmp_path / 'room')}"
    )


def test_a_program_that_cannot_be_started_is_named(tmp_path):
    (tmp_path / "text").write_text("no program")
    server = PeerProcess(Peer(name="mine", command=(str(tmp_path / "text"),)), {"threads": "1"}, tmp_path / "room")
    with pytest.raises(PacelineError, match="cannot be started"):
        server.start(5)
    server.stop()


def test_sigterm_ends_the_servers_before_the_benchmark(tmp_path):
    server = process(tmp_path, "-c", FAMILY, "{port}", "{room}")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error, ending_on_sigterm():
        try:
            server.start(30)
            server.pause()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            server.stop()
    assert error.value.code == 128 + signal.SIGTERM and server.end_words() is not None
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_has_inherited_to_ignore_ctrl_c_is_not_waited_for():
    """As of a benchmark that a shell's script runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline()
        began = time.monotonic()
        stop(server, timeout_s=60.0)
        assert time.monotonic() - began < 30.0 and server.returncode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)
