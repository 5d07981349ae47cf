"""Dashboard feed: keeps pages current at one read of the controller a second, however many are open.

One document is shared by all pages of a replica; a page is sent the parts whose digest it does not have, and the time
bins of traffic that are new. The bins are the controller's own of the past 20 minutes (they survive restarts), so that a
fresh page shows the past; a copy here covers the time while the controller is away. What is older a page asks for.

Pages wait in two threads of their own: a controller that answers slowly never takes the threads that the API works in.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from paceline.contracts import SPAN_S
from paceline.errors import EngineStoppedError
from paceline.infra.controller.snapshot import GroupSums, Snapshot, TrafficBin
from paceline.infra.controller.traffic import TIERS
from paceline.infra.web.sections import sections

FRESH_S = 0.8
PERIOD_S = 1.0
LIFETIME_S = 10.0
"""A stream ends after this and the page opens the next: a drain never waits longer for a page that was left open."""
MAX_PAGES = 24
"""Open streams of one replica; Serve counts each as a request."""
NUM_BUCKETS = 24
NUM_THREADS = 2
LATE_S = 3 * SPAN_S
"""Rows may arrive this late: bins of that age are read again."""

_encoder = msgspec.json.Encoder()
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Document:
    """Everything that a page can show, encoded once."""

    ts: float
    """By the controller's clock, as all times in it: this computer's may be off."""
    state: Snapshot
    """What the parts were made from."""
    parts: dict[str, bytes] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    bins: list[dict[str, Any]] = field(default_factory=list)


class DashboardFeed:
    """The shared document of one replica, and the threads that pages wait in. Thread-safe; `close` it."""

    def __init__(
        self,
        read_state: Callable[[], Snapshot],
        read_traffic: Callable[[float], list[TrafficBin] | None],
        *,
        clock: Callable[[], float] = time.time,
        fresh_s: float = FRESH_S,
        period_s: float = PERIOD_S,
        lifetime_s: float = LIFETIME_S,
        max_pages: int = MAX_PAGES,
    ) -> None:
        """Both readers may block for seconds; read_traffic(since) is None while the controller is away.

        Args:
            fresh_s: oldest document that a page is sent.
            period_s: seconds between two events of a stream.
            lifetime_s: seconds after which a stream ends and the page opens the next.
            max_pages: open streams of one replica.
        """
        self._read_state, self._read_traffic, self._clock = read_state, read_traffic, clock
        self.fresh_s, self.period_s, self.lifetime_s, self.max_pages = fresh_s, period_s, lifetime_s, max_pages
        self._lock = threading.Lock()
        self._document: Document | None = None
        self._read_at = float("-inf")
        self._bins: dict[float, dict[str, Any]] = {}
        self._last_full: Snapshot | None = None
        self._ahead_s = 0.0
        """How far the controller's clock is ahead of this computer's."""
        self.num_pages = 0
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dashboard")
        self._is_closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may block, from the dashboard's threads; raises EngineStoppedError once closed."""
        try:
            return await asyncio.wrap_future(self._pool.submit(work))
        except (RuntimeError, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise EngineStoppedError("this replica is stopping; open the dashboard again") from e

    def close(self) -> None:
        """End the threads: what waits is refused, a read that has begun ends by its own time limit."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def document(self) -> Document:
        """The latest document, at most `fresh_s` old; blocks while it is read."""
        with self._lock:
            if self._document is None or time.monotonic() - self._read_at > self.fresh_s:
                self._document = self._read()
                self._read_at = time.monotonic()
            return self._document

    def _read(self) -> Document:
        state = self._read_state()
        if state.has_controller:
            self._last_full = state
            if state.ts is not None and state.age_s is not None:
                self._ahead_s = state.ts + state.age_s - self._clock()
        elif self._last_full is not None:  # the controller is away: the past stays visible, marked as such
            state = msgspec.structs.replace(
                self._last_full, replica=state.replica, redis_up=state.redis_up, has_controller=False
            )
        self._take_bins()
        document = Document(
            ts=self._clock() + self._ahead_s, state=state, bins=[self._bins[t] for t in sorted(self._bins)]
        )
        for name, value in sections(state).items():
            raw = _encoder.encode(value)
            document.parts[name] = raw
            document.digests[name] = hashlib.blake2b(raw, digest_size=6).hexdigest()
        return document

    def _take_bins(self) -> None:
        newest = max(self._bins, default=0.0)
        found = self._read_traffic(newest - LATE_S if newest else 0.0)
        self._bins.update((row.ts, _as_bin(row)) for row in found or [] if row.seconds == SPAN_S)
        for old in sorted(self._bins)[: -TIERS[0][1]]:
            del self._bins[old]

    def past(self) -> list[dict[str, Any]]:
        """All time bins that the controller keeps, oldest first, none while it is away; blocks."""
        return [_as_bin(row) for row in self._read_traffic(0.0) or []]

    def history(self) -> bytes:
        """JSON of `past`; blocks."""
        return _encoder.encode(self.past())

    def whole(self) -> Document:
        """The latest document with the bins of the past; blocks."""
        document = self.document()
        return replace(document, bins=self.past() or document.bins)


def _as_bin(row: TrafficBin) -> dict[str, Any]:
    return {"ts": row.ts, "seconds": row.seconds, "buckets": _compact(row.buckets)}


def _compact(buckets: dict[str, dict[str, GroupSums]]) -> dict[str, dict[str, list]]:
    """bucket -> group -> [acceptance_length, tokens_per_s, tokens, rounds]; the largest NUM_BUCKETS of the bin."""
    by_tokens = sorted(buckets, key=lambda b: (-sum(g.tokens for g in buckets[b].values()), b))
    return {
        b: {g: [_round(s.acceptance_length), _round(s.tokens_per_s), s.tokens, s.rounds] for g, s in buckets[b].items()}
        for b in by_tokens[:NUM_BUCKETS]
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def update(document: Document, have: dict[str, str], since: float) -> bytes:
    """JSON of what a page lacks: parts whose digest differs from `have`, bins that end after `since` less LATE_S."""
    changed = [name for name, digest in document.digests.items() if have.get(name) != digest]
    return _encoder.encode(
        {
            "ts": document.ts,
            "digests": {name: document.digests[name] for name in changed},
            "parts": {name: msgspec.Raw(document.parts[name]) for name in changed},
            "bins": [b for b in document.bins if b["ts"] + SPAN_S > since - LATE_S],
        }
    )


def parse_have(text: str) -> dict[str, str]:
    """'head:1a2b,ledger:3c4d' -> dict; what is not of this form is ignored: it only costs a part sent twice."""
    pairs = (item.partition(":") for item in text[:2000].split(","))
    return {name: digest for name, sep, digest in pairs if sep}


async def events(feed: DashboardFeed, have: dict[str, str], since: float) -> AsyncGenerator[bytes, None]:
    """Server-sent events, one a second: `update` with what changed; ends with `renew` after the feed's `lifetime_s`.

    A feed that is closed ends it without `renew`; before the first event it raises EngineStoppedError.
    """
    is_first = True
    have, ends = dict(have), time.monotonic() + feed.lifetime_s
    feed.num_pages += 1
    try:
        while True:
            began = time.monotonic()
            try:
                document = await feed.run(feed.document)
            except EngineStoppedError:
                if is_first:
                    raise
                return  # the page waits, then opens its next stream at another replica
            is_first = False
            yield b"event: update\ndata: " + update(document, have, since) + b"\n\n"
            have, since = dict(document.digests), max((b["ts"] for b in document.bins), default=since)
            if time.monotonic() >= ends:
                yield b"event: renew\ndata: {}\n\n"
                return
            await asyncio.sleep(max(0.05, feed.period_s - (time.monotonic() - began)))
    finally:
        feed.num_pages -= 1
