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

MODES = ("before", "after", "lost_reply", "torn")


class Killed(BaseException):
    """The process ends here: nothing may handle it."""


class Fault:
    """Counts the writes that carry state: transactions of `client` (leases of jobs apart), synced and renamed files."""

    def __init__(self) -> None:
        self.mode, self._left = "", -1
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
        self.fired.add(mode)
        if mode == "before":
            raise Killed
        write()
        if mode == "lost_reply" and tear is None:
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
        is_lease = any(str(a).endswith(":train") for args, _ in self.command_stack for a in args)
        run = super().execute
        return run(raise_on_error) if is_lease else self.fault.around(lambda: run(raise_on_error))
