"""Stop signals: a foreground command notices Ctrl-C, SIGTERM and its terminal's end without an exception inside somebody's lock."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes these signals in `stop`, but a terminal's end where that is ignored (nohup); a context manager for the main thread
    that puts the old handlers back.

    A handler that raises may do so between a lock's acquisition and its release (logging's, say: every thread that logs
    hangs from then on) or inside a finalizer, where the exception is lost. Callers ask `check` where it is safe instead.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt once a signal has come."""
        if self.stop.is_set():
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set() and number == signal.SIGINT:  # whoever presses Ctrl-C twice does not want to wait
            raise KeyboardInterrupt
        self.stop.set()

    def __enter__(self) -> StopSignals:
        for s in SIGNALS:
            if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:
                self._previous[s] = signal.signal(s, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Keep a handler of SIGTERM that the program has set: `ray.init` replaces it by one that raises SystemExit.

    A signal that comes meanwhile is handled afterwards: raised inside a finalizer or a callback, SystemExit is lost.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        for end in (reader, writer):
            end.setblocking(False)
        # Told of every signal, whoever handles it
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGTERM, handler)
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in reader.recv(4096):
                    handler(signal.SIGTERM, None)
