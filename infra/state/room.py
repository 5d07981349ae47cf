"""Room: memory of Redis that is set aside for what the controller writes, and what gives way when there is none left.

A server at its maxmemory refuses every write and every transaction, the one that would delete too. So the controller holds
a reserve, a key of its own, and frees memory by single commands, which such a server still carries out: first what costs
nothing (the reserve, feedback that was acknowledged), then the older half of what waits unread, which the gaps in the
numbers of batches count. Producers are refused meanwhile; they count what they drop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError

from paceline.infra.state.redis_clients import FEEDBACK_GROUP, Keys, is_out_of_memory

logger = logging.getLogger(__name__)

RESERVE_BYTES = 2 * 2**20
"""More than a commit of 4,000 busy replicas writes (1.8 MB/s, `paceline bench control`), and it commits twice a second."""
LOG_ENTRIES = 20_000
LOG_BYTES = 32 * 2**20
"""Length and size of the log stream, an eighth of the embedded server's memory; the file in the data folder keeps all."""
_MAX_ATTEMPTS = 64
"""Times that memory is freed for one transaction: more than it takes to halve both streams to nothing."""
T = TypeVar("T")


class Room:
    """The reserve of one service. Methods raise redis errors; only the controller calls them."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client, self._keys = client, keys
        self._is_told = False
        self.filed: str | None = None
        """Id of the log's last line that its file is known to have; None = there is no file."""
        self._num_lost, self._lost_behind = 0, ""

    def keep(self) -> int:
        """Set the reserve aside where it is missing and there is memory for it; cut the log stream to its limits.

        Returns the lines that were cut and that the log's file does not have, at most; 0 until it takes the ones behind them.
        """
        for name, do in (("no memory is set aside", self._set_aside), ("the log stream is not cut", self._cut_log)):
            try:
                do()
            except ResponseError as e:  # a server that does not let us goes without
                if not is_out_of_memory(e) and not self._is_told:
                    self._is_told = True
                    logger.warning("Redis refuses what the controller's commits need, %s: %s", name, e)
        if self.filed == self._lost_behind:
            return 0
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def _set_aside(self) -> None:
        client, keys = self.client, self._keys
        if int(client.strlen(keys.reserve)) >= RESERVE_BYTES:  # type: ignore[arg-type]
            return
        memory: Any = client.info("memory")
        limit = int(memory.get("maxmemory") or 0)
        if limit == 0 or int(memory["used_memory"]) + 2 * RESERVE_BYTES < limit:
            client.setrange(keys.reserve, RESERVE_BYTES - 1, b"\0")

    def _cut_log(self) -> None:
        client, keys = self.client, self._keys
        try:
            num_bytes = int(client.memory_usage(keys.log) or 0)  # type: ignore[arg-type]
        except ResponseError:  # where we may not ask, the number of lines is a limit, too
            num_bytes = 0
        length = int(client.xlen(keys.log))  # type: ignore[arg-type]
        self._drop_lines(length - min(LOG_ENTRIES, length * LOG_BYTES // max(num_bytes, LOG_BYTES)))

    def _drop_lines(self, number: int) -> int:
        """Delete the oldest lines of the log stream and count those that its file does not have; returns how many."""
        client, log = self.client, self._keys.log
        oldest: Any = client.xrange(log, count=number) if number > 0 else []
        if not oldest:
            return 0
        last = oldest[-1][0].decode()
        if self.filed is not None and (lost := client.xrange(log, min=f"({self.filed}", max=last)):
            if not self._num_lost:
                logger.error("the data folder has not taken the decision log's oldest lines, which redis gives up now")
            self._num_lost += len(lost)  # type: ignore[arg-type]
            self._lost_behind = self.filed
        return int(client.xtrim(log, minid=_after(last), approximate=False))  # type: ignore[arg-type]

    def write(self, transaction: Callable[[], T]) -> T:
        """What a transaction returns; memory is freed for it where Redis has none.

        Raises: what it raises, ResponseError when there is nothing left to free.
        """
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return transaction()
            except ResponseError as e:
                if not is_out_of_memory(e) or not (self._make(attempt) or attempt == 0):
                    raise
        return transaction()

    def _make(self, attempt: int) -> bool:
        """Free memory for a transaction that was refused for the `attempt`-th time, from 0; False when nothing is left."""
        freed = int(self.client.delete(self._keys.reserve)) + self.drop_acknowledged()  # type: ignore[arg-type]
        if attempt > 0 and not freed:
            freed = self._halve(self._keys.feedback) or self._drop_lines(-(-self.client.xlen(self._keys.log) // 2))  # type: ignore[operator]
        return freed > 0

    def drop_acknowledged(self) -> int:
        """Delete the feedback entries that a commit has acknowledged; returns how many."""
        client, keys = self.client, self._keys
        try:
            groups: Any = client.xinfo_groups(keys.feedback)
        except ResponseError as e:
            if "no such key" in str(e):
                return 0
            raise
        for group in groups:
            if group["name"] in (FEEDBACK_GROUP, FEEDBACK_GROUP.encode()):
                pending: Any = client.xpending(keys.feedback, FEEDBACK_GROUP)
                first = pending["min"] if pending["pending"] else _after(group["last-delivered-id"])
                return int(client.xtrim(keys.feedback, minid=first, approximate=False))  # type: ignore[arg-type]
        return 0

    def _halve(self, stream: str) -> int:
        """Delete the older half of a stream's entries; returns how many."""
        length = int(self.client.xlen(stream))  # type: ignore[arg-type]
        gone = int(self.client.xtrim(stream, maxlen=length // 2, approximate=False))  # type: ignore[arg-type]
        if gone:
            logger.error("redis is out of memory: the %d oldest entries of %s were deleted", gone, stream)
        return gone


def _after(entry_id: bytes | str) -> str:
    """The smallest stream id behind this one."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    ms, _, number = text.partition("-")
    return f"{ms}-{int(number) + 1}"
