"""Clock: the wall clock of a service's processes, which can be stepped while they run.

A small library (clock.cpp) that is loaded before all others adds a number of seconds to what the processes take for the time of
day. libfaketime is no substitute: up to 0.9.10 every `time.sleep` of Python 3.11 fails under it.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import psutil

from paceline.errors import PacelineError
from paceline.kernels.cpu.build import BuildError, find_compilers

SOURCE = Path(__file__).with_name("clock.cpp")
VARIABLE = "PACELINE_CHAOS_CLOCK"
"""Environment variable of the library: the file that has the shift."""
_PRELOAD = "LD_PRELOAD"
_FLAGS = (
    "-O2", "-std=c++17", "-fPIC", "-shared", "-Wall", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
)  # fmt: skip


def why_no_clock() -> str | None:
    """Why clocks cannot be stepped on this computer, and what to do; None: they can."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux, this is {sys.platform}"
    try:
        find_compilers()
    except BuildError as e:
        return str(e)
    return None


class SteppedClock:
    """The clock of the processes that are started while it is entered into the environment."""

    def __init__(self, folder: Path) -> None:
        """Compile the library into the folder, which must outlive the processes. Raises: PacelineError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._library, self._file = folder / "clock.so", folder / "clock.shift"
        command = [*find_compilers()[0], *_FLAGS, str(SOURCE), "-o", str(self._library)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise PacelineError(f"{SOURCE.name} could not be compiled: {result.stderr[-500:]}")
        self.step(0.0)
        self._before: dict[str, str | None] = {}

    def enter(self) -> None:
        """Let the processes that this one starts from now on, and theirs, have the clock."""
        values = {_PRELOAD: str(self._library), VARIABLE: str(self._file)}
        self._before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def leave(self) -> None:
        """Undo `enter` and the step; safe to call twice."""
        self.step(0.0)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}

    def step(self, shift_s: float) -> None:
        """Let the clock be that many seconds ahead of the computer's (< 0: behind), at once for all its processes."""
        file = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(
                file, struct.pack("=q", round(shift_s * 1e9)), 0
            )  # eight bytes in place: processes have them mapped
        finally:
            os.close(file)

    def is_of(self, process: psutil.Process) -> bool:
        """Whether a process has this clock."""
        try:
            return str(self._library) in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
