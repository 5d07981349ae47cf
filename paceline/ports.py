"""Ports: free ones for servers that bind them later, from a range that no other program draws its own from."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from paceline.errors import ConfigError

_LOWEST = 20_000
"""Below are the ports of well-known services and those of Ray's workers (10002-19999)."""
_NUM_TRIES = 100
_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""What the kernel gives to outgoing connections and to port 0; 49152 and up (RFC 6335) where there is no such file."""


def claim_port(host: str, port: int) -> int:
    """`port` when it is free, a free one for 0; raises ConfigError when it is taken."""
    if port == 0:
        return free_port(host)
    try:
        return _bound(host, port)
    except OSError as e:
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
        raise ConfigError(f"host must be an address of this computer, got {host!r} ({e.strerror})") from e


def _bound(host: str, port: int) -> int:
    """The number of a port that could be bound; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((host, port))
        return int(s.getsockname()[1])
