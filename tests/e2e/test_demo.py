"""The main job from the command line of an installed wheel: exit code, document, consistency, nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.wheel import build_wheel

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The command, installed from the wheel into an environment of its own; what it depends on is this one's."""
    folder = tmp_path_factory.mktemp("installed")

    def run(*command):
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=240, cwd=folder
        ).stdout.strip()

    wheel, python = build_wheel(folder), folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # below site-packages: the wheel comes first
    found = run(python, "-c", "import paceline; print(paceline.__file__)")
    assert found == str(site / "paceline" / "__init__.py"), "not this checkout"
    return str(python.with_name("paceline")), "demo"


@pytest.fixture
def short_path():
    """A folder with a short name: Ray puts sockets below TMPDIR, whose paths may have 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="pl"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def environment(short_path):
    """As a user has it: no token for Ray is set, one for a service is, and a proxy that knows nothing of this computer."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    around = {"PACELINE_API_TOKEN": "of-another-service", "http_proxy": "http://127.0.0.1:9"}
    return {**kept, **around, "TMPDIR": str(short_path), "HOME": str(short_path), "PYTHONUNBUFFERED": "1"}


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
    num_requests = {g: sum(phase[g]["requests"] for phase in result["phases"]) for g in ("adaptive", "static")}
    assert (
        num_requests["adaptive"] > num_requests["static"] > 0
    )  # a phase of seconds on a busy machine may see one or two


def _left_behind_at_last(tmp_path, patience_s=10.0):
    """Processes that are still there when those that were told to end, or find themselves alone, have had time for it."""
    give_up = time.monotonic() + patience_s
    while (found := _left_behind(tmp_path)) and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def _left_behind(tmp_path):
    """Processes that name the run's folder or have it open as their working folder (Redis renames itself)."""
    mark = str(tmp_path)
    infos = [p.info for p in psutil.process_iter(["pid", "cmdline", "cwd"])]
    return [i for i in infos if mark in " ".join(i["cmdline"] or []) or mark in (i["cwd"] or "")]


def test_a_short_demo_that_was_killed_goes_on_and_is_lossless_consistent_and_cleans_up(demo, short_path, environment):
    json_path, html_path, answers = short_path / "demo.json", short_path / "demo.html", short_path / "run/answers.jsonl"
    options = ["--minutes", "0.6", "--seed", "3", "--data-dir", str(short_path / "run"), "--json", str(json_path), "--html", str(html_path)]  # fmt: skip
    command = {"args": [*demo, *options], "env": environment, "cwd": "/", "stdin": subprocess.DEVNULL}
    with subprocess.Popen(**command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        give_up = time.monotonic() + 200
        while not (answers.is_file() and answers.read_bytes().count(b"\n") >= 14) and time.monotonic() < give_up:
            time.sleep(0.1)
        killed.kill()
    before = answers.read_bytes()
    assert _left_behind_at_last(short_path, 60.0) == []
    done = subprocess.run(**command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert html_path.stat().st_size > 1_000_000  # plotly is inside the page
    result, lines = json.loads(json_path.read_text()), answers.read_bytes()
    _check_document(result)
    whole = before[: before.rindex(b"\n") + 1]
    assert [json.loads(x) for x in lines.splitlines()][: whole.count(b"\n")] == [
        json.loads(x) for x in whole.splitlines()
    ]
    assert sum(p["requests"] for p in result["phases"]) == lines.count(b"\n") > whole.count(b"\n") >= 14
    assert [p["name"] for p in result["phases"]] == ["A", "B", "C", "B again"]
    assert "lossless:" in done.stdout and "ledger:" in done.stdout
    assert _left_behind_at_last(short_path) == []
    assert not list(short_path.glob("paceline-demo-*"))
    assert not (short_path / ".ray").exists()  # the token that Ray would have written is as readable as any other file
    assert "Token authentication" not in done.stderr


def test_interrupted_demo_cleans_up(demo, short_path, environment):
    out = short_path / "out.txt"
    with out.open("w") as f:
        process = subprocess.Popen(
            [*demo, "--minutes", "5"], stdout=f, stderr=f, env=environment, cwd="/", stdin=subprocess.DEVNULL
        )
    deadline = time.monotonic() + 120
    while not _left_behind(short_path) and time.monotonic() < deadline:  # Redis runs, Ray is about to
        time.sleep(0.2)
    assert list(short_path.glob("paceline-demo-*/redis")), f"the demo did not start: {out.read_text()[-2000:]}"
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=180)
    assert process.returncode != 0
    assert _left_behind_at_last(short_path) == []
    assert not list(short_path.glob("paceline-demo-*"))
