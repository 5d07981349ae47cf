"""The main job from the command line: exit code, document, consistency, nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture
def short_path():
    """A folder with a short name: Ray puts sockets below TMPDIR, whose paths may have 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="pl"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _run(tmp_path, *options):
    json_path, html_path = tmp_path / "demo.json", tmp_path / "demo.html"
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [
        sys.executable,
        "-m",
        "paceline.cli.main",
        "demo",
        "--json",
        str(json_path),
        "--html",
        str(html_path),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert html_path.stat().st_size > 1_000_000  # plotly is inside the page
    return json.loads(json_path.read_text()), done.stdout


def _check_document(result):
    assert result["lossless"]["checked"] > 0 and result["lossless"]["mismatches"] == 0
    assert result["swaps"]["requests_dropped"] == 0 and result["failures"] == []
    feedback = result["feedback"]
    assert feedback["produced"] == feedback["delivered"] + feedback["dropped"] > 0
    ledger = result["ledger"]
    spent = sum(e["seconds"] for e in result["ledger_entries"] if e["kind"] != "saving")
    saved = sum(e["seconds"] for e in result["ledger_entries"] if e["kind"] == "saving")
    assert ledger["spent_s"] == pytest.approx(spent) and ledger["saved_s"] == pytest.approx(saved)
    assert ledger["net_s"] == pytest.approx(saved - spent)
    for phase in result["phases"]:
        assert phase["tokens"] == sum(phase[g]["tokens"] for g in ("adaptive", "static", "plain"))
        assert phase["adaptive"]["requests"] >= phase["static"]["requests"]


def _left_behind(tmp_path):
    """Processes that name the run's folder or have it open as their working folder (Redis renames itself)."""
    mark = str(tmp_path)
    infos = [p.info for p in psutil.process_iter(["pid", "cmdline", "cwd"])]
    return [i for i in infos if mark in " ".join(i["cmdline"] or []) or mark in (i["cwd"] or "")]


def test_short_demo_is_lossless_consistent_and_cleans_up(short_path):
    result, out = _run(short_path, "--minutes", "0.6", "--seed", "3")
    _check_document(result)
    assert [p["name"] for p in result["phases"]] == ["A", "B", "A again", "B again"]
    assert "lossless:" in out and "ledger:" in out
    assert _left_behind(short_path) == []
    assert not list(short_path.glob("paceline-demo-*"))


def test_interrupted_demo_cleans_up(short_path):
    env = {**os.environ, "TMPDIR": str(short_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "paceline.cli.main", "demo", "--minutes", "5"]
    out = short_path / "out.txt"
    with out.open("w") as f:
        process = subprocess.Popen(command, stdout=f, stderr=f, env=env, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not _left_behind(short_path) and time.monotonic() < deadline:  # Redis runs, Ray is about to
        time.sleep(0.2)
    assert list(short_path.glob("paceline-demo-*/redis")), f"the demo did not start: {out.read_text()[-2000:]}"
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=180)
    assert process.returncode != 0
    assert _left_behind(short_path) == []
    assert not list(short_path.glob("paceline-demo-*"))


def test_policy_never_trains_nothing(short_path):
    result, _ = _run(short_path, "--minutes", "0.4", "--policy", "never")
    _check_document(result)
    assert all(d["action"] == "hold" for d in result["decisions"])
    assert result["swaps"]["count"] == 0 and result["ledger"]["spent_s"] == 0
