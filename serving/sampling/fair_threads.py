"""Fair threads: a few threads for work of many tenants, none of whom holds up the others by having much of it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.errors import CapacityError

T = TypeVar("T")
_stack_lock = threading.Lock()  # a thread's stack is a setting of the whole process


class FairThreads:
    """Threads, each for one piece of work, of which the tenant with the fewest gets the next one. Thread-safe.

    A tenant has at most half of them, so that another one need not wait until its work is done; work of nobody ('') may
    have all.
    """

    def __init__(self, name: str, num_threads: int, *, stack_bytes: int = 0) -> None:
        """num_threads: at once. stack_bytes: of each; 0 = the usual."""
        self._name, self._num_threads, self._stack_bytes = name, num_threads, stack_bytes
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """Tenant -> its work in order of arrival; among tenants the one that was served longest ago comes first."""

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Begin the work when it is its turn. A result that is cancelled before that is never begun."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, work))
            self._begin()
        return future

    def _begin(self) -> None:
        """Begin what may be; the caller has the lock."""
        while self._running.total() < self._num_threads:
            able = [t for t in self._waiting if not t or self._running[t] < max(1, self._num_threads // 2)]
            if not able:
                return
            tenant = min(able, key=self._running.__getitem__)
            line = self._waiting.pop(tenant)
            future, work = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not future.set_running_or_notify_cancel():
                continue
            self._running[tenant] += 1
            try:
                self._start(lambda t=tenant, f=future, w=work: self._run(t, f, w))  # type: ignore[misc]
            except RuntimeError as e:
                self._end(tenant)
                future.set_exception(CapacityError(f"no thread for the work ({e}); try again later"))

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with _stack_lock:
            usual = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)

    def _run(self, tenant: str, future: Future[T], work: Callable[[], T]) -> None:
        try:
            result = work()
        except BaseException as e:  # belongs to the caller; a panic of a library is no Exception
            future.set_exception(e)
        else:
            future.set_result(result)
        finally:
            with self._lock:
                self._end(tenant)
                self._begin()

    def _end(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
