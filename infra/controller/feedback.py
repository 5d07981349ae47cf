"""Feedback: every batch of the stream is folded once, whatever is delivered twice, and every lost one is counted."""

from __future__ import annotations

import logging

import msgspec
from redis.exceptions import RedisError, ResponseError

from paceline.contracts import (
    ASKED_GROUP,
    SPAN_S,
    CellSums,
    EngineFacts,
    FeedbackBatch,
    Group,
    RequestSums,
    decode,
    window_name,
)
from paceline.infra.controller.lives import Lives
from paceline.infra.controller.store import Books
from paceline.infra.state.redis_clients import FEEDBACK_GROUP, stream_entries

logger = logging.getLogger(__name__)

CONSUMER = "controller"
READ_COUNT = 200
"""Entries read at a time; fewer say that the stream is read to its end."""
_MAX_LAG = 1000
"""Entries that are counted one by one, at most."""
_WATERMARK_MAX_AGE_S = 3600.0
_SWEEP_S = 60.0
"""Period of forgetting producers that are gone: a look at every watermark, which no single batch should pay for."""


class Feedback:
    """Gives every batch of the stream once to traffic statistics, life cycles and policy; its counts are in the state.

    Here alone a batch that came before is left out, by the watermark of its producer, and the number of bucket names is
    bounded: what follows keeps state per bucket. Acknowledging is part of the next commit.
    """

    def __init__(self, books: Books, lives: Lives) -> None:
        self._books, self._lives, self._client, self._keys = books, lives, books.store.client, books.store.keys
        self._cursor: str | None = "0"  # own pending entries from this id; None once they are all read
        self._sweep_due = 0.0
        self._began = books.clock.now()
        self._windows = WindowUnits()
        self._strangers: set[str] = set()
        """Replicas of another target that were told of."""
        self.lag: int | None = None
        """Entries that waited at the last look; None = unknown."""

    def ensure_group(self) -> None:
        """Create stream and group; reading starts at the oldest entry, watermarks drop what was folded before."""
        try:
            self._books.store.room.write(
                lambda: self._client.xgroup_create(self._keys.feedback, FEEDBACK_GROUP, id="0", mkstream=True)
            )
        except ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise

    @property
    def is_catching_up(self) -> bool:
        """Whether what an earlier controller had read and not committed is read first; more may wait behind it."""
        return self._cursor is not None

    def restart(self) -> None:
        """Read own pending entries again (after a restart of the controller or of Redis)."""
        self._cursor = "0"

    def _entries(self, block_ms: int) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
        """(id, fields) of up to READ_COUNT entries; waits at most block_ms for new ones.

        Raises redis errors, NOGROUP after a flush.
        """
        if self._cursor is not None:
            reply = self._client.xreadgroup(
                FEEDBACK_GROUP, CONSUMER, {self._keys.feedback: self._cursor}, count=READ_COUNT
            )
            entries = stream_entries(reply)
            if entries:
                self._cursor = entries[-1][0].decode()
                return entries
            self._cursor = None
        reply = self._client.xreadgroup(
            FEEDBACK_GROUP, CONSUMER, {self._keys.feedback: ">"}, count=READ_COUNT, block=block_ms or None
        )
        return stream_entries(reply)

    def look_at_lag(self) -> None:
        """Note how many entries wait, at most `_MAX_LAG` where the server does not say and rows are kept."""
        self.lag = self._read_lag()

    def _read_lag(self) -> int | None:
        try:
            for group in self._client.xinfo_groups(self._keys.feedback):
                if _text(group["name"]) == FEEDBACK_GROUP:
                    if group.get("lag") is not None:
                        return int(group["lag"])
                    if not self._books.config.keep_rows:  # what was acknowledged is deleted, the rest was read or waits
                        return max(0, int(self._client.xlen(self._keys.feedback)) - int(group["pending"]))
                    last = _text(group["last-delivered-id"])
                    return len(self._client.xrange(self._keys.feedback, min=f"({last}", count=_MAX_LAG) or ())
        except (RedisError, OSError) as e:
            logger.debug("stream lag cannot be read: %s", e)
        return None

    @staticmethod
    def _decode(entry_id: bytes, fields: dict[bytes, bytes] | None) -> FeedbackBatch | None:
        """The batch of an entry, None when its content is lost or unreadable."""
        if not fields:  # trimmed while pending: {} or None, depending on the server
            return None
        try:
            return decode(fields[b"v"], FeedbackBatch)
        except (KeyError, msgspec.DecodeError) as e:
            logger.warning("feedback entry %s is unreadable: %s", entry_id.decode(), e)
            return None

    def read(self, block_ms: int) -> int:
        """Read and fold what waits in the stream; returns the entries read, READ_COUNT when there may be more.

        Raises redis errors.
        """
        books, state = self._books, self._books.state
        try:
            entries = self._entries(block_ms)
        except ResponseError as e:
            if "NOGROUP" not in str(e):
                raise
            logger.warning("the feedback group is gone (Redis was flushed); made again")
            self.ensure_group()
            self.restart()
            books.log("note", {"text": "feedback group made again after a flush"})
            books.flush()
            return 0
        folded = set(books.pending.ack_ids)
        try:
            for entry_id, fields in entries:
                if entry_id in folded:  # read again, and not acknowledged yet
                    continue
                books.pending.ack_ids.append(entry_id)
                batch = self._decode(entry_id, fields)
                if batch is None:
                    state.num_lost_entries += 1
                elif self._is_own(batch) and self._is_new(batch):
                    self._fold(batch)
        except Exception:
            self.restart()  # those behind the one that failed were handed out, too
            raise
        return len(entries)

    def _is_own(self, batch: FeedbackBatch) -> bool:
        """Whether a batch is of this target; replicas of the one before it send theirs until they have drained."""
        if self._lives.is_own_target(batch.target_version):
            return True
        if batch.replica_id not in self._strangers:
            self._strangers.add(batch.replica_id)
            self._books.note(
                f"replica {batch.replica_id} serves target {batch.target_version}: its feedback does not count"
            )
        return False

    def _is_new(self, batch: FeedbackBatch) -> bool:
        state, now = self._books.state, self._books.clock.now()
        key = f"{batch.replica_id}:{batch.boot_epoch}"
        seq, _ = state.watermarks.get(key, (0, 0.0))
        if batch.seq <= seq:
            state.num_duplicates += 1
            return False
        state.num_missing_batches += batch.seq - seq - 1
        state.watermarks[key] = (batch.seq, now)
        if now >= self._sweep_due:
            self._sweep_due = now + _SWEEP_S
            self._forget_gone(now)
        return True

    def _forget_gone(self, now: float) -> None:
        """Forget the watermarks of producers that were not heard of for an hour; one that is idle reports all the same."""
        marks = list(self._books.state.watermarks.items())
        newest = {key.rpartition(":")[0]: key for key, _ in marks}  # boots come in turn
        kept = self._books.state.watermarks = {}
        for key, (seq, at) in marks:
            replica = key.rpartition(":")[0]
            heard_at = now if key == newest[replica] and self._lives.has_report(replica) else at
            # times of sessions before this one may be by another clock: those marks get a whole age from its start
            if now - max(heard_at, self._began) <= _WATERMARK_MAX_AGE_S:
                kept[key] = (seq, heard_at)

    def _fold(self, batch: FeedbackBatch) -> None:
        state = self._books.state
        state.num_rows += batch.num_rows
        state.num_dropped += batch.num_dropped
        if batch.prompts is not None and self._books.config.max_classes:
            prompts = batch.prompts
            now = self._books.clock.now()
            state.classes.observe(prompts.space, prompts.vectors, prompts.num_dims, now, prompts.tenants)
        batch = self._windows.pooled(batch, self._lives.facts_of(batch.replica_id))
        batch, gone = state.traffic.bounded(batch, self._books.kept_classes())
        for bucket in gone:
            self._books.policy.forget_bucket(bucket)
            state.rows_written.pop(bucket, None)
        self._lives.observe(batch)
        try:
            self._books.policy.observe(without_asked(batch))
        except Exception as e:  # one bad batch must not stop the stream; it is counted and logged
            self._books.errors.note("the policy refused a feedback batch", e)


