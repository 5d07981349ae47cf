"""How does a foreground command notice Ctrl-C and SIGTERM, although Ray takes SIGTERM for itself while it starts?"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Notes both signals in `stop`; a context manager for the main thread that puts the old handlers back.

    `ray.init` installs a SIGTERM handler of its own, so call `install` again behind it. An exception that a handler raises
    may be lost inside a finalizer or a callback; `stop` stays set.
    """

    def __init__(self, *, raises: bool) -> None:
        """raises: also raise KeyboardInterrupt at once, whatever the main thread is doing."""
        self.stop = threading.Event()
        self._raises = raises
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        for s in SIGNALS:
            signal.signal(s, self._take)

    def check(self) -> None:
        """Raise KeyboardInterrupt when a signal has come, also one whose exception was lost."""
        if self.stop.is_set():
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()
        if self._raises:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        self._previous = {s: signal.getsignal(s) for s in SIGNALS}
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)
