"""Engine inbox: new requests, aborts and calls on their way from other threads to the engine thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from paceline.errors import CapacityError, EngineStoppedError, RequestError
from paceline.serving.engine.running import RunningRequest

QUEUE_SHARE = 4
"""One tenant alone may fill four fifths of the queue, two four ninths each."""


class Queued(Sized, Protocol):
    """Requests that wait for admission."""

    def num_of(self, tenant: str) -> int:
        """Those of one tenant."""


Call = tuple[Callable[[], Any], Future]


class EngineInbox:
    """Bounded mailbox of one engine. Every method may be called from any thread unless it says otherwise."""

    def __init__(self, max_waiting: int, queued: Queued, rng: np.random.Generator) -> None:
        """queued: requests that the engine has taken but not admitted; they count against max_waiting."""
        self._max_waiting = max_waiting
        self._queued = queued
        self._rng = rng
        self._changed = threading.Condition()
        self._arrived: deque[RunningRequest] = deque()
        self._aborts: set[str] = set()
        self._calls: deque[Call] = deque()
        self._ids: set[str] = set()  # of every request not yet ended
        self._num_arrivals = 0
        self._closed: str | None = None

    def __len__(self) -> int:
        """Requests that have arrived and were not taken yet."""
        return len(self._arrived)

    @property
    def num_unfinished(self) -> int:
        return len(self._ids)

    @property
    def is_empty(self) -> bool:
        """Nothing to take; read without the lock, once per round."""
        return not (self._arrived or self._calls or self._aborts)

    def put_all(self, requests: Sequence[RunningRequest]) -> None:
        """Queue all of the requests or none; each gets its arrival number and, without one of its own, a seed.

        Raises: RequestError (id in use, more than the queue ever holds), CapacityError (queue full), EngineStoppedError.
        """
        with self._changed:
            if self._closed is not None:
                raise EngineStoppedError(f"the engine does not take requests: {self._closed}")
            own: set[str] = set()
            for request in requests:
                if request.request_id in self._ids or request.request_id in own:
                    raise RequestError(
                        f"request_id must be unique among unfinished requests, got {request.request_id!r}"
                    )
                own.add(request.request_id)
            most = self._max_waiting
            if requests and requests[0].request.tenant:  # what `_check_share` grants in an empty queue
                most = (QUEUE_SHARE * most + 1) // (QUEUE_SHARE + 1)
            if len(requests) > most:
                raise RequestError(
                    f"requests at once must be at most {most}, got {len(requests)}; send them in several bodies"
                )
            self._check_share(requests)
            room = self._max_waiting - len(self._arrived) - len(self._queued)
            if len(requests) > room:
                raise CapacityError(
                    f"the queue has room for {max(room, 0)} of {len(requests)} requests "
                    f"({self._max_waiting} may wait); try again later"
                )
            for request in requests:
                if request.request.params.seed is None:
                    request.seed = int(self._rng.integers(2**62))
                request.arrival = self._num_arrivals
                self._num_arrivals += 1
                self._ids.add(request.request_id)
                self._arrived.append(request)
            self._changed.notify_all()

    def _check_share(self, requests: Sequence[RunningRequest]) -> None:
        """Raise CapacityError where a named tenant's requests would leave too few places for others.

        A tenant may have QUEUE_SHARE times the places that stay free (dynamic thresholds of switch buffers: Choudhury and
        Hahne 1998), so that there is room for one that comes anew, however many flood.
        """
        tenant = requests[0].request.tenant if requests else ""
        if not tenant:
            return
        num_arrived = sum(r.request.tenant == tenant for r in self._arrived)
        num_own = num_arrived + self._queued.num_of(tenant) + len(requests)
        num_left = self._max_waiting - len(self._arrived) - len(self._queued) - len(requests)
        if num_own - 1 > QUEUE_SHARE * num_left:
            raise CapacityError(
                f"the queue has no room for more than {num_own - len(requests)} requests of one tenant now; try again later"
            )

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request; unknown or ended ids are ignored."""
        with self._changed:
            if request_id in self._ids:
                self._aborts.add(request_id)
                self._changed.notify_all()

    def call(self, fn: Callable[[], Any]) -> Future:
        """Have `fn` run in the engine thread; the future gives its result or exception."""
        future: Future = Future()
        with self._changed:
            if self._closed is not None and not self._ids:
                future.set_exception(EngineStoppedError(f"the engine has stopped: {self._closed}"))
                return future
            self._calls.append((fn, future))
            self._changed.notify_all()
        return future

    def wait(self, timeout_s: float) -> None:
        """Block until there is something to take, `wake` is called or the time is over."""
        with self._changed:
            if self.is_empty:
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Refuse new requests from now on."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    # ---- engine thread ------------------------------------------------------------------------------------------
    def take(self) -> tuple[list[RunningRequest], set[str], list[Call]]:
        """Everything that came in since the last call: requests in arrival order, ids to abort, calls."""
        with self._changed:
            taken = list(self._arrived), self._aborts, list(self._calls)
            self._arrived.clear()
            self._calls.clear()
            self._aborts = set()
            return taken

    def forget(self, request_id: str) -> None:
        """A request has ended: its id may be used again."""
        with self._changed:
            self._ids.discard(request_id)
            self._aborts.discard(request_id)  # a late abort must not hit the id's next user
