"""Wheel: this checkout's, built from a copy, so that nothing stale is packed and nobody else's build is in the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LEFT_OUT = (
    ".git",
    ".venv*",
    ".mypy*",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "build",
    "dist",
    "tests",
    "docs",
    "__pycache__",
    "*.egg-info",
)


def build_wheel(folder: Path) -> Path:
    """The wheel, in `folder`."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel
