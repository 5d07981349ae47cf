"""Claims of infra/app.py that need no cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from paceline.infra.app import _start_patiently

SLOW = Exception(
    "The current node timed out during startup. This could happen because some of the raylet failed to startup"
)


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_a_ray_that_is_slow_to_start_is_started_once_more_and_leaves_nothing(num_failures: int) -> None:
    mine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started: list[subprocess.Popen[bytes]] = []
    others: list[subprocess.Popen[bytes]] = []
    of_ray = [str(Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet")]

    def start() -> None:
        others.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))  # of another thread
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *of_ray]))
        if len(started) <= num_failures:
            raise SLOW

    try:
        if num_failures == 2:
            with pytest.raises(Exception, match="timed out during startup"):
                _start_patiently(start)
        else:
            _start_patiently(start)
        assert len(started) == min(num_failures + 1, 2)
        assert not any(psutil.pid_exists(p.pid) for p in started[:-1]), "what a start left is ended"
        assert all(p.poll() is None for p in (mine, *others, started[-1]))
    finally:
        for process in (mine, *others, *started):
            process.kill()
            process.wait()


def test_another_failure_of_ray_is_not_tried_again() -> None:
    calls = []

    def start() -> None:
        calls.append(1)
        raise ValueError("no such resource")

    with pytest.raises(ValueError, match="no such resource"):
        _start_patiently(start)
    assert calls == [1]