class WindowUnits:
    """Requests of engines whose drafter changes with time, pooled by window: such a window was drawn as one."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str, str], float] = {}
        """(replica, group, version) -> begin of its latest window: one whose end was judged must not begin again, also
        not by rows that come late, as those of engines do that tell of whole requests."""

    def pooled(self, batch: FeedbackBatch, facts: EngineFacts | None) -> FeedbackBatch:
        """The batch as it is, unless its engine's unit is time."""
        if facts is None or facts.group_unit != "time":
            return batch
        return msgspec.structs.replace(batch, cells=[self._pool(cell, batch.replica_id, facts) for cell in batch.cells])

    def _pool(self, cell: CellSums, replica_id: str, facts: EngineFacts) -> CellSums:
        if cell.group not in (Group.ADAPTIVE, Group.STATIC):
            return cell
        at, key = cell.span * SPAN_S, (replica_id, cell.group, cell.version)
        name, begin = window_name(replica_id, at, facts.window_s), at - at % facts.window_s
        whole = RequestSums(is_greedy=all(r.is_greedy for r in cell.requests.values()))
        for sums in cell.requests.values():
            for field in ("seconds", "num_tokens", "drafted_rounds", "kept", "num_rounds", "num_run", "batch_sum"):
                setattr(whole, field, getattr(whole, field) + getattr(sums, field))
        starts = [r.first_ts for r in cell.requests.values() if r.first_ts is not None]
        if starts and begin > self._latest.get(key, -1.0):
            whole.first_ts, self._latest[key] = min(starts), begin
        return msgspec.structs.replace(cell, requests={name: whole})


def without_asked(batch: FeedbackBatch) -> FeedbackBatch:
    """The batch without rows whose client chose the group: what decides and what is booked must not be a client's choice."""
    if all(cell.group != ASKED_GROUP for cell in batch.cells):
        return batch
    return msgspec.structs.replace(batch, cells=[cell for cell in batch.cells if cell.group != ASKED_GROUP])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
