"""Numbers exchange: what every process of a service counts, so that any one of them can tell a scraper all of it.

Each process writes its numbers to Redis every two seconds and once more before it reads them, so that what one scrape has
shown of a process never falls in the next one, whoever answers it. Without Redis a process knows its own numbers only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from paceline.contracts import Histogram, HttpMeters, combine_meters, decode, encode
from paceline.infra.state.desired import REPORT_TTL_S
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, Keys, producer_client
from paceline.names import ENGINE

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
WINDOW_S = 60.0
"""What `recent` covers, once a process is that old."""


class ReplicaNumbers(msgspec.Struct, kw_only=True):
    """What one process of a service counts."""

    kind: str = ENGINE
    """'engine' | 'ingress'."""
    model: str = ""
    counters: dict[str, Any] = {}
    """Of an engine: {"engine": Engine.stats(), "feedback": ..., "traces": ..., "spans": ..., "training": bool, "process": ...,
    "speculation": rows of metrics.speculation_rows}, all but the first optional. Of an ingress: attributes of ResumeCounters."""
    swap_pause_ms: float | None = None
    """Of the latest swap."""
    queue: Histogram | None = None
    """Engine.queue_times."""
    http: HttpMeters | None = None
    """None where another process speaks HTTP."""
    recent: HttpMeters | None = None
    """Of `http`, what came in the past minute."""


class NumbersExchange:
    """One process's end of the exchange. Thread-safe; `start` and `close` it."""

    def __init__(
        self, redis_url: str | None, keys: Keys, process_id: str, read: Callable[[], ReplicaNumbers],
        *, timer: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """read: the process's numbers now; called from several threads. redis_url: None = nothing is exchanged."""
        self._client = None if redis_url is None else producer_client(redis_url)
        self._keys, self._process_id, self._read, self._timer = keys, process_id, read, timer
        self._lock = threading.Lock()
        self._past: deque[tuple[float, HttpMeters]] = deque()
        self._breaker = Breaker()
        self._said = ""
        """Kind of the latest error, while it lasts."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_processes: int | None = None
        """Processes of the service, of whatever kind, that wrote lately, this one included; None = not known yet."""

    def start(self) -> NumbersExchange:
        self._thread = threading.Thread(target=self._run, name="numbers", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop writing and leave the exchange; others no longer see this process."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._client is not None:
            try:
                self._client.delete(self._keys.numbers_of(self._process_id))
                self._client.zrem(self._keys.numbers, self._process_id)
            except (RedisError, OSError) as e:
                logger.debug("numbers stay in Redis until they expire: %s", e)
            self._client.close()

    def own(self) -> ReplicaNumbers:
        """This process's numbers now."""
        numbers = self._read()
        if numbers.http is not None:
            now = decode(encode(numbers.http), HttpMeters)  # the event loop goes on writing
            with self._lock:
                if not self._past or self._timer() - self._past[-1][0] >= PERIOD_S / 2:
                    self._past.append((self._timer(), now))
                while len(self._past) > 1 and self._timer() - self._past[1][0] >= WINDOW_S:
                    self._past.popleft()
                before = self._past[0][1]
            numbers.http, numbers.recent = now, combine_meters([now], before)
        return numbers

    def gather(self, *kinds: str) -> dict[str, ReplicaNumbers]:
        """Process id -> numbers, of all processes of these kinds that are known to live; blocks for a second at most.

        While Redis is away or refuses, this process alone.
        """
        own = self.own()
        found = {self._process_id: own}
        if self._client is not None and self._breaker.is_up is not False:
            try:
                self._write(own)
                found = {**self._read_all(), **found}
            except (RedisError, OSError) as e:
                self._note(e)
        return {name: found[name] for name in sorted(found) if found[name].kind in kinds}

    def _write(self, own: ReplicaNumbers) -> None:
        assert self._client is not None
        now, _ = self._client.time()  # type: ignore[misc]  # one clock for all nodes
        pipe = self._client.pipeline(transaction=False)
        pipe.set(self._keys.numbers_of(self._process_id), encode(own), ex=REPORT_TTL_S)
        pipe.zadd(self._keys.numbers, {self._process_id: now})
        pipe.zcount(self._keys.numbers, now - REPORT_TTL_S, "+inf")
        self.num_processes = int(pipe.execute()[-1])
        self._breaker.succeeded()
        self._said = ""

    def _read_all(self) -> dict[str, ReplicaNumbers]:
        assert self._client is not None
        ids = [i.decode() for i in self._client.zrange(self._keys.numbers, 0, -1)]  # type: ignore[union-attr]
        values = self._client.mget([self._keys.numbers_of(i) for i in ids]) if ids else []
        gone = [i for i, v in zip(ids, values, strict=True) if v is None]  # type: ignore[arg-type]
        if gone:
            self._client.zrem(self._keys.numbers, *gone)
        found = {}
        for name, value in zip(ids, values, strict=True):  # type: ignore[arg-type]
            if isinstance(value, bytes):
                try:
                    found[name] = decode(value, ReplicaNumbers)
                except (msgspec.DecodeError, ValueError) as e:  # of another release
                    logger.debug("numbers of %s cannot be read: %s", name, e)
        return found

    def _note(self, error: Exception) -> None:
        if isinstance(error, OUTAGE_ERRORS):
            self._breaker.failed()
        if (kind := type(error).__name__) != self._said:
            self._said = kind
            logger.warning("numbers are not exchanged: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                own = self.own()  # without a Redis, too: the past minute is told from what was there before it
                if self._client is not None:
                    self._write(own)
            except (RedisError, OSError) as e:
                self._note(e)
            except Exception:  # one that stops writing would vanish from every scrape
                logger.exception("numbers could not be written; trying again")
