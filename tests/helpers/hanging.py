"""Hanging files: what a file server that is gone makes of a folder, with pipes that nobody reads or writes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class Hanging:
    """Files that hang until `release`; what was there before is put back."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        for path in paths:
            if path.exists():
                path.rename(path.with_suffix(".aside"))
            path.parent.mkdir(parents=True, exist_ok=True)
            os.mkfifo(path)

    def release(self) -> None:
        hung = [path.rename(path.with_suffix(".hung")) for path in self.paths]  # nobody who comes now finds them
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                path.with_suffix(".aside").rename(path)
        ends = [os.open(path, os.O_RDWR) for path in hung]  # who waits for either end goes on
        for path in hung:
            path.unlink()
        time.sleep(0.2)  # who found the file before it went may open it yet, and would wait for ever without an end
        for end in ends:
            os.close(end)
