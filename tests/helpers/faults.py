"""One fault at a chosen write of a controller: its process dies before or after it, its reply is lost, its line is torn."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

MODES = ("before", "after", "lost_reply", "away", "torn")
"""A lost reply: the next call gets through; away: it does not."""


class Killed(BaseException):
    """The process ends here: nothing may handle it."""


class Fault:
    """Counts the writes that carry state: transactions of `client` (leases of jobs apart), synced and renamed files."""

    def __init__(self) -> None:
        self.mode, self._left = "", -1
        self.last = ""
        """Mode that struck last."""
        self.fired: set[str] = set()
        """Modes that have struck."""

    def arm(self, mode: str, at: int) -> None:
        """Let the write that comes `at` others later fail; '' = none."""
        self.mode, self._left = mode, at

    def around(self, write: Callable[[], Any], *, tear: Callable[[], None] | None = None) -> Any:
        if not self.mode:
            return write()
        self._left -= 1
        if self._left >= 0:
            return write()
        mode, self.mode = self.mode, ""
        self.last = mode
        self.fired.add(mode)
        if mode == "before":
            raise Killed
        write()
        if mode in ("lost_reply", "away") and tear is None:
            raise redis.ConnectionError("reply lost")
        if mode == "torn" and tear is not None:
            tear()
        raise Killed

    def client(self, url: str) -> redis.Redis:
        """A client whose transactions may fail; it does not retry."""
        made = _FaultyRedis.from_url(url, protocol=2, socket_timeout=10.0, retry=Retry(NoBackoff(), 0))
        made.fault = self
        return made

    def fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        """`os.fsync` for files; what is torn loses the end of its last line."""

        def fsync(fd: int) -> None:
            def tear() -> None:
                if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_size > 10:  # a folder cannot be torn
                    os.truncate(fd, os.fstat(fd).st_size - 10)

            self.around(lambda: real(fd), tear=tear)

        return fsync

    def replace(self, real: Callable[..., None]) -> Callable[..., None]:
        """`os.replace`."""
        return lambda *args: self.around(lambda: real(*args), tear=lambda: None)


class _FaultyRedis(redis.Redis):
    fault: Fault

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        made = _FaultyPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.fault = self.fault
        return made


class _FaultyPipeline(Pipeline):
    fault: Fault

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            return super().execute(raise_on_error)
        except redis.WatchError:
            if self.fault.last != "away":
                raise
            self.fault.last = ""
            raise redis.ConnectionError("redis is away") from None

    def _execute_transaction(self, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:
        """Where redis-py itself meets a lost reply, and calls it a change of what was watched."""
        is_lease, is_watching = any(str(a).endswith(":train") for args, _ in commands for a in args), self.watching

        def execute() -> list[Any]:
            replies = super(_FaultyPipeline, self)._execute_transaction(connection, commands, raise_on_error)
            self.watching = is_watching  # as long as the reply has not come
            return replies

        return execute() if is_lease else self.fault.around(execute)
