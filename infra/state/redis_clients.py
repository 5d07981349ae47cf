"""Redis clients: key names, settings that never block serving, reply shapes, the breaker of an outage.

redis-py's defaults (5 s socket timeout, ten retries) turn an outage into seconds of blocking per call and a blocking
read into a TimeoutError; hence two kinds of client with explicit settings.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from paceline.errors import ConfigError

OUTAGE_ERRORS: tuple[type[Exception], ...] = (RedisConnectionError, RedisTimeoutError)
"""The server is away, restarting or loading: keep the work and try again later. redis-py makes these of sockets' errors, so
that an OSError is of a disk."""

FEEDBACK_GROUP = "bandit"
"""Consumer group of the feedback stream: the controller's."""
CONSUMER_SOCKET_TIMEOUT_S = 10.0
"""Socket timeout of the consumer; every BLOCK must stay well below it."""


class Keys:
    """Redis keys of one service; the literal braces put all of them into one cluster hash slot, which MULTI needs."""

    def __init__(self, model: str) -> None:
        if not model or any(c in "{}\r\n\0 " for c in model):
            raise ConfigError(f"model id must be non-empty and without braces or spaces, got {model!r}")
        self.model = model
        base = f"paceline:{{{model}}}"
        self.base = base
        self.feedback = f"{base}:fb"
        """Stream of FeedbackBatch (field v)."""
        self.desired = f"{base}:desired"
        """DesiredState."""
        self.classes = f"{base}:classes"
        """TrafficClasses."""
        self.replicas = f"{base}:replicas"
        """Sorted set: replica id -> time of its latest report."""
        self.numbers = f"{base}:numbers"
        """Sorted set: id of a process that exposes metrics -> time of its latest numbers."""
        self.epoch = f"{base}:epoch"
        """Fencing token of the controller: '<number>:<owner>'."""
        self.state = f"{base}:state"
        """Hash: part of the controller's state -> its bytes."""
        self.log = f"{base}:log"
        """Stream of decisions, ledger entries, generations and outcomes (fields kind, v = JSON)."""
        self.decisions = f"{base}:decisions"
        """Hash: decision id -> Decision, the newest form of each."""
        self.train = f"{base}:train"
        """Lease of the training job in flight."""
        self.train_stop = f"{base}:train:stop"
        """Id of the job that is asked to stop."""
        self.reserve = f"{base}:reserve"
        """Memory that the controller holds for its commits; the value says nothing."""
        self.poke = f"{base}:poke"
        """Pub/sub channel: hint that desired state or the lease changed."""

    def replica(self, replica_id: str) -> str:
        return f"{self.base}:replica:{replica_id}"

    def numbers_of(self, process_id: str) -> str:
        return f"{self.base}:numbers:{process_id}"

    def train_attempt(self, job_id: str) -> str:
        return f"{self.base}:train:attempt:{job_id}"

    def train_result(self, job_id: str) -> str:
        return f"{self.base}:train:result:{job_id}"


def parse_epoch(value: bytes | None) -> tuple[int, str | None]:
    """(epoch, its owner); (0, None) where there is none or it is damaged, which its owner repairs as a loss of data."""
    found = re.fullmatch(rb"(\d{1,18}):(\w+)", value or b"")
    return (0, None) if found is None else (int(found[1]), found[2].decode())


def producer_client(url: str, *, timeout_s: float = 0.5) -> redis.Redis:
    """Client that fails fast and never retries: for publishers, reports and leases."""
    return _client(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def consumer_client(url: str) -> redis.Redis:
    """Client for blocking stream reads; BLOCK must be well below CONSUMER_SOCKET_TIMEOUT_S.

    It does not retry either: a commit whose reply was lost must be looked up, never blindly repeated.
    """
    return _client(
        url,
        socket_timeout=CONSUMER_SOCKET_TIMEOUT_S,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=15,
    )


def patient_client(url: str, *, retries: int = 5) -> redis.Redis:
    """Client for start-up and command-line use: retries for a few seconds, then raises."""
    backoff = ExponentialBackoff(cap=1.0, base=0.05)
    return _client(url, socket_timeout=3.0, socket_connect_timeout=1.0, retry=Retry(backoff, retries))


def _client(url: str, **settings: Any) -> redis.Redis:
    try:
        return redis.Redis.from_url(url, protocol=2, **settings)
    except ValueError as e:
        raise ConfigError(f"redis_url must be redis://, rediss:// or unix://, got {redact(url)}") from e


def redact(url: str) -> str:
    """The URL without user, password and query: safe to log."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # not a URL, or not a port: nothing of it can be trusted to be harmless
        return "***"
    where = f"{host}:{port}" if port else host
    return urlunsplit((parts.scheme, f"***@{where}" if "@" in parts.netloc else where, parts.path, "", ""))


def stream_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes] | None]]:
    """(id, fields) of an XREADGROUP reply (RESP2, which every client here speaks); no fields: trimmed while pending."""
    return [entry for _, entries in reply or () for entry in entries]


def is_out_of_memory(error: Exception) -> bool:
    """Whether a write was refused because of maxmemory (it was surely not executed)."""
    return isinstance(error, ResponseError) and "OOM" in f"{type(error).__name__} {error}".upper().replace(
        "OUTOFMEMORY", "OOM"
    )


def cannot_store(error: Exception) -> bool:
    """Whether a write was refused because the server has no memory for it, or no disk for its own files."""
    return is_out_of_memory(error) or (isinstance(error, ResponseError) and "MISCONF" in str(error))


class Breaker:
    """Backoff of one connection: closed while calls succeed; after a failure, wait 0.2 s doubling to 5 s with jitter."""

    def __init__(self, *, base_s: float = 0.2, cap_s: float = 5.0, rng: random.Random | None = None) -> None:
        self._base_s, self._cap_s = base_s, cap_s
        self._rng = rng or random.Random()
        self.num_failures = 0
        self.is_up: bool | None = None
        """None until the first call."""

    def succeeded(self) -> bool:
        """Note a success; True when this ends an outage."""
        ended = self.is_up is False
        self.is_up, self.num_failures = True, 0
        return ended

    def failed(self) -> float:
        """Note a failure; returns seconds to wait before the next call."""
        self.is_up = False
        self.num_failures += 1
        delay = min(self._cap_s, self._base_s * 2.0 ** min(self.num_failures - 1, 10))
        return delay * self._rng.uniform(0.5, 1.0)


def ping(url: str, *, make: Callable[[str], redis.Redis] = patient_client) -> str:
    """Version of the server behind `url`; raises ConfigError when it is unreachable or older than 6.2."""
    client = make(url)
    try:
        version = str(client.info("server")["redis_version"])
    except (RedisError, OSError) as e:
        raise ConfigError(
            f"redis_url must name a reachable Redis, got {redact(url)} ({type(e).__name__}); start it, "
            "correct the URL, or leave redis_url out for an embedded one"
        ) from e
    finally:
        client.close()
    if tuple(int(x) for x in version.split(".")[:2]) < (6, 2):
        raise ConfigError(f"redis_url must name Redis 6.2 or newer, got {version} at {redact(url)}")
    return version
