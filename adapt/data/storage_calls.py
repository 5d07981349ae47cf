"""Storage calls: calls of a folder or an object store, made by a thread of their own, which nobody waits for longer than a
deadline.

A folder that hangs (an NFS server that is gone: reads and writes wait for ever and cannot be broken off) holds that one
thread and nothing else. Until it answers every other call is refused at once; then calls are made again.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from paceline.errors import StorageHangsError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StorageCalls:
    """The calls of one store; `run` and `later` are for one thread at a time, the rest for any."""

    def __init__(self, where: str, patience_s: float) -> None:
        """where: what is called, for messages. patience_s: longest time that a call is waited for."""
        self._where, self._patience_s = where, patience_s
        self._waiting: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: tuple[tuple, Future, float] | None = None
        """The call that was given up waiting for, its outcome, and since when it runs."""
        self.num_hangs = 0
        """Calls that took longer than the deadline."""

    @property
    def hung_s(self) -> float:
        """For how long a call has not been answered, seconds; 0 = the store answers."""
        late = self._late
        return 0.0 if late is None or late[1].done() else time.monotonic() - late[2]

    @property
    def error(self) -> str:
        """That the store hangs, in words; '' = it answers."""
        hung_s = self.hung_s
        return f"{self._where} does not answer for {hung_s:.0f} s; what needs it waits until it does" if hung_s else ""

    def run(self, fn: Callable[..., T], *args: Any, **options: Any) -> T:
        """What `fn(*args, **options)` returns. A call that was given up and has ended since is not made again.

        Raises: what it raises; StorageHangsError where the store hangs (the call goes on and ends when it answers).
        """
        call = (fn, args, options)
        if self._late is not None:
            made, future, since = self._late
            if not future.done():
                raise StorageHangsError(self.error)
            self._late = None
            logger.warning("%s answers again after %.0f s", self._where, time.monotonic() - since)
            if _is_same(made, call):
                return future.result()
        began, future = time.monotonic(), self.later(fn, *args, **options)
        try:
            return future.result(self._patience_s)
        except TimeoutError:
            if future.done():  # its own
                raise
        self._late = (call, future, began)
        self.num_hangs += 1
        logger.error("%s does not answer for %.0f s", self._where, self._patience_s)
        raise StorageHangsError(self.error)

    def later(self, fn: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
        """Have a call made behind those that are under way, without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="storage-calls", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._waiting.put((future, functools.partial(fn, *args, **options)))
        return future

    def guard(self, subject: T) -> T:
        """The same object, whose methods are called by `run`."""
        return cast(T, _Guarded(self, subject))

    def _work(self) -> None:
        while True:
            future, call = self._waiting.get()
            try:
                future.set_result(call())
            except BaseException as e:  # belongs to whoever waits; this thread is for all calls
                logger.debug("a storage call failed: %s", e)
                future.set_exception(e)


def _is_same(made: tuple, call: tuple) -> bool:
    """Whether two calls are of the same function with the same arguments, as far as that is plain to see."""
    (fn, args, options), (other, others, other_options) = made, call
    values, other_values = (*args, *options.values()), (*others, *other_options.values())
    return (
        fn == other
        and options.keys() == other_options.keys()
        and len(values) == len(other_values)
        and all(a is b or (isinstance(a, str) and a == b) for a, b in zip(values, other_values, strict=True))
    )


class _Guarded:
    def __init__(self, calls: StorageCalls, subject: Any) -> None:
        self._calls, self._subject = calls, subject

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._subject, name)
        return functools.partial(self._calls.run, found) if callable(found) else found
