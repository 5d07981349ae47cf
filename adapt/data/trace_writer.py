"""Trace writer: finished traces reach the store without the engine ever waiting.

A queue bounded by traces and bytes, and one thread. A store that fails is tried again with what comes meanwhile, as long as that
is no more than the queue holds; what does not fit is dropped and counted. Nothing of it reaches the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.adapt.data.trace_store import TraceStore
from paceline.config import TraceConfig
from paceline.machine import Clock, SystemClock
from paceline.serving.sampling.request import RequestTrace

log = logging.getLogger(__name__)

WAITING_SHARE = 0.25
"""Of the store's size: what may wait for it in memory."""


@dataclass(slots=True)
class _Pending:
    """Traces of one bucket and target version that wait for their shard."""

    since: float
    traces: list[RequestTrace] = field(default_factory=list)
    num_rows: int = 0
    is_held: bool = False
    """The store failed: they wait for another flush interval."""


def num_bytes(trace: RequestTrace) -> int:
    """Memory of a trace's tensors."""
    return sum(t.numel() * t.element_size() for t in (trace.features, trace.topk_ids, trace.topk_logprobs))


class TraceWriter:
    """A TraceSink that writes shards per bucket in its own thread; all methods are thread-safe."""

    def __init__(
        self, store: TraceStore, config: TraceConfig, *, clock: Clock | None = None, keeps_limits: bool = True
    ) -> None:
        """keeps_limits: deletes what the store may no longer hold, and lets as much wait as it has room for, by `config`; else
        others do, and traces are counted only."""
        self._keeps_limits = keeps_limits
        self._max_waiting_bytes = WAITING_SHARE * config.max_bytes if keeps_limits else math.inf
        self._store, self._config, self._clock = store, config, clock or SystemClock()
        self._queue: queue.Queue[RequestTrace | threading.Event | None] = queue.Queue(maxsize=config.max_pending)
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._num_waiting_bytes = 0
        """Of the traces that were recorded and neither written nor dropped."""
        self._lock = threading.Lock()
        self._counts = {"traces_written": 0, "traces_dropped": 0, "shards_written": 0, "shards_failed": 0}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    def wants(self, request_id: str, bucket: str) -> bool:
        """Whether this request is traced: it lies in the share and a trace would have a place now."""
        has_place = not self._queue.full() and self._num_waiting_bytes <= self._max_waiting_bytes
        return self.is_sampled(request_id) and not self._is_closed and has_place

    def is_sampled(self, request_id: str) -> bool:
        """Whether this request lies in the traced share (crc32 of its id, equal on every replica).

        The hold-back group is chosen by the last two digits of the same number; these are the four before them, so that
        a small share is a sample of both groups.
        """
        return zlib.crc32(request_id.encode()) // 100 % 10_000 < self._config.share * 10_000

    def record_trace(self, trace: RequestTrace) -> None:
        """Append a trace that was wanted; drops and counts when the queue is full or the writer is closed. Never blocks."""
        size, is_kept = num_bytes(trace), False
        # one that is longer than all that may wait does so alone
        if not self._is_closed and self._num_waiting_bytes + size <= max(self._max_waiting_bytes, size):
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(trace)
                is_kept = True
        with self._lock:
            self._num_waiting_bytes += size if is_kept else 0
            self._counts["traces_dropped"] += not is_kept

    def counters(self) -> dict[str, int]:
        """Traces written and dropped, shards written and failed, traces waiting in the queue."""
        with self._lock:
            return {**self._counts, "traces_waiting": self._queue.qsize()}

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Write everything recorded so far; return False when that took longer than timeout_s."""
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is waiting and end the thread; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                log.warning("trace writer did not drain within %.0f s", timeout_s)
        self._thread.join(timeout_s)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def _count_off(self, traces: Sequence[RequestTrace]) -> None:
        """These wait no more."""
        with self._lock:
            self._num_waiting_bytes -= sum(map(num_bytes, traces))

    def _run(self) -> None:
        poll_s = max(0.01, min(0.5, self._config.flush_interval_s / 2))
        next_sweep = 0.0  # what grew too old while no replica ran goes at once
        while True:
            try:
                item = self._queue.get(timeout=poll_s)
            except queue.Empty:
                self._write_due(everything=False)
                if time.monotonic() > next_sweep:  # age limits hold on an idle service too
                    self._enforce()
                    next_sweep = time.monotonic() + 30.0
                continue
            if isinstance(item, RequestTrace):
                self._add(item)
                self._write_due(everything=False)
                continue
            self._write_due(everything=True)
            if item is None:
                return
            item.set()

    def _add(self, trace: RequestTrace) -> None:
        key = (trace.bucket, trace.target_version)
        pending = self._pending.setdefault(key, _Pending(since=self._clock.now()))
        pending.traces.append(trace)
        pending.num_rows += max(0, len(trace.token_ids) - trace.prompt_len)

    def _write_due(self, *, everything: bool) -> None:
        now = self._clock.now()
        for key, pending in list(self._pending.items()):
            is_old = now - pending.since >= self._config.flush_interval_s
            is_full = pending.num_rows >= self._config.shard_rows and not pending.is_held
            if not (everything or is_old or is_full):
                continue
            del self._pending[key]
            try:
                self._store.write_shard(pending.traces, key[0])
            # whatever a file system or an allocator raises: a thread that ends would keep nothing more
            except Exception as e:
                num_held = sum(len(p.traces) for p in self._pending.values() if p.is_held) + len(pending.traces)
                if isinstance(e, OSError) and not everything and num_held <= self._config.max_pending:
                    pending.since, pending.is_held = now, True
                    self._pending[key] = pending
                    log.info("trace shard of bucket %s waits: %s", key[0], e)
                    continue
                log.warning("trace shard of bucket %s lost: %r", key[0], e)
                self._count("shards_failed", 1)
                self._count("traces_dropped", len(pending.traces))
                self._count_off(pending.traces)
                continue
            self._count("shards_written", 1)
            self._count("traces_written", len(pending.traces))
            self._count_off(pending.traces)
            self._enforce()

    def _enforce(self) -> None:
        if not self._keeps_limits:
            return
        max_age_s = self._config.max_age_s if self._clock.is_set else float("inf")  # of all nodes' traces
        try:
            self._store.enforce_limits(self._config.max_bytes, max_age_s, self._clock.now())
        except Exception as e:
            log.warning("trace store limits could not be enforced: %r", e)
