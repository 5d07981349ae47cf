"""Engine thread: calls Engine.step while there is work, sleeps when idle and reports its own death."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from paceline.serving.engine.engine import Engine

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5


class EngineThread:
    """Runs one engine until stopped or failed."""

    def __init__(self, engine: Engine, *, timer: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self._timer = timer
        self._thread: threading.Thread | None = None
        self._is_draining = False
        self._is_stopping = False
        self._beat_s = timer()
        self.error: BaseException | None = None
        """What ended the thread, None while it is healthy."""

    def start(self, *, is_warmed_up: bool = False) -> None:
        """Start the thread; it measures the verify cost first unless the caller did (`Engine.warm_up`)."""
        assert self._thread is None, "the engine thread is started once"
        self._beat_s = self._timer()
        self._thread = threading.Thread(target=self._run, args=(not is_warmed_up,), name="paceline-engine", daemon=True)
        self._thread.start()

    def stop(self, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Refuse new requests and end the thread; True when it ended in time.

        Args:
            drain: finish the requests that were taken; False ends them with finish reason 'error'.
        """
        self.engine.close_inbox("the engine is shutting down")
        self._is_draining = True
        if not drain:
            self._is_stopping = True
        self.engine.wake()
        if self._thread is None:
            self.engine.fail_all("the engine was shut down before it was started")
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._is_stopping:  # the drain took too long
            self._is_stopping = True
            self.engine.wake()
            self._thread.join(5.0)
        return not self._thread.is_alive()

    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last finished a round or an idle wait (at most 0.5 s when idle and healthy)."""
        return self._timer() - self._beat_s

    @property
    def is_draining(self) -> bool:
        """New requests are refused; those that were taken are finished."""
        return self._is_draining

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, must_warm_up: bool) -> None:
        engine = self.engine
        if engine.config.num_threads is not None:
            torch.set_num_threads(engine.config.num_threads)
        try:
            if must_warm_up:
                engine.warm_up()
            while not self._is_stopping:
                self._beat_s = self._timer()
                if not engine.step():
                    if self._is_draining and engine.is_idle:
                        break
                    engine.wait_for_work(_IDLE_WAIT_S)
            engine.deliver_traces()
            engine.fail_all("the engine was shut down before the request was complete")
        except BaseException as e:
            self.error = e
            logger.exception("engine thread died")
            engine.fail_all("the engine failed; its log says why")  # what it was may quote other requests
