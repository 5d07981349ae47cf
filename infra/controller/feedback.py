"""How does the controller read the feedback stream: own pending entries first, then new ones, lost ones counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import redis
from redis.exceptions import RedisError, ResponseError

from paceline.contracts import FeedbackBatch, decode
from paceline.infra.state.redis_clients import Keys, stream_entries

logger = logging.getLogger(__name__)

GROUP = "bandit"
CONSUMER = "controller"


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
            self._client.xgroup_create(self._keys.feedback, GROUP, id="0", mkstream=True)
        except ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise

    def restart(self) -> None:
        """Read own pending entries again (after a restart of the controller or of Redis)."""
        self._cursor = "0"

    def read(self, *, count: int, block_ms: int) -> list[Entry]:
        """Up to `count` entries; waits at most block_ms for new ones. Raises redis errors, NOGROUP after a flush."""
        if self._cursor is not None:
            reply = self._client.xreadgroup(GROUP, CONSUMER, {self._keys.feedback: self._cursor}, count=count)
            entries = stream_entries(reply)
            if entries:
                self._cursor = entries[-1][0].decode()
                return [self._decode(i, fields) for i, fields in entries]
            self._cursor = None
        reply = self._client.xreadgroup(
            GROUP, CONSUMER, {self._keys.feedback: ">"}, count=count, block=block_ms if block_ms > 0 else None
        )
        return [self._decode(i, fields) for i, fields in stream_entries(reply)]

    def lag(self, limit: int = 1000) -> int | None:
        """Entries not delivered yet, at most `limit` on servers older than 7; None when it cannot be read."""
        try:
            for group in self._client.xinfo_groups(self._keys.feedback):
                if _text(group["name"]) == GROUP:
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


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
