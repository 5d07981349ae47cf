"""Feedback publisher: brings round statistics to Redis without ever slowing a round, by a bounded ring and one flusher thread.

The flusher adds the rounds of a flush up by request, so that the controller's work grows with requests, not with rounds.
At-least-once: a batch whose XADD was not acknowledged is sent again under the same (replica_id, boot_epoch, seq), and
the consumer drops a seq that it has folded already. The engine thread only appends to the ring.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import numpy as np
from redis.exceptions import RedisError

from paceline.bandit.beliefs.observation import summed
from paceline.config import FeedbackConfig
from paceline.contracts import NO_ROWS, FeedbackBatch, PromptVectors, RoundStats, encode
from paceline.infra.state.redis_clients import OUTAGE_ERRORS, Breaker, Keys, is_out_of_memory, producer_client
from paceline.infra.state.redis_clock import RedisClock
from paceline.machine import SystemClock

logger = logging.getLogger(__name__)

BATCH_ROWS = 2000
"""Rows behind one stream entry; the last round in it is whole, so it may have some more."""
BATCH_PROMPTS = 8
"""Vectors of prompts in a batch: 32 a second tell what kinds of prompts there are."""
_ENTRY_OVERHEAD_BYTES = 512
"""What a stream needs for an entry beside its value, rounded up; tests/infra/state/test_room.py measures it."""
_MAX_SKEW_S = 0.5
"""Far below the spans that rounds are summed over (5 s), far above what two clocks that are kept differ by."""
_MAX_UNACKED = 8
"""Batches that may wait for an acknowledgement; everything else waits in the ring."""


def make_batch(
    parts: Sequence[RoundStats], *, replica_id: str, boot_epoch: int, seq: int, target_version: str, num_dropped: int,
    keep_rows: bool = False, prompts: PromptVectors | None = None, tenant_of: Callable[[str], str] | None = None,
    draft_ratio: Callable[[int], float] | None = None,
) -> FeedbackBatch:  # fmt: skip
    """The sums of these rounds as one batch.

    Args:
        keep_rows: with their rows, which the controller does not read.
        tenant_of: bucket -> tenant that it counts for; None = nobody's.
        draft_ratio: batch size -> plain rounds that a drafted one would take; None = not known.
    """
    rows = RoundStats(**RoundStats.columns_of(parts))
    sums = summed(rows)
    if draft_ratio is not None:
        for size, part in chain.from_iterable(cell.sizes.items() for cell in sums.cells if cell.version):
            if part.num_rounds > part.drafted_rounds:
                part.draft_ratio = draft_ratio(size)
    tenants = {} if tenant_of is None else {cell.bucket: tenant_of(cell.bucket) for cell in sums.cells}
    return FeedbackBatch(
        replica_id=replica_id,
        boot_epoch=boot_epoch,
        seq=seq,
        target_version=target_version,
        num_dropped=num_dropped,
        cells=sums.cells,
        rounds=sums.rounds,
        rows=msgspec.Raw(encode(rows)) if keep_rows else NO_ROWS,
        prompts=prompts,
        tenants={bucket: tenant for bucket, tenant in tenants.items() if tenant},
    )


class FeedbackPublisher:
    """FeedbackSink and PromptSink that publishes to the stream `keys.feedback`.

    num_produced == num_delivered + num_dropped + num_pending at every quiet moment (rows).
    """

    def __init__(
        self,
        redis_url: str,
        keys: Keys,
        *,
        replica_id: str,
        target_version: str,
        config: FeedbackConfig | None = None,
        boot_epoch: int | None = None,
        clock: RedisClock | None = None,
    ) -> None:
        """clock: is set as soon as Redis answers; rounds are sent with its times. None = the engine's own."""
        self._client, self._clock = producer_client(redis_url), clock
        if clock is not None:
            clock.try_to_look(self._client)
        self._keys = keys
        self._replica_id, self._target_version = replica_id, target_version
        self._config = config or FeedbackConfig()
        self._boot_epoch = time.time_ns() if boot_epoch is None else boot_epoch
        self._ring: deque[RoundStats] = deque()
        self._prompts: deque[tuple[str, bytes]] = deque()  # (tenant, vector), at most BATCH_PROMPTS
        self._prompts_lock = threading.Lock()  # held for microseconds
        self._space = ""  # theirs
        self.tenant_of: Callable[[str], str] | None = None
        """Bucket -> tenant that it counts for; set by who has the engine, before `start`."""
        self.draft_ratio: Callable[[int], float] | None = None
        """Batch size -> plain rounds that a drafted one would take; set as `tenant_of` is."""
        self._unacked: deque[tuple[int, int, bytes]] = deque()  # (seq, rows, encoded batch)
        self._seq = 0
        self._breaker = Breaker()
        self._num_unreported = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._flushing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next_try = 0.0
        self.num_produced = 0
        self.num_delivered = 0
        self._num_taken = 0  # out of the ring, counted by the flusher
        self._num_dropped_full = 0  # counted by the engine thread
        self._num_dropped_refused = 0  # counted by the flusher
        self.num_outages = 0
        self.num_prompts = 0
        """Vectors of prompts recorded."""
        self.num_prompts_sent = 0

    @property
    def num_dropped(self) -> int:
        return self._num_dropped_full + self._num_dropped_refused

    @property
    def num_pending(self) -> int:
        """Rows in the ring or waiting for an acknowledgement."""
        return self._num_in_ring + sum(rows for _, rows, _ in list(self._unacked))

    @property
    def _num_in_ring(self) -> int:
        return self.num_produced - self._num_dropped_full - self._num_taken

    @property
    def is_redis_up(self) -> bool:
        return self._breaker.is_up is not False

    def record_rounds(self, rows: RoundStats) -> None:
        """Append a round; never blocks. When the ring is full the oldest rounds are dropped and their rows counted."""
        while self._ring and self._num_in_ring + rows.num_rows > self._config.max_rows:
            try:
                self._num_dropped_full += self._ring.popleft().num_rows
            except IndexError:  # the flusher emptied the ring in between: nothing was dropped
                logger.debug("feedback ring emptied while full")
        self._ring.append(rows)
        self.num_produced += rows.num_rows

    def record_prompt(self, space: str, vector: np.ndarray, tenant: str = "") -> None:
        """Keep the vector (d,) float32 of a tenant's prompt for the next batch; never blocks.

        Of many the newest are sent, and of several tenants evenly many: the oldest of whoever has most gives way.
        """
        self._space = space
        self.num_prompts += 1
        with self._prompts_lock:
            if len(self._prompts) >= BATCH_PROMPTS:
                counts = Counter([t for t, _ in self._prompts] + [tenant])
                most = max(counts.values())
                if counts[tenant] < most:
                    del self._prompts[next(i for i, (t, _) in enumerate(self._prompts) if counts[t] == most)]
                elif (own := next((i for i, (t, _) in enumerate(self._prompts) if t == tenant), None)) is not None:
                    del self._prompts[own]
                else:  # everybody has one
                    self._prompts.popleft()
            self._prompts.append((tenant, vector.astype("<f4").tobytes()))

    def _take_prompts(self) -> PromptVectors | None:
        with self._prompts_lock:
            taken = list(self._prompts)
            self._prompts.clear()
        if not taken:
            return None
        self.num_prompts_sent += len(taken)
        vectors, tenants = [vector for _, vector in taken], [tenant for tenant, _ in taken]
        return PromptVectors(
            space=self._space, num_dims=len(vectors[0]) // 4, vectors=b"".join(vectors),
            tenants=tenants if any(tenants) else [],
        )  # fmt: skip

    def start(self) -> FeedbackPublisher:
        """Start the flusher thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="feedback-publisher", daemon=True)
            self._thread.start()
        return self

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop the thread after a last flush; what Redis does not take in time is counted as dropped."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        deadline = time.monotonic() + timeout_s
        while self.num_pending and time.monotonic() < deadline:
            if not self.flush():
                time.sleep(0.05)
        lost = self.num_pending
        if lost:
            self._num_dropped_refused += lost
            self._num_taken += self._num_in_ring
            self._ring.clear()
            self._unacked.clear()
            logger.warning("feedback publisher closed with undelivered rows=%d", lost)
        self._client.close()

    def counters(self) -> dict[str, int | bool]:
        return {
            "produced": self.num_produced,
            "delivered": self.num_delivered,
            "dropped": self.num_dropped,
            "pending": self.num_pending,
            "redis_up": self.is_redis_up,
            "outages": self.num_outages,
            "prompts": self.num_prompts,
            "prompts_sent": self.num_prompts_sent,
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_s = max(self._config.flush_interval_s, self._next_try - time.monotonic())
            self._wake.wait(wait_s)
            if not self._stop.is_set():
                try:
                    self.flush()
                except Exception:  # what a thread that has ended is given is lost
                    logger.exception("feedback could not be sent; trying again")

    def flush(self) -> bool:
        """Send what is there; False when Redis did not take it (it is kept and sent again later)."""
        with self._flushing:
            while True:
                self._fill_unacked()
                if not self._unacked:
                    return True
                if not self._send():
                    return False

    def _fill_unacked(self) -> None:
        while self._ring and len(self._unacked) < _MAX_UNACKED:
            parts: list[RoundStats] = []
            num_rows = 0
            while self._ring and num_rows < BATCH_ROWS:
                try:
                    parts.append(self._ring.popleft())
                except IndexError:  # the engine thread dropped the last round in between
                    break
                num_rows += parts[-1].num_rows
            if not parts:
                return
            self._num_taken += num_rows
            dropped = self.num_dropped
            try:
                batch = encode(make_batch(
                    self._by_redis_time(parts), replica_id=self._replica_id, boot_epoch=self._boot_epoch, seq=self._seq + 1,
                    target_version=self._target_version, num_dropped=dropped - self._num_unreported,
                    keep_rows=self._config.keep_rows, prompts=self._take_prompts(), tenant_of=self.tenant_of,
                    draft_ratio=self.draft_ratio,
                ))  # fmt: skip
            except Exception:  # by rows of an engine that others run, say: those behind them are told
                self._num_dropped_refused += num_rows
                logger.exception("feedback that cannot be written is dropped rows=%d", num_rows)
                continue
            self._seq += 1
            self._num_unreported = dropped
            self._unacked.append((self._seq, num_rows, batch))

    def _by_redis_time(self, parts: list[RoundStats]) -> list[RoundStats]:
        """Rounds with their times by Redis' clock where this computer's, which engines go by, is off."""
        shift_s = 0.0 if self._clock is None else self._clock.now() - SystemClock().now()
        if abs(shift_s) < _MAX_SKEW_S:
            return parts
        return [msgspec.structs.replace(part, ts=[ts + shift_s for ts in part.ts]) for part in parts]

    def _send(self) -> bool:
        batches = list(self._unacked)
        # transaction=False: MULTI is neither needed nor allowed to replicas by the recommended ACL
        pipe = self._client.pipeline(transaction=False)
        limit = self._max_entries(max(len(data) for _, _, data in batches))
        for _, _, data in batches:
            pipe.xadd(self._keys.feedback, {"v": data}, maxlen=limit, approximate=True)
        try:
            replies = pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as e:
            self._note_outage(e)
            return False
        for (_, rows, _), reply in zip(batches, replies, strict=True):
            if isinstance(reply, OUTAGE_ERRORS):
                self._note_outage(reply)
                return False
            self._unacked.popleft()
            if isinstance(reply, Exception):
                self._num_dropped_refused += rows
                if not is_out_of_memory(reply):
                    logger.warning("redis refused a feedback batch: %s", reply)
            else:
                self.num_delivered += rows
        if self._clock is not None:
            self._clock.try_to_look(self._client)
        if self._breaker.succeeded():
            logger.info("redis is back; feedback flows again pending_rows=%d", self.num_pending)
        return True

    def _max_entries(self, largest: int) -> int:
        """Entries that the stream may hold: were all as large as the largest one sent now, they would fill its bytes."""
        config = self._config
        return max(1, min(config.max_stream_entries, config.max_stream_bytes // (largest + _ENTRY_OVERHEAD_BYTES)))

    def _note_outage(self, error: Exception) -> None:
        if self.is_redis_up:
            self.num_outages += 1
            logger.warning("redis is away, feedback is kept in a ring of %d rows: %s", self._config.max_rows, error)
        self._next_try = time.monotonic() + self._breaker.failed()
