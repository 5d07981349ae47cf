"""Machine: the clocks of this computer, of which logic receives one instead of calling time.time(), and its free ports."""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError

_LOWEST = 20_000
"""Below are the ports of well-known services and those of Ray's workers (10002-19999)."""
_NUM_TRIES = 100
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""What the kernel gives to outgoing connections and to port 0; 49152 and up (RFC 6335) where there is no such file."""


class Clock(Protocol):
    """Source of time in seconds."""

    @property
    def is_set(self) -> bool:
        """Whether it shows the time that the service goes by; where not, only differences mean something."""

    def now(self) -> float: ...


def steady() -> float:
    """Seconds that only ever go forward, also while the computer sleeps where the system can tell."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


_WALL_S = time.time() - steady()


class SystemClock:
    """Seconds since the epoch: the wall clock's when this process began, carried on without the steps it makes later."""

    is_set = True

    def now(self) -> float:
        return _WALL_S + steady()


class ManualClock:
    """A clock that a test advances by hand."""

    is_set = True

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def spare_loopback() -> None:
    """Let calls of this process and its children to this computer go by no proxy that the environment names."""
    ours = ("127.0.0.1", "localhost", "::1")
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    names = [name.strip() for name in given.split(",") if name.strip()]
    os.environ["no_proxy"] = ",".join([*names, *(name for name in ours if name not in names)])


def claim_port(host: str, port: int) -> int:
    """`port` when it is free, a free one for 0; raises ConfigError when it is taken or `host` is no address of this computer."""
    if port == 0:
        return free_port(host)
    try:
        return _bound(host, port)
    except OSError as e:
        if e.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise _no_address(host, e) from e
        raise ConfigError(f"port {port} on {host} must be free ({e.strerror}); choose another, 0 takes any") from e


def free_port(host: str = "127.0.0.1") -> int:
    """A free port for a server that starts seconds later.

    Drawn by chance below the kernel's own range: a port of that range may meanwhile go to any connection of the computer.
    Raises: ConfigError when `host` is no address of this computer.
    """
    end = int(_KERNEL_RANGE.read_text().split()[0]) if _KERNEL_RANGE.is_file() else 49_152
    for _ in range(_NUM_TRIES if end > _LOWEST else 0):
        try:
            return _bound(host, random.SystemRandom().randrange(_LOWEST, end))
        except OSError:
            continue
    try:
        return _bound(host, 0)
    except OSError as e:
        raise _no_address(host, e) from e


def _no_address(host: str, error: OSError) -> ConfigError:
    return ConfigError(f"host must be an address of this computer, got {host!r} ({error.strerror})")


def _bound(host: str, port: int) -> int:
    """The number of a port that could be bound; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, port))
        return int(s.getsockname()[1])
