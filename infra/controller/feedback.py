"""Feedback: every batch of the stream is folded once, whatever is delivered twice, and every lost one is counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import redis
from redis.exceptions import RedisError, ResponseError

from paceline.contracts import FeedbackBatch, decode
from paceline.infra.controller.lives import Lives
from paceline.infra.controller.store import Books
from paceline.infra.state.redis_clients import FEEDBACK_GROUP, Keys, stream_entries

logger = logging.getLogger(__name__)

CONSUMER = "controller"
READ_COUNT = 200
"""Entries read at a time; fewer say that the stream is read to its end."""
_WATERMARK_MAX_AGE_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One stream entry; batch is None when its content is lost (trimmed while pending) or unreadable."""

    entry_id: bytes
    batch: FeedbackBatch | None
    is_trimmed: bool = False


class FeedbackConsumer:
    """Reads; acknowledging is part of the caller's transaction."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._cursor: str | None = "0"  # own pending entries from this id; None once they are all read

    def ensure_group(self) -> None:
        """Create stream and group; reading starts at the oldest entry, watermarks drop what was folded before."""
        try:
            self._client.xgroup_create(self._keys.feedback, FEEDBACK_GROUP, id="0", mkstream=True)
        except ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise

    def restart(self) -> None:
        """Read own pending entries again (after a restart of the controller or of Redis)."""
        self._cursor = "0"

    def read(self, *, count: int, block_ms: int) -> list[Entry]:
        """Up to `count` entries; waits at most block_ms for new ones. Raises redis errors, NOGROUP after a flush."""
        if self._cursor is not None:
            reply = self._client.xreadgroup(FEEDBACK_GROUP, CONSUMER, {self._keys.feedback: self._cursor}, count=count)
            entries = stream_entries(reply)
            if entries:
                self._cursor = entries[-1][0].decode()
                return [self._decode(i, fields) for i, fields in entries]
            self._cursor = None
        reply = self._client.xreadgroup(
            FEEDBACK_GROUP, CONSUMER, {self._keys.feedback: ">"}, count=count, block=block_ms if block_ms > 0 else None
        )
        return [self._decode(i, fields) for i, fields in stream_entries(reply)]

    def lag(self, limit: int = 1000) -> int | None:
        """Entries not delivered yet, at most `limit` on servers older than 7; None when it cannot be read."""
        try:
            for group in self._client.xinfo_groups(self._keys.feedback):
                if _text(group["name"]) == FEEDBACK_GROUP:
                    if group.get("lag") is not None:
                        return int(group["lag"])
                    last = _text(group["last-delivered-id"])
                    return len(self._client.xrange(self._keys.feedback, min=f"({last}", count=limit) or ())
        except (RedisError, OSError) as e:
            logger.debug("stream lag cannot be read: %s", e)
        return None

    @staticmethod
    def _decode(entry_id: bytes, fields: dict[bytes, bytes] | None) -> Entry:
        if not fields:  # trimmed while pending: {} or None, depending on the server
            return Entry(entry_id=entry_id, batch=None, is_trimmed=True)
        try:
            return Entry(entry_id=entry_id, batch=decode(fields[b"v"], FeedbackBatch))
        except (KeyError, msgspec.DecodeError) as e:
            logger.warning("feedback entry %s is unreadable: %s", entry_id.decode(), e)
            return Entry(entry_id=entry_id, batch=None)


class Feedback:
    """Gives every batch once to traffic statistics, life cycles and policy; its counts are in the state.

    Here alone a batch that came before is left out, by the watermark of its producer, and the number of bucket names is
    bounded: what follows keeps state per bucket.
    """

    def __init__(self, consumer: FeedbackConsumer, books: Books, lives: Lives) -> None:
        self.consumer, self._books, self._lives = consumer, books, lives
        self.lag: int | None = None
        """Entries that waited at the last look; None = unknown."""

    def look_at_lag(self) -> None:
        self.lag = self.consumer.lag()

    def read(self, block_ms: int) -> int:
        """Read and fold what waits in the stream; returns the entries read, READ_COUNT when there may be more.

        Raises redis errors.
        """
        books, state = self._books, self._books.state
        try:
            entries = self.consumer.read(count=READ_COUNT, block_ms=block_ms)
        except ResponseError as e:
            if "NOGROUP" not in str(e):
                raise
            logger.warning("the feedback group is gone (Redis was flushed); made again")
            self.consumer.ensure_group()
            self.consumer.restart()
            books.log("note", {"text": "feedback group made again after a flush"})
            books.flush()
            return 0
        for entry in entries:
            books.pending.ack_ids.append(entry.entry_id)
            if entry.batch is None:
                state.num_lost_entries += 1
            elif self._is_new(entry.batch):
                self._fold(entry.batch)
        return len(entries)

    def _is_new(self, batch: FeedbackBatch) -> bool:
        state, now = self._books.state, self._books.clock.now()
        key = f"{batch.replica_id}:{batch.boot_epoch}"
        seq, _ = state.watermarks.get(key, (0, 0.0))
        if batch.seq <= seq:
            state.num_duplicates += 1
            return False
        state.num_missing_batches += batch.seq - seq - 1
        state.watermarks[key] = (batch.seq, now)
        for old in [k for k, (_, t) in state.watermarks.items() if now - t > _WATERMARK_MAX_AGE_S]:
            del state.watermarks[old]
        return True

    def _fold(self, batch: FeedbackBatch) -> None:
        state = self._books.state
        state.num_rows += len(batch.request_id)
        state.num_dropped += batch.num_dropped
        batch = state.traffic.bounded(batch)
        self._lives.observe(batch)
        try:
            self._books.policy.observe(batch)
        except Exception as e:  # one bad batch must not stop the stream; it is counted and logged
            self._books.errors.note("the policy refused a feedback batch", e)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
